"""Every exception that packshift raises on purpose.

    PackshiftError
    ├── UsageError (ValueError)         an argument that cannot be right; the command exits with 2
    ├── SourceError (OSError)           the folder of pictures: missing, empty, nothing to convert
    ├── ImageError (ValueError)         one picture that cannot be read; carries the reason
    ├── TargetError (OSError)           the file to be written: exists, not writable, disk full, in use
    ├── WatchError                      the process to be watched: not there, not ours, its log not writable
    └── StoreError (OSError)            the store to be read
        ├── NotAStoreError              some other file
        ├── UnfinishedStoreError        a conversion that has not ended
        ├── NewerVersionError           made by a later packshift
        ├── DamagedStoreError           truncated or altered
        └── ChangedStoreError           not the file that this dataset was opened on

    KeyboardInterrupt
    └── Interrupted                     Ctrl-C during a conversion; says what is kept for the next run

A message is one line: it names the file, says what was expected and what was found, and what to do.
"""

from __future__ import annotations


class PackshiftError(Exception):
    """Base of all errors raised by packshift."""


class UsageError(PackshiftError, ValueError):
    """An argument that cannot be right, whatever the files hold."""


class SourceError(PackshiftError, OSError):
    """The source folder cannot be converted."""


class ImageError(PackshiftError, ValueError):
    """One picture cannot be read; `str(error)` is the reason, without the file's name."""


class TargetError(PackshiftError, OSError):
    """The target cannot be written; nothing was published under its name."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a conversion; says what is kept."""


class WatchError(PackshiftError):
    """The process cannot be watched, or what is seen cannot be logged."""


class StoreError(PackshiftError, OSError):
    """The store cannot be read."""


class NotAStoreError(StoreError):
    """The file was not written by packshift, or is of another format than the one asked for."""


class UnfinishedStoreError(StoreError):
    """The file is what an interrupted or running conversion left."""


class NewerVersionError(StoreError):
    """The store's format version is later than this packshift can read."""


class DamagedStoreError(StoreError):
    """The file is shorter, longer or other than what was written."""


class ChangedStoreError(StoreError):
    """The file was replaced since the dataset was opened on it."""
