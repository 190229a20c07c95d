#include "model/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct spec_list {
    mtp__tensor_spec *specs;
    int64_t count;
} spec_list;

static void add(spec_list *list, const char *name, int32_t rank, int64_t rows, int64_t cols)
{
    mtp__tensor_spec *spec = &list->specs[list->count++];
    snprintf(spec->name, sizeof spec->name, "%s", name);
    spec->rank = rank;
    spec->shape[0] = rows;
    spec->shape[1] = cols;
}

static void add_in_layer(spec_list *list, int64_t layer, const char *name, int32_t rank, int64_t rows, int64_t cols)
{
    char full[sizeof list->specs->name];
    snprintf(full, sizeof full, "model.layers.%lld.%s", (long long)layer, name);
    add(list, full, rank, rows, cols);
}

static void add_layer(spec_list *list, const mtp_drafter_config *config, int64_t layer)
{
    const int64_t H = config->hidden_size, I = config->intermediate_size;
    const int64_t D = config->geometry[config->layer_types[layer]].head_dim, heads = config->num_heads * D;
    add_in_layer(list, layer, "input_layernorm.weight", 1, H, 0);
    add_in_layer(list, layer, "post_attention_layernorm.weight", 1, H, 0);
    add_in_layer(list, layer, "pre_feedforward_layernorm.weight", 1, H, 0);
    add_in_layer(list, layer, "post_feedforward_layernorm.weight", 1, H, 0);
    add_in_layer(list, layer, "self_attn.q_proj.weight", 2, heads, H);
    add_in_layer(list, layer, "self_attn.q_norm.weight", 1, D, 0);
    add_in_layer(list, layer, "self_attn.o_proj.weight", 2, H, heads);
    add_in_layer(list, layer, "mlp.gate_proj.weight", 2, I, H);
    add_in_layer(list, layer, "mlp.up_proj.weight", 2, I, H);
    add_in_layer(list, layer, "mlp.down_proj.weight", 2, H, I);
    add_in_layer(list, layer, "layer_scalar", 1, 1, 0);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const mtp__tensor_spec *)a)->name, ((const mtp__tensor_spec *)b)->name);
}

mtp_status mtp__tensor_specs(const mtp_drafter_config *config, mtp__tensor_spec **specs, int64_t *count)
{
    enum { PER_LAYER = 11, OTHERS = 6 };
    const int64_t H = config->hidden_size, Hb = config->backbone_hidden_size;
    spec_list list = {calloc((size_t)config->num_layers * PER_LAYER + OTHERS, sizeof *list.specs), 0};
    if (!list.specs) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the tensor names of a drafter");
    add(&list, "model.embed_tokens.weight", 2, config->vocab_size, H);
    add(&list, "model.norm.weight", 1, H, 0);
    add(&list, "pre_projection.weight", 2, H, 2 * Hb);
    add(&list, "post_projection.weight", 2, Hb, H);
    if (config->ordered) {
        add(&list, "masked_embedding.centroids.weight", 2, config->num_centroids, H);
        add(&list, MTP__TOKEN_ORDERING, 1, config->vocab_size, 0);
    }
    for (int64_t layer = 0; layer < config->num_layers; layer++) add_layer(&list, config, layer);
    qsort(list.specs, (size_t)list.count, sizeof *list.specs, by_name);
    *specs = list.specs;
    *count = list.count;
    return MTP_OK;
}

const mtp__tensor_spec *mtp__tensor_spec_find(const mtp__tensor_spec *specs, int64_t count, const char *name)
{
    for (int64_t i = 0; i < count; i++)
        if (strcmp(specs[i].name, name) == 0) return &specs[i];
    return NULL;
}

const char *mtp__shape_text(int32_t rank, const int64_t *shape, char *text, size_t capacity)
{
    size_t used = (size_t)snprintf(text, capacity, "[");
    for (int32_t axis = 0; axis < rank && used < capacity; axis++)
        used += (size_t)snprintf(text + used, capacity - used, "%s%lld", axis ? ", " : "", (long long)shape[axis]);
    if (used < capacity) snprintf(text + used, capacity - used, "]");
    return text;
}

bool mtp__tensor_fits(const mtp__tensor_spec *spec, const mtp_safetensors_entry *entry)
{
    if (entry->rank != spec->rank) return false;
    for (int32_t axis = 0; axis < spec->rank; axis++)
        if (entry->shape[axis] != spec->shape[axis]) return false;
    return true;
}

const char *mtp__tensor_stranger(const char *name)
{
    static const struct {
        const char *part;
        const char *why;
    } strangers[] = {
        {"lm_head.weight", "the head of a drafter is its model.embed_tokens.weight; remove this tensor"},
        {"k_proj", "a drafter has no keys of its own, it reads the verifier's; remove this tensor"},
        {"v_proj", "a drafter has no values of its own, it reads the verifier's; remove this tensor"},
        {"k_norm", "a drafter has no keys of its own, it reads the verifier's; remove this tensor"},
        {"v_norm", "a drafter has no values of its own, it reads the verifier's; remove this tensor"},
        {"masked_embedding.", "use_ordered_embeddings is false in config.json; set it, or remove this tensor"},
        {"model.pre_projection", "the name is pre_projection.weight, without \"model.\""},
        {"model.post_projection", "the name is post_projection.weight, without \"model.\""},
    };
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++)
        if (strstr(name, strangers[i].part)) return strangers[i].why;
    return "no drafter of this configuration has it";
}

mtp_status mtp__check_ordering(const int64_t *ordering, int64_t vocab_size, const char *origin)
{
    mtp_status status = MTP_OK;
    bool *seen = calloc((size_t)vocab_size, sizeof *seen);
    if (!seen) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld tokens", (long long)vocab_size);
    for (int64_t slot = 0; slot < vocab_size && status == MTP_OK; slot++) {
        const int64_t token = ordering[slot];
        if (token < 0 || token >= vocab_size)
            status = MTP_FAIL(MTP_E_DATA, "%s: slot %lld holds token %lld, outside 0..%lld", origin, (long long)slot,
                              (long long)token, (long long)vocab_size - 1);
        else if (seen[token])
            status = MTP_FAIL(MTP_E_DATA,
                              "%s: token %lld stands in slot %lld and in an earlier one; every token must stand once",
                              origin, (long long)token, (long long)slot);
        else
            seen[token] = true;
    }
    free(seen);
    return status;
}
