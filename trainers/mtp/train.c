/* mtp train: from stored samples to a drafter that serves. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "mtp/train.h"
#include "program.h"

/* A reader of our progress that has gone (`| head`) ends nothing: the run goes on without it. */
static void catch_signals(void)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is a failed write, as a full disk is */
    program_catch_signals();
}

/* ---- other ranks that are lost ------------------------------------------------------------------------------------
 */

enum { LAST_SECONDS = 10, PIECE = 512 };
static unsigned last_seconds = LAST_SECONDS;
static char lost_message[2048];

/* As far as somebody takes it: what the training hangs in may be a pipe that nobody reads, and room in a pipe is room
 * for a piece. */
static void say_from_handler(const char *text)
{
    struct pollfd target = {.fd = STDERR_FILENO, .events = POLLOUT};
    for (size_t left = strlen(text), size; left > 0; left -= size, text += size) {
        size = left < PIECE ? left : PIECE;
        if (poll(&target, 1, 0) != 1 || !(target.revents & POLLOUT) || write(STDERR_FILENO, text, size) < 0) return;
    }
}

/* Only what is safe in a handler. */
static void on_alarm(int number)
{
    (void)number;
    say_from_handler("mtp: error: ");
    say_from_handler(lost_message);
    say_from_handler("; this rank did not come to an end by itself\n");
    _exit(1);
}

/* No longer than ranks wait for each other. */
static void choose_last_seconds(const mtp_train_config *config)
{
    const char *limit = getenv("MTP_COMM_TIME_LIMIT");
    const double seconds = config->timeout_seconds > 0 ? config->timeout_seconds : limit ? strtod(limit, NULL) : 0;
    if (seconds > 0 && seconds < LAST_SECONDS) last_seconds = (unsigned)seconds + 1;
}

/* The thread that trains ends with this failure once it looks; one that waits for something else is not waited for. */
static void ranks_failed(void *user, const char *message)
{
    (void)user;
    snprintf(lost_message, sizeof lost_message, "%s", message);
    signal(SIGALRM, on_alarm);
    alarm(last_seconds);
}

static bool stop(void *user)
{
    (void)user;
    return program_stop_requested();
}

/* On a terminal the line of the running step is rewritten in place; lines that stay, and messages, end it first. */
typedef struct screen {
    bool open; /* the cursor stands behind a live line */
} screen;

static void end_line(screen *s)
{
    if (s->open) fputs("\r\033[K", stderr);
    s->open = false;
}

static void show_progress(void *user, const char *line, bool live)
{
    screen *s = user;
    end_line(s);
    fputs(line, stderr);
    if (!live) fputc('\n', stderr);
    s->open = live;
    fflush(stderr);
}

static void show_report(void *user, const char *text)
{
    end_line(user);
    fputs(text, stdout);
    fflush(stdout);
}

static void show_message(void *user, mtp_log_level level, const char *line)
{
    const mtp_logger *logger = program_logger();
    end_line(user);
    logger->write(logger->user, level, line);
}

typedef struct arguments {
    const char *config, *resume;
    args_list overrides;
    bool print_config, print_reference, dry_run;
} arguments;

static bool parse(int argc, char **argv, arguments *a, int *exit_code)
{
    const args_positional positionals[] = {
        {.name = "CONFIG",
         .target = &a->config,
         .help = "TOML file; configs/reference.toml explains every key.",
         .optional = true},
    };
    const args_option options[] = {
        {.name = "set",
         .kind = ARGS_LIST,
         .target = &a->overrides,
         .value = "KEY=VALUE",
         .help =
             "Override a key of the file, as `learning_rate=1e-3` or `optimizer.learning_rate=1e-3`. May be given many "
             "times; the last one wins."},
        {.name = "resume",
         .kind = ARGS_STRING,
         .target = &a->resume,
         .value = "auto|never|PATH",
         .help =
             "Go on from the newest good checkpoint of output_dir, start only in a directory without a run, or go on "
             "from the checkpoint PATH. The same as --set resume=... A launcher with --max-restarts needs auto."},
        {.name = "dry-run",
         .kind = ARGS_FLAG,
         .target = &a->dry_run,
         .help =
             "Open the model and the data, read one batch, check the free disk, lay out the memory; then stop. Nothing "
             "is written."},
        {.name = "print-config",
         .kind = ARGS_FLAG,
         .target = &a->print_config,
         .help = "Print the configuration with every default filled in, as TOML, and stop."},
        {.name = "print-reference",
         .kind = ARGS_FLAG,
         .target = &a->print_reference,
         .help = "Print the commented reference of all keys, as TOML, and stop. Needs no CONFIG."},
    };
    const args_spec spec = {
        .command = "mtp train",
        .summary =
            "Train a drafter as CONFIG says. Progress goes to standard error, the acceptance before and after "
            "training to standard output, everything else into output_dir. SIGINT, SIGTERM or SIGHUP finishes "
            "the step, "
            "saves a checkpoint and ends with exit code 130; a second one stops at once. Under mtprun (or torchrun, "
            "srun, mpirun) all ranks train together; a signal to one of them stops all at the same step.",
        .positionals = positionals,
        .num_positionals = 1,
        .options = options,
        .num_options = sizeof options / sizeof *options,
        .epilogue = "exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 bad data, 130 interrupted"};
    if (!args_parse(&spec, argc, argv, exit_code)) return false;
    if (a->config || a->print_reference) return true;
    *exit_code = program_usage("CONFIG is missing; see mtp train --help");
    return false;
}

