/* Protects: whatever the bytes, the TOML facade refuses them or gives a tree whose links are sound; the same for the
 * first line taken as a --set override. */
#include "fuzz.h"

#include <string.h>

#include "formats/toml.h"

static void use_tree(const mtp__toml *toml)
{
    char path[128];
    int32_t reached = 1;
    for (int32_t i = 0; i < toml->num_nodes; i++) {
        const mtp__toml_node *node = &toml->nodes[i];
        int32_t children = 0;
        for (const mtp__toml_node *child = mtp__toml_first(toml, node); child; child = mtp__toml_next(toml, child)) {
            FUZZ_CHECK(child->parent == i && child > node);
            FUZZ_CHECK((child->key != NULL) == (node->kind == MTP__TOML_TABLE));
            if (child->key) FUZZ_CHECK(mtp__toml_find(toml, node, child->key) == child);
            children++;
        }
        FUZZ_CHECK(children == node->num_children);
        FUZZ_CHECK(node->line >= 1);
        FUZZ_CHECK((node->kind == MTP__TOML_STRING) == (node->string != NULL));
        FUZZ_CHECK(strlen(mtp__toml_path(toml, node, path, sizeof path)) < sizeof path);
        reached += children;
    }
    FUZZ_CHECK(reached == toml->num_nodes);
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp__toml *toml;
    char line[256];
    const uint8_t *end = size > 0 ? memchr(data, '\n', size) : NULL;
    const size_t length = end ? (size_t)(end - data) : size;
    if (length < sizeof line) {
        memcpy(line, data, length);
        line[length] = '\0';
        if (mtp__toml_override(line, &toml) == MTP_OK) use_tree(toml);
        mtp__toml_free(toml);
    }
    if (mtp__toml_parse((const char *)data, size, "fuzz", &toml) != MTP_OK) return 0;
    use_tree(toml);
    mtp__toml_free(toml);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
