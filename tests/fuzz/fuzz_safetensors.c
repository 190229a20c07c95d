/* Protects: whatever the bytes, the safetensors reader refuses them or hands out tensors that lie inside them. */
#include "fuzz.h"

#include <string.h>

#include "mtp/safetensors.h"

static void use_tensor(const mtp_safetensors *file, const mtp_safetensors_entry *entry, const uint8_t *data,
                       size_t size)
{
    mtp_view view;
    const uint8_t *begin = entry->data;
    int64_t count = 1;
    FUZZ_CHECK(begin >= data && entry->size <= (size_t)(data + size - begin));
    for (int32_t i = 0; i < entry->rank; i++) count *= entry->shape[i];
    FUZZ_CHECK(count == entry->count);
    FUZZ_CHECK((size_t)count * mtp_dtype_size(entry->dtype) == entry->size);
    FUZZ_CHECK(mtp_safetensors_find(file, entry->name) == entry);
    uint8_t *copy = malloc(entry->size + 1);
    FUZZ_CHECK(copy && mtp_safetensors_copy(entry, copy, entry->size) == MTP_OK);
    free(copy);
    if (mtp_safetensors_view(entry, &view) == MTP_OK) FUZZ_CHECK(mtp_view_count(view) == count);
}

int mtp_fuzz_accepts(const uint8_t *data, size_t size)
{
    mtp_safetensors *file;
    size_t total = 0;
    if (mtp_safetensors_from_memory(data, size, "fuzz", &file) != MTP_OK) return 0;
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        use_tensor(file, mtp_safetensors_at(file, i), data, size);
        total += mtp_safetensors_at(file, i)->size;
    }
    FUZZ_CHECK(total < size);
    for (size_t i = 0; i < mtp_safetensors_metadata_count(file); i++) {
        const mtp_safetensors_pair pair = mtp_safetensors_metadata_at(file, i);
        FUZZ_CHECK(mtp_safetensors_metadata(file, pair.key) == pair.value);
    }
    mtp_safetensors_close(file);
    return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)mtp_fuzz_accepts(data, size);
    return 0;
}
