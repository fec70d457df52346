#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* A batch to be copied: row i of `out`, rows of `n` bytes, is the one that begins `positions[i]` times `stride` bytes after
   `first`. It is copied in pieces of some rows by everybody who takes part; `begun` counts the rows that somebody has begun.
   The last three are 0 before anybody takes part. */
struct batch {
    const uint8_t *first;
    size_t stride, n;
    const int64_t *positions;
    size_t count;
    uint8_t *out;
    _Atomic size_t begun;
    size_t taking_part; /* of those in a queue: guarded by its lock, as is the next */
    struct batch *next;
};

/* Copy a batch. The threads, at most MOST_THREADS and the caller's among them, live as long as the call, so that a process
   can be forked between two. */
void gather(struct batch *batch, size_t threads);

/* Batches that are copied by threads which stay, in the order in which they were handed over. */
struct queue;

/* NULL where there is no memory. Threads that cannot be started are done without: whoever waits for a batch copies it. */
struct queue *open_queue(size_t threads);

/* Have a batch copied, which stays where it is in memory until `finish` or `end_threads`. What another queue, whose threads
   have ended, has begun of it is not copied again. */
void hand_over(struct queue *queue, struct batch *batch);

/* Whether a batch that was handed over is there, and the queue knows it no longer. */
int is_there(struct queue *queue, struct batch *batch);

/* Come back when it is, and take part in it until then. */
void finish(struct queue *queue, struct batch *batch);

/* How many of those that were handed over the queue still knows. */
size_t waiting(struct queue *queue);

/* Come back when the threads have ended, each after the piece that it was copying, and the queue knows no batch any more.
   Whoever waits for one copies it, also one that is handed over afterwards. */
void end_threads(struct queue *queue);

/* Its threads have ended, and nobody is going to use it. */
void free_queue(struct queue *queue);
