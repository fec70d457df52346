"""The JSON header of a store: written canonically, read with suspicion."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packshift.errors import DamagedStoreError, NewerVersionError, NotAStoreError
from packshift.record import ArrayPlace, StoreInfo, encode_name

MAGIC = "packshift"
VERSION = 1

_DTYPE = re.compile(r"[|<][iu][1248]")
_LARGEST = 1 << 60


def encode(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII (names that are not UTF-8 survive as escaped surrogates)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def encode_header(header: Mapping[str, Any], places: Mapping[str, ArrayPlace]) -> bytes:
    arrays = {
        name: {"offset": place.offset, "dtype": place.dtype, "shape": list(place.shape), "crc32": place.crc32}
        for name, place in places.items()
    }
    return encode({**header, "magic": MAGIC, "version": VERSION, "arrays": arrays})


def newer_version(path: Path, version: int) -> NewerVersionError:
    return NewerVersionError(
        f"{path} has store format version {version}; this packshift reads up to version {VERSION}: update packshift"
    )


def decode_header(data: bytes, format_name: str, path: Path) -> StoreInfo:
    """Parse and check a header whose CRC-32 already matched.

    Raises NotAStoreError where it is somebody else's JSON, NewerVersionError, DamagedStoreError.
    """
    try:
        header = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise NotAStoreError(f"{path} is not a packshift store: its header is not JSON") from error
    if not isinstance(header, dict) or header.get("magic") != MAGIC:
        raise NotAStoreError(f"{path} is not a packshift store: its header does not say {MAGIC!r}")
    version = header.get("version")
    if not isinstance(version, int) or version < 1:
        raise DamagedStoreError(f"{path} is damaged: its header says format version {version!r}")
    if version > VERSION:
        raise newer_version(path, version)
    try:
        return _info(header, format_name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedStoreError(f"{path} is damaged: its header makes no sense ({repr(error)[:200]})") from error


def _finite(text: str) -> float:
    """A number of JSON; Python's parser takes NaN, Infinity and 1e999 as well, which no other reads again."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number in JSON")
    return number


def _info(header: Mapping[str, Any], format_name: str) -> StoreInfo:
    payload = header["payload"]
    shape = payload["shape"]
    stride = payload["stride"]
    if (shape is None) != (stride is None):
        raise ValueError("payload shape without stride")
    return StoreInfo(
        format=format_name,
        version=header["version"],
        count=_size(header["count"]),
        shape=None if shape is None else _picture_shape(shape),
        payload_offset=_size(payload["offset"]),
        stride=None if stride is None else _size(stride),
        classes=_strings(header["classes"]),
        preprocessing=dict(header["preprocessing"]),
        source=_source(header["source"]),
        notes={str(name): _size(count) for name, count in header["notes"].items()},
        tools={str(name): str(text) for name, text in header["tools"].items()},
        arrays={str(name): _place(place) for name, place in header["arrays"].items()},
    )


def _source(source: Mapping[str, Any]) -> dict[str, Any]:
    return {**source, **{key: _size(source[key]) for key in ("found", "skipped", "bytes")}}


def _place(place: Mapping[str, Any]) -> ArrayPlace:
    dtype = place["dtype"]
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"unexpected dtype {dtype!r}")
    shape = tuple(_size(length) for length in place["shape"])
    if not 1 <= len(shape) <= 2 or math.prod(shape) > _LARGEST:
        raise ValueError(f"unexpected shape {shape}")
    return ArrayPlace(_size(place["offset"]), dtype, shape, _size(place["crc32"]))


def _picture_shape(shape: Any) -> tuple[int, int, int]:
    height, width, channels = (_size(length) for length in shape)
    if height < 1 or width < 1 or channels != 3:
        raise ValueError(f"unexpected picture shape {shape}")
    return height, width, channels


def _strings(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("expected a list of names")
    for name in names:
        encode_name(name)  # raises ValueError for what can be no file's name
    return tuple(names)


def _size(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _LARGEST:
        raise ValueError(f"expected a size, got {number!r}")
    return number
