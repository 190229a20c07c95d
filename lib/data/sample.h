/* Internal: one sample file. All variants of the interchange form (lib/data/README.md) become one description: where
 * the values of token t lie, and how they become real numbers. */
#ifndef MTP_DATA_SAMPLE_H
#define MTP_DATA_SAMPLE_H

#include "mtp/data.h"
#include "mtp/safetensors.h"

enum { MTP__K, MTP__V, MTP__KV };

/* A stored tensor as rows, one a token. A row is `heads` times `width` values that lie together. */
typedef struct mtp__field {
    const mtp_safetensors_entry *entry;
    int64_t row_stride, row_offset; /* elements: row t begins at t * row_stride + row_offset */
    int64_t heads, width;
    const mtp_safetensors_entry *scales; /* of fp8 values; NULL for others */
    int64_t scale_stride, scale_offset;  /* scales of row t begin at t * scale_stride + scale_offset */
    int64_t num_scales;                  /* of a row: 1, or one for each head */
    mtp_dtype dtype;                     /* what it is read as without loss: its own type, F32 for fp8 with scales */
} mtp__field;

typedef struct mtp__sample {
    const mtp_safetensors *file; /* must stay open while the sample is used */
    int64_t num_tokens;          /* S */
    const mtp_safetensors_entry *token_ids;
    const mtp_safetensors_entry *loss_mask; /* NULL when the file has none */
    mtp__field hidden;
    mtp__field kv[MTP_LAYER_TYPES][MTP__KV]; /* entry NULL for types without K/V in the verifier */
    mtp_hidden_norm label;                   /* what the file's metadata says */
} mtp__sample;

/* Check the header of `file` against the verifier: keys, shapes, dtypes, lengths, metadata. No values are read.
 * Messages do not name the file: the caller does. */
mtp_status mtp__sample_describe(const mtp_safetensors *file, const mtp_verifier_config *verifier, mtp__sample *sample);

/* The final norm, to apply to hidden states that were stored before it. */
typedef struct mtp__final_norm {
    const float *weight; /* [Hb]; NULL: leave the rows as they are */
    double eps;
} mtp__final_norm;

/* Read the first `count` tokens. Values are checked: MTP_E_DATA names key and index. */
mtp_status mtp__sample_read_ids(const mtp__sample *sample, int64_t vocab_size, int64_t count, int32_t *ids);
/* The file must have a mask. */
mtp_status mtp__sample_read_mask(const mtp__sample *sample, int64_t count, uint8_t *mask);
/* A stable identity of the document: FNV-1a over its ids as I32, whether they are in the vocabulary or not. */
uint64_t mtp__sample_hash(const mtp__sample *sample);
/* Ids and mask of tokens [begin, end), token `begin` first. */
mtp_status mtp__sample_read_ids_from(const mtp__sample *sample, int64_t vocab_size, int64_t begin, int64_t end,
                                     int32_t *ids);
mtp_status mtp__sample_read_mask_from(const mtp__sample *sample, int64_t begin, int64_t end, uint8_t *mask);
/* Rows of a field as `to` (its own dtype or F32), row t at dst + t * dst_stride elements. `scratch` holds two rows of
 * floats. With a norm each row becomes x * (mean(x^2) + eps)^-1/2 * weight, in fp32, and is rounded to the field's
 * dtype once. Refuses NaN and Inf, and with `no_zero_rows` rows of zeros. */
mtp_status mtp__field_read(const mtp__field *field, int64_t count, mtp__final_norm norm, bool no_zero_rows,
                           mtp_dtype to, void *dst, int64_t dst_stride, float *scratch);
/* Bytes of a stored row, its scales included. */
int64_t mtp__field_row_bytes(const mtp__field *field);
/* Tell the system that rows [begin, end) of a mapped file will be read soon, so that it begins. */
void mtp__field_announce(const mtp__field *field, int64_t begin, int64_t end);
/* Rows [begin, end) of it, row `begin` at dst. */
mtp_status mtp__field_read_rows(const mtp__field *field, int64_t begin, int64_t end, mtp__final_norm norm,
                                bool no_zero_rows, mtp_dtype to, void *dst, int64_t dst_stride, float *scratch);

#endif
