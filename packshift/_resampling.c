/* Pillow's bilinear scaling of 8-bit pictures (its Resample.c), with the
   same whole-number weights and so the same results, written so that compilers turn it into vector instructions.

   A pixel is four bytes. Making one line of bytes from several, each with one weight, is what vector instructions are
   good at. Scaling the height is that by itself; for the width, a block of rows is turned on its side, and back. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_compiling.h"
#include "_resampling.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__GNUC__) && (defined(__clang__) || __GNUC__ >= 12)
#define SHUFFLES
typedef uint8_t bytes16 __attribute__((vector_size(16)));
#endif

#define BITS 22 /* weights are multiples of 2^-22: PRECISION_BITS of Resample.c */
#define HALF (1 << (BITS - 1))
#define BLOCK 16 /* rows turned on their side together: 0.12 ms for 375 x 500 to 375 x 256, against 0.20 with 64 */

/* How the `size` pixels wanted are made of the `used` ones in memory from `start` on: for each the first, counted from
   `start`, how many they are, and their weights, of which `table` has `most` for each. */
struct weights {
    size_t start, used, size, most;
    int32_t *firsts, *counts, *table;
};

/* One allocation, for the caller to free through `firsts`; 0 where there is no memory. As precompute_coeffs of Resample.c
   with the bilinear filter. A side that was `turned` before is scaled in the direction in which it is upright. */
static int find_weights(const struct side *side, int turned, struct weights *found)
{
    double scale = (side->stop - side->start) / side->size;
    double support = scale < 1.0 ? 1.0 : scale;
    double inverse = 1.0 / support;
    size_t size = (size_t)(side->last - side->first), most = 2 * (size_t)support + 3;
    int32_t lowest = side->length, highest = 0;
    int32_t *memory = malloc(size * (most + 2) * sizeof(int32_t));
    if (!memory)
        return 0;
    *found = (struct weights){0, 0, size, most, memory, memory + size, memory + 2 * size};
    for (size_t number = 0; number < size; number++) {
        int32_t *table = found->table + number * most;
        int32_t wanted = side->first + (int32_t)number;
        int32_t place = side->mirrored && !turned ? side->size - 1 - wanted : wanted;
        double centre = side->start + (place + 0.5) * scale;
        double total = 0.0;
        int32_t first = (int32_t)(centre - support + 0.5);
        int32_t last = (int32_t)(centre + support + 0.5);
        first = first < 0 ? 0 : first;
        last = last > side->length ? side->length : last;
        for (int pass = 0; pass < 2; pass++) {
            for (int32_t pixel = first; pixel < last; pixel++) {
                double distance = (pixel - centre + 0.5) * inverse;
                double weight = 1.0 - (distance < 0.0 ? -distance : distance);
                weight = weight < 0.0 ? 0.0 : weight;
                if (pass == 0)
                    total += weight;
                else
                    table[side->mirrored && turned ? last - 1 - pixel : pixel - first] =
                        (int32_t)(0.5 + (total != 0.0 ? weight / total : weight) * (1 << BITS));
            }
        }
        found->counts[number] = last - first;
        found->firsts[number] = side->mirrored && turned ? side->length - last : first;
        lowest = found->firsts[number] < lowest ? found->firsts[number] : lowest;
        highest = found->firsts[number] + last - first > highest ? found->firsts[number] + last - first : highest;
    }
    for (size_t number = 0; number < size; number++)
        found->firsts[number] -= lowest;
    found->start = (size_t)lowest;
    found->used = (size_t)(highest - lowest);
    return 1;
}

/* `n` bytes of `out` from those of `count` lines, `stride` bytes apart. */
INLINE void mix(
    const uint8_t *restrict line, size_t stride, const int32_t *restrict weight, size_t count, size_t n,
    int32_t *restrict sums, uint8_t *restrict out)
{
    int32_t w0 = weight[0], w1 = count > 1 ? weight[1] : 0, w2 = count > 2 ? weight[2] : 0;
    if (count == 1) {
        for (size_t i = 0; i < n; i++)
            out[i] = (uint8_t)((HALF + w0 * line[i]) >> BITS);
    } else if (count == 2) {
        for (size_t i = 0; i < n; i++)
            out[i] = (uint8_t)((HALF + w0 * line[i] + w1 * line[stride + i]) >> BITS);
    } else if (count == 3) {
        for (size_t i = 0; i < n; i++)
            out[i] = (uint8_t)((HALF + w0 * line[i] + w1 * line[stride + i] + w2 * line[2 * stride + i]) >> BITS);
    } else {
        for (size_t i = 0; i < n; i++)
            sums[i] = HALF + w0 * line[i] + w1 * line[stride + i] + w2 * line[2 * stride + i];
        size_t number = 3;
        for (; number + 4 < count; number += 4) {
            const uint8_t *restrict next = line + number * stride;
            w0 = weight[number], w1 = weight[number + 1], w2 = weight[number + 2];
            int32_t w3 = weight[number + 3];
            for (size_t i = 0; i < n; i++)
                sums[i] += w0 * next[i] + w1 * next[stride + i] + w2 * next[2 * stride + i] + w3 * next[3 * stride + i];
        }
        for (; number < count - 1; number++)
            for (size_t i = 0; i < n; i++)
                sums[i] += weight[number] * line[number * stride + i];
        const uint8_t *restrict last = line + (count - 1) * stride;
        for (size_t i = 0; i < n; i++)
            out[i] = (uint8_t)((sums[i] + weight[count - 1] * last[i]) >> BITS);
    }
}

