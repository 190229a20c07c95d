/* "Did you mean": the known name nearest to a mistyped one. */
#ifndef MTP_SUGGEST_H
#define MTP_SUGGEST_H

#include <stddef.h>

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The one of known[0..count) with the smallest edit distance to `word` (insert, delete, replace, swap of neighbours;
 * case and '-' against '_' do not count), or NULL when none is near enough to be meant (more than a third of the word,
 * at least two edits, away). Ties: the first. */
MTP_API const char *mtp_suggest(const char *word, const char *const *known, size_t count);

#ifdef __cplusplus
}
#endif
#endif
