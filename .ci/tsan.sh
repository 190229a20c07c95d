#!/bin/bash
# The tests that use threads under ThreadSanitizer: kernels (clang and libomp: no false positives there), the loader and
# two trainings in one process. The reference cases and the command line repeat the same code and are left out, and so do
# runs of several ranks that only compare losses and bits.
source "$(dirname "$0")/lib.sh" tsan
build()
{
    bash .ci/deps.sh build check && cmake --preset tsan -DMTP_WERROR=ON && cmake --build --preset tsan -j "$jobs"
}
if check "build with clang, warnings as errors" build; then
    ctest --preset tsan -j "$jobs" -LE '^(golden|cli|cost)$' -E '^dist_(bits|chaos|losses)$' 2>&1 | tee "$suite_logs/ctest"
    count_ctest "$suite_logs/ctest" build-tsan
fi
finish
