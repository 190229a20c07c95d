/* golden DIR...: check reference cases and print, for each, the largest error per group.
 *
 * A DIR is a drafter case (case.json) or the optimizer alone (optimizer.json). Exit code: 0 all pass, 1 some case
 * differs by more than the tolerance or cannot be read, 2 wrong usage, 77 nothing failed and nothing could be checked
 * (every case needs an objective that is not built). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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

static bool print_groups(const golden_result *result, bool verbose)
{
    bool good = result->wrong == 0;
    int64_t compared = result->integers;
    for (int g = 0; g < GOLDEN_GROUPS; g++) {
        if (result->group[g].count == 0) continue;
        compared += result->group[g].count;
        const bool inside = result->group[g].error <= golden_tolerances[g];
        printf("  %s %.1e%s", golden_group_names[g], result->group[g].error, inside ? "" : " (!)");
        if (verbose) printf(" in %s", result->group[g].where);
        good = good && inside;
    }
    if (result->integers) printf("  integers %s", result->wrong ? "differ (!)" : "equal");
    return good && compared > 0;
}

static void print_wrong_integers(const golden_result *result)
{
    if (result->wrong)
        fprintf(stderr, "    %lld of %lld integers differ, the first in %s\n", (long long)result->wrong,
                (long long)result->integers, result->wrong_where);
}

static void print_failures(const golden_result *result)
{
    for (int g = 0; g < GOLDEN_GROUPS; g++)
        if (result->group[g].count && !(result->group[g].error <= golden_tolerances[g]))
            fprintf(stderr, "    %s: %s differs by %.3e of its largest magnitude; the tolerance is %.1e\n",
                    golden_group_names[g], result->group[g].where, result->group[g].error, golden_tolerances[g]);
    print_wrong_integers(result);
}

/* ---- bf16 mode --------------------------------------------------------------------------------------------------- */

static const mtp_context_options plain_device = {.device = "cpu", .bf16 = true};

