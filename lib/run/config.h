/* Internal: the schema of the configuration and what works from it. */
#ifndef MTP_RUN_CONFIG_H
#define MTP_RUN_CONFIG_H

#include <stddef.h>

#include "base/text.h"
#include "mtp/train.h"

typedef enum mtp__field_kind {
    MTP__FIELD_STRING,  /* char * */
    MTP__FIELD_STRINGS, /* mtp_strings */
    MTP__FIELD_SOURCES, /* mtp_sources: tables with path and weight; min and max are those of a weight */
    MTP__FIELD_INT,     /* int64_t */
    MTP__FIELD_REAL,    /* double */
    MTP__FIELD_BOOL,    /* bool */
    MTP__FIELD_CHOICE   /* int32_t: index in `choices`, which has the order of the enumeration it stands for */
} mtp__field_kind;

/* May a resumed run have another value. */
typedef enum mtp__field_resume {
    MTP__RESUME_SAME,    /* no: the run would not be the one that the checkpoint belongs to */
    MTP__RESUME_BATCH,   /* when as many micro-batches make an update on all ranks together as then */
    MTP__RESUME_FREE,    /* yes; content behind a path is compared by fingerprint */
    MTP__RESUME_SCHEDULE /* when it leaves the learning rates of the steps already done as they were */
} mtp__field_resume;

typedef struct mtp__field {
    const char *section, *key;
    mtp__field_kind kind;
    size_t offset;       /* in mtp_train_config */
    const char *value;   /* the default, as TOML */
    const char *example; /* shown in the reference in its place; NULL: the default. With one the key is required */
    double min, max;     /* MTP__FIELD_INT, MTP__FIELD_REAL: inclusive */
    const char *const *choices; /* MTP__FIELD_CHOICE, NULL-terminated */
    mtp__field_resume resume;
    const char *help;
} mtp__field;

/* All keys, those of a section together, in the order of the reference. */
const mtp__field *mtp__config_fields(size_t *count);
/* What the reference says above a section. */
const char *mtp__config_section_help(const char *section);
/* Index of a field by its key; the count when there is none. Keys are unique over all sections. */
size_t mtp__config_find(const char *key);

/* Where each field got its value: "run.toml:12", "--set seed=3", or NULL for a default. */
struct mtp__config_places {
    char *path;    /* of the TOML file */
    char **origin; /* [number of fields] */
};
/* Raise MTP_E_CONFIG: "<place of key>: <key>: <message>". */
mtp_status mtp__config_fail(const mtp_train_config *config, const char *key, const char *format, ...) MTP__PRINTF(3, 4);

/* MTP_E_CONFIG with the place of the key when `path`, its value, is no directory that is there. */
mtp_status mtp__config_check_directory(const mtp_train_config *config, const char *key, const char *path);

/* A list of tables with path and weight, in place of what `sources` holds. */
struct mtp__toml;
struct mtp__toml_node;
mtp_status mtp__config_take_sources(const struct mtp__toml *toml, const struct mtp__toml_node *node,
                                    const mtp__field *field, mtp_sources *sources);
void mtp__config_free_sources(mtp_sources *sources);

/* One value as TOML text. */
void mtp__config_value(mtp__text *text, const mtp_train_config *config, const mtp__field *field);
/* Every key: with `comments` the help above each, with `values` NULL the defaults, or the examples of the reference
 * when there are comments. */
void mtp__config_write(mtp__text *text, const mtp_train_config *values, bool comments);

/* Is there anything to evaluate on? */
static inline bool mtp__config_evaluates(const mtp_train_config *config)
{
    return config->eval_data.count > 0 || config->validation_share > 0;
}

/* The parts of a configuration as other modules take them. */
mtp_step_config mtp__config_step(const mtp_train_config *config);
mtp_adamw_config mtp__config_adamw(const mtp_train_config *config);
mtp_dtype mtp__config_masters(const mtp_train_config *config); /* of matrices */
mtp_context_options mtp__config_context(const mtp_train_config *config, const mtp_logger *logger);

#endif
