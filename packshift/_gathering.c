/* Copies of many rows of a store into one batch.

   A processor that copies one row after the other waits for memory most of the time: what it fetches ahead ends with each
   page. Six rows at a time keep it busy, and writing around the cache saves reading what is overwritten
   (benchmarks/read_speed.py). */

#ifdef __linux__
#define _GNU_SOURCE /* SCHED_BATCH, pthread_setname_np */
#endif

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "_compiling.h"
#include "_gathering.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Whether what is read should be fetched ahead by instruction, around the cache as what is written: on AMD's processors (Zen)
   a worker of a DataLoader then takes 13 % less time for 64 pictures of 224 pixels, since the interpreter's memory stays in the
   cache; on Intel's (Xeon) copying takes twice as long. */
#if defined(__SSE2__) && defined(__GNUC__)
#define FETCHES_AHEAD __builtin_cpu_is("amd")
#else
#define FETCHES_AHEAD 0
#endif

#define TOGETHER 6      /* 4 and 8 rows were slower */
#define STEP 128        /* bytes of each row in turn */
#define AHEAD 512       /* bytes: 256 was slower, 1024 and 2048 were not better */
#define PIECE (1 << 20) /* bytes that one who takes part copies at a time, about: 0.1 ms */
#define MOST_THREADS 8
#define LINE 64         /* of cache: one that is written around it in two parts is slower than not around it */

/* `to` begins a line of cache. */
INLINE void copy_step(const uint8_t *from, uint8_t *to, int fetch_ahead)
{
#ifdef __SSE2__
    for (size_t line = 0; fetch_ahead && line < STEP; line += LINE)
        _mm_prefetch((const char *)from + AHEAD + line, _MM_HINT_NTA);
    __m128i held[STEP / 16];
    for (size_t part = 0; part < STEP / 16; part++)
        held[part] = _mm_loadu_si128((const __m128i *)(from + 16 * part));
    for (size_t part = 0; part < STEP / 16; part++)
        _mm_stream_si128((__m128i *)(to + 16 * part), held[part]);
#else
    memcpy(to, from, STEP);
#endif
}

/* Rows of `n` bytes, `count` of them, a constant where this is called, as `fetch_ahead` is. */
INLINE void copy_rows(const uint8_t *const *rows, size_t count, size_t n, uint8_t *out, int fetch_ahead)
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
            copy_step(from[row] + step * STEP, to[row] + step * STEP, fetch_ahead);
    for (size_t row = 0; row < count; row++)
        memcpy(to[row] + steps * STEP, from[row] + steps * STEP, left[row] - steps * STEP);
}

INLINE void copy(const uint8_t *const *rows, size_t count, size_t n, uint8_t *out, int fetch_ahead)
{
    switch (count) {
    case 1: copy_rows(rows, 1, n, out, fetch_ahead); break;
    case 2: copy_rows(rows, 2, n, out, fetch_ahead); break;
    case 3: copy_rows(rows, 3, n, out, fetch_ahead); break;
    case 4: copy_rows(rows, 4, n, out, fetch_ahead); break;
    case 5: copy_rows(rows, 5, n, out, fetch_ahead); break;
    case 6: copy_rows(rows, 6, n, out, fetch_ahead); break;
    }
}

static void copy_until(struct batch *batch, const _Atomic int *stop)
{
    int fetch_ahead = FETCHES_AHEAD;
    size_t n = batch->n, count = batch->count;
    size_t piece = n < PIECE / TOGETHER ? PIECE / TOGETHER / (n ? n : 1) * TOGETHER : TOGETHER;
    size_t begin;
    while (!atomic_load(stop) && (begin = atomic_fetch_add(&batch->begun, piece)) < count) {
        size_t end = count - begin < piece ? count : begin + piece;
        for (size_t place = begin; place < end; place += TOGETHER) {
            size_t together = end - place < TOGETHER ? end - place : TOGETHER;
            const uint8_t *rows[TOGETHER];
            for (size_t row = 0; row < together; row++)
                rows[row] = batch->first + (size_t)batch->positions[place + row] * batch->stride;
            if (fetch_ahead)
                copy(rows, together, n, batch->out + place * n, 1);
            else
                copy(rows, together, n, batch->out + place * n, 0);
        }
    }
#ifdef __SSE2__
    _mm_sfence(); /* before anybody is told that the rows are there */
#endif
}

static const _Atomic int never = 0;

static void *copy_pieces(void *batch)
{
    copy_until(batch, &never);
    return NULL;
}

