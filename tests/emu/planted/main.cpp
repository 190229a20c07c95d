/* planted NAME: runs the program of that name. */
#include "planted.h"

#include <cstring>

int main(int count, char **words)
{
    for (const Planted *list : {barrier_bugs, memory_bugs, copy_bugs, host_bugs})
        for (; list->name; list++)
            if (count == 2 && strcmp(list->name, words[1]) == 0) return list->run();
    fprintf(stderr, "planted: no program of this name\n");
    return 0; /* so that the test of it fails */
}