/* Pixel (x, y) of `in` to (y, x) of `out`; the strides are in pixels. */
INLINE void turn(
    const uint32_t *restrict in, size_t in_stride, size_t rows, size_t columns, uint32_t *restrict out,
    size_t out_stride)
{
    size_t y = 0;
#ifdef __SSE2__
    for (; y + 4 <= rows; y += 4) {
        size_t x = 0;
        for (; x + 4 <= columns; x += 4) {
            const uint32_t *from = in + y * in_stride + x;
            uint32_t *to = out + x * out_stride + y;
            __m128i a = _mm_loadu_si128((const __m128i *)from);
            __m128i b = _mm_loadu_si128((const __m128i *)(from + in_stride));
            __m128i c = _mm_loadu_si128((const __m128i *)(from + 2 * in_stride));
            __m128i d = _mm_loadu_si128((const __m128i *)(from + 3 * in_stride));
            __m128i ab_low = _mm_unpacklo_epi32(a, b), cd_low = _mm_unpacklo_epi32(c, d);
            __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
            _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi64(ab_low, cd_low));
            _mm_storeu_si128((__m128i *)(to + out_stride), _mm_unpackhi_epi64(ab_low, cd_low));
            _mm_storeu_si128((__m128i *)(to + 2 * out_stride), _mm_unpacklo_epi64(ab_high, cd_high));
            _mm_storeu_si128((__m128i *)(to + 3 * out_stride), _mm_unpackhi_epi64(ab_high, cd_high));
        }
        for (; x < columns; x++)
            for (size_t row = y; row < y + 4; row++)
                out[x * out_stride + row] = in[row * in_stride + x];
    }
#endif
    for (; y < rows; y++)
        for (size_t x = 0; x < columns; x++)
            out[x * out_stride + y] = in[y * in_stride + x];
}

/* Leave out the fourth channel. */
INLINE void pack(const uint8_t *restrict in, size_t pixels, uint8_t *restrict out)
{
    size_t place = 0;
#ifdef SHUFFLES
    for (; place + 6 <= pixels; place += 4) { /* writes 16 bytes, of which 12 count */
        bytes16 held;
        memcpy(&held, in + 4 * place, 16);
        held = __builtin_shufflevector(held, held, 0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 7, 11, 15);
        memcpy(out + 3 * place, &held, 16);
    }
#endif
    for (; place < pixels; place++)
        for (size_t channel = 0; channel < 3; channel++)
            out[3 * place + channel] = in[4 * place + channel];
}

/* Scratch for `across`: `turned` columns->used * BLOCK pixels, `scaled` and `flat` columns->size * BLOCK; for `mix`: `sums`. */
struct scratch {
    uint32_t *turned, *scaled, *flat;
    int32_t *sums;
};

/* Scale the width of up to BLOCK rows, to lines of `bytes` (3 or 4) per pixel. */
INLINE void across(
    const uint32_t *in, size_t in_stride, size_t rows, const struct weights *columns, const struct scratch *scratch,
    size_t bytes, uint8_t *out)
{
    size_t width = columns->size;
    turn(in, in_stride, rows, columns->used, scratch->turned, BLOCK);
    for (size_t x = 0; x < width; x++)
        mix((const uint8_t *)(scratch->turned + (size_t)columns->firsts[x] * BLOCK), 4 * BLOCK,
            columns->table + x * columns->most, (size_t)columns->counts[x], 4 * BLOCK, scratch->sums,
            (uint8_t *)(scratch->scaled + x * BLOCK));
    turn(scratch->scaled, BLOCK, width, rows, bytes == 4 ? (uint32_t *)out : scratch->flat, width);
    for (size_t row = 0; bytes == 3 && row < rows; row++)
        pack((const uint8_t *)(scratch->flat + row * width), width, out + 3 * row * width);
}

/* One line of `n` bytes from those that it is made of, the first of which is `in`. */
INLINE void down(
    const uint8_t *in, size_t stride, size_t n, const struct weights *rows, size_t row, int32_t *sums, uint8_t *out)
{
    mix(in, stride, rows->table + row * rows->most, (size_t)rows->counts[row], n, sums, out);
}

/* Lines of the picture that wait between the passes, `capacity` of `n` bytes: from `first` up to, without it, `end`. */
struct window {
    uint8_t *lines;
    size_t n, capacity, first, end;
};

