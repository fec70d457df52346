/* What packshift/gathering.py calls through ctypes: copies of many rows of a store into one batch.

   A processor that copies one row after the other waits for memory most of the time: what it fetches ahead ends with each
   page. Six rows at a time keep it busy, and writing around the cache saves reading what is overwritten
   (benchmarks/read_speed.py). */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_compiling.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

PUBLIC const int32_t packshift_interface = INTERFACE;

#define TOGETHER 6 /* 4 and 8 rows were slower */
#define STEP 128   /* bytes of each row in turn */
#define MOST_THREADS 8
#define LINE 64    /* of cache: one that is written around it in two parts is slower than not around it */

/* `to` begins a line of cache. */
INLINE void copy_step(const uint8_t *from, uint8_t *to)
{
#ifdef __SSE2__
    __m128i held[STEP / 16];
    for (size_t part = 0; part < STEP / 16; part++)
        held[part] = _mm_loadu_si128((const __m128i *)(from + 16 * part));
    for (size_t part = 0; part < STEP / 16; part++)
        _mm_stream_si128((__m128i *)(to + 16 * part), held[part]);
#else
    memcpy(to, from, STEP);
#endif
}

/* Rows of `n` bytes, `count` of them, a constant where this is called. */
INLINE void copy_rows(const uint8_t *const *rows, size_t count, size_t n, uint8_t *out)
{
    const uint8_t *from[TOGETHER];
    uint8_t *to[TOGETHER];
    size_t left[TOGETHER], steps = 0;
    for (size_t row = 0; row < count; row++) {
        uint8_t *first = out + row * n;
        size_t head = (LINE - (uintptr_t)first % LINE) % LINE;
        head = head < n ? head : n;
        memcpy(first, rows[row], head);
        from[row] = rows[row] + head;
        to[row] = first + head;
        left[row] = n - head;
        steps = row == 0 || left[row] / STEP < steps ? left[row] / STEP : steps;
    }
    for (size_t step = 0; step < steps; step++)
        for (size_t row = 0; row < count; row++)
            copy_step(from[row] + step * STEP, to[row] + step * STEP);
    for (size_t row = 0; row < count; row++)
        memcpy(to[row] + steps * STEP, from[row] + steps * STEP, left[row] - steps * STEP);
}

INLINE void copy(const uint8_t *const *rows, size_t count, size_t n, uint8_t *out)
{
    switch (count) {
    case 1: copy_rows(rows, 1, n, out); break;
    case 2: copy_rows(rows, 2, n, out); break;
    case 3: copy_rows(rows, 3, n, out); break;
    case 4: copy_rows(rows, 4, n, out); break;
    case 5: copy_rows(rows, 5, n, out); break;
    case 6: copy_rows(rows, 6, n, out); break;
    }
}

/* A part of a batch, for one thread. */
struct part {
    const uint8_t *first;
    size_t stride, n, count;
    const int64_t *positions;
    uint8_t *out;
};

static void *copy_part(void *argument)
{
    const struct part *part = argument;
    for (size_t place = 0; place < part->count; place += TOGETHER) {
        size_t together = part->count - place < TOGETHER ? part->count - place : TOGETHER;
        const uint8_t *rows[TOGETHER];
        for (size_t row = 0; row < together; row++)
            rows[row] = part->first + (size_t)part->positions[place + row] * part->stride;
        copy(rows, together, part->n, part->out + place * part->n);
    }
#ifdef __SSE2__
    _mm_sfence(); /* before anybody is told that the rows are there */
#endif
    return NULL;
}

/* Row i of `out`, rows of `n` bytes, is the one that begins `positions[i]` times `stride` bytes after `first`. Gives 0, and
   copies nothing, where a position is not one of `length`. The threads, at most MOST_THREADS and the caller's among them, live
   as long as the call, so that a process can be forked between two. */
PUBLIC int32_t gather(
    const uint8_t *first, int64_t length, size_t stride, size_t n, const int64_t *positions, size_t count, uint8_t *out,
    size_t threads)
{
    for (size_t place = 0; place < count; place++)
        if (positions[place] < 0 || positions[place] >= length)
            return 0;
    pthread_t started[MOST_THREADS];
    struct part parts[MOST_THREADS];
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    size_t share = threads > 1 ? count / threads / TOGETHER * TOGETHER : 0, running = 0;
    for (; share > 0 && running + 1 < threads; running++) {
        size_t done = running * share;
        parts[running] = (struct part){first, stride, n, share, positions + done, out + done * n};
        if (pthread_create(&started[running], NULL, copy_part, &parts[running]) != 0)
            break; /* what it would have done is done below */
    }
    size_t done = running * share;
    struct part rest = {first, stride, n, count - done, positions + done, out + done * n};
    copy_part(&rest);
    while (running > 0)
        pthread_join(started[--running], NULL);
    return 1;
}
