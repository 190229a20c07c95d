#!/bin/bash
# Real peers against our files and numbers: transformers, safetensors and tensorboard from PyPI, and with MTP_PEERS=all
# also vLLM on a CPU and llama.cpp's converter. tests/peers/README.md says what each check is. Uses build/ (made by
# tests.sh, or here).
source "$(dirname "$0")/lib.sh" peers
sample=tests/data/sample
work=$suite_logs/work
mkdir -p "$work"
export OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1

build()
{
    bash .ci/deps.sh build peers && cmake --preset release && cmake --build --preset release --target mtp mtprun golden test_cli_mtprun -j "$jobs"
}

# A short run: its export, a checkpoint and its events are what the peers read.
train()
{
    build/mtp train configs/quickstart.toml --set output_dir="$work/run" --set max_steps=40 --set eval_steps=20 \
        --set logging_steps=5 && build/mtp export "$work/run" "$work/export"
}

# The numbers of transformers as a reference case: ours must be within 1e-5 of the largest logit.
logits()
{
    local drafter=$1 offset=$2
    "$python" tests/peers/make_case.py "$drafter" "$sample/verifier" "$work/case" --position-offset "$offset" \
        "$sample"/eval/sample_010[0-1].safetensors || return 1
    build/tests/golden "$work/case" | tee "$work/golden" || return 1
    grep -o 'logits [^ ]*' "$work/golden" | awk '{ seen = 1; if ($2 + 0 > 1e-5) bad = 1 } END { exit bad || !seen }'
}

generate()
{
    build/mtp eval --model "$1" --verifier "$sample/verifier" --data "$sample/eval" --num-speculative-steps 3 \
        --position-offset 1 --json >"$work/eval.json" &&
        "$python" tests/peers/hf_generate.py "$1" "$sample/verifier" "$sample/prompts.jsonl" "$work/eval.json" --skip 100
}

# Files of every dtype that the package writes: inspect shows each tensor's name, dtype and shape.
read_theirs()
{
    "$python" tests/peers/safetensors_files.py write "$work/theirs" || return 1
    local list line dtype shape name
    for list in "$work"/theirs/*.txt; do
        build/mtp inspect "${list%.txt}.safetensors" >"$work/inspect" || return 1
        while IFS= read -r line; do
            dtype=${line%% *} line=${line#* }
            shape=${line%%]*}] name=${line#*] }
            grep -F -- "$name" "$work/inspect" | grep -qF -- " $dtype $shape" ||
                { cat "$work/inspect"; echo "mtp inspect does not show $name as $dtype $shape"; return 1; }
        done <"$list"
    done
}

# A drafter that the package wrote goes through ours unchanged.
untrained_export()
{
    build/mtp export "$sample/drafter_reference" "$work/same" --verifier "$sample/verifier" &&
        cmp "$work/same/model.safetensors" "$sample/drafter_reference/model.safetensors"
}

read_store()
{
    build/mtp pack "$work/store" "$sample/train" --verifier "$sample/verifier" --shard-size 0.005 &&
        "$python" tests/peers/h5py_shard.py "$work/store" "$sample/train" &&
        build/mtp pack "$work/store_v" "$sample/eval" --verifier "$sample/verifier" --global-v-only &&
        "$python" tests/peers/h5py_shard.py "$work/store_v" "$sample/eval"
}

if check "build" build && check "environment" bash tests/peers/environment.sh && check "a short run" train; then
    python=$(bash tests/peers/environment.sh | tail -n 1)/bin/python
    check "transformers loads the export" "$python" tests/peers/hf_load.py "$work/export" "$sample/verifier"
    check "transformers: same logits, centroid head" logits "$work/export" 0
    check "transformers: same logits, dense head, t + 1" logits "$sample/drafter_init_dense" 1
    check "transformers drafts: same text, same acceptance" generate "$sample/drafter_reference"
    # shellcheck disable=SC2046
    check "safetensors reads our files and rewrites them byte for byte" "$python" tests/peers/safetensors_files.py read \
        "$work/export/model.safetensors" $(find "$work/run/checkpoints" -name '*.safetensors')
    check "we read a file of safetensors" read_theirs
    check "export of an untrained drafter is the file that safetensors wrote" untrained_export
    check "h5py reads a packed store" read_store
    check "torchrun and mtprun start each other's programs" bash tests/peers/torchrun.sh "${python%/bin/python}" build
    check "tensorboard reads the events" "$python" tests/peers/tensorboard_events.py "$work/run"
    if check "environment of the extraction" bash tests/peers/environment.sh extract; then
        python=$(bash tests/peers/environment.sh extract | tail -n 1)/bin/python
        for test in tests/extract/test_*.py; do
            check "$test" "$python" "$test" --mtp build/mtp
        done
    fi
    if [ "${MTP_PEERS:-}" = all ]; then
        check "llama.cpp's converter" bash tests/peers/llamacpp.sh "$work/same"
        check "vLLM accepts what mtp eval says" bash tests/peers/vllm.sh build/mtp "$work/same"
        check "vLLM extracts what transformers computes" bash tests/peers/vllm_extract.sh build/mtp
    else
        skip "llama.cpp's converter" "runs with MTP_PEERS=all"
        skip "vLLM, drafting and extraction" "runs with MTP_PEERS=all"
    fi
fi
finish
