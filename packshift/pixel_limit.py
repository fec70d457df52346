"""How many pixels a picture may have: Pillow's guard against small files that fill the memory, or another limit.

Pillow refuses more than twice `Image.MAX_IMAGE_PIXELS`, when it opens a file and once more inside several decoders. That
number is one for the whole process. So a lower limit is checked beside it, and for a higher one it is raised while a picture
is decoded and put back behind it; what other threads open meanwhile is under the higher limit, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from packshift.errors import ImageError

_BOMB = re.compile(r"Image size \((\d+) pixels\) exceeds limit of (\d+) pixels")


class _Guard:
    """Pillow's number: its own one, and those to which it is raised now."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._own: int | None = None
        self._raised: list[int] = []

    @contextmanager
    def raised_to(self, pixels: int) -> Iterator[None]:
        with self._lock:
            self._own = self.own()
            self._raised.append(pixels)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._raised.remove(pixels)
                self._set()

    def own(self) -> int | None:
        from PIL import Image

        return self._own if self._raised else Image.MAX_IMAGE_PIXELS

    def _set(self) -> None:
        from PIL import Image

        if self._own is not None:
            Image.MAX_IMAGE_PIXELS = max([self._own, *self._raised])

    def forget_other_threads(self) -> None:
        """In a forked child, which has none of the threads that were decoding."""
        self._lock = Lock()
        if self._raised:
            self._raised.clear()
            self._set()


_guard = _Guard()
os.register_at_fork(after_in_child=_guard.forget_other_threads)


@contextmanager
def pixels_up_to(limit: int | None) -> Iterator[None]:
    """Have Pillow decode pictures of `limit` pixels meanwhile, where that is more than it would; None: as it would."""
    if limit is None:
        yield
        return
    with _guard.raised_to(limit):
        yield


def check_pixels(size: tuple[int, int], limit: int | None) -> None:
    """Raise ImageError for a picture of (width, height) over the limit; None: Pillow has checked it."""
    if limit is not None and size[0] * size[1] > limit:
        raise ImageError(_reason(size[0] * size[1], limit))


def scaled_limit(limit: int | None) -> int | None:
    """How many pixels a picture may have once it is scaled: a lower limit is about the file alone. None: any number."""
    own = _guard.own()
    return None if own is None else max(2 * own, limit or 0)


def bomb_reason(error: Exception, limit: int | None) -> str:
    """The reason for a picture at which Pillow raised DecompressionBombError."""
    found = _BOMB.match(str(error))
    return _reason(int(found[1]), limit or int(found[2])) if found else f"too many pixels: {error} (see --max-pixels)"


def _reason(pixels: int, limit: int) -> str:
    return f"too many pixels: {pixels:,}, over the limit of {limit:,} (--max-pixels sets another)"
