"""The conversion: pictures are decoded by several processes (`packshift.pool`), written in order, and published whole.

What is finished is noted in a journal beside the partial file, so a run that ended early, however it ended, is carried
on by the same command: from the first picture that is not known to be on disk, or whose file has changed since. Bytes
do not depend on how often that happened: records come in the order of the listing, and nothing else is in the store.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from packshift._version import __version__
from packshift.duplicates import Duplicates, find_duplicates
from packshift.errors import ImageError, Interrupted, PackshiftError, SourceError, StoreError, TargetError
from packshift.journal import Earlier, Journal, Outcome, earlier_journal
from packshift.options import Options
from packshift.planning import Plan, check_room, look_ahead, make_plan
from packshift.pool import Decoded, DecodingPool
from packshift.record import Listing, Sample, Skipped, encode_name
from packshift.sources import AUTO
from packshift.sources._labelling import STRING
from packshift.stores._header import VERSION
from packshift.stores._partial import PartialFile, partial_file
from packshift.stores._reader import Reader
from packshift.stores._writer import Description, Writer
from packshift.text import counted, printable
from packshift.worker import NO_FILE, folder_identity, source_state

Progress = Callable[[int, int], None]
"""Called with (pictures done, pictures in all) after each picture, from the thread that called `convert`."""

Log = Callable[[str], None]
"""Called with a line that a user wants to read while the conversion runs."""

LOADER = "packshift.preprocess:load_record"
"""The function that decodes a picture in a worker; tests put others in its place."""

_MOST_KINDS = 1000
_OTHER_KINDS = "others"


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    `preprocessing` are the settings as the store records them, with which `jobs` processes made it.
    `found` = `written` + len(`skipped`). `carried_on` of them were finished by earlier runs. Sizes are in bytes:
    `source_bytes` of the pictures written, `store_bytes` of the store. `images_per_s` counts pictures of this run over
    `seconds`, scanning and syncing included. `notes` counts pictures by what was done to them beyond the settings,
    `messages` by what their decoders printed. `duplicates` are files that occur under several names, `ignored` counts files
    that are not pictures, by reason.
    """

    target: str
    format: str
    preprocessing: Mapping[str, Any]
    jobs: int
    found: int
    written: int
    carried_on: int
    skipped: Sequence[Skipped]
    classes: tuple[str, ...]
    empty_classes: tuple[str, ...]
    source_bytes: int
    store_bytes: int
    seconds: float
    images_per_s: float
    notes: Mapping[str, int]
    messages: Mapping[str, int]
    duplicates: Duplicates
    ignored: Mapping[str, int]
    ignored_examples: Mapping[str, Sequence[str]]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    size: int | str | tuple[int, int] | None = 256,
    fit: str = "crop",
    background: str | tuple[int, int, int] | None = None,
    fast_decode: bool = False,
    max_pixels: int | None = None,
    layout: str = AUTO,
    class_order: str = STRING,
    classes_from: str | os.PathLike[str] | None = None,
    format: str | None = None,
    jobs: int | None = None,
    on_error: str = "skip",
    max_errors: int | str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    log: Log | None = None,
) -> Report:
    """Convert a folder of pictures into one store file of uint8 pixels (H, W, 3), and return what was done.

    `size` is 256, (height, width) or None (every picture keeps its own), `fit` one of "crop", "pad", "stretch".
    `background` is the colour over which transparent pictures are laid (default: transparency is dropped), `fast_decode`
    decodes large JPEGs smaller, which changes pixels a little. A picture of more than `max_pixels` counts as unreadable
    (default: 178,956,970, Pillow's limit; each process needs 4 bytes and more for a pixel).

    Labels count from 0 in the order of the class folders' names: `class_order` "string" (as torchvision) or "natural" (2
    before 10). Or they are those of `classes_from`, a store or a text file with one class name per line: a folder that it
    lacks is refused, a class without a folder stays, with no picture.

    The format follows the target's suffix unless `format` names it. `jobs` processes decode (default: the CPUs this
    process may use); the store's bytes do not depend on them. With `on_error="stop"` the first unreadable picture ends
    the run, with `max_errors` (a number, or "5%" of the pictures) the first one above that.

    The target appears when it is whole, or not at all; an existing one is replaced only with `overwrite=True`, in the
    last moment. A run that ends early is carried on by the next one with the same arguments, unless that has
    `restart=True`. A disk that cannot hold the store is found out before, and ignored with `force=True`.

    Raises UsageError, SourceError, TargetError, and for too many unreadable pictures ImageError.
    """
    started = time.perf_counter()
    options = Options(
        size=size,
        fit=fit,
        background=background,
        fast_decode=fast_decode,
        max_pixels=max_pixels,
        layout=layout,
        class_order=class_order,
        classes_from=classes_from,
        format=format,
        jobs=jobs,
        on_error=on_error,
        max_errors=max_errors,
        overwrite=overwrite,
        restart=restart,
        force=force,
    )
    plan = make_plan(source, target, options)
    check_room(plan, look_ahead(plan, decode=False))
    return run_plan(plan, progress=progress, log=log, started=started)


