# The parts of bench/gpu_check.sh, which sources this; `check` and the variables are its own.
# shellcheck disable=SC2154

# skipped REASON: ends as a check does that could not be made.
skipped()
{
    echo "$1"
    return 77
}

# nvcc: CUDACXX, the one on the path, or the one of the usual place.
find_nvcc()
{
    local found
    for found in "${CUDACXX:-}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
        [ -n "$found" ] && [ -x "$found" ] && echo "$found" && return
    done
    return 1
}

# What to compile for: the first device alone. CMake before 3.24 has no word for it.
architecture()
{
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
    if [[ $capability =~ ^[0-9]+\.[0-9]$ ]]; then echo "${capability/./}-real"; else echo native; fi
}

machine_of()
{
    local nvcc
    echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, $(awk '/MemTotal/ { print int($2 / 1048576) }' /proc/meminfo) GiB"
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem --format=csv,noheader 2>/dev/null
    if nvcc=$(find_nvcc); then "$nvcc" --version | sed -n 's/^Cuda compilation tools, /nvcc: /p'; fi
}

# Targets that the other parts run.
targets()
{
    local source
    echo mtp
    echo mtp_cuda
    for source in bench/cuda/bench_cuda_*.c bench/cuda/bench_cuda_*.cu bench/bench_step.c; do
        source=${source##*/}
        echo "${source%.*}"
    done
    [[ " ${parts_missing[*]} " != *" cmocka "* ]] || return
    echo golden
    for source in tests/ops/test_*.c; do
        source=${source##*/test_}
        echo "test_ops_${source%.c}"
    done
}

# The devices, of which one must be a GPU that can be used.
devices()
{
    local found
    found=$("$build/mtp" devices) || return 1
    echo "$found"
    grep '^cuda' <<<"$found" | grep -qv 'not usable' || { echo "no GPU that can be used"; return 1; }
}

part_build()
{
    local backend=(-DMTP_CUDA=ON "-DMTP_CUDA_ARCHITECTURES=$(architecture)") nvcc generator=() chosen
    if [ "$emulator" = 1 ]; then
        backend=(-DMTP_EMULATOR=ON ${MTP_CUDA_INCLUDE:+"-DMTP_CUDA_INCLUDE=$MTP_CUDA_INCLUDE"})
    elif nvcc=$(find_nvcc); then
        backend+=("-DCMAKE_CUDA_COMPILER=$nvcc")
    fi
    command -v ninja >/dev/null && [ ! -e "$build/CMakeCache.txt" ] && generator=(-G Ninja)
    mapfile -t chosen < <(targets)
    check configure 120 cmake "${generator[@]}" -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DMTP_BUILD_FUZZ=OFF \
        -DMTP_BUILD_BENCH=ON "${backend[@]}" "${deps_flags[@]}" "${parts_flags[@]}"
    check compile 500 cmake --build "$build" -j "$(nproc)" --target "${chosen[@]}"
    check devices 60 devices
}

# ---- test -------------------------------------------------------------------------------------------------------------

# Training with the sample, from which the first of the two arguments is the run's directory and the others are settings.
quickstart()
{
    local run=$1
    shift
    rm -rf "$run"
    "$build/mtp" train configs/quickstart.toml --set device=cuda --set "output_dir=$run" "$@"
}

# What the quickstart must reach (.ci/job.sh).
acceptance()
{
    quickstart "$out/run" --set eval_steps=0 &&
        "$build/mtp" eval --device cuda --model "$out/run/export" --verifier tests/data/sample/verifier \
            --data tests/data/sample/eval --json >"$out/eval.json" || return 1
    cat "$out/eval.json"
    command -v python3 >/dev/null || return 0
    python3 tests/peers/acceptance.py "$out/eval.json" 0.21 0.33
}

short_run()
{
    quickstart "$1" --set max_steps="$2" --set warmup_steps=0 --set "eval_data=[]" --set eval_steps=0 "${@:3}"
}

same_bits()
{
    short_run "$out/run-1" "$1" "${@:2}" && short_run "$out/run-2" "$1" "${@:2}" &&
        cmp "$out/run-1/export/model.safetensors" "$out/run-2/export/model.safetensors"
}

part_test()
{
    local program name case cases=() tests
    if [ ! -x "$build/tests/golden" ]; then
        skip "op tests and reference cases" "they were not built: cmocka is not installed"
    else
        tests=("$build"/tests/test_ops_*)
        for case in tests/data/goldens/*/; do cases+=("$(basename "$case")"); done
        [ "$few" = 0 ] || tests=("$build"/tests/test_ops_norm) cases=(e2b_masked)
        for name in "${cases[@]}"; do
            check "golden $name" 200 "$build/tests/golden" --device cuda "tests/data/goldens/$name"
            check "golden bf16 $name" 200 "$build/tests/golden" --device cuda --bf16 "tests/data/goldens/$name"
        done
        for program in "${tests[@]}"; do
            name=${program##*/test_ops_}
            case $name in device | vec) continue ;; esac
            MTP_TEST_DEVICE=cuda check "op $name" 200 "$program"
        done
    fi
    if [ "$emulator" = 1 ]; then
        check training 300 short_run "$out/run" 1
        [ "$few" = 1 ] || check "two runs, the same bits" 300 same_bits 1 --set precision=bf16
        return
    fi
    check "two runs, the same bits" 120 same_bits 20
    check "two runs in bf16, the same bits" 120 same_bits 20 --set precision=bf16
    check quickstart 200 acceptance
}

