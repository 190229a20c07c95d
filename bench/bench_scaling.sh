#!/bin/bash
# bench/bench_scaling.sh [BUILD_DIR]: training over Gloo, two ranks against one, with the same work and one thread for each
# rank: JSON lines on stdout, one for each drafter and way of running:
#   alone    one rank
#   beside   two runs of one rank at the same time, which do not talk: what sharing the machine costs
#   ranks    one run of two ranks
# `efficiency` is the rate of a rank against `alone`. A few minutes; on a quiet machine with at least two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
steps=${MTP_BENCH_STEPS:-16}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

# train NAME RANKS DRAFTER TOKENS
train()
{
    "$build/mtprun" --nproc-per-node "$2" "$build/mtp" train configs/quickstart.toml --set "drafter=$3" \
        --set "output_dir=$work/$1" --set 'eval_data=[]' --set eval_steps=0 --set save_steps=0 --set logging_steps=1 \
        --set "max_steps=$steps" --set overlong=truncate \
        --set "tokens_per_batch=$4" --set warmup_steps=0 --set num_threads=1 >"$work/$1.log" 2>&1 ||
        { tail -5 "$work/$1.log" >&2; return 1; }
}

# rows a second of each rank, without the first steps: of one run, or the mean of several
rate()
{
    python3 - "$@" <<'PYTHON'
import json, sys
ranks, runs = int(sys.argv[1]), sys.argv[2:]
total = 0
for run in runs:
    lines = [json.loads(line) for line in open(run + "/metrics.jsonl")]
    lines = [line for line in lines if line["kind"] == "train"][3:]
    seconds = lines[-1]["time"]["unix"] - lines[0]["time"]["unix"]
    total += sum(line["rows"] for line in lines[1:]) / seconds / ranks
print(total / len(runs))
PYTHON
}

# line DRAFTER WAY RATE ALONE
line()
{
    python3 -c 'import sys; d, way, rate, alone = sys.argv[1:]
print("{\"bench\": \"scaling\", \"drafter\": \"%s\", \"run\": \"%s\", \"rows_per_second_per_rank\": %.1f, \"efficiency\": %.3f}"
      % (d, way, float(rate), float(rate) / float(alone)))' "$@"
}

scaling()
{
    local name=$1 drafter=$2 tokens=$3 alone
    train alone 1 "$drafter" "$tokens"
    alone=$(rate 1 "$work/alone")
    line "$name" alone "$alone" "$alone"
    train first 1 "$drafter" "$tokens" &
    train second 1 "$drafter" "$tokens"
    wait $!
    line "$name" beside "$(rate 1 "$work/first" "$work/second")" "$alone"
    train both 2 "$drafter" "$tokens"
    line "$name" ranks "$(rate 2 "$work/both")" "$alone"
    rm -rf "$work/alone" "$work/first" "$work/second" "$work/both"
}

scaling sample tests/data/sample/drafter_init 1024
# 28 million parameters: an all-reduce of 112 MB a step
"$build/mtp" init --verifier tests/data/sample/verifier --output "$work/large" --hidden-size 512 \
    --intermediate-size 4096 --num-centroids 64 >/dev/null 2>&1
scaling large "$work/large" 256
