#include <stdint.h>

/* A side of the upright picture: `start` to `stop` of its `length` pixels are scaled to `size`, of which those from `first`
   to `last` are wanted. `mirrored`: it lies in memory the other way round. */
struct side {
    double start, stop;
    int32_t length, size, first, last, mirrored;
};

int32_t resample(
    const uint32_t *picture, const struct side *height, const struct side *width, int32_t sideways, int32_t turned,
    uint8_t *out);