void gather(struct batch *batch, size_t threads)
{
    pthread_t started[MOST_THREADS];
    size_t running = 0;
    threads = threads > MOST_THREADS ? MOST_THREADS : threads;
    while (running + 1 < threads && pthread_create(&started[running], NULL, copy_pieces, batch) == 0)
        running++; /* what one would have done that cannot be started is done by the others */
    copy_pieces(batch);
    while (running > 0)
        pthread_join(started[--running], NULL);
}

struct queue {
    pthread_mutex_t lock;
    pthread_cond_t more, less; /* there is something to do; somebody has left a batch */
    struct batch *oldest;
    _Atomic int closing;
    size_t running;
    pthread_t threads[];
};

/* Take part in a batch; with the lock, which is given back meanwhile. */
static void take_part(struct queue *queue, struct batch *batch, const _Atomic int *stop)
{
    batch->taking_part++;
    pthread_mutex_unlock(&queue->lock);
    copy_until(batch, stop);
    pthread_mutex_lock(&queue->lock);
    batch->taking_part--;
    for (struct batch **place = &queue->oldest; *place != NULL; place = &(*place)->next)
        if (*place == batch) { /* all of it has been begun, or the threads are ending */
            *place = batch->next;
            batch->next = NULL;
            break;
        }
    pthread_cond_broadcast(&queue->less);
}

static void *copy_batches(void *argument)
{
    struct queue *queue = argument;
#ifdef __linux__
    struct sched_param none = {0}; /* on a busy machine, do not push whoever hands a batch over off its core */
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
    pthread_setname_np(pthread_self(), "packshift-copy");
#endif
    pthread_mutex_lock(&queue->lock);
    while (!atomic_load(&queue->closing))
        if (queue->oldest != NULL)
            take_part(queue, queue->oldest, &queue->closing);
        else
            pthread_cond_wait(&queue->more, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

struct queue *open_queue(size_t threads)
{
    struct queue *queue = calloc(1, sizeof(struct queue) + threads * sizeof(pthread_t));
    if (queue == NULL)
        return NULL;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->more, NULL);
    pthread_cond_init(&queue->less, NULL);
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the interpreter */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (queue->running < threads && pthread_create(&queue->threads[queue->running], NULL, copy_batches, queue) == 0)
        queue->running++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return queue;
}

void hand_over(struct queue *queue, struct batch *batch)
{
    if (atomic_load(&batch->begun) >= batch->count)
        return; /* also one of nothing: it is there already, and would be known for ever */
    pthread_mutex_lock(&queue->lock);
    struct batch **place = &queue->oldest;
    while (*place != NULL)
        place = &(*place)->next;
    *place = batch;
    pthread_cond_broadcast(&queue->more);
    pthread_mutex_unlock(&queue->lock);
}

int is_there(struct queue *queue, struct batch *batch)
{
    pthread_mutex_lock(&queue->lock);
    int there = batch->taking_part == 0 && atomic_load(&batch->begun) >= batch->count;
    pthread_mutex_unlock(&queue->lock);
    return there;
}

void finish(struct queue *queue, struct batch *batch)
{
    pthread_mutex_lock(&queue->lock);
    take_part(queue, batch, &never);
    while (batch->taking_part > 0)
        pthread_cond_wait(&queue->less, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
}

size_t waiting(struct queue *queue)
{
    size_t count = 0;
    pthread_mutex_lock(&queue->lock);
    for (struct batch *batch = queue->oldest; batch != NULL; batch = batch->next)
        count++;
    pthread_mutex_unlock(&queue->lock);
    return count;
}

void end_threads(struct queue *queue)
{
    pthread_mutex_lock(&queue->lock);
    atomic_store(&queue->closing, 1);
    size_t running = queue->running;
#ifdef __linux__
    struct sched_param none = {0}; /* now they are waited for: see copy_batches */
    for (size_t number = 0; number < running; number++)
        pthread_setschedparam(queue->threads[number], SCHED_OTHER, &none);
#endif
    queue->running = 0;
    pthread_cond_broadcast(&queue->more);
    pthread_mutex_unlock(&queue->lock);
    while (running > 0)
        pthread_join(queue->threads[--running], NULL);
    pthread_mutex_lock(&queue->lock);
    while (queue->oldest != NULL) {
        struct batch *batch = queue->oldest;
        queue->oldest = batch->next;
        batch->next = NULL;
    }
    pthread_mutex_unlock(&queue->lock);
}

void free_queue(struct queue *queue)
{
    pthread_cond_destroy(&queue->more);
    pthread_cond_destroy(&queue->less);
    pthread_mutex_destroy(&queue->lock);
    free(queue);
}