def run_plan(
    plan: Plan, *, progress: Progress | None = None, log: Log | None = None, started: float | None = None
) -> Report:
    """Carry out a plan. `started` is the `time.perf_counter()` from which seconds count (default: now)."""
    started = time.perf_counter() if started is None else started
    with partial_file(plan.target) as file:
        run = _Run(plan, file, log or (lambda _: None))
        try:
            run.carry_on()
            if run.done and progress is not None:
                progress(run.done, len(plan.listing))
            run.decode(progress)
            store = run.publish()
        except BaseException as error:
            told = run.keep(error)
            if told is error:
                raise
            raise told from error
    seconds = time.perf_counter() - started
    return Report(
        target=str(plan.target),
        format=plan.format.name,
        preprocessing=plan.settings.to_json(),
        jobs=plan.jobs,
        found=len(plan.listing),
        written=len(run.writer),
        carried_on=run.carried_on,
        skipped=tuple(run.skipped),
        classes=plan.listing.classes,
        empty_classes=plan.listing.empty_classes,
        source_bytes=store.info.source["bytes"],
        store_bytes=store.file_size,
        seconds=seconds,
        images_per_s=(len(plan.listing) - run.carried_on) / seconds,
        notes=store.info.notes,
        messages=dict(sorted(run.messages.items())),
        duplicates=find_duplicates(store),
        ignored=plan.listing.ignored,
        ignored_examples=plan.listing.ignored_examples,
    )


