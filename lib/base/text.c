#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>

static bool reserve(mtp__text *text, size_t size)
{
    if (size <= text->capacity) return true;
    size_t capacity = text->capacity ? text->capacity : 256;
    while (capacity < size) capacity *= 2;
    char *grown = realloc(text->data, capacity);
    if (!grown) return false;
    text->data = grown;
    text->capacity = capacity;
    return true;
}

void mtp__text_add(mtp__text *text, const char *format, ...)
{
    va_list args;
    if (text->failed) return;
    va_start(args, format);
    const int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (length < 0 || !reserve(text, text->length + (size_t)length + 1)) {
        text->failed = true;
        return;
    }
    va_start(args, format);
    vsnprintf(text->data + text->length, (size_t)length + 1, format, args);
    va_end(args);
    text->length += (size_t)length;
}

mtp_status mtp__text_check(const mtp__text *text)
{
    return text->failed ? MTP_FAIL(MTP_E_MEMORY, "out of memory for a text of %zu bytes", text->length) : MTP_OK;
}

const char *mtp__text_get(const mtp__text *text)
{
    return text->data ? text->data : "";
}

void mtp__text_free(mtp__text *text)
{
    free(text->data);
    *text = (mtp__text){0};
}
