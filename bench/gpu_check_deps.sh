# What bench/gpu_check.sh needs of Debian packages on a machine without network; sourced by it.
#
# Packages are unpacked into a folder of the build, never installed: nothing of the machine changes, no root is needed,
# and what the machine has itself is used first.

# Programs and libraries to gather. The compilers are not among them: nvcc works with the host's only, so a machine with
# CUDA's toolkit has them. HDF5, Gloo and toml++ are left out of the build where they are not there.
deps_wanted=(cmake ninja-build pkgconf libopenblas-pthread-dev libjansson-dev libcmocka-dev)
# What every system with compilers has, or what only the packages' own installation needs.
deps_there='^(libc6|libgcc-s1|libstdc\+\+6|gcc-[0-9]+-base|libcrypt1|zlib1g|dpkg|tar|debconf|usrmerge|init-system-helpers|procps|'
deps_there+='libproc2-0|perl.*|libperl.*|lib.*-perl|libgdbm.*|libncursesw6|libtinfo6|libsystemd0|libselinux1|libblas3|liblapack3)$'
deps_most=$((64 << 20))

# collect DIR: packages for this release and architecture, with all they need, into an empty folder.
collect()
{
    local dir=$1 work name total
    local names=()
    command -v apt-get >/dev/null || { echo "gpu_check: --collect needs apt-get: run it on Debian or Ubuntu" >&2 && return 1; }
    mkdir -p "$dir" || return 1
    [ -z "$(ls -A "$dir")" ] || { echo "gpu_check: --collect: $dir is not empty" >&2 && return 1; }
    work=$(mktemp -d) || return 1
    # as if nothing were installed, so that nothing is left out because this machine has it
    : >"$work/status"
    while read -r name; do
        [[ $name =~ $deps_there ]] || names+=("$name")
    done < <(apt-get -o "Dir::State::status=$work/status" --no-install-recommends -s install "${deps_wanted[@]}" 2>"$work/log" |
        awk '$1 == "Inst" { print $2 }')
    if [ ${#names[@]} -eq 0 ]; then
        cat "$work/log" >&2
        echo "gpu_check: --collect: apt-get knows no such packages; run apt-get update" >&2
        rm -rf "$work"
        return 1
    fi
    if ! (cd "$dir" && apt-get -q download "${names[@]}" >"$work/log" 2>&1); then
        tail -n 20 "$work/log" >&2
        echo "gpu_check: --collect: apt-get could not download" >&2
        rm -rf "$work"
        return 1
    fi
    rm -rf "$work"
    total=$(cat "$dir"/*.deb | wc -c)
    echo "$dir: ${#names[@]} packages, $(awk "BEGIN { printf \"%.1f\", $total / 1048576 }") MiB"
    [ "$total" -lt "$deps_most" ] || { echo "gpu_check: --collect: that is more than $((deps_most >> 20)) MiB" >&2 && return 1; }
}

# unpack_deb FILE DIR: dpkg where it is, else as the two archives in each other that a package is.
unpack_deb()
{
    local member
    if command -v dpkg-deb >/dev/null; then
        dpkg-deb -x "$1" "$2"
    else
        member=$(ar t "$1" | grep '^data\.tar') && ar p "$1" "$member" | case $member in
        *.xz) tar -xJ -C "$2" ;;
        *.zst) tar -x --zstd -C "$2" ;;
        *) tar -xz -C "$2" ;;
        esac
    fi
}

# wrap PREFIX PROGRAM: PROGRAM of the packages, for a machine that has none, with the libraries of the packages.
wrap()
{
    command -v "$2" >/dev/null && return
    [ -x "$1/usr/bin/$2" ] || return
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$libraries" "$1/usr/bin/$2" >"$1/bin/$2"
    chmod +x "$1/bin/$2"
}

# use_deps DIR PREFIX: unpack the packages of DIR into PREFIX, and let what follows find them.
use_deps()
{
    local prefix deb libraries file
    ls "$1"/*.deb >/dev/null 2>&1 || { echo "MTP_DEPS_DIR=$1 holds no packages (*.deb); bench/gpu_check.sh --collect DIR gathers them" >&2 && return 1; }
    mkdir -p "$2/bin" "$2/run" || return 1
    prefix=$(cd "$2" && pwd)
    if [ ! -e "$prefix/complete" ]; then
        for deb in "$1"/*.deb; do
            unpack_deb "$deb" "$prefix" || { echo "cannot unpack $deb" >&2 && return 1; }
        done
        # packages name /usr in their pkg-config files
        find "$prefix/usr" -name '*.pc' -type f -exec sed -i "s|=/usr|=$prefix/usr|" {} +
        : >"$prefix/complete"
    fi
    libraries=$(find "$prefix/usr/lib" "$prefix/lib" -name 'lib*.so*' -printf '%h\n' 2>/dev/null | sort -u | paste -s -d :)
    for file in cmake ctest ninja pkgconf pkg-config; do wrap "$prefix" "$file"; done
    # what our programs are linked to, and nothing that other programs might take
    for file in openblas gfortran quadmath jansson cmocka; do
        find "$prefix/usr/lib" -name "lib$file*.so*" -exec ln -sf -t "$prefix/run" {} +
    done
    export PATH=$PATH:$prefix/bin
    export LD_LIBRARY_PATH=$prefix/run${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    file=$(find "$prefix/usr" -name pkgconfig -type d | paste -s -d :)
    export PKG_CONFIG_PATH=${PKG_CONFIG_PATH:+$PKG_CONFIG_PATH:}$file
    # shellcheck disable=SC2034  # for who sources this
    deps_flags=("-DCMAKE_PREFIX_PATH=$prefix/usr" "-DCMAKE_LIBRARY_PATH=$prefix/run")
}

# compiles TEXT [FLAG...]: does the preprocessor take it?
compiles()
{
    local text=$1
    shift
    printf '%b' "$text" | "${CXX:-c++}" -E -x c++ "$@" - >/dev/null 2>&1
}

# optional_parts: the switches of what is not on this machine into parts_flags, their names into parts_missing.
optional_parts()
{
    local hdf5
    hdf5=$(pkg-config --cflags hdf5-serial 2>/dev/null || pkg-config --cflags hdf5 2>/dev/null)
    # shellcheck disable=SC2086  # flags are words
    if ! { pkg-config --exists hdf5-serial || pkg-config --exists hdf5; } 2>/dev/null ||
        ! compiles '#include <hdf5.h>\n#ifndef H5_HAVE_THREADSAFE\n#error\n#endif\n' $hdf5; then
        parts_flags+=(-DMTP_HDF5=OFF) && parts_missing+=(HDF5)
    fi
    compiles '#include <gloo/rendezvous/store.h>\n' -std=c++17 || { parts_flags+=(-DMTP_GLOO=OFF) && parts_missing+=(Gloo); }
    pkg-config --exists tomlplusplus 2>/dev/null || { parts_flags+=(-DMTP_TOML=OFF) && parts_missing+=(toml++); }
    pkg-config --exists cmocka 2>/dev/null || { parts_flags+=(-DMTP_BUILD_TESTS=OFF) && parts_missing+=(cmocka); }
}
