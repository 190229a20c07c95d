#!/bin/bash
# Real peers against our files and numbers; see tests/peers/README.md. Needs build/ (made by tests.sh).
source "$(dirname "$0")/lib.sh" peers
source tests/peers/run.sh
finish
