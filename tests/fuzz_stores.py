"""Damages small stores in every way it can think of and reads them: nothing but a PackshiftError of one line may come.

    python tests/fuzz_stores.py --mutations 10000 --seed 0

Each damaged store goes through info, verify, export, and a dataset (first, last, a batch, names, labels) in a child process,
which is restarted when it dies. A finding is: another exception, an error of several lines, a signal, more than `PATIENCE`
seconds, more memory than `MEMORY`, a file outside the folder of the export, or `verify` calling a store sound in which a byte
was changed (stores that were forged with right checksums may be sound). Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PATIENCE = 20
MEMORY = 2 << 30

Mutation = Callable[[random.Random, "Target", list[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """A whole store, and where its header is."""

    format: str
    data: bytes
    header_offset: int
    header: bytes


def make_targets(folder: Path) -> list[Target]:
    from helpers import make_records, write_store

    from packshift.record import Skipped
    from packshift.stores import formats
    from packshift.stores._reader import Reader

    targets = []
    for known in formats():
        for own_sizes in (False, True):
            shapes = [(9, 7), (40, 30), (1, 1), (17, 80)] if own_sizes else [(12, 11)] * 6
            path = folder / f"{known.name}-{own_sizes}{known.suffixes[0]}"
            skipped = [Skipped("class0/bad.jpg", "empty file")]
            write_store(path, known.name, make_records(shapes), own_sizes=own_sizes, skipped=skipped)
            reader = Reader(path)
            targets.append(Target(known.name, path.read_bytes(), reader.header_place.offset, reader.header_text()))
    return targets


def flip_bits(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    data = bytearray(target.data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def flip_bits_outside_records(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    data = bytearray(target.data)
    first = rng.choice((0, 4096, max(0, target.header_offset - 2000), len(data) - 4096, len(data) - 8192))
    data[min(len(data) - 1, max(0, first) + rng.randrange(4096))] ^= 1 << rng.randrange(8)
    return bytes(data)


def set_bytes(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    data = bytearray(target.data)
    start = rng.randrange(len(data))
    for place in range(start, min(len(data), start + rng.choice((1, 2, 4, 8, 64)))):
        data[place] = rng.choice((0, 0xFF, rng.randrange(256)))
    return bytes(data)


def set_numbers(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    """Integers where a format has some: the first pages, the last ones, beside the header."""
    data = bytearray(target.data)
    for _ in range(rng.choice((1, 1, 3))):
        base = rng.choice((0, 4096, 8192, len(data) - 4096, max(0, target.header_offset - 64)))
        place = max(0, min(len(data) - 8, base + rng.randrange(256)))
        value = rng.choice((0, 1, 2, 7, 16, 255, 4096, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, -1))
        value = rng.choice((value, len(data), len(data) // 4096, rng.getrandbits(64))) & (1 << 64) - 1
        size = rng.choice((1, 2, 4, 8))
        data[place : place + size] = struct.pack("<Q", value)[:size]
    return bytes(data)


def truncate(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    data = target.data[: rng.randrange(len(target.data))]
    return data if rng.random() < 0.5 else data[: len(data) // 4096 * 4096]


def extend(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    return target.data + rng.randbytes(rng.choice((1, 8, 4096))) * rng.choice((0, 1)) + bytes(rng.choice((1, 4096)))


def zero(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    start, size = rng.randrange(len(target.data)), rng.choice((16, 512, 4096, 20_000))
    data = bytearray(target.data)
    data[start : start + size] = bytes(len(data[start : start + size]))
    return bytes(data)


def swap_pages(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    data = bytearray(target.data)
    first, second = (rng.randrange(len(data) // 4096) * 4096 for _ in range(2))
    data[first : first + 4096], data[second : second + 4096] = data[second : second + 4096], data[first : first + 4096]
    return bytes(data)


def splice(rng: random.Random, target: Target, others: list[bytes]) -> bytes:
    other, data = rng.choice(others), bytearray(target.data)
    size = rng.choice((64, 4096, 8192, 30_000))
    here, there = (rng.randrange(max(1, len(each) // 4096)) * 4096 for each in (data, other))
    block = other[there : there + size]
    data[here : here + len(block)] = block
    return bytes(data)


HOSTILE: tuple[Any, ...] = (
    None, True, 0, 1, -1, -(10**9), 2**31, 2**60, 2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "\n",
    "../../x", "\udcff", [], {}, [[]], [None], [-1], [1, 2, 3], [2**40, 2**40], "<f8", "|O", "<i8", "<u4",
)  # fmt: skip


def forge_header(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    """Other values in the JSON, with a checksum that says they are right."""
    header = json.loads(target.header)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, header)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return with_header(target, text)


def forge_numbers(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    """Numbers near the true ones, which get past coarse checks."""
    header = json.loads(target.header)
    for _ in range(rng.choice((1, 1, 2, 3))):
        box = rng.choice((header, header["payload"], header["source"], header["arrays"]))
        places = [(inside, key) for inside, key, value in _values({"": box}) if type(value) is int]
        inside, key = rng.choice(places)
        step = rng.choice((-4096, -16, -1, 1, 16, 4096))
        inside[key] = rng.choice((inside[key] + step, inside[key] * 2, 0, 1, len(target.data), 1 << 50))
    return with_header(target, json.dumps(header, sort_keys=True, separators=(",", ":")).encode())


def forge_array(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    """Other numbers in a side array, with a checksum that says they are right: offsets, shapes, labels, paths."""
    header, data = json.loads(target.header), bytearray(target.data)
    place = header["arrays"][rng.choice(sorted(header["arrays"]))]
    width = int(place["dtype"][2:])
    nbytes = width * math.prod(place["shape"])
    for _ in range(rng.choice((1, 1, 2, 5))):
        offset = place["offset"] + rng.randrange(nbytes // width) * width
        now = int.from_bytes(data[offset : offset + width], "little")
        value = rng.choice(
            (now + rng.choice((-4096, -1, 1, 4096)), 0, 1, 46, 47, -1, len(data), 1 << 31, rng.getrandbits(64))
        )
        data[offset : offset + width] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    place["crc32"] = zlib.crc32(data[place["offset"] : place["offset"] + nbytes])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return with_header(replace(target, data=bytes(data)), text)


def forge_text(rng: random.Random, target: Target, _: list[bytes]) -> bytes:
    """Text that is hard on a JSON parser, with a right checksum."""
    size = len(target.header)
    bombs = (
        b"[" * size, b'{"a":' * (size // 5), b"null", b"[]", b'"packshift"', b"{}", b"\xff" * size, b"1" * size,
        b'{"magic":"packshift","version":1}', b'{"magic":"packshift","version":999}', b'{"magic":"packshift","version":-1}',
        b'{"magic":"packshift","version":true}', target.header.replace(b'"magic"', b'"magic":"packshift","magic"'),
        target.header.replace(b'"count":', b'"count":1' + b"0" * 400 + b',"count":'),
        target.header.replace(b'"notes":{', b'"notes":{"x":' + b"[" * 300 + b"]" * 300 + b","),
        target.header.replace(b"class0", b"cla\\u0000"), target.header.replace(b'"class0"', b'"\\ud800"'),
        target.header.replace(b'"class1"', b"7"), target.header.replace(b'"class1"', b'"a\\nb"'),
        target.header.replace(b'"notes":{', b'"notes":{"x":1e999,'), target.header.replace(b'"RGB"', b"1e999"),
        target.header.replace(b'"RGB"', b"-Infinity"), target.header.replace(b'"class0"', b'"class1"'),
        b" " + target.header, target.header + b" " * 10,
    )  # fmt: skip
    return with_header(target, rng.choice(bombs))


def _values(box: Any) -> Iterator[tuple[Any, Any, Any]]:
    pairs = list(box.items()) if isinstance(box, dict) else list(enumerate(box))
    for key, value in pairs:
        yield box, key, value
        if isinstance(value, dict | list):
            yield from _values(value)


def _change(rng: random.Random, header: Any) -> None:
    top = rng.choice([key for key in header if isinstance(header[key], (dict, list)) and header[key]])
    box, key, value = rng.choice([*_values(header[top]), (header, rng.choice(list(header)), header[top])])
    if isinstance(box, dict) and rng.random() < 0.2:
        if rng.random() < 0.5:
            del box[key]
        else:
            box[rng.choice(("", "x\ny", "a/b", "..", "\udcff", "labels", "offsets", "new"))] = value
    else:
        box[key] = copy.deepcopy(rng.choice(HOSTILE))


def with_header(target: Target, text: bytes) -> bytes:
    """The store with another header and its checksum; in the old place where it fits, else behind (HDF5)."""
    text = text[: (4096 - 16 if target.format == "lmdb" else 1 << 20)]
    data = bytearray(target.data)
    crc32 = zlib.crc32(text)
    if target.format == "hdf5":
        offset = target.header_offset
        if len(text) > len(target.header):
            offset = len(data)
            data += text
        data[offset : offset + len(text)] = text
        line = (
            f"packshift store, format 1: header at byte {offset}, {len(text)} bytes, "
            f"crc32 {crc32:08x}; file {len(data)} bytes\n"
        ).encode()
        data[:4096] = line + bytes(4096 - len(line))
        return bytes(data)
    place = target.header_offset
    data[place : place + 4096 - 16] = text + bytes(4096 - 16 - len(text))
    checksum = data.index(struct.pack("<I", zlib.crc32(target.header)), place + 4096 - 16)
    data[checksum : checksum + 4] = struct.pack("<I", crc32)
    node = data.rindex(b"header" + struct.pack("<Q", place // 4096)) - 8  # data size (low, high), flags, key size
    data[node : node + 4] = struct.pack("<HH", len(text) & 0xFFFF, len(text) >> 16)
    return bytes(data)


PLAIN: tuple[Mutation, ...] = (
    flip_bits, flip_bits_outside_records, set_bytes, set_numbers, truncate, extend, zero, swap_pages, splice,
)  # fmt: skip
FORGED: tuple[Mutation, ...] = (forge_header, forge_numbers, forge_array, forge_text)


# The child: one line of JSON in (path, whether it may be sound), one out.


def read_everything(path: str) -> dict[str, Any]:
    """What each way of reading said: "ok", or the error's type."""
    from packshift import open_dataset
    from packshift.export import export_store
    from packshift.report import info_json, info_text, verification_json, verification_text
    from packshift.stores._reader import Reader
    from packshift.verification import verify_store

    sound: list[bool] = []

    def information() -> None:
        reader = Reader(path)
        info_text(reader, all_classes=True, all_skipped=True)
        json.dumps(info_json(reader), allow_nan=False)

    def verified() -> None:
        found = verify_store(path, jobs=1)
        sound.append(found.sound)
        verification_text(found)
        json.dumps(verification_json(found), allow_nan=False)
        for problem in found.problems:
            if "\n" in str(problem):
                raise AssertionError(f"a problem of several lines: {problem}")

    def dataset() -> None:
        with open_dataset(path) as opened:
            count = len(opened)
            opened[0], opened[-1]
            opened.__getitems__([0, count // 2, -1])
            opened.paths[0], opened.paths[-1], opened.targets[0], opened.meta(-1), opened.classes, repr(opened)

    def exported() -> None:
        folder = Path(f"{path} exported")
        folder.mkdir()
        try:
            export_store(path, folder / "here", jobs=1)
        finally:
            beside = [each for place in (folder, folder.parent) for each in place.iterdir()]
            shutil.rmtree(folder)
            if unexpected := {each for each in beside if each not in (folder, folder / "here")} - before:
                raise AssertionError(f"written outside the folder: {unexpected}")

    before = set(Path(path).parent.iterdir())
    said = {what.__name__: _outcome(what) for what in (information, verified, dataset, exported)}
    if sound == [False]:
        said["verified"] = "problems"
    return {"said": said, "sound": sound == [True]}


def _outcome(what: Callable[[], None]) -> str:
    from packshift.errors import PackshiftError

    try:
        what()
    except PackshiftError as error:
        return "error" if "\n" not in str(error) and str(error) else f"FINDING: a message of several lines: {error!r}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what this script looks for
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"FINDING: {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return "ok"


def child() -> None:
    import torch

    torch.set_num_threads(1)
    import packshift.datasets
    import packshift.export
    import packshift.report
    import packshift.verification  # noqa: F401

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    for line in sys.stdin:
        signal.alarm(PATIENCE)
        answer = read_everything(line.rstrip("\n"))
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


class Child:
    """A process that reads stores; started again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, path: Path) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, str(Path(__file__).resolve()), "--child"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{path}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE * 6)  # the first time it has torch to load
        line = process.stdout.readline() if ready else b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        code = process.returncode
        how = "did not answer" if not ready else "took too long" if code == -signal.SIGALRM else f"ended with {code}"
        return {"said": {"child": f"FINDING: the reading process {how}"}, "sound": False}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill() if self._process.poll() is None and not self._ends() else None
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def _ends(self) -> bool:
        try:
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
                self._process.wait(timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            return False
        return True


def fuzz(mutations: int, seed: int, folder: Path, *, keep: Path | None = None, progress: bool = False) -> list[str]:
    """Run the mutations; return the findings. The n-th mutation of a seed is always the same."""
    targets = make_targets(folder)
    path, findings, outcomes, started = folder / "damaged", [], Counter[str](), time.perf_counter()
    reader = Child()
    try:
        for number in range(mutations):
            rng = random.Random(f"{seed} {number}")
            target = rng.choice(targets)
            mutation = rng.choice(PLAIN if rng.random() < 0.6 else FORGED)
            others = [other.data for other in targets]
            data = mutation(rng, target, others)
            path.write_bytes(data)
            answer = reader.ask(path)
            said = [f"{what}: {text}" for what, text in answer["said"].items() if text.startswith("FINDING")]
            if answer["sound"] and mutation in PLAIN and data not in others:
                said.append("verified: FINDING: called sound, though bytes were changed")
            outcomes.update([" / ".join(f"{what}: {text[:8]}" for what, text in answer["said"].items())])
            for text in said:
                findings.append(f"mutation {number} of seed {seed} ({mutation.__name__}, {target.format}): {text}")
                print(findings[-1], file=sys.stderr)
                if keep is not None:
                    (keep / f"seed{seed}-{number}.{target.format}").write_bytes(data)
            if progress and (number + 1) % 500 == 0:
                rate = (number + 1) / (time.perf_counter() - started)
                print(f"{number + 1:,} of {mutations:,}, {rate:.0f}/s, {len(findings)} findings", file=sys.stderr)
    finally:
        reader.close()
    if progress:
        print(
            f"{mutations:,} mutations of seed {seed} in {time.perf_counter() - started:.0f} s, {len(findings)} findings"
        )
        for outcome, count in outcomes.most_common():
            print(f"{count:>7,}  {outcome}")
    return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the stores that gave a finding in this folder")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        findings = fuzz(arguments.mutations, arguments.seed, Path(folder), keep=arguments.keep, progress=True)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