static int print_reference(void)
{
    char *text = NULL;
    const mtp_status status = mtp_train_config_reference(&text);
    if (status == MTP_OK) fputs(text, stdout);
    free(text);
    return program_finish(status);
}

static int print_config(const mtp_train_config *config)
{
    char *text = NULL;
    const mtp_status status = mtp_train_config_print(config, &text);
    if (status == MTP_OK) fputs(text, stdout);
    free(text);
    return program_finish(status);
}

static mtp_status train(const mtp_train_config *config, bool dry_run)
{
    screen s = {.open = false};
    const mtp_logger logger = {.write = show_message, .user = &s, .min_level = MTP_LOG_INFO};
    const mtp_train_options options = {.logger = &logger,
                                       .stop = stop,
                                       .progress = show_progress,
                                       .report = show_report,
                                       .ranks_failed = ranks_failed,
                                       .user = &s,
                                       .live_progress = isatty(STDERR_FILENO) != 0,
                                       .dry_run = dry_run};
    catch_signals();
    choose_last_seconds(config);
    const mtp_status status = mtp_train(config, &options, NULL);
    end_line(&s);
    return status;
}

/* --resume VALUE as --set resume="VALUE": a path that looks like a TOML value of another kind stays a path. free() it;
 * NULL when out of memory. */
static char *resume_override(const char *value)
{
    char *text = malloc(2 * strlen(value) + sizeof "resume=\"\"");
    if (!text) return NULL;
    char *end = stpcpy(text, "resume=\"");
    for (; *value; value++) {
        if (*value == '"' || *value == '\\') *end++ = '\\';
        *end++ = *value;
    }
    stpcpy(end, "\"");
    return text;
}

/* A launcher that starts all ranks again finds the run of the attempt before in output_dir. Said before the first step,
 * not when the first rank is lost. */
static bool survives_restarts(const mtp_train_config *config)
{
    const char *restarts = getenv("TORCHELASTIC_MAX_RESTARTS");
    if (!restarts || strtol(restarts, NULL, 10) <= 0 || strcmp(config->resume, MTP_RESUME_AUTO) == 0) return true;
    program_usage("resume is \"%s\" and the launcher has --max-restarts %s: a restart would not go on from the newest "
                  "checkpoint; give mtp train --resume auto",
                  config->resume, restarts);
    return false;
}

static int run(const arguments *a)
{
    mtp_train_config *config = NULL;
    mtp_status status = mtp_train_config_load(a->config, a->overrides.items, a->overrides.count, &config);
    int exit_code = 0;
    if (status == MTP_OK && a->print_config)
        exit_code = print_config(config);
    else if (status == MTP_OK && !a->dry_run && !survives_restarts(config))
        exit_code = 2;
    else if (status == MTP_OK)
        exit_code = program_finish(train(config, a->dry_run));
    else
        exit_code = program_finish(status);
    mtp_train_config_free(config);
    return exit_code;
}

int command_train(int argc, char **argv)
{
    arguments a = {0};
    int exit_code = 0;
    char *resume = NULL;
    if (parse(argc, argv, &a, &exit_code)) {
        if (a.resume) resume = resume_override(a.resume);
        if (a.resume && (!resume || !args_list_add(&a.overrides, resume)))
            exit_code = 1;
        else
            exit_code = a.print_reference ? print_reference() : run(&a);
    }
    args_list_free(&a.overrides);
    free(resume);
    return exit_code;
}
