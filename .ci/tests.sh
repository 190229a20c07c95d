#!/bin/bash
# The README's test command, with warnings as errors.
source "$(dirname "$0")/lib.sh" tests
log=$suite_logs/ctest
bash tests/run.sh -DMTP_WERROR=ON 2>&1 | tee "$log" | grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Generating)'
count_ctest "$log" build

# refuses MESSAGE COMMAND...: fails, and says so
refuses()
{
    local text
    ! text=$("${@:2}" 2>&1) && grep -F "$1" <<<"$text"
}

# The parts that can be left out, all of them at once: what needs none of them works, what does says so.
without_parts()
{
    local build=build-parts shard=build-parts/shard-00000.h5
    cmake -G Ninja -S . -B $build -DCMAKE_BUILD_TYPE=Release -DMTP_WERROR=ON -DMTP_BUILD_BENCH=OFF -DMTP_HDF5=OFF \
        -DMTP_GLOO=OFF -DMTP_TOML=OFF &&
        cmake --build $build -j "$jobs" --target mtp mtprun test_formats_toml test_run_config test_cli_main \
            test_dataset_sampler test_comm_collectives fuzz_toml fuzz_config &&
        ctest --test-dir $build -j "$jobs" --output-on-failure \
            -R '^(formats_toml|run_config|cli_main|dataset_sampler|comm_collectives|fuzz_toml|fuzz_config)$' &&
        $build/mtp --version | grep 'HDF5 no, Gloo no, toml++ no' &&
        $build/mtp train configs/quickstart.toml --set output_dir=$build/run --dry-run &&
        cp tests/fuzz/corpus/shard/good/bf16.h5 $shard &&
        refuses 'a packed store needs HDF5, which this build was made without' $build/mtp inspect $shard &&
        refuses 'this build has no Gloo' $build/mtprun --nproc-per-node 2 $build/mtp train configs/quickstart.toml \
            --set output_dir=$build/run
}
check "without HDF5, Gloo and toml++: build, warnings as errors, and what must still work" without_parts
finish
