#!/bin/bash
# tests/run.sh [CMAKE_OPTION...]
#
# Sets everything up and runs the tests: installs missing Debian packages, builds the release preset in build/ and runs
# every ctest case. Several programs of several threads run at once, so idle OpenMP threads sleep (OMP_WAIT_POLICY of the
# preset) instead of spinning. Options go to the configure step, e.g. -DMTP_WERROR=ON.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc)

bash .ci/deps.sh build
echo "configuring and building in build/ with $jobs jobs"
cmake --preset release "$@"
cmake --build --preset release -j "$jobs"
echo "running the tests"
ctest --preset release -j "$jobs"
