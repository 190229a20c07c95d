#include "mtp/safetensors.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { PIECE = 1 << 20 };

/* The order in which the format's reference implementation ranks its types; the file holds the highest first. */
static const int dtype_rank[MTP_DTYPE_COUNT] = {
    [MTP_BOOL] = 0, [MTP_U8] = 1,   [MTP_I8] = 2,   [MTP_F8_E5M2] = 3, [MTP_F8_E4M3] = 4,
    [MTP_I16] = 5,  [MTP_U16] = 6,  [MTP_F16] = 7,  [MTP_BF16] = 8,    [MTP_I32] = 9,
    [MTP_U32] = 10, [MTP_F32] = 11, [MTP_F64] = 12, [MTP_I64] = 13,    [MTP_U64] = 14,
};

/* ---- the layout ----------------------------------------------------------------------------------------------- */

static int compare_sources(const void *a, const void *b)
{
    const mtp_safetensors_source *x = *(const mtp_safetensors_source *const *)a;
    const mtp_safetensors_source *y = *(const mtp_safetensors_source *const *)b;
    const int order = dtype_rank[y->dtype] - dtype_rank[x->dtype];
    return order ? order : strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static bool is_utf8(const char *text)
{
    json_t *string = json_string(text); /* NULL unless valid UTF-8 */
    const bool valid = string != NULL;
    json_decref(string);
    return valid;
}

/* Bytes of a tensor; MTP_E_ARGUMENT when the shape makes no sense. */
static mtp_status source_size(const mtp_safetensors_source *source, uint64_t *size)
{
    const int64_t width = (int64_t)mtp_dtype_size(source->dtype);
    int64_t count = 1, nonzero = 1;
    if (width == 0) return MTP_FAIL(MTP_E_ARGUMENT, "tensor '%s': unknown dtype %d", source->name, (int)source->dtype);
    if (source->rank < 0 || (source->rank > 0 && !source->shape))
        return MTP_FAIL(MTP_E_ARGUMENT, "tensor '%s': no shape", source->name);
    for (int32_t i = 0; i < source->rank; i++) {
        const int64_t axis = source->shape[i], factor = axis > 0 ? axis : 1;
        if (axis < 0 || nonzero > INT64_MAX / width / factor)
            return MTP_FAIL(MTP_E_ARGUMENT, "tensor '%s': axis %d of its shape is negative or too large", source->name,
                            (int)i);
        nonzero *= factor;
        count *= axis;
    }
    *size = (uint64_t)(count * width);
    return MTP_OK;
}

static mtp_status check_unique(const char **names, size_t count, const char *what)
{
    if (count > 1) qsort(names, count, sizeof *names, compare_names);
    for (size_t i = 0; i < count; i++) {
        if (!is_utf8(names[i])) return MTP_FAIL(MTP_E_ARGUMENT, "%s '%s' is not valid UTF-8", what, names[i]);
        if (i > 0 && !strcmp(names[i - 1], names[i]))
            return MTP_FAIL(MTP_E_ARGUMENT, "%s '%s' is given twice", what, names[i]);
    }
    return MTP_OK;
}

static mtp_status check_names(const mtp_safetensors_pair *metadata, size_t num_metadata,
                              const mtp_safetensors_source *tensors, size_t num_tensors)
{
    const char **names = calloc(num_metadata + num_tensors + 1, sizeof *names);
    mtp_status status = MTP_OK;
    if (!names) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    for (size_t i = 0; i < num_metadata; i++) names[i] = metadata[i].key;
    for (size_t i = 0; i < num_tensors; i++) names[num_metadata + i] = tensors[i].name;
    for (size_t i = 0; i < num_metadata && status == MTP_OK; i++)
        if (!is_utf8(metadata[i].value))
            status = MTP_FAIL(MTP_E_ARGUMENT, "metadata '%s' is not valid UTF-8", metadata[i].key);
    for (size_t i = 0; i < num_tensors && status == MTP_OK; i++)
        if (!strcmp(tensors[i].name, "__metadata__"))
            status = MTP_FAIL(MTP_E_ARGUMENT, "no tensor may be called __metadata__");
    if (status == MTP_OK) status = check_unique(names, num_metadata, "metadata key");
    if (status == MTP_OK) status = check_unique(names + num_metadata, num_tensors, "tensor");
    free(names);
    return status;
}

/* ---- the header ----------------------------------------------------------------------------------------------- */

/* As Rust's serde_json quotes: control characters in lower-case hexadecimal, everything else as it is. */
static void put_quoted(FILE *out, const char *text)
{
    static const char letters[] = "\bb\ff\nn\rr\tt";
    fputc('"', out);
    for (const char *c = text; *c; c++) {
        const char *pair = (unsigned char)*c < ' ' ? strchr(letters, *c) : NULL;
        if (*c == '"' || *c == '\\')
            fprintf(out, "\\%c", *c);
        else if (pair)
            fprintf(out, "\\%c", pair[1]);
        else if ((unsigned char)*c < ' ')
            fprintf(out, "\\u%04x", (unsigned)*c);
        else
            fputc(*c, out);
    }
    fputc('"', out);
}

static void put_metadata(FILE *out, const mtp_safetensors_pair *metadata, size_t count)
{
    fputs("\"__metadata__\":{", out);
    for (size_t i = 0; i < count; i++) {
        if (i > 0) fputc(',', out);
        put_quoted(out, metadata[i].key);
        fputc(':', out);
        put_quoted(out, metadata[i].value);
    }
    fputc('}', out);
}

static void put_tensor(FILE *out, const mtp_safetensors_source *source, uint64_t begin, uint64_t end)
{
    put_quoted(out, source->name);
    fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", mtp_dtype_name(source->dtype));
    for (int32_t i = 0; i < source->rank; i++) fprintf(out, "%s%lld", i ? "," : "", (long long)source->shape[i]);
    fprintf(out, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)begin, (unsigned long long)end);
}

