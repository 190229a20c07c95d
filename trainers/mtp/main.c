/* mtp: one program, one subcommand for each thing to do. */
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "mtp/context.h"
#include "mtp/suggest.h"
#include "mtp/version.h"
#include "program.h"

typedef struct command {
    const char *name;
    const char *help;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
#define COMMAND_ROW(name, help) {#name, help, command_##name},
    COMMAND_LIST(COMMAND_ROW)
#undef COMMAND_ROW
        {NULL, NULL, NULL},
};
enum { MAX_DEVICES = 64 };
enum { NUM_COMMANDS = (int)(sizeof commands / sizeof *commands) - 1 };

static void print_help(FILE *out)
{
    fputs("mtp trains Gemma-4 multi-token-prediction drafters.\n"
          "\n"
          "usage: mtp COMMAND [ARGUMENTS]     mtp COMMAND --help explains each one\n"
          "       mtp --version               what this program was built with and runs on\n"
          "\n"
          "commands:\n",
          out);
    for (int i = 0; i < NUM_COMMANDS; i++) fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fputs("\n"
          "exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 bad data, 130 interrupted\n",
          out);
}

/* What is said of CUDA: the first device, or why there is none. */
static mtp_status describe_cuda(char *text, size_t size)
{
    mtp_device_entry entries[MAX_DEVICES];
    int count = 0;
    snprintf(text, size, "not built");
    const mtp_status status = mtp_devices_list(entries, MAX_DEVICES, &count);
    for (int i = count < MAX_DEVICES ? count - 1 : MAX_DEVICES - 1; status == MTP_OK && i >= 0; i--)
        if (strncmp(entries[i].device, "cuda", 4) == 0)
            snprintf(text, size, "%s", entries[i].usable ? entries[i].name : entries[i].reason);
    return status;
}

static int print_version(void)
{
    char cuda[512];
    const mtp_context_options options = {.num_threads = 0};
    mtp_context *context = NULL;
    mtp_status status = mtp_context_create(&options, &context);
    if (status == MTP_OK) status = describe_cuda(cuda, sizeof cuda);
    if (status != MTP_OK) {
        mtp_context_free(context);
        return program_finish(status);
    }
    const mtp_context_info info = mtp_context_describe(context);
    printf("mtp %s\n"
           "compiler         %s\n"
           "parts            %s\n"
           "BLAS             %s\n"
           "instruction set  %s, %d threads\n"
           "row independence %s\n"
           "CUDA             %s\n",
           mtp_version(), mtp_compiler(), mtp_parts(), info.blas, info.isa, info.num_threads, info.rows_note, cuda);
    mtp_context_free(context);
    return 0;
}

static const command *find(const char *name)
{
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

static int unknown(const char *name)
{
    static const char *const options[] = {"--help", "--version"};
    const char *names[NUM_COMMANDS + 1] = {NULL};
    for (int i = 0; i < NUM_COMMANDS; i++) names[i] = commands[i].name;
    const bool option = name[0] == '-';
    const char *nearest = option ? mtp_suggest(name, options, 2) : mtp_suggest(name, names, (size_t)NUM_COMMANDS);
    const char *kind = option ? "option" : "command";
    if (nearest) return program_usage("unknown %s '%s' (did you mean '%s'?)", kind, name, nearest);
    return program_usage("unknown %s '%s'; mtp --help lists what there is", kind, name);
}

/* OpenMP's threads spin while they wait, for as long as it takes, unless told otherwise when the library loads. Beside
 * the loader's thread, or any other work on the machine, that makes a step many times slower; sleeping at once costs 5
 * % of a step on an idle machine, for waking up between ops (bench/results). So spin for some microseconds, then sleep:
 * start this program once more with that set. libgomp reads the count, other libraries the policy. What the user chose
 * stays. */
static void wait_with_little_spinning(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
    if (setenv("OMP_WAIT_POLICY", "passive", 1) == 0 && setenv("GOMP_SPINCOUNT", "2000", 1) == 0)
        execv("/proc/self/exe", argv);
}

/* A standard stream that the caller closed is taken by the first file that is opened, and what is printed to it lands
 * in that file. Keep the three numbers, in the direction that fails: writing to a closed standard output stays an
 * error. */
static bool keep_standard_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd) return false;
    return true;
}

/* Verifier and drafter are mapped: whoever shortens their files in place takes the memory away. */
static void on_bus_error(int number)
{
    static const char message[] =
        "mtp: error: a file that is mapped (the verifier's or the drafter's weights) was made "
        "shorter while it was in use; restore it and start again\n";
    (void)number;
    const ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
    _exit(written < 0 ? 1 : 3);
}

int main(int argc, char **argv)
{
    if (!keep_standard_streams()) return 1;
    wait_with_little_spinning(argv); /* goes on here only when the policy is set, or cannot be */
    signal(SIGBUS, on_bus_error);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is reported like a full disk */
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return program_flush(0);
    }
    if (strcmp(argv[1], "--version") == 0) {
        if (argc > 2) return program_usage("unexpected argument '%s': --version takes none", argv[2]);
        return program_flush(print_version());
    }
    const command *chosen = find(argv[1]);
    if (!chosen) return unknown(argv[1]);
    return program_flush(chosen->run(argc - 1, argv + 1));
}
