#!/bin/bash
# deps.sh GROUP...    install the Debian packages of the groups that are not installed yet, and say which
#   build   compilers, CMake and the libraries of the README's dependency table, cmocka
#   check   clang 14 with its sanitizer runtimes, libomp and clang-format
#   peers   Python with virtual environments
# Works as root, or through sudo. Does nothing, and needs neither, when all is there.
set -euo pipefail

packages=()
for group in "$@"; do
    case $group in
    build)
        packages+=(gcc g++ cmake ninja-build pkg-config libc6-dev libopenblas-dev libjansson-dev libtomlplusplus-dev
            libgloo-dev libhdf5-dev libcmocka-dev iproute2 python3)
        ;;
    check) packages+=(clang-14 libclang-rt-14-dev libomp-14-dev llvm-14 clang-format-14) ;;
    peers) packages+=(python3 python3-venv ca-certificates) ;;
    *)
        echo "deps.sh: unknown group '$group' (build, check, peers)" >&2
        exit 2
        ;;
    esac
done

if ! command -v dpkg-query >/dev/null; then
    echo "deps.sh: this is no Debian system; install what these Debian packages hold, then go on: ${packages[*]}" >&2
    exit 1
fi
missing=()
for package in "${packages[@]}"; do
    state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "deps ($*): all ${#packages[@]} packages are installed"
    exit 0
fi

as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "deps.sh: run this as root, or install sudo; missing packages: ${missing[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi
echo "deps ($*): installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 30 "$log" >&2
    echo "deps.sh: apt-get failed; packages wanted: ${missing[*]}" >&2
    exit 1
fi
