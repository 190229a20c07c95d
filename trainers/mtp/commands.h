/* The subcommands: one file each, command_<name>(argc, argv) with argv[0] the subcommand's name; returns the exit code.
 */
#ifndef MTP_TRAINERS_COMMANDS_H
#define MTP_TRAINERS_COMMANDS_H

/* X(name, what `mtp --help` says about it), in the order of the help */
#define COMMAND_LIST(X)                                                         \
    X(init, "make an untrained drafter for a verifier")                         \
    X(pack, "pack samples into a store of a few large files")                   \
    X(train, "train a drafter from stored samples")                             \
    X(eval, "measure the acceptance of a drafter as a server would see it")     \
    X(check, "check samples, or that a drafter does not leak")                  \
    X(export, "write a trained drafter as a directory that engines load")       \
    X(inspect, "explain a file or a directory, or check that an export serves") \
    X(plan, "say how much memory and disk a training run needs")                \
    X(devices, "list the devices that can train here")

#define COMMAND_DECLARE_(name, help) int command_##name(int argc, char **argv);
COMMAND_LIST(COMMAND_DECLARE_)
#undef COMMAND_DECLARE_

#endif