/* Scale, widths first, to `out` of `bytes` per pixel. Few lines are kept in between, so they stay in the processor's cache. */
INLINE void widths_first(
    const uint32_t *in, size_t in_stride, const struct weights *rows, const struct weights *columns,
    const struct scratch *scratch, struct window *window, size_t bytes, uint8_t *out)
{
    int upwards = rows->firsts[0] > rows->firsts[rows->size - 1];
    for (size_t number = 0; number < rows->size; number++) {
        size_t row = upwards ? rows->size - 1 - number : number;
        size_t first = (size_t)rows->firsts[row];
        while (window->end < first + (size_t)rows->counts[row]) {
            if (window->end - window->first + BLOCK > window->capacity) {
                memmove(window->lines, window->lines + (first - window->first) * window->n, (window->end - first) * window->n);
                window->first = first;
            }
            size_t height = rows->used - window->end < BLOCK ? rows->used - window->end : BLOCK;
            uint8_t *lines = window->lines + (window->end - window->first) * window->n;
            across(in + window->end * in_stride, in_stride, height, columns, scratch, bytes, lines);
            window->end += height;
        }
        down(window->lines + (first - window->first) * window->n, window->n, window->n, rows, row, scratch->sums,
             out + row * window->n);
    }
}

/* The same, heights first, to four bytes per pixel; `lines` has room for BLOCK lines. */
INLINE void heights_first(
    const uint32_t *in, size_t in_stride, const struct weights *rows, const struct weights *columns,
    const struct scratch *scratch, uint32_t *lines, uint32_t *out)
{
    size_t used = columns->used;
    for (size_t top = 0; top < rows->size; top += BLOCK) {
        size_t height = rows->size - top < BLOCK ? rows->size - top : BLOCK;
        for (size_t row = top; row < top + height; row++)
            down((const uint8_t *)(in + (size_t)rows->firsts[row] * in_stride), 4 * in_stride, 4 * used, rows, row,
                 scratch->sums, (uint8_t *)(lines + (row - top) * used));
        across(lines, used, height, columns, scratch, 4, (uint8_t *)(out + top * columns->size));
    }
}

/* Scale, heights or widths first, leave out the fourth channel, and, if `sideways`, exchange rows and columns. */
FOR_EACH_PROCESSOR static int scale(
    const uint32_t *picture, size_t width, const struct weights *rows, const struct weights *columns,
    int begin_with_heights, int sideways, uint8_t *restrict out)
{
    size_t bytes = sideways ? 4 : 3, block = columns->size * BLOCK;
    size_t wanted = sideways ? rows->size * columns->size : 0;
    size_t lines = begin_with_heights ? BLOCK : rows->most + 4 * BLOCK; /* more than needed: they are moved less often */
    size_t line = begin_with_heights ? columns->used : columns->size;
    size_t turned = columns->used * BLOCK, sums = 4 * (line > BLOCK ? line : BLOCK);

    uint32_t *memory = malloc((turned + 2 * block + sums + lines * line + 2 * wanted) * 4);
    if (!memory)
        return 0;
    struct scratch scratch = {memory, memory + turned, memory + turned + block, (int32_t *)(memory + turned + 2 * block)};
    uint32_t *between = memory + turned + 2 * block + sums, *lying = between + lines * line, *upright = lying + wanted;
    uint8_t *result = sideways ? (uint8_t *)lying : out;
    const uint32_t *in = picture + rows->start * width + columns->start;
    if (begin_with_heights) {
        heights_first(in, width, rows, columns, &scratch, between, lying);
    } else {
        struct window window = {(uint8_t *)between, bytes * columns->size, lines, 0, 0};
        if (sideways)
            widths_first(in, width, rows, columns, &scratch, &window, 4, result);
        else
            widths_first(in, width, rows, columns, &scratch, &window, 3, result);
    }
    if (sideways) {
        turn(lying, columns->size, rows->size, columns->size, upright, rows->size);
        pack((const uint8_t *)upright, wanted, out);
    }
    free(memory);
    return 1;
}

/* Make `out`, of three bytes a pixel, from the picture in memory, which lies on its side if `sideways`. The widths are
   scaled before the heights: of the upright picture if it is `turned` first, else as it lies in memory. Gives 0 where
   there is no memory. */
int32_t resample(
    const uint32_t *picture, const struct side *height, const struct side *width, int32_t sideways, int32_t turned,
    uint8_t *out)
{
    struct weights rows, columns;
    int done = 0;
    if (!find_weights(sideways ? width : height, turned, &rows))
        return 0;
    if (find_weights(sideways ? height : width, turned, &columns)) {
        size_t in_memory = (size_t)(sideways ? height->length : width->length);
        done = scale(picture, in_memory, &rows, &columns, sideways && turned, sideways, out);
        free(columns.firsts);
    }
    free(rows.firsts);
    return done;
}
