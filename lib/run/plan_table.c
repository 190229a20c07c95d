/* A plan for people, and the failure that shows it. */
#include <stdlib.h>

#include "base/context.h"
#include "base/text.h"
#include "run/plan.h"

static double mib(uint64_t bytes)
{
    return (double)bytes / (1024 * 1024);
}

static void add_number(mtp__text *text, bool there, uint64_t bytes)
{
    if (there)
        mtp__text_add(text, " %12.1f", mib(bytes));
    else
        mtp__text_add(text, " %12s", "");
}

/* One column without a device of its own, else two: device and host. */
static void add_row(mtp__text *text, const mtp_plan *plan, const mtp_plan_line *line)
{
    mtp__text_add(text, "%-32s", line->what);
    if (plan->has_device) add_number(text, line->on_device, line->bytes);
    if (!plan->has_device || !line->on_device || *line->note) add_number(text, !line->on_device, line->bytes);
    mtp__text_add(text, "%s%s\n", *line->note ? "  " : "", line->note);
}

static void add_totals(mtp__text *text, const mtp_plan *plan)
{
    mtp__text_add(text, "%-32s", "total");
    if (plan->has_device) add_number(text, true, plan->device_bytes);
    add_number(text, true, plan->host_bytes);
    mtp__text_add(text, "\n");
    if (!plan->has_device) return;
    mtp__text_add(text, "%-32s", "free");
    add_number(text, true, plan->device_free);
    mtp__text_add(text, " %12s  of %.1f of %s\n", "", mib(plan->device_total), plan->device);
}

mtp_status mtp_plan_table(const mtp_plan *plan, char **table)
{
    mtp__text text = {0};
    MTP_REQUIRE(plan && table);
    *table = NULL;
    if (plan->has_device)
        mtp__text_add(&text, "%-32s %12s %12s\n", "memory, MiB", "device", "host");
    else
        mtp__text_add(&text, "%-32s %12s\n", "memory", "MiB");
    for (int64_t i = 0; i < plan->num_lines; i++)
        if (!plan->lines[i].mapped) add_row(&text, plan, &plan->lines[i]);
    add_totals(&text, plan);
    bool mapped = false;
    for (int64_t i = 0; i < plan->num_lines; i++) {
        if (!plan->lines[i].mapped) continue;
        if (!mapped) mtp__text_add(&text, "\n");
        mapped = true;
        add_row(&text, plan, &plan->lines[i]);
    }
    const mtp_status status = mtp__text_check(&text);
    if (status == MTP_OK)
        *table = text.data;
    else
        mtp__text_free(&text);
    return status;
}

mtp_status mtp__plan_check(const mtp_plan *plan)
{
    if (!plan->has_device || plan->device_bytes <= plan->device_free) return MTP_OK;
    return MTP_FAIL(MTP_E_MEMORY, "too little memory: %.1f MiB of %s are needed, %.1f are free",
                    mib(plan->device_bytes), plan->device, mib(plan->device_free));
}

void mtp__plan_log_embedding(const mtp_plan *plan, const mtp_logger *logger)
{
    const mtp_plan_line *line = &plan->lines[plan->num_lines - (plan->embedding_on_device ? 2 : 1)];
    if (plan->has_device)
        mtp_log(logger, MTP_LOG_INFO, "verifier embedding of %.1f MiB: %s (%s)", mib(line->bytes),
                plan->embedding_on_device ? "held on the device" : "rows are brought to the device as they are needed",
                line->note);
}

mtp_status mtp__plan_explain(const mtp_plan *plan, mtp_status status)
{
    char *table = NULL;
    if (status != MTP_E_MEMORY || !plan || !plan->has_device) return status;
    const mtp_error first = *mtp_last_error();
    if (mtp_plan_table(plan, &table) != MTP_OK) return mtp__fail_again(&first);
    mtp__fail(first.status, first.foreign, first.file, first.line, "%s\nless is needed with %s\n%s", first.message,
              plan->remedy, table);
    free(table);
    return status;
}