# ---- sanitize ---------------------------------------------------------------------------------------------------------

# bench PROGRAM ARGUMENTS...: of the kernel's program on the device
bench()
{
    local program=$build/bench/bench_cuda_$1
    shift
    "$program" --device cuda --peak-gflops "$peak" "$@"
}

# small TOOL...: cases of a few blocks of every kind of kernel, each once, run by a tool (or as they are).
small()
{
    local case name
    while read -r name case; do
        # shellcheck disable=SC2086  # arguments are words
        MTP_CUDNN_LIBRARY=none check "${*##*/}${*:+ }$name ${case%% *}" 100 "$@" "$build/bench/bench_cuda_$name" --device cuda --sets 1 \
            --repeats 1 ${case#* }
        [ "$few" = 0 ] || return 0
    done <<'CASES'
norm small --rows 72 --width 256
rows small --rows 70 --width 512 --head 256
optimizer small --values 5000
gemm small --rows 130 --in 256 --out 128
attention 256 --tokens 300 --document 150 --window 100
attention 512 --tokens 150 --document 150 --window 0 --width 512 --heads 8
attention fp32 --tokens 90 --document 40 --window 20 --fp32 1
heads masked --rows 200 --hidden 256 --vocabulary 4096 --centroids 32 --selected 4
heads flat --mode 0 --rows 130 --hidden 256 --vocabulary 1024 --centroids 8
heads hierarchical --mode 2 --rows 200 --hidden 256 --vocabulary 4096 --centroids 32
CASES
}

part_sanitize()
{
    local tool path
    path=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    if [ -z "$path" ]; then
        skip compute-sanitizer "compute-sanitizer is not installed"
        # so that it is known whether the cases themselves run
        [ "$emulator" = 0 ] || small
        return
    fi
    for tool in memcheck racecheck synccheck; do
        small "$path" --tool $tool --error-exitcode 1
        [ ! -x "$build/tests/golden" ] ||
            check "$tool training step" 150 "$path" --tool $tool --error-exitcode 1 "$build/tests/golden" --device cuda \
                tests/data/goldens/e2b_masked
    done
}

# ---- bench ------------------------------------------------------------------------------------------------------------

part_bench()
{
    local tokens
    if [ "$emulator" = 1 ]; then
        bench_emulated
        return
    fi
    check "read rate of L2" 60 "$build/bench/bench_cuda_memory" --kib 16384 --passes 200
    check "read rate of memory" 60 "$build/bench/bench_cuda_memory" --kib 1048576 --passes 1 --sets 3
    bench_steps
    check "products, 256 to 2048" 60 bench gemm --rows 24576 --in 256 --out 2048
    check "products, 2048 to 256" 60 bench gemm --rows 24576 --in 2048 --out 256
    check "products, 1024 to 8192" 60 bench gemm --rows 24576 --in 1024 --out 8192
    check "products, 8192 to 1024" 60 bench gemm --rows 24576 --in 8192 --out 1024
    check "products, 1024 to the vocabulary" 60 bench gemm --rows 8192 --in 1024 --out 262144 --sets 2
    check "products, 256 to the vocabulary" 60 bench gemm --rows 8192 --in 256 --out 262144 --sets 2
    for tokens in 2048 4096 8192 16384; do
        check "attention 512, T $tokens" 60 bench attention --width 512 --window 0 --heads 16 --kv-heads 2 --tokens 16384 --document "$tokens"
        check "attention 256, T $tokens" 60 bench attention --width 256 --window 0 --heads 16 --kv-heads 8 --tokens 16384 --document "$tokens"
        check "attention 256, window 512, T $tokens" 60 bench attention --width 256 --window 512 --tokens 16384 --document "$tokens"
    done
    check "loss of the centroid head" 60 bench heads --rows 24576
    check "loss of the flat head, hidden 1024" 90 bench heads --mode 0 --rows 8192 --hidden 1024 --sets 1
    check "loss of the flat head, hidden 256" 60 bench heads --mode 0 --rows 8192 --hidden 256 --sets 1
    check "norms, hidden 256" 60 bench norm --rows 24576 --width 256
    check "norms, hidden 1024" 60 bench norm --rows 24576 --width 1024
    check "GeGLU and RoPE, width 2048" 60 bench rows --rows 24576 --width 2048
    check "GeGLU and RoPE, width 8192" 60 bench rows --rows 24576 --width 8192
    check "optimizer, E2B" 60 bench optimizer --values 77730000
    check "optimizer, 26B" 60 bench optimizer --values 419700000 --sets 1
}

# Steps of 8192 positions, 3 draft steps.
bench_steps()
{
    local tokens
    for tokens in 2048 4096 8192; do
        check "step E2B, T $tokens" 60 bench_step e2b masked "$tokens"
    done
    check "step 26B, T 4096" 120 bench_step 26b-a4b flat 4096
    check "step E2B with the flat head, T 4096" 60 bench_step e2b flat 4096
}

# In one chunk where the device has room for that.
bench_step()
{
    local chunk=8192 memory
    memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    [[ $memory =~ ^[0-9]+$ ]] && [ "$memory" -lt 60000 ] && chunk=2048
    "$build/bench/bench_step" --device cuda --bf16 --json --repeat 20 --size "$1" --head "$2" --rows 8192 \
        --rows-per-chunk "$chunk" --document "$3" --peak-gflops "$peak"
}

# The same programs at sizes that the emulator takes.
bench_emulated()
{
    local tiny=(--sets 2 --repeats 1)
    check memory 100 "$build/bench/bench_cuda_memory" --kib 80 --passes 3 --sets 2 --repeats 1
    check products 100 bench gemm "${tiny[@]}" --rows 70 --in 48 --out 40
    check norms 100 bench norm "${tiny[@]}" --rows 12 --width 160
    check "step E2B" 200 "$build/bench/bench_step" --device cuda --bf16 --json --rows 8 --document 5 --vocab-size 4096 --repeat 1
    [ "$few" = 0 ] || return
    check attention 100 bench attention "${tiny[@]}" --tokens 40 --document 40 --window 20
    check "loss of the centroid head" 100 bench heads "${tiny[@]}" --rows 70 --hidden 48 --vocabulary 512 --centroids 16 --selected 3
    check "loss of the flat head" 100 bench heads "${tiny[@]}" --mode 0 --rows 70 --hidden 48 --vocabulary 512 --centroids 16
    check "GeGLU and RoPE" 100 bench rows "${tiny[@]}" --rows 7 --width 64 --head 32
    check optimizer 100 bench optimizer "${tiny[@]}" --values 1100
}