/* The first bytes of the file: length and header; and the order of the data. */
typedef struct layout {
    const mtp_safetensors_source **order;
    char *head;
    size_t head_size;
    uint64_t data_size;
} layout;

static void layout_free(layout *plan)
{
    free(plan->order);
    free(plan->head);
}

static mtp_status put_header(layout *plan, FILE *out, const mtp_safetensors_pair *metadata, size_t num_metadata,
                             size_t num_tensors)
{
    fwrite("\0\0\0\0\0\0\0\0{", 1, 9, out);
    if (num_metadata > 0) put_metadata(out, metadata, num_metadata);
    for (size_t i = 0; i < num_tensors; i++) {
        uint64_t size;
        MTP_TRY(source_size(plan->order[i], &size));
        if (size > INT64_MAX - plan->data_size)
            return MTP_FAIL(MTP_E_ARGUMENT, "tensor '%s': the file would be too large", plan->order[i]->name);
        if (i > 0 || num_metadata > 0) fputc(',', out);
        put_tensor(out, plan->order[i], plan->data_size, plan->data_size + size);
        plan->data_size += size;
    }
    fputc('}', out);
    for (long used = ftell(out); used % 8 != 0; used++) fputc(' ', out);
    return MTP_OK;
}

static mtp_status layout_create(layout *plan, const mtp_safetensors_pair *metadata, size_t num_metadata,
                                const mtp_safetensors_source *tensors, size_t num_tensors)
{
    *plan = (layout){.order = calloc(num_tensors + 1, sizeof *plan->order)};
    FILE *out = open_memstream(&plan->head, &plan->head_size);
    mtp_status status = MTP_OK;
    if (!plan->order || !out) status = MTP_FAIL(MTP_E_MEMORY, "out of memory");
    if (status == MTP_OK) {
        for (size_t i = 0; i < num_tensors; i++) plan->order[i] = &tensors[i];
        if (num_tensors > 1) qsort(plan->order, num_tensors, sizeof *plan->order, compare_sources);
        status = put_header(plan, out, metadata, num_metadata, num_tensors);
    }
    if (out && (ferror(out) | fclose(out)) != 0 && status == MTP_OK) status = MTP_FAIL(MTP_E_MEMORY, "out of memory");
    if (status == MTP_OK && plan->head_size - 8 > MTP_SAFETENSORS_MAX_HEADER)
        status = MTP_FAIL(MTP_E_ARGUMENT, "a header of %zu bytes; the format allows %u", plan->head_size - 8,
                          MTP_SAFETENSORS_MAX_HEADER);
    if (status != MTP_OK) {
        layout_free(plan);
        return status;
    }
    for (size_t i = 0; i < 8; i++) plan->head[i] = (char)((plan->head_size - 8) >> 8 * i & 0xff);
    return MTP_OK;
}

