/* Large blocks of memory. Internal. */
#ifndef MTP_BASE_PAGES_H
#define MTP_BASE_PAGES_H

#include <stddef.h>

/* Memory aligned to 64 bytes at least; free() it. A large block is mostly the cost of its page faults when it is used
 * first, so it is aligned to huge pages and asks for them; where the system gives none it is memory like any other.
 * NULL: no memory. */
void *mtp__pages_alloc(size_t size);

#endif
