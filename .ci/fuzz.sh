#!/bin/bash
# Each fuzz target of build-asan/ (made by asan.sh) over its corpus, then for MTP_FUZZ_SECONDS (15) on new inputs.
source "$(dirname "$0")/lib.sh" fuzz
seconds=${MTP_FUZZ_SECONDS:-15}
build()
{
    bash .ci/deps.sh build check && cmake --preset asan -DMTP_WERROR=ON && cmake --build --preset asan -j "$jobs"
}
check "build" build || { finish; exit; }
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1
for target in build-asan/tests/fuzz/fuzz_*; do
    [ -f "$target" ] && [ -x "$target" ] || continue
    name=$(basename "$target")
    # new inputs go to a scratch folder, so that a run leaves the tree as it was
    mkdir -p "$suite_logs/$name"
    check "$name, $seconds s" "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix="build-asan/$name-" "$suite_logs/$name" "tests/fuzz/corpus/${name#fuzz_}"
done
[ "$((passed + failed))" -gt 1 ] || { echo "FAILED   fuzz: no target in build-asan/tests/fuzz"; failed=$((failed + 1)); }
finish
