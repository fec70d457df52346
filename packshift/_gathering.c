/* What packshift/gathering.py calls through ctypes: copies of many rows of a store into one batch.

   A processor that copies one row after the other waits for memory most of the time: what it fetches ahead ends with each
   page. Six rows at a time keep it busy, and writing around the cache saves reading what is overwritten
   (benchmarks/read_speed.py). */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_compiling.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

PUBLIC const int32_t packshift_interface = INTERFACE;

#define TOGETHER 6      /* 4 and 8 rows were slower */
#define STEP 128        /* bytes of each row in turn */
#define PIECE (1 << 20) /* bytes that one who takes part copies at a time, about: 0.1 ms */
#define MOST_THREADS 8
#define LINE 64         /* of cache: one that is written around it in two parts is slower than not around it */

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

/* A batch, copied in pieces of some rows by everybody who takes part. `progress` is shared by them: how many rows have been
   begun, and how many are there. */
struct work {
    const uint8_t *first;
    size_t stride, n, count, piece;
    const int64_t *positions;
    uint8_t *out;
    _Atomic int64_t *progress;
};

static void *copy_pieces(void *argument)
{
    const struct work *work = argument;
    for (;;) {
        size_t begin = (size_t)atomic_fetch_add(&work->progress[0], (int64_t)work->piece);
        if (begin >= work->count)
            return NULL;
        size_t end = work->count - begin < work->piece ? work->count : begin + work->piece;
        for (size_t place = begin; place < end; place += TOGETHER) {
            size_t together = end - place < TOGETHER ? end - place : TOGETHER;
            const uint8_t *rows[TOGETHER];
            for (size_t row = 0; row < together; row++)
                rows[row] = work->first + (size_t)work->positions[place + row] * work->stride;
            copy(rows, together, work->n, work->out + place * work->n);
        }
#ifdef __SSE2__
        _mm_sfence(); /* before anybody is told that the rows are there */
#endif
        atomic_fetch_add(&work->progress[1], (int64_t)(end - begin));
    }
}

/* Row i of `out`, rows of `n` bytes, is the one that begins `positions[i]` times `stride` bytes after `first`. Gives 0, and
   copies nothing, where a position is not one of `length`; else it comes back when all rows are there. Whoever calls it with
   the same arguments meanwhile takes a part of the work; `progress`, two numbers, is 0 before the first call. The threads, at
   most MOST_THREADS and the caller's among them, live as long as the call, so that a process can be forked between two. */
PUBLIC int32_t gather(
    const uint8_t *first, int64_t length, size_t stride, size_t n, const int64_t *positions, size_t count, uint8_t *out,
    size_t threads, _Atomic int64_t *progress)
{
    for (size_t place = 0; place < count; place++)
        if (positions[place] < 0 || positions[place] >= length)
            return 0;
    size_t piece = n < PIECE / TOGETHER ? PIECE / TOGETHER / (n ? n : 1) * TOGETHER : TOGETHER;
    struct work work = {first, stride, n, count, piece, positions, out, progress};
    pthread_t started[MOST_THREADS];
    size_t running = 0;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    while (running + 1 < threads && pthread_create(&started[running], NULL, copy_pieces, &work) == 0)
        running++; /* what one would have done that cannot be started is done by the others */
    copy_pieces(&work);
    while (running > 0)
        pthread_join(started[--running], NULL);
    while ((size_t)atomic_load(&progress[1]) < count)
        sched_yield(); /* until another caller has finished its last piece */
    return 1;
}
