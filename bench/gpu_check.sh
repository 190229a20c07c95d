#!/bin/bash
# bench/gpu_check.sh [--part build|test|sanitize|bench]... [--build DIR] [--out DIR] [--peak-gflops N] [--emulator] [--few]
# bench/gpu_check.sh --collect DIR
#
# What is to be done on a machine with a GPU and CUDA's toolkit: builds the cuda backend for the device that is there, runs
# the op tests, the reference cases and a training run on it, compute-sanitizer where it is installed, and the benchmarks.
# Without --part all four parts run, one after the other. A check that fails stops nothing. Each part takes less than 9
# minutes: what does not fit any more is reported as not run. Results are in OUT (gpu_check): report-PART.md to read and
# report-PART.json, report.md and report.json of all parts that ran into OUT, and the log of each check. The exit code is 0
# when nothing failed.
#
# --build DIR      where to build (build-gpu); the other parts use what the part `build` made
# --peak-gflops N  dense bf16 rate of the device; without it that of its data sheet, for devices that are known
# --emulator       the same with tests/emu for a device, which shows that this script works; its times mean nothing
# --few            of each kind of test and benchmark only the smallest
# --collect DIR    gathers the Debian packages that a build needs, on a machine with network and the same architecture.
#                  MTP_DEPS_DIR=DIR then makes the parts use them, without network and without installing anything.
#
# Needs no network. HDF5, Gloo and toml++ are left out where they are not installed, the tests where cmocka is not.
set -uo pipefail
from=$PWD
cd "$(dirname "$0")/.." || exit 1
source bench/gpu_check_deps.sh
set -a # functions of the parts run in shells of their own, with a time limit
source bench/gpu_check_parts.sh
set +a