class _Run:
    """One conversion on its way: the store under construction, its journal, and what is counted."""

    def __init__(self, plan: Plan, file: PartialFile, log: Log) -> None:
        self.plan = plan
        self.file = file
        self.log = log
        self.skipped: list[Skipped] = []
        self.messages: Counter[str] = Counter()
        self.carried_on = 0
        self._earlier = 0  # outcomes in the journal of an earlier run
        self._source = folder_identity(plan.listing.root)
        self._description = _description(plan)
        self._journal: Journal | None = None

    @property
    def done(self) -> int:
        return len(self.writer) + len(self.skipped)

    def carry_on(self) -> None:
        """Take over what an earlier run has finished, as far as it can be trusted, and begin the rest."""
        earlier = None if self.plan.options.restart else earlier_journal(self.file)
        if earlier is None or not earlier.count:
            if not self.plan.options.restart and os.fstat(self.file.fd).st_size:
                self.log(
                    f"beginning anew: {printable(str(self.file.path))} is there, but no journal that belongs to it"
                )
            self._begin()
            return
        self.file.keep = True
        self._earlier = earlier.count
        self._check_same_conversion(earlier)
        self.writer = Writer(self.file, self.plan.format, self.plan.settings.shape)
        keep, rest = self._take_over(earlier)
        if not self.done:
            self._begin()
            return
        self.carried_on = self.done
        self.file.resize(self.writer.end)
        self._journal = Journal(self.file, self._description, keep=keep)
        self._journal.took_over(self.done - len(rest))
        for outcome, end in rest:
            self._journal.add(outcome, end)
        self.log(
            f"carrying on: {self.done:,} of {counted(len(self.plan.listing), 'picture')} were finished by an earlier run"
        )

    def _begin(self) -> None:
        self.file.keep = False
        self.file.resize(0)
        self.writer = Writer(self.file, self.plan.format, self.plan.settings.shape)
        self._journal = Journal(self.file, self._description)

    def _check_same_conversion(self, earlier: Earlier) -> None:
        """An earlier run with other settings or another listing must not be continued, nor be lost without being asked."""
        differences = _differences(earlier.description, self._description)
        if differences:
            self._earlier = 0  # not of this conversion: the message says what is kept
            raise TargetError(
                f"{self.plan.target}: {self.file.path} holds {counted(earlier.count, 'finished picture')} of a conversion "
                f"that differs: {'; '.join(differences)}. Run that one again to carry on with it, or add --restart to "
                "throw it away"
            )

    def _take_over(self, earlier: Earlier) -> tuple[int | None, list[tuple[Outcome, int]]]:
        """(bytes of the journal to keep, outcomes taken over from behind them with the ends of their records)."""
        size = os.fstat(self.file.fd).st_size
        keep: int | None = None
        for outcomes, end in earlier.lines():
            taken: list[tuple[Outcome, int]] = []
            for outcome in outcomes:
                trusted = size if self.done < earlier.synced else 0
                if not self._take(outcome, trusted=trusted):
                    return keep, taken
                taken.append((outcome, self.writer.end))
            keep = end
        return keep, []

    def _take(self, outcome: Outcome, *, trusted: int) -> bool:
        if self.done >= len(self.plan.listing):
            return False
        sample = self.plan.listing.sample(self.done)
        if source_state(self.plan.listing.root, sample.name) != (outcome.source_size, outcome.source_mtime_ns):
            self.log(f"{printable(sample.name)} has changed since an earlier run read it")
            return False
        if outcome.entry is None:
            self._skip(sample, outcome.reason)
        elif not self.writer.take_over(sample.name, sample.label, outcome.entry, trusted=trusted):
            return False
        self._count(outcome.messages)
        return True

    def decode(self, progress: Progress | None) -> None:
        """Decode and write every picture that is not done yet."""
        listing = self.plan.listing
        todo = range(self.done, len(listing))
        if not todo:
            return
        with (
            DecodingPool(listing.root, self.plan.settings, min(self.plan.jobs, len(todo)), loader=LOADER) as pool,
            closing(pool.outcomes((listing.sample(index) for index in todo), len(todo))) as outcomes,
        ):
            for decoded in outcomes:
                self._settle(decoded)
                if progress is not None:
                    progress(self.done, len(listing))

    def _settle(self, decoded: Decoded) -> None:
        """Write a record or note a skipped file, then enter it into the journal."""
        assert self._journal is not None  # `carry_on` came first; not a user's data
        sample, entry = decoded.sample, decoded.entry
        if entry is not None and decoded.pixels is not None:
            self.writer.add(sample.name, sample.label, entry, decoded.pixels)
            outcome = Outcome(entry, "", entry.source_size, entry.source_mtime_ns, decoded.messages)
        else:
            self._check_that_the_source_is_there(decoded)
            outcome = Outcome(None, decoded.reason, *decoded.source_state, decoded.messages)
            self._skip(sample, decoded.reason)
        self._count(decoded.messages)
        self._journal.add(outcome, self.writer.end)

    def _check_that_the_source_is_there(self, decoded: Decoded) -> None:
        """A folder that was unplugged or moved must not become a store of what was read until then."""
        if decoded.source_state == NO_FILE and folder_identity(self.plan.listing.root) != self._source:
            raise SourceError(
                f"the source folder {self.plan.listing.root} is gone or another one since the conversion began "
                f"({decoded.sample.name}: {decoded.reason})"
            )

    def _skip(self, sample: Sample, reason: str) -> None:
        if self.plan.options.on_error == "stop":
            raise ImageError(f"{sample.name}: {reason.rstrip('.')}. Nothing was published (--on-error stop)")
        skipped = Skipped(sample.name, reason)
        self.skipped.append(skipped)
        self.writer.skip(skipped)
        limit = self.plan.max_errors
        if limit is not None and len(self.skipped) > limit:
            self._name_the_skipped()
            raise ImageError(
                f"{counted(len(self.skipped), 'picture')} cannot be read, more than the {limit:,} that --max-errors allows; "
                f"the last one, {sample.name}: {reason.rstrip('.')}. Nothing was published"
            )

    def _name_the_skipped(self) -> None:
        """Where no report will do it."""
        for skipped in self.skipped:
            self.log(f"skipped {printable(skipped.path)}: {skipped.reason}")

    def _count(self, messages: Sequence[str]) -> None:
        for kind in messages:
            known = kind in self.messages or len(self.messages) < _MOST_KINDS
            self.messages[kind if known else _OTHER_KINDS] += 1

    def publish(self) -> Reader:
        """Finish the store, read it back, and give it its name."""
        assert self._journal is not None  # `carry_on` came first; not a user's data
        found = len(self.plan.listing)
        if not len(self.writer):
            self._name_the_skipped()
            raise SourceError(
                f"none of the {found:,} pictures in {self.plan.listing.root} can be read; the first, "
                f"{self.skipped[0].path}: {self.skipped[0].reason}"
            )
        if self.done != found:
            raise TargetError(f"{self.plan.target}: {found} pictures went in, {self.done} came out")
        self.writer.finish(_store_description(self.plan))
        store = _read_back(self.file, self.plan)
        self.file.publish(overwrite=self.plan.options.overwrite)
        self._journal.discard()
        return store

    def keep(self, error: BaseException) -> BaseException:
        """Leave what is finished for another run, and return the error with the words for that."""
        if self.file.is_published() or not self.file.is_in_place():  # in the last moment; must not be cut any more
            self.file.keep = False
            if self._journal is not None:
                self._journal.discard()
            return error
        if self._journal is None:  # stopped while an earlier run's work was taken over, of which nothing is lost
            return _with_what_is_kept(error, self._earlier if self.file.keep else 0, len(self.plan.listing))
        self.file.keep = len(self.writer) > 0  # also when what follows is interrupted in its turn
        with suppress(TargetError):
            self.file.resize(self.writer.end)  # room for the journal where the disk is full
        kept = self._journal.close()
        self.file.keep = bool(kept and len(self.writer))
        if not self.file.keep:
            self._journal.remove()
        return _with_what_is_kept(error, kept if self.file.keep else 0, len(self.plan.listing))


