#!/bin/bash
# Each libFuzzer target over its corpus, then for MTP_FUZZ_SECONDS (10) on new inputs, which stay in build-fuzz/.
source "$(dirname "$0")/lib.sh" fuzz
seconds=${MTP_FUZZ_SECONDS:-10}
build()
{
    bash .ci/deps.sh build check && cmake --preset fuzz -DMTP_WERROR=ON && cmake --build --preset fuzz -j "$jobs"
}
# libhdf5 keeps memory of damaged files
export LSAN_OPTIONS=suppressions=$PWD/tests/support/leaks.txt:print_suppressions=0
targets=0
if check "build" build; then
    for target in build-fuzz/tests/fuzz/libfuzz_*; do
        [ -f "$target" ] && [ -x "$target" ] || continue
        targets=$((targets + 1))
        name=${target##*/libfuzz_}
        mkdir -p "build-fuzz/found/$name"
        check "$name, $seconds s" "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
            -print_final_stats=1 -artifact_prefix="build-fuzz/found/$name-" "build-fuzz/found/$name" \
            "tests/fuzz/corpus/$name/good" "tests/fuzz/corpus/$name/bad"
    done
    check "there are targets" test "$targets" -gt 0
fi
finish
