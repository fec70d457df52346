/* What packshift/gathering.py calls through ctypes: copies of many rows of a store into one batch.

   A processor that copies one row after the other waits for memory most of the time: what it fetches ahead ends with each
   page. Six rows at a time keep it busy, and writing around the cache saves reading what is overwritten
   (benchmarks/read_speed.py). */

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

/* Row i of `out`, rows of `n` bytes, is the one that begins `positions[i]` times `stride` bytes after `first`. Gives 0, and
   copies nothing, where a position is not one of `length`. */
PUBLIC int32_t gather(
    const uint8_t *first, int64_t length, size_t stride, size_t n, const int64_t *positions, size_t count, uint8_t *out)
{
    for (size_t place = 0; place < count; place++)
        if (positions[place] < 0 || positions[place] >= length)
            return 0;
    for (size_t place = 0; place < count; place += TOGETHER) {
        size_t together = count - place < TOGETHER ? count - place : TOGETHER;
        const uint8_t *rows[TOGETHER];
        for (size_t row = 0; row < together; row++)
            rows[row] = first + (size_t)positions[place + row] * stride;
        copy(rows, together, n, out + place * n);
    }
#ifdef __SSE2__
    _mm_sfence(); /* before anybody is told that the batch is there */
#endif
    return 1;
}
