/* Evaluations side by side, as a table for people. */
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "mtp/eval.h"

enum { LABEL_WIDTH = 42, LEAST_WIDTH = 12 };

typedef struct layout {
    mtp__text *out;
    const mtp_evaluation *const *columns;
    int32_t num_columns;
    int width; /* of a column */
} layout;

/* A figure of one evaluation: of its rounds or of its positions, and of draft step k where it has one. */
typedef double (*figure)(const mtp_evaluation *evaluation, bool rounds, int32_t k);

static const mtp_acceptance *pooled(const mtp_evaluation *e, bool rounds)
{
    return rounds ? &e->rounds : &e->positions;
}
static double count(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)k;
    return (double)pooled(e, rounds)->count;
}
static double length(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)k;
    return mtp_acceptance_length(pooled(e, rounds), e->num_speculative_steps);
}
static double length_with_bonus(const mtp_evaluation *e, bool rounds, int32_t k)
{
    return length(e, rounds, k) + 1;
}
static double length_over_samples(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)k;
    return rounds ? e->rounds_length_sample_mean : e->positions_length_sample_mean;
}
static double rate(const mtp_evaluation *e, bool rounds, int32_t k)
{
    return mtp_acceptance_rate(pooled(e, rounds), k);
}
static double conditional(const mtp_evaluation *e, bool rounds, int32_t k)
{
    return mtp_acceptance_conditional(pooled(e, rounds), k);
}
static double rate_over_samples(const mtp_evaluation *e, bool rounds, int32_t k)
{
    return rounds ? e->rounds_sample_mean[k] : e->positions_sample_mean[k];
}
static double step_loss(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)rounds;
    return e->steps[k].loss;
}
static double step_accuracy(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)rounds;
    return e->steps[k].accuracy;
}
static double step_miss(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)rounds;
    return e->steps[k].centroid_miss;
}
static double weighted_loss(const mtp_evaluation *e, bool rounds, int32_t k)
{
    (void)rounds;
    (void)k;
    return e->loss;
}

/* One line: a label and a figure of each column with `digits` behind the point. */
static void line(const layout *table, const char *label, figure value, bool rounds, int32_t k, int digits)
{
    mtp__text_add(table->out, "  %-*s", LABEL_WIDTH, label);
    for (int32_t i = 0; i < table->num_columns; i++)
        mtp__text_add(table->out, "%*.*f", table->width, digits, value(table->columns[i], rounds, k));
    mtp__text_add(table->out, "\n");
}

/* A line for each draft step. */
static void lines(const layout *table, const char *label, figure value, bool rounds)
{
    char text[LABEL_WIDTH + 16];
    for (int32_t k = 0; k < table->columns[0]->num_speculative_steps; k++) {
        snprintf(text, sizeof text, "%s, draft %d", label, k + 1);
        line(table, text, value, rounds, k, 3);
    }
}

static void acceptance(const layout *table, bool rounds)
{
    mtp__text_add(table->out, "%s\n", rounds ? "rounds, as a server walks them" : "a round at every position");
    line(table, "rounds", count, rounds, 0, 0);
    line(table, "accepted length without the bonus token", length, rounds, 0, 3);
    line(table, "accepted length with the bonus token", length_with_bonus, rounds, 0, 3);
    line(table, "without the bonus token, mean over samples", length_over_samples, rounds, 0, 3);
    lines(table, "acceptance", rate, rounds);
    if (table->columns[0]->num_speculative_steps > 1) lines(table, "given the draft before", conditional, rounds);
    lines(table, "acceptance, mean over samples", rate_over_samples, rounds);
}

static void losses(const layout *table)
{
    mtp__text_add(table->out, "teacher-fed, over supervised rows\n");
    line(table, "training loss", weighted_loss, false, 0, 4);
    lines(table, "loss", step_loss, false);
    lines(table, "accuracy", step_accuracy, false);
    if (table->columns[0]->ordered) lines(table, "centroid_miss", step_miss, false);
}

/* A column is as wide as its title, all alike. */
static int column_width(const char *const *titles, int32_t num_columns)
{
    size_t width = LEAST_WIDTH;
    for (int32_t i = 0; i < num_columns; i++)
        if (strlen(titles[i]) + 2 > width) width = strlen(titles[i]) + 2;
    return width > 60 ? 60 : (int)width;
}

static void print(const layout *table, const char *const *titles)
{
    const mtp_evaluation *first = table->columns[0];
    char conditions[LABEL_WIDTH + 1];
    snprintf(conditions, sizeof conditions, "K %d, position t%s", first->num_speculative_steps,
             first->position_offset ? "+1" : "");
    mtp__text_add(table->out, "%-*s", LABEL_WIDTH + 2, conditions);
    bool has_loss = true;
    for (int32_t i = 0; i < table->num_columns; i++) {
        mtp__text_add(table->out, "%*s", table->width, titles[i]);
        has_loss = has_loss && table->columns[i]->has_loss;
    }
    mtp__text_add(table->out, "\n");
    acceptance(table, true);
    acceptance(table, false);
    if (has_loss) losses(table);
}

mtp_status mtp_evaluation_table(const mtp_evaluation *const *columns, const char *const *titles, int32_t num_columns,
                                char **table)
{
    MTP_REQUIRE(columns && titles && table && num_columns >= 1);
    *table = NULL;
    for (int32_t i = 1; i < num_columns; i++)
        MTP_REQUIRE(columns[i]->num_speculative_steps == columns[0]->num_speculative_steps);
    mtp__text text = {0};
    const layout made = {&text, columns, num_columns, column_width(titles, num_columns)};
    print(&made, titles);
    const mtp_status status = mtp__text_check(&text);
    if (status != MTP_OK) {
        mtp__text_free(&text);
        return status;
    }
    *table = text.data; /* handed over: malloc'ed */
    return MTP_OK;
}
