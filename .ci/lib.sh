# What the suites of .ci share; source it with the name of the suite as argument. A suite is a script whose checks each
# print one line and whose end prints one summary line and adds it to $MTP_CI_RESULTS, which .ci/run reads.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
suite=$1
passed=0 failed=0 skipped=0
suite_logs=$(mktemp -d)
suite_start=$SECONDS
jobs=$(nproc)

# check NAME COMMAND...: passes when the command exits 0; shows the end of its output otherwise.
check()
{
    local name=$1 start=$SECONDS
    shift
    if "$@" >"$suite_logs/log" 2>&1 </dev/null; then
        passed=$((passed + 1))
        echo "ok       $suite: $name ($((SECONDS - start)) s)"
    else
        failed=$((failed + 1))
        echo "FAILED   $suite: $name ($((SECONDS - start)) s): $*"
        tail -n "${MTP_CI_LINES:-60}" "$suite_logs/log" | sed 's/^/    /'
        return 1
    fi
}

# skip NAME REASON: counted apart, never as passed.
skip()
{
    skipped=$((skipped + 1))
    echo "skipped  $suite: $1: $2"
}

# count_ctest LOG BUILD_DIR: add what ctest reported, and print why what was skipped was skipped: whole programs, and
# single cases inside of programs that passed. A program that did not run at all is a failure.
count_ctest()
{
    local total ok out record=$2/Testing/Temporary/LastTest.log name
    total=$(sed -n 's/.* tests failed out of \([0-9]*\)$/\1/p' "$1")
    ok=$(grep -c '  Passed  ' "$1")
    out=$(grep -c '\*\*\*Skipped' "$1")
    if [ -z "$total" ] || [ "$total" -eq 0 ]; then
        echo "FAILED   $suite: ctest ran no test"
        failed=$((failed + 1))
        return
    fi
    passed=$((passed + ok))
    failed=$((failed + total - ok - out))
    while read -r name; do
        skip "$name" "$(awk -v name="$name" '/^[0-9]+\/[0-9]+ Testing: / { here = $3 == name } /^<end of output>/ { here = 0 }
            here && text && NF { last = $0 } here && /^-----/ { text = 1 } END { print last }' "$record")"
    done < <(sed -n 's/.*(Skipped)$/&/p' "$1" | awk '{ print $3 }')
    while IFS= read -r name; do
        skip "$name" "its program says why, in $record"
    done < <(grep -E '^\[  SKIPPED \] [^0-9]' "$record" | sed 's/^\[  SKIPPED \] //' | sort -u)
}

# finish: the summary line; the exit status says whether all passed.
finish()
{
    rm -rf "$suite_logs"
    local line="$passed passed, $failed failed"
    [ "$skipped" -eq 0 ] || line+=", $skipped skipped"
    echo "== $suite: $line ($((SECONDS - suite_start)) s)"
    [ -z "${MTP_CI_RESULTS:-}" ] || echo "$suite $passed $failed $skipped" >>"$MTP_CI_RESULTS"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}
