#!/bin/bash
# headers.sh: the directories of CUDA's headers (runtime, bf16, cuBLASLt, NCCL, cuDNN) on the last line, separated by semicolons:
# those of the toolkit that an nvcc stands in, else of packages from PyPI in a virtual environment outside of the tree
# ($MTP_PEERS_DIR, ${XDG_CACHE_HOME:-~/.cache}/mtp unless set). That environment also has an nvcc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

toolkit()
{
    local nvcc
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    [ -x "$nvcc" ] || return 1
    local root
    root=$(cd "$(dirname "$(realpath "$nvcc")")/.." && pwd)
    local header
    for header in cuda_runtime_api.h cublasLt.h nccl.h cudnn_graph.h; do
        [ -e "$root/include/$header" ] || return 1
    done
    echo "$root/include"
}
if [ -z "${MTP_CUDA_FROM_PYPI:-}" ] && toolkit; then
    exit 0
fi

folder=${MTP_PEERS_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mtp}
venv=$folder/cuda
requirements=$here/requirements.txt
wanted=$(sha256sum <"$requirements")
if [ "$(cat "$venv/.requirements" 2>/dev/null)" != "$wanted" ]; then
    mkdir -p "$folder"
    free=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
    if [ "$free" -lt 6000 ]; then
        echo "headers.sh: $folder has $free MB free, CUDA's packages need 6000; set MTP_PEERS_DIR" >&2
        exit 1
    fi
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        echo "headers.sh: $venv exists and is no virtual environment; set MTP_PEERS_DIR to another folder" >&2
        exit 1
    fi
    echo "making $venv"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-cache-dir --no-compile \
        -r "$requirements" </dev/null
    # the names that a linker looks for
    find "$venv" -name 'lib*.so.[0-9]*' | while read -r library; do
        [ -e "${library%.so.*}.so" ] || ln -s "${library##*/}" "${library%.so.*}.so"
    done
    echo "$wanted" >"$venv/.requirements"
fi
find "$venv" -type f \( -name cuda_runtime_api.h -o -name cublasLt.h -o -name nccl.h -o -name cudnn_graph.h -o -path '*/crt/host_defines.h' \) |
    sed -E 's,/(crt/)?[^/]*$,,' | sort -u | paste -sd ';'
