#!/bin/bash
# The tests under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer, built with clang 14 and warnings as
# errors.
source "$(dirname "$0")/lib.sh" asan
build()
{
    bash .ci/deps.sh build check && cmake --preset asan -DMTP_WERROR=ON && cmake --build --preset asan -j "$jobs"
}
if check "build with clang, warnings as errors" build; then
    ctest --preset asan -j "$jobs" 2>&1 | tee "$suite_logs/ctest"
    count_ctest "$suite_logs/ctest" build-asan
fi
finish
