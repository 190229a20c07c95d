#!/bin/bash
# The README's test command, with warnings as errors.
source "$(dirname "$0")/lib.sh" tests
log=$suite_logs/ctest
bash tests/run.sh -DMTP_WERROR=ON 2>&1 | tee "$log" | grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Generating)'
count_ctest "$log" build
finish
