#!/bin/bash
# run.sh PROGRAM BUG MESSAGE: the program must fail, and say MESSAGE (an extended regular expression).
output=$("$1" "$2" 2>&1)
status=$?
printf '%s\n' "$output"
[ "$status" -ne 0 ] || { echo "run.sh: '$2' ended with status 0"; exit 1; }
grep -qE -- "$3" <<<"$output" || { echo "run.sh: '$2' did not say '$3'"; exit 1; }