def _with_what_is_kept(error: BaseException, kept: int, found: int) -> BaseException:
    then = f"{kept:,} of {counted(found, 'picture')} are kept, and the same command carries on" if kept else ""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"nothing was published; {then or 'the same command starts again'}")
    if isinstance(error, PackshiftError) and then:
        return type(error)(f"{str(error).rstrip('.')}. {then[0].upper()}{then[1:]}")
    return error


def _read_back(file: PartialFile, plan: Plan) -> Reader:
    """Open the finished file as users will, with packshift and with the format's own library."""
    try:
        store = Reader(file.path, format=plan.format.name)
        plan.format.check(file.path, store.info)
    except StoreError as error:
        reason = str(error).replace(str(file.path), str(plan.target))
        raise TargetError(f"{plan.target}: what was written cannot be read back: {reason}") from error
    return store


def _store_description(plan: Plan) -> Description:
    return Description(
        classes=plan.listing.classes,
        preprocessing=plan.settings.to_json(),
        source={"layout": plan.listing.layout, "found": len(plan.listing), **_class_order(plan.listing)},
        tools=tool_versions(),
    )


def _class_order(listing: Listing) -> dict[str, str]:
    """For the store's header; only where it is not the default."""
    return {} if listing.class_order is None else {"class_order": listing.class_order}


def _description(plan: Plan) -> dict[str, Any]:
    """Everything that decides about the store's bytes, beside the contents of the files."""
    return {
        "format": plan.format.name,
        "format version": VERSION,
        "preprocessing": plan.settings.to_json(),
        "tools": tool_versions(),
        "class_order": plan.listing.class_order,
        "pictures": len(plan.listing),
        "listing": _fingerprint(plan.listing),
    }


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions, in words."""
    words = []
    for key in now:
        before, after = earlier.get(key), now[key]
        if before == after:
            continue
        if key == "listing":
            words.append("files were added, removed or renamed, or other classes hold them")
        elif isinstance(before, dict) and isinstance(after, dict):
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            words += [f"{name} was {before.get(name)}, now {after.get(name)}" for name in names]
        else:
            words.append(f"{key} was {before}, now {after}")
    return words


def _fingerprint(listing: Listing) -> str:
    digest = hashlib.sha256(repr((listing.layout, len(listing))).encode())
    for name in listing.classes:
        digest.update(encode_name(name) + b"\0")
    for array in (listing.names.data, listing.names.offsets, listing.labels):
        digest.update(array.tobytes())
    return digest.hexdigest()


def tool_versions() -> dict[str, str]:
    """Versions of everything that decides about a store's pixels."""
    from PIL import __version__ as pillow_version
    from PIL import features

    versions: dict[str, Any] = {"packshift": __version__, "pillow": pillow_version}
    for library, feature in (
        ("libjpeg-turbo", "libjpeg_turbo"),
        ("libjpeg", "jpg"),
        ("zlib", "zlib"),
        ("webp", "webp"),
    ):
        versions[library] = features.version(feature)
    return {name: str(version) for name, version in versions.items() if version is not None}
