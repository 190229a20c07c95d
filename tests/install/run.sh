#!/bin/bash
# run.sh BUILD_DIR
#
# Protects: cmake --install. Installs BUILD_DIR into a scratch prefix, moves the prefix (the package must not remember
# where it was), then builds the example against it with pkg-config and with CMake, shared and static, and runs all four.
set -euo pipefail
build=$(realpath "${1:?usage: run.sh BUILD_DIR}")
here=$(cd "$(dirname "$0")" && pwd)
drafter=$here/../data/sample/drafter_init
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
libdir=$(dirname "$(find "$work/prefix" -name libmtp.so)")
export PKG_CONFIG_PATH=$libdir/pkgconfig
cc=${CC:-cc}
flags=(-std=c11 -Wall -Wextra -Wpedantic -Werror)

# every public header stands on its own, in C and in C++, and mtp.h lists them all
for header in "$work"/prefix/include/mtp/*.h; do
    name=mtp/$(basename "$header")
    echo "#include <$name>" | "$cc" "${flags[@]}" -I"$work/prefix/include" -fsyntax-only -x c -
    echo "#include <$name>" | "${CXX:-c++}" -std=c++17 -Wall -Wextra -Werror -I"$work/prefix/include" -fsyntax-only -x c++ -
    [ "$name" = mtp/mtp.h ] || grep -q "#include \"$name\"" "$work/prefix/include/mtp/mtp.h" ||
        { echo "mtp/mtp.h does not include $name"; exit 1; }
done

# shellcheck disable=SC2046  # the flags of pkg-config are words
"$cc" "${flags[@]}" $(pkg-config --cflags mtp) "$here/example.c" -o "$work/pc_shared" $(pkg-config --libs mtp)
# shellcheck disable=SC2046
"$cc" "${flags[@]}" $(pkg-config --cflags mtp) "$here/example.c" -o "$work/pc_static" \
    $(pkg-config --static --libs mtp | sed "s|-lmtp|$libdir/libmtp.a|")
cmake -S "$here" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_COMPILER="$cc" >"$work/log" ||
    { cat "$work/log"; exit 1; }
cmake --build "$work/build" >"$work/log" || { cat "$work/log"; exit 1; }

export LD_LIBRARY_PATH=$libdir
for program in pc_shared pc_static build/example_mtp build/example_mtp_static; do
    echo "$program:"
    "$work/$program" "$drafter" | tee "$work/out"
    grep -q '^4 layers, hidden 64, vocabulary 2048, ' "$work/out" || { echo "wrong geometry"; exit 1; }
    # not through a pipe: grep that ends early would end ldd, which counts as a failure here
    ldd "$work/$program" >"$work/libraries"
    case $program in
    *static) ! grep libmtp "$work/libraries" || { echo "$program is linked to libmtp.so"; exit 1; } ;;
    *) grep -q "$libdir/libmtp.so.0" "$work/libraries" || { echo "$program is not linked to libmtp.so"; exit 1; } ;;
    esac
done
"$work/prefix/bin/mtp" --version
