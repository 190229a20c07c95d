#!/bin/bash
# configs/quickstart.sh [OUTPUT_DIR]
#
# The main job on the shipped sample, from nothing: installs missing Debian packages, builds mtp in build/, trains the
# sample's untrained drafter, which evaluates it before and after and exports it, and evaluates the export once more.
# A few minutes on 2 cores. OUTPUT_DIR (default: runs/quickstart) must not hold a run yet.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-runs/quickstart}
sample=tests/data/sample
if [ -e "$output" ]; then
    echo "quickstart.sh: $output exists; remove it, or name another directory: configs/quickstart.sh DIR" >&2
    exit 2
fi

bash .ci/deps.sh build
jobs=$(nproc)
echo "building build/mtp with $jobs jobs"
cmake --preset release >/dev/null
cmake --build --preset release --target mtp -j "$jobs" | tail -n 1

echo "training; the run is written to $output, the trained drafter to $output/export"
build/mtp train configs/quickstart.toml --set output_dir="$output"
echo "evaluating the export, as it serves"
build/mtp eval --model "$output/export" --verifier $sample/verifier --data $sample/eval --json >"$output/eval.json"
echo "done: $output/export serves; its figures are in $output/eval.json"