/* ---- the file ------------------------------------------------------------------------------------------------- */

static mtp_status write_tensor(mtp__file_writer *writer, const mtp_safetensors_source *source, void *piece)
{
    uint64_t size;
    MTP_TRY(source_size(source, &size));
    if (source->data) return mtp__file_writer_write(writer, source->data, (size_t)size);
    for (size_t offset = 0; offset < size; offset += PIECE) {
        const size_t count = size - offset < PIECE ? (size_t)(size - offset) : PIECE;
        MTP_TRY_AT(source->fill(source->user, offset, piece, count), "tensor '%s'", source->name);
        MTP_TRY(mtp__file_writer_write(writer, piece, count));
    }
    return MTP_OK;
}

static mtp_status write_file(const char *path, const layout *plan, size_t num_tensors)
{
    mtp__file_writer writer = {.fd = -1};
    mtp_status status;
    void *piece = malloc(PIECE);
    if (!piece) return MTP_FAIL(MTP_E_MEMORY, "%s: out of memory", path);
    MTP_TRY_GOTO(status, mtp__file_writer_open(&writer, path), done);
    MTP_TRY_GOTO(status, mtp__file_writer_write(&writer, plan->head, plan->head_size), done);
    for (size_t i = 0; i < num_tensors; i++) MTP_TRY_GOTO(status, write_tensor(&writer, plan->order[i], piece), done);
    status = mtp__file_writer_commit(&writer);
done:
    mtp__file_writer_abort(&writer);
    free(piece);
    return status;
}

static mtp_status check_sources(const mtp_safetensors_source *tensors, size_t num_tensors, bool with_data)
{
    for (size_t i = 0; i < num_tensors; i++) {
        uint64_t size;
        if (!tensors[i].name) return MTP_FAIL(MTP_E_ARGUMENT, "tensor %zu has no name", i);
        MTP_TRY(source_size(&tensors[i], &size));
        if (with_data && size > 0 && !tensors[i].data && !tensors[i].fill)
            return MTP_FAIL(MTP_E_ARGUMENT, "tensor '%s': neither data nor a function that fills it", tensors[i].name);
    }
    return MTP_OK;
}

mtp_status mtp_safetensors_write(const char *path, const mtp_safetensors_pair *metadata, size_t num_metadata,
                                 const mtp_safetensors_source *tensors, size_t num_tensors)
{
    layout plan;
    MTP_REQUIRE(path != NULL && (metadata != NULL || num_metadata == 0) && (tensors != NULL || num_tensors == 0));
    MTP_TRY_AT(check_sources(tensors, num_tensors, true), "%s", path);
    MTP_TRY_AT(check_names(metadata, num_metadata, tensors, num_tensors), "%s", path);
    MTP_TRY_AT(layout_create(&plan, metadata, num_metadata, tensors, num_tensors), "%s", path);
    const mtp_status status = write_file(path, &plan, num_tensors);
    layout_free(&plan);
    return status;
}

mtp_status mtp_safetensors_file_size(const mtp_safetensors_pair *metadata, size_t num_metadata,
                                     const mtp_safetensors_source *tensors, size_t num_tensors, uint64_t *bytes)
{
    layout plan;
    MTP_REQUIRE((metadata != NULL || num_metadata == 0) && (tensors != NULL || num_tensors == 0) && bytes != NULL);
    MTP_TRY(check_sources(tensors, num_tensors, false));
    MTP_TRY(check_names(metadata, num_metadata, tensors, num_tensors));
    MTP_TRY(layout_create(&plan, metadata, num_metadata, tensors, num_tensors));
    *bytes = plan.head_size + plan.data_size;
    layout_free(&plan);
    return MTP_OK;
}
