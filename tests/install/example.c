/* A program outside the tree, as a user of the installed library writes it: which libmtp this is, on what it computes,
 * and what a drafter directory holds. `example DRAFTER_DIR`; the test in run.sh reads what it prints. */
#include <inttypes.h>
#include <stdio.h>

#include <mtp/mtp.h>

static int failed(void)
{
    const mtp_error *error = mtp_last_error();
    fprintf(stderr, "example: %s: %s\n", mtp_status_name(error->status), error->message);
    return mtp_status_exit_code(error->status);
}

int main(int argc, char **argv)
{
    const mtp_context_options options = {.device = "cpu"};
    mtp_context *context = NULL;
    mtp_drafter *drafter = NULL;

    if (argc != 2) {
        fprintf(stderr, "usage: example DRAFTER_DIR\n");
        return 2;
    }
    if (mtp_context_create(&options, &context) != MTP_OK) return failed();
    const mtp_context_info info = mtp_context_describe(context);
    printf("libmtp %s (%s), device %s, %s\n", mtp_version(), mtp_compiler(), info.device, info.isa);

    if (mtp_drafter_load(context, argv[1], &drafter) != MTP_OK) {
        mtp_context_free(context);
        return failed();
    }
    const mtp_drafter_config *config = mtp_drafter_get_config(drafter);
    printf("%" PRId64 " layers, hidden %" PRId64 ", vocabulary %" PRId64 ", %" PRId64 " parameters in %" PRId64
           " tensors\n",
           config->num_layers, config->hidden_size, config->vocab_size, mtp_drafter_num_trained(drafter),
           mtp_drafter_num_parameters(drafter));
    mtp_drafter_free(drafter);
    mtp_context_free(context);
    return 0;
}
