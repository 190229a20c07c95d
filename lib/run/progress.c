#include "run/progress.h"

#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

enum { SHOWN_STEPS = 8 };

double mtp__clock(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Highest resident memory of this process so far; 0 when the system does not say. */
static double peak_memory_mib(void)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
    return (double)usage.ru_maxrss / 1024;
}

void mtp__progress_start(mtp__progress *progress, int64_t step)
{
    const double time = mtp__clock();
    *progress = (mtp__progress){.begin = time, .begin_step = step, .last = time};
}

void mtp__progress_skip(mtp__progress *progress, double seconds)
{
    progress->begin += seconds;
    progress->last += seconds;
}

mtp__pace mtp__progress_pace(mtp__progress *progress, double wait_seconds, bool reset)
{
    const double time = mtp__clock(), passed = time - progress->last;
    mtp__pace pace = {.peak_memory_mib = peak_memory_mib()};
    if (passed > 0) {
        pace.rows_per_second = (double)progress->rows / passed;
        pace.data_wait = (wait_seconds - progress->wait) / passed;
    }
    if (reset) {
        progress->last = time;
        progress->rows = 0;
        progress->wait = wait_seconds;
    }
    return pace;
}

typedef struct line_writer {
    char *text;
    size_t length;
} line_writer;

static void add(line_writer *w, const char *format, ...) MTP__PRINTF(2, 3);
static void add(line_writer *w, const char *format, ...)
{
    const size_t left = MTP__PROGRESS_LINE - w->length;
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(w->text + w->length, left, format, args);
    va_end(args);
    if (length > 0) w->length += (size_t)length < left ? (size_t)length : left - 1;
}

/* Shares of all draft steps, up to the first eight. */
static void add_shares(line_writer *w, const char *name, const mtp__update *u, int32_t K, bool missed)
{
    add(w, "  %s", name);
    for (int32_t k = 0; k < K && k < SHOWN_STEPS; k++) {
        const int64_t part = missed ? u->sums[k].missed : u->sums[k].correct;
        add(w, " %.3f", u->counts[k] ? (double)part / (double)u->counts[k] : 0.0);
    }
    if (K > SHOWN_STEPS) add(w, " ...");
}

static void add_duration(line_writer *w, double seconds)
{
    const long long total = seconds > 0 ? (long long)(seconds + 0.5) : 0;
    if (total >= 3600)
        add(w, "  ETA %lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60);
    else
        add(w, "  ETA %lld:%02lld", total / 60, total % 60);
}

void mtp__progress_line(const mtp__progress *progress, const mtp__metrics *metrics, const mtp__update *u,
                        const mtp__pace *pace, int64_t total_steps, char line[MTP__PROGRESS_LINE])
{
    line_writer w = {.text = line};
    add(&w, "step %lld/%lld", (long long)u->step, (long long)total_steps);
    add(&w, "  loss %.4f", u->loss);
    add_shares(&w, "acc", u, metrics->K, false);
    if (metrics->ordered) add_shares(&w, "miss", u, metrics->K, true);
    add(&w, "  lr %.2e", u->learning_rate);
    add(&w, "  %.0f rows/s", pace->rows_per_second);
    add(&w, "  wait %.0f%%", 100 * pace->data_wait);
    add(&w, "  %.0f MiB", pace->peak_memory_mib);
    const int64_t done = u->step - progress->begin_step;
    if (done > 0) add_duration(&w, (mtp__clock() - progress->begin) / (double)done * (double)(total_steps - u->step));
}
