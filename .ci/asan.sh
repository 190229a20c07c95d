#!/bin/bash
# The tests under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer, built with clang 14 and warnings as
# errors. Not again what only repeats whole runs of several ranks many times (the suites tests and dist), or counts products.
source "$(dirname "$0")/lib.sh" asan
build()
{
    bash .ci/deps.sh build check && cmake --preset asan -DMTP_WERROR=ON && cmake --build --preset asan -j "$jobs"
}
if check "build with clang, warnings as errors" build; then
    ctest --preset asan -j "$jobs" -E '^(dist_(bits|chaos|faults|losses)|cost_laws)$' 2>&1 | tee "$suite_logs/ctest"
    count_ctest "$suite_logs/ctest" build-asan
fi
finish
