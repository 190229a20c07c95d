#!/bin/bash
# bench/gpu_check.sh [--part build|test|sanitize|bench]... [--build DIR] [--out DIR] [--peak-gflops N] [--emulator]
#
# What is to be done on a machine with a GPU: builds the cuda backend for the device that is there, runs the op tests, the
# reference cases and a training run on it, compute-sanitizer where it is installed, and the benchmarks. Without --part all
# four parts run, one after the other, each going on when another failed. Results are in OUT (gpu_check): report.md to
# read, report.json with one object a check, and the log of each check. Needs no network. Exit code 0 when nothing failed.
#
# --emulator: the same with tests/emu for a device, which shows that this script works; its times mean nothing.
# --peak-gflops: dense bf16 rate of the device, to print percent of it.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
parts=() build=build-gpu out=gpu_check emulator=0 peak=0
while [ $# -gt 0 ]; do
    case $1 in
    --part) parts+=("$2") && shift ;;
    --build) build=$2 && shift ;;
    --out) out=$2 && shift ;;
    --peak-gflops) peak=$2 && shift ;;
    --emulator) emulator=1 ;;
    *) sed -n '2,13p' "$0" && exit 2 ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=(build test sanitize bench)
mkdir -p "$out" || exit 1
: >"$out/report.json"
failed=0

# check PART NAME LIMIT COMMAND...: one line in the reports; the log stays in OUT
check()
{
    local part=$1 name=$2 limit=$3 start=$SECONDS status log
    shift 3
    log="$out/$part-${name//[^a-zA-Z0-9_.-]/_}.log"
    timeout "$limit" "$@" >"$log" 2>&1 </dev/null
    status=$?
    local word=ok
    [ "$status" -eq 77 ] && word=skipped
    [ "$status" -eq 0 ] || [ "$status" -eq 77 ] || { word=FAILED && failed=$((failed + 1)); }
    printf '{"part": "%s", "check": "%s", "result": "%s", "status": %d, "seconds": %d, "log": "%s"}\n' \
        "$part" "$name" "$word" "$status" "$((SECONDS - start))" "$log" >>"$out/report.json"
    printf '%-8s %s: %s (%d s)\n' "$word" "$part" "$name" "$((SECONDS - start))"
}

part_build()
{
    local backend=(-DMTP_CUDA=ON -DMTP_CUDA_ARCHITECTURES=native)
    [ "$emulator" = 1 ] && backend=(-DMTP_EMULATOR=ON)
    check build configure 300 cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DMTP_BUILD_FUZZ=OFF "${backend[@]}"
    check build compile 540 cmake --build "$build" -j "$(nproc)"
    check build devices 60 "$build/mtp" devices
}

part_test()
{
    local program name case
    for program in "$build"/tests/test_ops_*; do
        name=${program##*/test_ops_}
        case $name in device | vec) continue ;; esac
        MTP_TEST_DEVICE=cuda check test "op $name" 300 "$program"
    done
    for case in tests/data/goldens/*/; do
        check test "golden $(basename "$case")" 300 "$build/tests/golden" --device cuda "$case"
    done
    for name in m12b_flat m26b_flat m31b_flat_k5; do
        check test "golden bf16 $name" 300 "$build/tests/golden" --device cuda --bf16 "tests/data/goldens/$name"
    done
    rm -rf "$out/run"
    local steps=()
    [ "$emulator" = 1 ] && steps=(--set max_steps=2 --set warmup_steps=0 --set "eval_data=[]" --set eval_steps=0)
    check test quickstart 500 "$build/mtp" train configs/quickstart.toml --set device=cuda --set "output_dir=$out/run" \
        "${steps[@]}"
}

part_sanitize()
{
    local tool name
    if ! command -v compute-sanitizer >/dev/null; then
        check sanitize compute-sanitizer 10 bash -c 'echo "compute-sanitizer is not installed"; exit 77'
        return
    fi
    for tool in memcheck racecheck synccheck; do
        for name in norm head_candidates attention; do
            MTP_TEST_DEVICE=cuda check sanitize "$tool $name" 120 compute-sanitizer --tool "$tool" --error-exitcode 1 \
                "$build/tests/test_ops_$name"
        done
    done
}

part_bench()
{
    local size head
    if [ "$emulator" = 1 ]; then
        check bench "attention" 200 "$build/bench/bench_cuda_attention" --device cuda --sets 2 --repeats 1 --tokens 40 \
            --document 40 --window 20
        return
    fi
    for width in 256 512; do
        for tokens in 2048 4096 8192 16384; do
            check bench "attention $width $tokens" 60 "$build/bench/bench_cuda_attention" --device cuda \
                --width "$width" --tokens "$tokens" --document "$tokens"
        done
    done
    check bench heads 60 "$build/bench/bench_cuda_heads" --device cuda
    for size in e2b 26b-a4b; do
        for head in masked flat; do
            [ "$size $head" = "26b-a4b masked" ] && continue # a dense head
            check bench "step $size $head" 90 "$build/bench/bench_step" --device cuda --bf16 --json --size "$size" \
                --head "$head" --rows 8192 --rows-per-chunk 8192 --peak-gflops "$peak"
        done
    done
}

for part in "${parts[@]}"; do
    case $part in
    build | test | sanitize | bench) "part_$part" ;;
    *) echo "part '$part' is unknown: build, test, sanitize, bench" >&2 && exit 2 ;;
    esac
done

{
    echo "# gpu_check"
    echo
    "$build/mtp" --version 2>&1 | sed 's/^/    /'
    echo
    echo "| part | check | result | seconds |"
    echo "|---|---|---|---|"
    sed 's/.*"part": "\([^"]*\)", "check": "\([^"]*\)", "result": "\([^"]*\)", "status": [0-9]*, "seconds": \([0-9]*\).*/| \1 | \2 | \3 | \4 |/' \
        "$out/report.json"
    echo
    for log in "$out"/bench-*.log; do
        [ -e "$log" ] && printf '## %s\n\n```\n%s\n```\n\n' "$(basename "$log" .log)" "$(tail -n 20 "$log")"
    done
} >"$out/report.md"
echo "$out/report.md; $failed failed"
[ "$failed" -eq 0 ]
