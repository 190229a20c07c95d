/* golden DIR...: check reference cases and print, for each, the largest error per group.
 *
 * A DIR is a drafter case (case.json) or the optimizer alone (optimizer.json). Exit code: 0 all pass, 1 some case
 * differs by more than the tolerance or cannot be read, 2 wrong usage, 77 nothing failed and nothing could be checked
 * (every case needs an objective that is not built). */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "golden/golden.h"

typedef enum outcome { PASSED, FAILED, SKIPPED } outcome;

static bool exists(const char *directory, const char *name)
{
    char path[4096];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return stat(path, &info) == 0;
}

/* The three curve groups print as one: the interface names hidden, state, logits, loss, gradients, curve. */
static bool print_groups(const golden_result *result, const double *tolerances, bool verbose)
{
    bool good = result->wrong == 0;
    int64_t compared = result->integers;
    for (int g = 0; g < GOLDEN_GROUPS; g++) {
        if (result->group[g].count == 0) continue;
        compared += result->group[g].count;
        const bool inside = result->group[g].error <= tolerances[g];
        printf("  %s %.1e%s", golden_group_names[g], result->group[g].error, inside ? "" : " (!)");
        if (verbose) printf(" in %s", result->group[g].where);
        good = good && inside;
    }
    if (result->integers) printf("  integers %s", result->wrong ? "differ (!)" : "equal");
    return good && compared > 0;
}

static void print_failures(const golden_result *result, const double *tolerances)
{
    for (int g = 0; g < GOLDEN_GROUPS; g++)
        if (result->group[g].count && !(result->group[g].error <= tolerances[g]))
            fprintf(stderr, "    %s: %s differs by %.3e of its largest magnitude; the tolerance is %.1e\n",
                    golden_group_names[g], result->group[g].where, result->group[g].error, tolerances[g]);
    if (result->wrong)
        fprintf(stderr, "    %lld of %lld integers differ, the first in %s\n", (long long)result->wrong,
                (long long)result->integers, result->wrong_where);
}

static outcome check(const char *directory, const mtp_context_options *device, bool verbose)
{
    golden_result result = {0};
    const double *tolerances = device->bf16 ? golden_tolerances_bf16 : golden_tolerances;
    const char *skipped = NULL;
    const bool optimizer = exists(directory, "optimizer.json");
    const mtp_status status = optimizer ? golden_run_adamw(directory, device, &result)
                                        : golden_run_case(directory, device, &result, &skipped);
    printf("%s:", directory);
    if (status != MTP_OK) {
        printf("  FAILED\n");
        fflush(stdout);
        fprintf(stderr, "    %s\n", mtp_last_error()->message);
        return FAILED;
    }
    if (skipped) {
        printf("  skipped: objective %s not built yet\n", skipped);
        return SKIPPED;
    }
    const bool good = print_groups(&result, tolerances, verbose);
    printf("  %s\n", good ? "ok" : "FAILED");
    fflush(stdout);
    if (!good) print_failures(&result, tolerances);
    return good ? PASSED : FAILED;
}

int main(int argc, char **argv)
{
    static const char usage[] =
        "usage: golden [--verbose] [--device NAME] [--bf16] DIR...\n"
        "Checks reference cases (format: tests/data/goldens/README.md) and prints, for each, the largest error per "
        "group; with --verbose also the tensor that has it. NAME: cpu, cuda, cuda:1. --bf16: "
        "products in bf16, with the tolerances of that mode.\n";
    int count[3] = {0}, first = 1;
    bool verbose = false;
    mtp_context_options device = {.num_threads = 0};
    if (argc > 1 && strcmp(argv[1], "--help") == 0) return fputs(usage, stdout) < 0;
    for (; first < argc && strncmp(argv[first], "--", 2) == 0; first++) {
        if (strcmp(argv[first], "--verbose") == 0)
            verbose = true;
        else if (strcmp(argv[first], "--bf16") == 0)
            device.bf16 = true;
        else if (strcmp(argv[first], "--device") == 0 && first + 1 < argc)
            device.device = argv[++first];
        else
            break;
    }
    if (argc <= first || strncmp(argv[first], "--", 2) == 0) {
        fputs(usage, stderr);
        return 2;
    }
    for (int i = first; i < argc; i++) count[check(argv[i], &device, verbose)]++;
    if (argc > first + 1) printf("%d passed, %d failed, %d skipped\n", count[PASSED], count[FAILED], count[SKIPPED]);
    return count[FAILED] ? 1 : count[PASSED] ? 0 : 77;
}
