#!/bin/bash
# bench/run.sh [BUILD_DIR]: the benchmarks whose numbers are kept in bench/results, as JSON lines on stdout. Run it on a
# quiet machine; ten minutes on two cores. The first line says what machine class it is.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
# as mtp sets them
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}

model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)
flags=$(grep -o -w -E 'avx2|avx512f|avx512_bf16' /proc/cpuinfo | sort -u | tr '\n' ' ')
printf '{"machine": "%s", "cores": %d, "features": "%s", "memory_gib": %d, "load": "%s", "commit": "%s"}\n' \
    "$model" "$(nproc)" "${flags% }" "$(awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo)" \
    "$(cut -d' ' -f1-3 /proc/loadavg)" "$(git rev-parse --short HEAD 2>/dev/null || echo none)"

step() { "$build/bench/bench_step" --json --repeat 3 "$@"; }
# the three goals: E2B, 512 rows, K = 3
step --head masked
step --head flat
step --head none
# cost laws (performance model): linear in K and in rows, independent of V with centroids
step --head masked --num-speculative-steps 6
step --head masked --rows 1024
step --head masked --rows 2048
step --head masked --vocab-size 131072
step --head flat --vocab-size 131072
"$build/bench/bench_checkpoint" --json
"$build/bench/bench_ops"
"$build/bench/bench_attention"
"$build/bench/bench_heads"
# 4 GiB of shards, made beside the programs the first time
"$build/bench/bench_loader" --json --directory "$build/bench_loader_data"
