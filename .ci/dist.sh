#!/bin/bash
# The chaos test of tests/dist at full length: 30 runs of 2 to 4 ranks, disturbed at random moments. ctest runs a few.
source "$(dirname "$0")/lib.sh" dist
build()
{
    bash .ci/deps.sh build && cmake --preset release -DMTP_WERROR=ON &&
        cmake --build --preset release -j "$jobs" --target mtp mtprun test_dist_chaos
}
seed=${MTP_CHAOS_SEED:-$RANDOM}
chaos()
{
    MTP_CHAOS_RUNS=30 MTP_CHAOS_SEED=$seed timeout 900 build/tests/test_dist_chaos
}
if check "build" build; then
    check "30 disturbed runs, seed $seed" chaos
    reason=$(MTP_CHAOS_RUNS=0 build/tests/test_dist_chaos 2>&1 | sed -n 's/^skipped: //p')
    [ -z "$reason" ] || skip "a full disk" "$reason"
fi
finish
