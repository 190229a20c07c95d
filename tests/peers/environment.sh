#!/bin/bash
# environment.sh [NAME]
#
# Makes a virtual environment of the peers, outside the tree, and prints its folder on the last line: NAME `peers`
# (default) from requirements.txt, `vllm` from requirements-vllm.txt, `extract`: `peers` and requirements-extract.txt. It lies in $MTP_PEERS_DIR, which is
# ${XDG_CACHE_HOME:-~/.cache}/mtp unless set; it is kept between runs and made anew when its requirements change.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-peers}
case $name in
peers) requirements=$here/requirements.txt megabytes=7000 ;;
vllm) requirements=$here/requirements-vllm.txt megabytes=9000 ;;
extract) requirements=$here/requirements-extract.txt megabytes=1000 ;;
*)
    echo "environment.sh: unknown environment '$name' (peers, vllm, extract)" >&2
    exit 2
    ;;
esac
folder=${MTP_PEERS_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mtp}
venv=$folder/$name
if [ "$name" = extract ]; then
    peers=$(bash "$0" peers | tail -n 1)
fi
wanted=$(sha256sum <"$requirements")
if [ "$(cat "$venv/.requirements" 2>/dev/null)" = "$wanted" ]; then
    echo "$venv"
    exit 0
fi

mkdir -p "$folder"
free=$(df -Pm "$folder" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt "$megabytes" ]; then
    echo "environment.sh: $folder has $free MB free, the environment needs $megabytes; set MTP_PEERS_DIR" >&2
    exit 1
fi
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    echo "environment.sh: $venv exists and is no virtual environment; set MTP_PEERS_DIR to another folder" >&2
    exit 1
fi
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "environment.sh: $python is older than 3.11; set PYTHON" >&2
    exit 1
}
echo "making $venv"
"$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-cache-dir --no-compile \
    -r "$requirements" </dev/null
if [ "$name" = extract ]; then
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    "$peers/bin/python" -c "$purelib" >"$("$venv/bin/python" -c "$purelib")/peers.pth"
fi
echo "$wanted" >"$venv/.requirements"
echo "$venv"
