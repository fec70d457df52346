"""Stand-ins for `packshift.preprocess.load_record` that misbehave as their pictures' names say.

A worker imports this module by name; it finds it because it is told the path of the process that started it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import time
import warnings
from pathlib import Path

from packshift.errors import SourceError
from packshift.preprocess import load_record
from packshift.record import Record, Sample
from packshift.settings import Preprocessing


def crash(root: str, sample: Sample, settings: Preprocessing) -> Record:
    """Die over every picture with "crash" in its name, in the way that the rest of the name says."""
    if "crash-read" in sample.name:
        ctypes.string_at(0)
    if "crash-exit" in sample.name:
        print("decoder: giving up on this one", file=sys.stderr, flush=True)
        os._exit(3)
    if "crash-kill" in sample.name:
        os.kill(os.getpid(), 9)
    if "crash-once" in sample.name:
        mark = Path(root) / "crashed once"
        if not mark.exists():
            mark.touch()
            os._exit(4)
    return load_record(root, sample, settings)


def chatter(root: str, sample: Sample, settings: Preprocessing) -> Record:
    """Print as C libraries and Python do; a "flood" of it where the name says so."""
    if "talk" in sample.name:
        os.write(2, f"Corrupt JPEG data: {len(sample.name)} extraneous bytes in {sample.name}\n".encode())
        warnings.warn(f"Corrupt EXIF data, expecting {id(sample)} bytes", stacklevel=1)
    if "flood" in sample.name:
        for number in range(20_000):
            os.write(
                2, b"TIFFReadDirectory: Warning, Unknown field with tag %d (0x%x) encountered.\n" % (number, number)
            )
    return load_record(root, sample, settings)


def no_memory(root: str, sample: Sample, settings: Preprocessing) -> Record:
    raise MemoryError


def too_many_open_files(root: str, sample: Sample, settings: Preprocessing) -> Record:
    raise SourceError(f"{sample.name}: {os.strerror(errno.EMFILE)}: use fewer jobs, or raise the limit (ulimit)")


def hesitate(root: str, sample: Sample, settings: Preprocessing) -> Record:
    """Wait over a picture with "slow" in its name until the file "go on" appears in the source folder."""
    deadline = time.monotonic() + 30
    while "slow" in sample.name and not (Path(root) / "go on").exists():
        if time.monotonic() > deadline:
            raise SourceError("nobody said go on")
        time.sleep(0.01)
    return load_record(root, sample, settings)


def die_late(root: str, sample: Sample, settings: Preprocessing) -> Record:
    """Die over the picture "slow" once, after the others had time to finish theirs."""
    mark = Path(root) / "died once"
    if "slow" in sample.name and not mark.exists():
        time.sleep(2)
        mark.touch()
        os._exit(4)
    return load_record(root, sample, settings)
