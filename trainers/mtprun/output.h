/* What ranks print: each line with its rank in front, to here, to a log, or both; and the last lines kept. */
#ifndef MTPRUN_OUTPUT_H
#define MTPRUN_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

enum { TAIL_LINES = 10, TAIL_LETTERS = 400, LINE_LETTERS = 16384 };

/* The last lines of one rank, of both streams. */
typedef struct tail {
    char lines[TAIL_LINES][TAIL_LETTERS];
    int count; /* lines ever added */
} tail;

typedef struct stream {
    int fd;      /* the end of the pipe that we read; -1 when at its end */
    int console; /* 1, 2, or -1: not shown here */
    int log;     /* -1: none */
    int rank;
    tail *last;
    char line[LINE_LETTERS];
    size_t used;
} stream;

/* Read what is there and pass it on; at the end close. Never blocks on `fd`. */
void stream_read(stream *own);
/* Pass on the rest, close. */
void stream_close(stream *own);
/* Show the lines kept, oldest first. */
void tail_print(const tail *own, int rank);

#endif
