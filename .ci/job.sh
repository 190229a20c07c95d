#!/bin/bash
# The README's main job: it must end within 5 minutes on 2 cores and reach the acceptance that the sample is known for.
source "$(dirname "$0")/lib.sh" job
out=$suite_logs/quickstart
job()
{
    bash configs/quickstart.sh "$out"
}
start=$SECONDS
if check "train, evaluate before and after, export" job; then
    took=$((SECONDS - start))
    check "under 300 s (took $took s)" test "$took" -lt 300
    check "first draft at least 0.21, 0.33 accepted a round" python3 tests/peers/acceptance.py "$out/eval.json" 0.21 0.33
fi
finish