parts=() build=build-gpu out=gpu_check emulator=0 few=0 peak=0 collect_into=
usage()
{
    sed -n '2,23s/^# \{0,1\}//p' bench/gpu_check.sh
    exit "$1"
}
# path NAME: from where the script was called, not from here
path()
{
    if [[ $1 = /* ]]; then echo "$1"; else echo "$from/$1"; fi
}

while [ $# -gt 0 ]; do
    case $1 in
    --part | --build | --out | --peak-gflops | --collect) [ $# -ge 2 ] || { echo "$1 needs a value" >&2 && exit 2; } ;;&
    --part) [[ $2 =~ ^(build|test|sanitize|bench)$ ]] || { echo "part '$2' is unknown: build, test, sanitize, bench" >&2 && exit 2; }
        parts+=("$2") && shift ;;
    --build) build=$(path "$2") && shift ;;
    --out) out=$(path "$2") && shift ;;
    --peak-gflops) [[ $2 =~ ^[0-9]+$ ]] || { echo "--peak-gflops '$2': a whole number" >&2 && exit 2; }
        peak=$2 && shift ;;
    --collect) collect_into=$(path "$2") && shift ;;
    --emulator) emulator=1 ;;
    --few) few=1 ;;
    --help | -h) usage 0 ;;
    *) echo "unknown argument '$1'" >&2 && usage 2 ;;
    esac
    shift
done
if [ -n "$collect_into" ]; then
    collect "$collect_into"
    exit
fi
[ ${#parts[@]} -gt 0 ] || parts=(build test sanitize bench)
export build out peak
mkdir -p "$out" || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
part_limit=520 # seconds of a part
failed=0 not_run=0

# ---- JSON -------------------------------------------------------------------------------------------------------------

# quoted TEXT: as a JSON string
quoted()
{
    printf '"%s"' "$(printf '%s' "$1" | LC_ALL=C tr -d '\000-\010\013\014\016-\037' | sed 's/\\/\\\\/g; s/"/\\"/g; s/\t/\\t/g' |
        awk 'NR > 1 { printf "\\n" } { printf "%s", $0 }')"
}

# The JSON lines of a log, as the items of a list.
results_of()
{
    grep '^{".*}$' "$1" | paste -s -d ,
}

# ---- checks -----------------------------------------------------------------------------------------------------------

# check NAME LIMIT COMMAND...: one line of the report of the part that runs; the log stays in OUT. The command is a program
# or a function of gpu_check_parts.sh. One that ends with 77 was skipped; the last line of its log says why.
check()
{
    local name=$1 limit=$2 start=$SECONDS left=$((part_start + part_limit - SECONDS)) status=0 word log note=
    shift 2
    # shellcheck disable=SC2016  # for the other shell
    ! declare -F "$1" >/dev/null || set -- bash -uo pipefail -c '"$0" "$@"' "$@"
    log=$out/$part-${name//[^a-zA-Z0-9_.-]/_}.log
    if [ "$left" -lt 5 ]; then
        : >"$log"
        word="not run" note="the time of the part was used up"
    else
        timeout -k 5 "$((limit < left ? limit : left))" "$@" >"$log" 2>&1 </dev/null
        status=$?
        case $status in
        0) word=ok ;;
        77) word=skipped note=$(tail -n 1 "$log") ;;
        124 | 137)
            word=FAILED note="stopped after $limit s"
            [ "$limit" -lt "$left" ] || word="not run" note="stopped when the time of the part was used up"
            ;;
        *) word=FAILED note=$(tail -n 1 "$log") ;;
        esac
    fi
    [ "$word" != FAILED ] || failed=$((failed + 1))
    [ "$word" != "not run" ] || not_run=$((not_run + 1))
    printf '{"check": %s, "result": "%s", "status": %d, "seconds": %d, "note": %s, "log": %s, "results": [%s]}\n' \
        "$(quoted "$name")" "$word" "$status" "$((SECONDS - start))" "$(quoted "$note")" "$(quoted "${log##*/}")" \
        "$(results_of "$log")" >>"$work/checks"
    printf '| %s | %s | %d | %s |\n' "$name" "$word" "$((SECONDS - start))" "${note//|/\\|}" >>"$work/rows"
    printf '%-8s %s: %s (%d s)%s\n' "$word" "$part" "$name" "$((SECONDS - start))" "${note:+: $note}"
    [ "$word" = ok ]
}

# skip NAME REASON
skip()
{
    check "$1" 5 skipped "$2"
}

# ---- reports ----------------------------------------------------------------------------------------------------------

# awk: a value of the JSON line at hand; "-" when it is not there or null.
field='
    function field(name,    at) {
        at = match($0, "\"" name "\": (\"[^\"]*\"|[^,}]*)")
        if (!at) return "-"
        at = substr($0, RSTART + length(name) + 4, RLENGTH - length(name) - 4)
        gsub(/^"|"$/, "", at)
        return at == "null" ? "-" : at
    }'

# The table of the benchmarks in the checks of a part: one row a JSON line with an op.
bench_table()
{
    local lines
    lines=$(grep -h '^{"op": .*}$' "$out"/bench-*.log 2>/dev/null)
    [ -n "$lines" ] || return
    printf '\n| op | case | mode | microseconds | TFLOP/s | %% of peak | GB/s | %% of peak |\n|---|---|---|---|---|---|---|---|\n'
    awk "$field"'
        function some(number) { return number + 0 > 0 ? number : "-" }
        { printf "| %s | %s | %s | %.1f | %s | %s | %s | %s |\n", field("op"), field("case"), field("mode"), 1e6 * field("seconds"),
            some(field("tflops")), field("percent_of_peak_flops"), some(field("gbytes_per_second")), field("percent_of_peak_bytes") }' <<<"$lines"
}

step_table()
{
    local lines
    lines=$(grep -h '^{"bench": "step".*}$' "$out"/bench-*.log 2>/dev/null)
    [ -n "$lines" ] || return
    printf '\n| step | positions | K | tokens of a document | ms | positions/s | rows/s | %% of the floor | at TFLOP/s | ops | graph nodes | device GB | host GB |\n'
    printf '|---|---|---|---|---|---|---|---|---|---|---|---|---|\n'
    awk "$field"'
        { printf "| %s, %s | %s | %s | %s | %.2f | %.0f | %.0f | %s | %.0f | %s | %s | %.2f | %.2f |\n", field("size"), field("head"),
            field("rows"), field("num_speculative_steps"), field("document"), 1e3 * field("median_seconds"),
            field("positions_per_second"), field("draft_rows_per_second"),
            (field("peak_gflops") + 0 > 0 ? field("percent_of_floor") : "-"), field("peak_gflops") / 1e3, field("op_calls"),
            field("graph_nodes"), field("device_bytes") / 1e9, field("peak_rss_bytes") / 1e9 }' <<<"$lines"
}

# report PART SECONDS: report-PART.json and report-PART.md from the checks so far.
report()
{
    local version
    version=$("$build/mtp" --version 2>/dev/null || echo "mtp was not built")
    {
        printf '{"part": "%s", "seconds": %d, "emulator": %s, "machine": %s, "left_out": %s, "version": %s,\n"checks": [\n' "$1" "$2" \
            "$([ $emulator = 1 ] && echo true || echo false)" "$(quoted "$machine")" "$(quoted "${parts_missing[*]}")" \
            "$(quoted "$version")"
        sed '$!s/$/,/' "$work/checks"
        echo ']}'
    } >"$out/report-$1.json"
    {
        # shellcheck disable=SC2016  # fences of code
        printf '# gpu_check: %s\n\n%s\n\n```\n%s\n```\n' "$1" "${machine//$'\n'/  $'\n'}" "$version"
        [ ${#parts_missing[@]} -eq 0 ] || printf '\nLeft out, since not installed here: %s.\n' "${parts_missing[*]}"
        [ "$emulator" = 0 ] || printf '\nOn the emulator: times mean nothing.\n'
        printf '\n| check | result | seconds | |\n|---|---|---|---|\n'
        cat "$work/rows"
        if [ "$1" = bench ]; then
            bench_table
            step_table
        fi
        grep '"result": "FAILED"' "$work/checks" | sed 's/.*"log": "\([^"]*\)".*/\1/' | while read -r log; do
            # shellcheck disable=SC2016
            printf '\n## %s\n\n```\n%s\n```\n' "$log" "$(tail -n 40 "$out/$log")"
        done
    } >"$out/report-$1.md"
}

# One document of the parts that ran into OUT, now or before.
whole_report()
{
    local part first=1
    {
        echo '{"parts": ['
        for part in build test sanitize bench; do
            [ -e "$out/report-$part.json" ] || continue
            [ $first = 1 ] || echo ,
            first=0
            cat "$out/report-$part.json"
        done
        echo ']}'
    } >"$out/report.json"
    for part in build test sanitize bench; do
        [ ! -e "$out/report-$part.md" ] || { cat "$out/report-$part.md" && echo; }
    done >"$out/report.md"
}

# ---- the run ----------------------------------------------------------------------------------------------------------

deps_flags=() parts_flags=() parts_missing=()
if [ -n "${MTP_DEPS_DIR:-}" ]; then
    use_deps "$(path "$MTP_DEPS_DIR")" "$build/deps" || exit 1
fi
optional_parts
machine=$(machine_of)
for part in "${parts[@]}"; do
    : >"$work/checks"
    : >"$work/rows"
    rm -f "$out/$part"-*.log
    part_start=$SECONDS
    "part_$part"
    report "$part" "$((SECONDS - part_start))"
done
whole_report
echo "$out/report.md; $failed failed, $not_run not run"
[ "$failed" -eq 0 ]
