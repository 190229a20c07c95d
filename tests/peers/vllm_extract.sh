#!/bin/bash
# vllm_extract.sh MTP [SAMPLE]
#
# vLLM on a CPU with trainers/extract/vllm_connector.py against extract_hf.py, both in fp32: prompts shorter and longer than
# the window, several at once, cut into chunks of 96 tokens. MTP is the program (build/mtp), SAMPLE the folder with verifier/
# and prompts.jsonl (default: tests/data/sample). MTP_PEERS_PYTHON and MTP_VLLM_PYTHON: interpreters in place of those of
# environment.sh. Takes some minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
extract=$here/../../trainers/extract
mtp=$(realpath "${1:?usage: vllm_extract.sh MTP [SAMPLE]}")
sample=$(realpath "${2:-$here/../data/sample}")
peers=${MTP_PEERS_PYTHON:-$(bash "$here/environment.sh" peers | tail -n 1)/bin/python}
vllm=${MTP_VLLM_PYTHON:-$(bash "$here/environment.sh" vllm | tail -n 1)/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0

# COMMAND...: its last lines when it fails
quiet()
{
    "$@" >"$work/log" 2>&1 || { tail -n 40 "$work/log"; echo "failed: $*"; exit 1; }
}

engine='"enforce_eager": true, "max_num_seqs": 4'
quiet "$peers" "$here/vllm_extract_compare.py" prompts "$sample" "$work/prompts.jsonl"
quiet "$vllm" "$extract/vllm_extract.py" generate --verifier "$sample/verifier" --prompts "$work/prompts.jsonl" \
    --texts "$work/texts.jsonl" --dtype float32 --ignore-eos --max-length 512 --engine "{$engine}"
quiet "$vllm" "$extract/vllm_extract.py" extract --verifier "$sample/verifier" --prompts "$work/texts.jsonl" \
    --out "$work/vllm" --dtype float32 --max-length 512 \
    --engine "{$engine, \"enable_chunked_prefill\": true, \"max_num_batched_tokens\": 96}"
quiet "$peers" "$extract/extract_hf.py" --given --verifier "$sample/verifier" --prompts "$work/texts.jsonl" \
    --out "$work/hf" --dtype float32 --store-dtype float32 --threads 1
quiet "$mtp" check "$work/vllm" --verifier "$sample/verifier"
cat "$work/log"
"$peers" "$here/vllm_extract_compare.py" samples "$sample" "$work/vllm" "$work/hf" 2>/dev/null