static double share(int64_t part, int64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

/* What a group's mean error may be, beside a plain step in bf16. */
static double allowed(const golden_result *result, const golden_result *plain, int group)
{
    const double turned = share(result->redrafted + plain->redrafted, result->drafts);
    const bool sums_places = group == GOLDEN_LOSS || group == GOLDEN_GRADIENTS;
    return 2 * golden_mean_error(plain, group) + (sums_places ? turned : 0);
}

static bool few_turned(const golden_result *result)
{
    return result->reselected * GOLDEN_TURNED_SELECTIONS <= result->selections &&
           result->redrafted * GOLDEN_TURNED_DRAFTS <= result->drafts;
}

static bool print_beside_plain(const golden_result *result, const golden_result *plain)
{
    bool good = result->wrong == 0 && few_turned(result);
    int64_t compared = 0;
    for (int g = 0; g < GOLDEN_GROUPS; g++) {
        if (result->group[g].count == 0) continue;
        compared += result->group[g].count;
        const double error = golden_mean_error(result, g), least = golden_mean_error(plain, g);
        const bool inside = error <= allowed(result, plain, g) && least <= golden_plain_limits[g];
        printf("  %s %.1e (plain %.1e)%s", golden_group_names[g], error, least, inside ? "" : " (!)");
        good = good && inside;
    }
    if (result->selections)
        printf("  reselected %lld of %lld", (long long)result->reselected, (long long)result->selections);
    if (result->drafts) printf("  redrafted %lld of %lld", (long long)result->redrafted, (long long)result->drafts);
    printf("%s  integers %s", few_turned(result) ? "" : " (!)", result->wrong ? "differ (!)" : "equal");
    return good && compared > 0;
}

static void print_failures_beside_plain(const golden_result *result, const golden_result *plain)
{
    for (int g = 0; g < GOLDEN_GROUPS; g++) {
        if (result->group[g].count == 0) continue;
        const double error = golden_mean_error(result, g), least = golden_mean_error(plain, g);
        if (!(error <= allowed(result, plain, g)))
            fprintf(stderr, "    %s: a mean error of %.3e; %.3e is allowed, the plain step in bf16 has %.3e\n",
                    golden_group_names[g], error, allowed(result, plain, g), least);
        if (!(least <= golden_plain_limits[g]))
            fprintf(stderr, "    %s: a mean error of the plain step in bf16 of %.3e; %.1e is allowed\n",
                    golden_group_names[g], least, golden_plain_limits[g]);
    }
    if (!few_turned(result))
        fprintf(stderr, "    1 of %d selected centroids and 1 of %d drafts may be other ones\n",
                (int)GOLDEN_TURNED_SELECTIONS, (int)GOLDEN_TURNED_DRAFTS);
    print_wrong_integers(result);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static bool same_bits(const golden_steps *a, const golden_steps *b)
{
    return a->num_weights == b->num_weights && memcmp(a->loss, b->loss, sizeof a->loss) == 0 &&
           memcmp(a->norm, b->norm, sizeof a->norm) == 0 &&
           memcmp(a->weights, b->weights, (size_t)a->num_weights * sizeof *a->weights) == 0;
}

/* The root mean square over the steps of the relative error of the loss. */
static double loss_error(const golden_steps *got, const golden_steps *want, int64_t count)
{
    double squares = 0;
    for (int64_t i = 0; i < count; i++) {
        const double error = (got->loss[i] - want->loss[i]) / want->loss[i];
        squares += error * error;
    }
    return sqrt(squares / (double)count);
}

/* Steps of AdamW in bf16 mode: the same bits again; losses that differ from those of the CPU in fp32 by twice what the
 * plain step's differ by; a loss that falls. */
static outcome check_steps(const char *directory, const mtp_context_options *device, int64_t count)
{
    static const mtp_context_options exact = {.device = "cpu"};
    const mtp_context_options *const devices[] = {device, device, &exact, &plain_device};
    golden_steps runs[4] = {0};
    mtp_status status = MTP_OK;
    for (int i = 0; i < 4 && status == MTP_OK; i++) status = golden_run_steps(directory, devices[i], count, &runs[i]);
    bool good = status == MTP_OK;
    printf("%s:", directory);
    if (good) {
        const double error = loss_error(&runs[0], &runs[2], count);
        const double most = 2 * loss_error(&runs[3], &runs[2], count);
        const bool same = same_bits(&runs[0], &runs[1]), falls = runs[0].loss[count - 1] < runs[0].loss[0];
        good = same && falls && error <= most;
        printf("  %lld steps  loss %.4f to %.4f%s  error %.1e (%.1e allowed)%s  twice %s", (long long)count,
               runs[0].loss[0], runs[0].loss[count - 1], falls ? "" : " (!)", error, most, error <= most ? "" : " (!)",
               same ? "the same bits" : "other bits (!)");
    }
    printf("  %s\n", good ? "ok" : "FAILED");
    fflush(stdout);
    if (status != MTP_OK) fprintf(stderr, "    %s\n", mtp_last_error()->message);
    for (int i = 0; i < 4; i++) free(runs[i].weights);
    return good ? PASSED : FAILED;
}

/* ---- one case ---------------------------------------------------------------------------------------------------- */

/* Prints, and says whether it is good. */
static bool judge(const golden_result *result, const golden_result *plain, bool verbose)
{
    const bool good = plain ? print_beside_plain(result, plain) : print_groups(result, verbose);
    printf("  %s\n", good ? "ok" : "FAILED");
    fflush(stdout);
    if (good) return true;
    if (plain)
        print_failures_beside_plain(result, plain);
    else
        print_failures(result);
    return false;
}

static outcome check(const char *directory, const mtp_context_options *device, bool verbose)
{
    golden_result result = {0}, plain = {0};
    const char *skipped = NULL;
    const bool optimizer = exists(directory, "optimizer.json"), beside_plain = device->bf16 && !optimizer;
    mtp_status status = optimizer ? golden_run_adamw(directory, device, &result)
                                  : golden_run_case(directory, device, &result, &skipped);
    if (status == MTP_OK && beside_plain) status = golden_run_case(directory, &plain_device, &plain, &skipped);
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
    return judge(&result, beside_plain ? &plain : NULL, verbose) ? PASSED : FAILED;
}

int main(int argc, char **argv)
{
    static const char usage[] =
        "usage: golden [--verbose] [--device NAME] [--bf16] [--steps N] DIR...\n"
        "Checks reference cases (format: tests/data/goldens/README.md) and prints, for each, the largest error per "
        "group; with --verbose also the tensor that has it. NAME: cpu, cuda, cuda:1. --bf16: bf16 mode, whose mean "
        "errors are compared with those of a plain step in bf16 on the CPU. --steps, with --bf16: N steps of AdamW "
        "instead, twice, and beside the CPU's.\n";
    int count[3] = {0}, first = 1, steps = 0;
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
        else if (strcmp(argv[first], "--steps") == 0 && first + 1 < argc)
            steps = atoi(argv[++first]);
        else
            break;
    }
    if (argc <= first || strncmp(argv[first], "--", 2) == 0 || steps < 0 || steps > GOLDEN_STEPS_MOST ||
        (steps > 0 && !device.bf16)) {
        fputs(usage, stderr);
        return 2;
    }
    for (int i = first; i < argc; i++)
        count[steps ? check_steps(argv[i], &device, steps) : check(argv[i], &device, verbose)]++;
    if (argc > first + 1) printf("%d passed, %d failed, %d skipped\n", count[PASSED], count[FAILED], count[SKIPPED]);
    return count[FAILED] ? 1 : count[PASSED] ? 0 : 77;
}
