"""The file under construction: beside the target, locked, and given the target's name only when it is whole.

It is called `.NAME.partial`, always the same, so that what a killed run left is found and taken over instead of piling
up. The lock goes with the process, however that ends. Its journal (`packshift.journal`) lies beside it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from packshift.errors import TargetError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_LONGEST_NAME = 255  # bytes; NAME_MAX of every common file system
_CROSS_LINK_REFUSED = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES}


class PartialFile:
    """A locked file opened for writing at given offsets; see `partial_file`."""

    def __init__(self, path: Path, target: Path, fd: int) -> None:
        self.path = path
        self.target = target
        self.fd = fd
        self.keep = False

    def write_at(self, offset: int, *buffers: ReadableBuffer) -> int:
        """Write the buffers one after another from `offset` on; return the offset behind them."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        while views:
            try:
                written = os.pwritev(self.fd, views, offset)
            except OSError as error:
                raise self.failure(error) from error
            offset += written
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if views:
                views[0] = views[0][written:]
        return offset

    def start_writing_back(self, start: int, end: int) -> None:
        """Have the kernel begin to write a range to disk now, so that the final `sync` has little left to wait for.

        DONTNEED on pages that are still dirty starts their writing and leaves them in the page cache.
        """
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self.fd, nbytes, offset)

    def resize(self, nbytes: int) -> None:
        """Cut the file to `nbytes`, or extend it with zeros."""
        try:
            os.ftruncate(self.fd, nbytes)
        except OSError as error:
            raise self.failure(error) from error

    def sync(self) -> None:
        """Wait until everything written so far is on disk."""
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError) -> TargetError:
        """The one line for a failed write."""
        folder = self.target.parent
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            written = os.fstat(self.fd).st_size
            return TargetError(
                f"{self.target}: the disk is full after {written / 1e6:,.1f} MB were written; "
                f"make room in {folder} or write elsewhere. Nothing was published"
            )
        return TargetError(f"{self.target}: writing failed: {error.strerror}. Nothing was published")

    def is_in_place(self) -> bool:
        """Whether the file still has the partial file's name: not once it was published."""
        return _is_named(self.fd, self.path)

    def is_published(self) -> bool:
        """Whether the file has the target's name, perhaps beside that of the partial file."""
        return _is_named(self.fd, self.target)

    def publish(self, *, overwrite: bool) -> None:
        """Wait until the file is on disk, then give it its name; an old store keeps the name up to that moment."""
        self.sync()
        if not overwrite and os.path.lexists(self.target):
            raise self._taken()
        try:
            if overwrite:
                os.replace(self.path, self.target)
            else:
                self._name_if_free()
            sync_folder(self.target.parent)
        except FileExistsError:
            raise self._taken() from None
        except OSError as error:
            raise self.failure(error) from error

    def _taken(self) -> TargetError:
        return TargetError(
            f"{self.target} appeared while the conversion ran; it was left as it is: move it away, or add --overwrite"
        )

    def _name_if_free(self) -> None:
        """Rename without replacing: a hard link fails where the name is taken, which a rename would not."""
        try:
            os.link(self.path, self.target)
        except OSError as error:
            if error.errno not in _CROSS_LINK_REFUSED:
                raise
            os.rename(self.path, self.target)
        else:
            os.unlink(self.path)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def partial_file(target: Path) -> Iterator[PartialFile]:
    """Open the partial file of `target`, locked, with what an earlier run left in it.

    It is removed at the end unless it was published or `keep` was set.
    """
    path = partial_path(target)
    fd = _open_locked(path, target)
    file = PartialFile(path, target, fd)
    try:
        try:
            yield file
        finally:
            if not file.keep and _is_named(fd, path):
                with suppress(FileNotFoundError):
                    os.unlink(path)
    finally:
        os.close(fd)


def partial_path(target: Path) -> Path:
    name = f".{target.name}.partial"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{zlib.crc32(os.fsencode(target.name)):08x}.partial"
    return target.with_name(name)


def _open_locked(path: Path, target: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise TargetError(f"{target}: cannot write {path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise TargetError(f"{target}: {path} is in the way, which is not a regular file; remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise TargetError(
                f"{target}: another conversion is writing it now; wait for it, or choose another name"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(fd)
                raise TargetError(f"{target}: cannot lock {path}: {error.strerror}") from error
        if _is_named(fd, path):
            if os.fstat(fd).st_nlink == 1:
                return fd
            # A run was killed after it had published the file and before it had removed this name of it.
            _remove_name(fd, path, target)
        # The run that held the lock has published or removed the file meanwhile: this handle is on its store.
        os.close(fd)


def _remove_name(fd: int, path: Path, target: Path) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        os.close(fd)
        raise TargetError(
            f"{target}: cannot remove {path}, another name of a finished store: {error.strerror}"
        ) from error


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
