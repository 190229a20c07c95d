#!/bin/bash
# Rules of the source that no compiler checks.
source "$(dirname "$0")/lib.sh" rules

sources()
{
    git ls-files "${@:-*}" | grep -E '\.(c|h|cc|cpp|hpp|cu|cuh)$' | grep -v '^tests/data/'
}

formatted()
{
    bash .ci/deps.sh check || return 1
    # one line a file: how many places; clang-format-14 -i FILE mends it
    local places
    places=$(sources | xargs clang-format-14 --dry-run -Werror 2>&1 | sed -n 's/^\([^:]*\):[0-9]*:[0-9]*: error.*/\1/p')
    sort <<<"$places" | uniq -c | grep '[a-z]' && return 1
    return 0
}

# kernels/ knows ops.h, its own headers and three of lib's; programs know the public headers; nothing points back.
layered()
{
    local bad=0
    # shellcheck disable=SC2046
    if grep -nE '^#include "' $(sources 'kernels/*') |
        grep -vE '"(mtp/(status|tensor)\.h|base/error\.h|ops\.h|((cpu|cuda)/)?[a-z0-9_]+\.cuh|((cpu|cuda|emu)/)?[a-z0-9_]+\.h)"'; then
        echo "^ kernels/ includes more of lib/ than mtp/status.h, mtp/tensor.h and base/error.h"
        bad=1
    fi
    if grep -nE '^#include "(base|formats|model|data|optim|comm|run|validate|cpu|cuda)/|^#include "(ops|module)\.h"' $(sources 'trainers/*'); then
        echo "^ trainers/ includes internal headers of lib/"
        bad=1
    fi
    if grep -nE '^#include "(cpu/|cuda/|(check|check_args)\.h")' $(sources 'lib/*'); then
        echo "^ lib/ includes internal headers of kernels/"
        bad=1
    fi
    return $bad
}

# The library returns statuses: it neither ends the process nor prints.
no_exit()
{
    # shellcheck disable=SC2046
    ! grep -nE '(^|[^a-z_>.])(exit|_exit|abort|assert|printf|puts|perror)\(' $(sources 'lib/*' 'kernels/*') |
        grep -vE '^[^:]*:[0-9]+: *(/?\*|//)|__attribute__'
}

# A kernel says for how many threads it is compiled: else it may take more registers than its block has.
bounded()
{
    # shellcheck disable=SC2046
    if grep -nE '__global__' $(sources 'kernels/cuda/*') | grep -vE '__launch_bounds__|^[^:]*:[0-9]+: *(/?\*|//)'; then
        echo "^ kernels without __launch_bounds__"
        return 1
    fi
}

# 700 lines are the limit of a source file.
sized()
{
    ! sources | xargs wc -l | awk '$2 != "total" && $1 > 700 { print "more than 700 lines:", $0; bad = 1 } END { exit !bad }'
}

scripts()
{
    local script
    git ls-files '*.sh' .ci/run | while read -r script; do bash -n "$script" || exit 1; done &&
        git ls-files '*.py' | xargs -r python3 -c 'import ast, sys
for path in sys.argv[1:]: ast.parse(open(path, encoding="utf-8").read(), path)'
}

# Every relative link of a README points at something.
links()
{
    local bad=0 page link
    while read -r page; do
        while read -r link; do
            [ -e "$(dirname "$page")/${link%%#*}" ] || { echo "$page: no such file: $link"; bad=1; }
        done < <(grep -oE '\]\([^)#:]+(#[^)]*)?\)' "$page" | sed -E 's/^\]\(//; s/\)$//')
    done < <(git ls-files '*.md' | grep -v '^tests/data/')
    return $bad
}

check "clang-format" formatted
check "layers: who includes whom" layered
check "no exit, abort, assert or printing in lib/ and kernels/" no_exit
check "every kernel has its launch bounds" bounded
check "no source file above 700 lines" sized
check "scripts parse" scripts
check "links of the READMEs" links
finish
