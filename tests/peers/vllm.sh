#!/bin/bash
# vllm.sh MTP DRAFTER [SAMPLE]
#
# vLLM on a CPU serves the sample's verifier with DRAFTER and speculation; its accepted counts per position are those of
# `MTP eval` for the same prompts. Both work in fp32, so the samples are computed anew in fp32 first. MTP is the program
# (build/mtp), SAMPLE the folder with verifier/ and eval/ (default: tests/data/sample). Takes some minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mtp=$(realpath "${1:?usage: vllm.sh MTP DRAFTER [SAMPLE]}")
drafter=$(realpath "${2:?usage: vllm.sh MTP DRAFTER [SAMPLE]}")
sample=$(realpath "${3:-$here/../data/sample}")
peers=$(bash "$here/environment.sh" peers | tail -n 1)
vllm=$(bash "$here/environment.sh" vllm | tail -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$peers/bin/python" "$here/make_samples.py" "$sample/verifier" "$sample/eval" "$work" 2>/dev/null
"$mtp" eval --model "$drafter" --verifier "$work/verifier" --data "$work/samples" --num-speculative-steps 3 \
    --json >"$work/eval.json"
"$vllm/bin/python" "$here/vllm_serve.py" "$drafter" "$sample/verifier" "$work/samples" "$work/eval.json" \
    2>"$work/log" || { status=$?; tail -n 30 "$work/log"; exit $status; }
