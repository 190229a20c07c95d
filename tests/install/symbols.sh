#!/bin/bash
# symbols.sh LIBMTP_SO LIBMTP_A
#
# Protects: what libmtp shows and what it hides. The shared library exports exactly the functions that the public headers
# declare with MTP_API. No variable of the library can change: .data and .bss of the archive are empty but for
# thread-local storage.
set -euo pipefail
export LC_ALL=C
shared=${1:?usage: symbols.sh LIBMTP_SO LIBMTP_A}
static=${2:?usage: symbols.sh LIBMTP_SO LIBMTP_A}
include=$(cd "$(dirname "$0")/../../lib/include" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0

nm -D --defined-only "$shared" | awk '{ print $NF }' | sed 's/@.*//' | sort -u >"$work/exported"
# A declaration ends at its semicolon; the function's name stands before the first parenthesis.
cat "$include"/mtp/*.h | tr '\n' ' ' | grep -o 'MTP_API [^;(]*(' | grep -o 'mtp_[a-z0-9_]*(' | tr -d '(' |
    sort -u >"$work/declared"
[ -s "$work/declared" ] || { echo "found no MTP_API declaration in $include"; exit 1; }
if comm -23 "$work/exported" "$work/declared" | grep .; then
    echo "^ exported, but not declared with MTP_API in a public header"
    bad=1
fi
if comm -13 "$work/exported" "$work/declared" | grep .; then
    echo "^ declared in a public header, but not exported"
    bad=1
fi

# DW.ref.*: the compiler's own pointers for C++ exceptions; _ZStL8__ioinit: what <iostream>, which Gloo's headers include,
# leaves in every object.
objdump -t "$static" | grep -E ' O (\.data|\.bss|\*COM\*)' | grep -vE '\.data\.rel\.ro|\.data\.rel\.local\.DW\.ref\.| _ZStL8__ioinit$' \
    >"$work/globals" || true
if grep . "$work/globals"; then
    echo "^ variables of libmtp that can change"
    bad=1
fi
echo "$(wc -l <"$work/exported") functions exported"
exit $bad
