#!/bin/bash
# CUDA without a GPU: kernels/cuda compiled against the emulator (tests/emu/README.md), whose own tests, planted bugs and
# all tests labelled emu run in three builds: plain, AddressSanitizer and UndefinedBehaviorSanitizer, ThreadSanitizer. Plain
# also with blocks and threads in another order, with blocks in parallel, and, where the device matters, on every profile.
source "$(dirname "$0")/lib.sh" emu
prepare()
{
    bash .ci/deps.sh build check peers && bash tests/emu/headers.sh
}
build()
{
    cmake --preset "$1" -DMTP_WERROR=ON -DMTP_CUDA_INCLUDE="$headers" &&
        cmake --build --preset "$1" --target emu_programs -j "$jobs"
}
# run PRESET [ctest arguments]: the tests of a build that exists
run()
{
    local preset=$1
    shift
    ctest --preset "$preset" -j "$jobs" -L '^emu$' "$@" 2>&1 | tee "$suite_logs/ctest"
    count_ctest "$suite_logs/ctest" "build-$preset"
}

# The device's compiler takes the same files, for every architecture, without a warning, and no kernel spills registers.
device_code()
{
    local directory nvcc=
    while read -r directory; do
        [ ! -x "$directory/../bin/nvcc" ] || nvcc=$(realpath "$directory/../bin/nvcc")
    done < <(tr ';' '\n' <<<"$headers")
    [ -n "$nvcc" ] || { echo "no nvcc beside $headers"; return 1; }
    cmake -G Ninja -S . -B build-cuda -DCMAKE_BUILD_TYPE=Release -DMTP_CUDA=ON -DMTP_WERROR=ON -DMTP_BUILD_TESTS=OFF \
        -DMTP_BUILD_BENCH=OFF -DMTP_BUILD_FUZZ=OFF -DCMAKE_CUDA_COMPILER="$nvcc" &&
        cmake --build build-cuda --target mtp_cuda --clean-first -j "$jobs" >"$suite_logs/nvcc" 2>&1 ||
        { tail -n 40 "$suite_logs/nvcc" 2>/dev/null; return 1; }
    if ! grep -q 'bytes spill' "$suite_logs/nvcc" || grep -B 2 -E '[1-9][0-9]* bytes spill' "$suite_logs/nvcc"; then
        echo "^ kernels that spill (or ptxas did not say)"
        return 1
    fi
}

# The script for a machine with a GPU, with the emulator for one: all its parts run, and its report is one JSON document.
gpu_check()
{
    MTP_CUDA_INCLUDE=$headers bash bench/gpu_check.sh --emulator --few --build build-emu --out "$suite_logs/gpu_check" &&
        python3 - "$suite_logs/gpu_check/report.json" <<'PYTHON'
import json, sys
parts = json.load(open(sys.argv[1], encoding="utf-8"))["parts"]
assert [part["part"] for part in parts] == ["build", "test", "sanitize", "bench"], parts
assert all(part["checks"] for part in parts), "a part without checks"
assert all(result["seconds"] > 0 for check in parts[3]["checks"] for result in check["results"])
results = [result for check in parts[3]["checks"] for result in check["results"]]
assert len(results) >= 9 and results[-1]["graph_nodes"] > 0, "results of benchmarks are missing"
report = open(sys.argv[1].replace(".json", ".md"), encoding="utf-8").read()
assert "| e2b, masked | 6 | 3 |" in report and "| linear_dw | 70 rows, 48 to 40 |" in report, "tables are missing"
PYTHON
}

if check "CUDA's headers" prepare; then
    headers=$(bash tests/emu/headers.sh | tail -n 1)
    check "nvcc: every architecture, no warning, no spill" device_code
    for preset in emu emu-asan emu-tsan; do
        check "$preset: build, warnings as errors" build "$preset" && run "$preset"
    done
    if [ -e build-emu/libmtp_cuda.so ]; then
        # what chooses its tiles by the device, and a training step of each kind of head
        for device in sm_86 sm_90 sm_100 sm_120; do
            MTP_EMU_DEVICE=$device run emu -R '^emu_(ops_attention|ops_heads_bf16|golden_(e2b_masked|bf16_m26b_flat)$)'
        done
        # the profile and planted tests choose their own settings
        MTP_EMU_SEED=12345 run emu -E '^emu_(profile|planted)_'
        MTP_EMU_THREADS=2 run emu -E '^emu_(profile|planted)_'
        check "bench/gpu_check.sh on the emulator" gpu_check
    fi
fi
finish
