#!/bin/bash
# environment.sh [REQUIREMENTS]
#
# Makes the virtual environment of the peers, outside the tree, and prints its folder on the last line. It is
# $MTP_PEERS_VENV, or peers-NAME in ${XDG_CACHE_HOME:-~/.cache}/mtp; kept between runs, made anew when REQUIREMENTS
# (default: requirements.txt beside this script) changes. Needs 5 GB of disk while it is made.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
requirements=${1:-$here/requirements.txt}
name=$(basename "$requirements" .txt)
venv=${MTP_PEERS_VENV:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mtp/peers-$name}
wanted=$(sha256sum <"$requirements")
if [ "$(cat "$venv/.requirements" 2>/dev/null)" = "$wanted" ]; then
    echo "$venv"
    exit 0
fi

mkdir -p "$(dirname "$venv")"
free=$(df -Pm "$(dirname "$venv")" | awk 'NR == 2 { print $4 }')
if [ "$free" -lt 6000 ]; then
    echo "environment.sh: $(dirname "$venv") has $free MB free, the environment needs 6000; set MTP_PEERS_VENV" >&2
    exit 1
fi
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    echo "environment.sh: $venv exists and is no virtual environment; set MTP_PEERS_VENV to another folder" >&2
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
echo "$wanted" >"$venv/.requirements"
echo "$venv"
