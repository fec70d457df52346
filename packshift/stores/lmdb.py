"""LMDB stores: a data file of the LMDB 0.9 format, laid out page by page by packshift itself.

What is written is what the engine would hold after putting all keys in order; its own library opens it, checks it
(`check`) and can go on writing to it. Laying the pages out here instead of calling `put` has four reasons:

- records lie at a fixed distance from each other, so a batch is one gather from a map, and no reader needs the engine:
  no handle that must not be opened twice, forked or pickled, no lock file, no reader table, no map size;
- the bytes depend on the records alone, not on transactions, free lists or the library's version;
- a record is one plain write, so nothing is held in dirty pages and a full disk is an error, not a bus error;
- the file has exactly the size that its content needs.

The page format is that of LMDB 0.9 (`mdb.c`: MDB_page, MDB_node, MDB_meta, MDB_db; little-endian, 64-bit), with
4,096-byte pages on every machine. Records lie on overflow pages whatever their size; docs/FORMAT.md shows the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from packshift.checksum import crc32
from packshift.errors import DamagedStoreError, NotAStoreError, StoreError, TargetError
from packshift.record import ArrayPlace, StoreInfo, bytes_of
from packshift.stores._format import HeaderPlace, Payload
from packshift.stores._header import encode_header
from packshift.stores._partial import PartialFile

PAGE = 4096
KEY_DIGITS = 10

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_LARGEST_VALUE = 0xFFFF_FFFF
_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG_DATA = 0x01
_NOSUBDIR, _INTEGERKEY = 0x4000, 0x08

_PAGE_HEAD = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_OVERFLOW_HEAD = struct.Struct("<QHHI")  # page number, pad, flags, number of pages
_META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, map size
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_NODE_HEAD = struct.Struct("<HHHH")  # data size or child page (low, high), flags, key size
_POINTER = struct.Struct("<H")
_PAGE_NUMBER = struct.Struct("<Q")

_META_OFFSET = _PAGE_HEAD.size
_MAIN_DB_OFFSET = _META_OFFSET + _META_HEAD.size + _DB.size
_TAIL_OFFSET = _MAIN_DB_OFFSET + _DB.size


def record_key(index: int) -> bytes:
    return b"%0*d" % (KEY_DIGITS, index)


def _pages_for(nbytes: int) -> int:
    return -(-(_OVERFLOW_HEAD.size + nbytes) // PAGE)


@dataclass(frozen=True)
class _Value:
    """A value on overflow pages: its key, first page and size in bytes."""

    key: bytes
    page: int
    nbytes: int

    def node(self) -> bytes:
        head = _NODE_HEAD.pack(self.nbytes & 0xFFFF, self.nbytes >> 16, _BIG_DATA, len(self.key))
        return _even(head + self.key + _PAGE_NUMBER.pack(self.page))


@dataclass(frozen=True)
class _Child:
    """A page of the tree and the first key below it."""

    key: bytes
    page: int

    def node(self) -> bytes:
        low, middle, high = self.page & 0xFFFF, self.page >> 16 & 0xFFFF, self.page >> 32
        return _even(_NODE_HEAD.pack(low, middle, high, len(self.key)) + self.key)


def _even(node: bytes) -> bytes:
    return node + b"\0" * (len(node) % 2)


def _tree_page(number: int, flags: int, nodes: list[bytes]) -> bytes:
    """A leaf or branch page: node pointers grow from the head, nodes from the end."""
    page = bytearray(PAGE)
    upper = PAGE
    pointers = []
    for node in nodes:
        upper -= len(node)
        page[upper : upper + len(node)] = node
        pointers.append(upper)
    lower = _PAGE_HEAD.size + _POINTER.size * len(nodes)
    _PAGE_HEAD.pack_into(page, 0, number, 0, flags, lower, upper)
    struct.pack_into(f"<{len(pointers)}H", page, _PAGE_HEAD.size, *pointers)
    return bytes(page)


_Item = TypeVar("_Item", "_Value", "_Child")


def _fill(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Group items into pages, each as full as it gets; yields at least one group."""
    group: list[_Item] = []
    room = PAGE - _PAGE_HEAD.size
    for item in items:
        need = len(item.node()) + _POINTER.size
        if group and need > room:
            yield group
            group, room = [], PAGE - _PAGE_HEAD.size
        group.append(item)
        room -= need
    yield group


class _Pages:
    """Appends whole pages to the file and counts them."""

    def __init__(self, file: PartialFile, next_page: int) -> None:
        self._file = file
        self.next_page = next_page
        self.overflow = 0

    def add_value(self, key: bytes, data: bytes | memoryview) -> _Value:
        if len(data) > _LARGEST_VALUE:
            raise TargetError(
                f"{self._file.target}: the array {key.decode()!r} takes {len(data):,} bytes, more than one LMDB value "
                "holds (4 GiB); choose .h5, or split the source"
            )
        count = _pages_for(len(data))
        head = _OVERFLOW_HEAD.pack(self.next_page, 0, _OVERFLOW, count)
        padding = bytes(count * PAGE - len(head) - len(data))
        self._file.write_at(self.next_page * PAGE, head, data, padding)
        value = _Value(key, self.next_page, len(data))
        self.next_page += count
        self.overflow += count
        return value

    def add_tree_page(self, flags: int, nodes: list[bytes]) -> int:
        page = self.next_page
        self._file.write_at(page * PAGE, _tree_page(page, flags, nodes))
        self.next_page += 1
        return page


@dataclass(frozen=True)
class _Tree:
    root: int
    depth: int
    branch_pages: int
    leaf_pages: int


def _branch_nodes(children: list[_Child]) -> list[bytes]:
    """The nodes of a branch page; the leftmost key is never compared and left out."""
    return [_Child(b"", children[0].page).node(), *(child.node() for child in children[1:])]


def _add_tree(pages: _Pages, values: Iterable[_Value]) -> _Tree:
    """Write the B-tree over `values`, which must come in the order of their keys."""
    level: list[_Child] = []
    for group in _fill(values):
        level.append(_Child(group[0].key, pages.add_tree_page(_LEAF, [value.node() for value in group])))
    leaf_pages, branch_pages, depth = len(level), 0, 1
    while len(level) > 1:
        groups = list(_fill(level))
        if len(groups[-1]) == 1:  # the engine takes no branch page with a single child
            groups[-1].insert(0, groups[-2].pop())
        level = [_Child(group[0].key, pages.add_tree_page(_BRANCH, _branch_nodes(group))) for group in groups]
        branch_pages += len(level)
        depth += 1
    return _Tree(level[0].page, depth, branch_pages, leaf_pages)


def _meta_page(number: int, file_size: int, main: bytes, last_page: int, transaction: int) -> bytes:
    free = _DB.pack(PAGE, _NOSUBDIR | _INTEGERKEY, 0, 0, 0, 0, 0, _NO_PAGE)
    page = (
        _PAGE_HEAD.pack(number, 0, _META, 0, 0)
        + _META_HEAD.pack(_MAGIC, _DATA_VERSION, 0, file_size)
        + free
        + main
        + _META_TAIL.pack(last_page, transaction)
    )
    return page + bytes(PAGE - len(page))


class LMDBFormat:
    """One data file (`subdir=False`), keys `0000000000`, `0000000001`, ... and a few named ones behind them."""

    name = "lmdb"
    suffixes = (".lmdb",)
    fixed_bytes = 36 << 10

    def first_frame(self) -> int:
        return 2 * PAGE

    def frame(self, offset: int, nbytes: int) -> tuple[bytes, int]:
        count = _pages_for(nbytes)
        head = _OVERFLOW_HEAD.pack(offset // PAGE, 0, _OVERFLOW, count)
        return head, count * PAGE - len(head) - nbytes

    def finish(
        self, file: PartialFile, payload: Payload, arrays: Mapping[str, NDArray[Any]], header: Mapping[str, Any]
    ) -> None:
        pages = _Pages(file, payload.end // PAGE)
        named, places = [], {}
        for name, array in arrays.items():
            data = bytes_of(array)
            value = pages.add_value(name.encode(), data)
            named.append(value)
            places[name] = ArrayPlace(
                value.page * PAGE + _OVERFLOW_HEAD.size, array.dtype.str, array.shape, crc32(data)
            )
        text = encode_header(header, places)
        named.append(pages.add_value(b"header", text))
        named.append(pages.add_value(b"header_crc32", struct.pack("<I", crc32(text))))
        named.sort(key=lambda value: value.key)

        overflow = pages.overflow + payload.end // PAGE - 2
        tree = _add_tree(pages, _all_values(payload, named))
        last_page = pages.next_page - 1
        entries = payload.count + len(named)
        main = _DB.pack(0, 0, tree.depth, tree.branch_pages, tree.leaf_pages, overflow, entries, tree.root)
        empty = _DB.pack(0, 0, 0, 0, 0, 0, 0, _NO_PAGE)
        size = (last_page + 1) * PAGE
        file.resize(size)
        file.write_at(0, _meta_page(0, size, empty, 1, 0), _meta_page(1, size, main, last_page, 1))

    def check(self, path: Path, info: StoreInfo) -> None:
        import lmdb

        expected = info.count + len(info.arrays) + 2
        try:
            with lmdb.open(str(path), subdir=False, readonly=True, lock=False, readahead=False) as environment:
                entries = environment.stat()["entries"]
                with environment.begin() as transaction:
                    ends = [transaction.get(record_key(index)) for index in (0, info.count - 1)]
        except lmdb.Error as error:
            raise StoreError(f"{path}: LMDB cannot read back what was written: {error}") from error
        if entries != expected or None in ends:
            raise StoreError(f"{path}: LMDB reads back {entries} entries where {expected} were written")

    def structure_problems(self, path: Path) -> list[str] | None:
        try:
            verifier = import_module("lmdb.verify")
        except ModuleNotFoundError:
            return None
        try:
            return [str(problem) for problem in verifier.verify(str(path))]
        except verifier.VerifyError as error:
            return [str(error)]

    def written_with(self) -> str:
        return ""

    def recognises(self, head: bytes) -> bool:
        return len(head) >= _META_OFFSET + 8 and head[_META_OFFSET : _META_OFFSET + 4] == struct.pack("<I", _MAGIC)

    def find_header(self, view: memoryview, path: Path) -> HeaderPlace:
        tree = _StoredTree(view, path)
        header, checksum = tree.find(b"header"), tree.find(b"header_crc32")
        if header is None or checksum is None or checksum[1] != 4:
            raise NotAStoreError(
                f"{path} is an LMDB file that packshift did not write (it has no packshift header): "
                "make a store from the pictures with packshift convert"
            )
        (crc32,) = struct.unpack_from("<I", view, checksum[0])
        return HeaderPlace(*header, crc32, tree.file_size)


def _all_values(payload: Payload, named: list[_Value]) -> Iterator[_Value]:
    first = payload.offset - _OVERFLOW_HEAD.size
    for index in range(payload.count):
        offset = first + int(payload.offsets[index])
        yield _Value(record_key(index), offset // PAGE, int(payload.sizes[index]))
    yield from named


class _StoredTree:
    """Looks keys up in a mapped LMDB file, checking every number against the file before using it."""

    def __init__(self, view: memoryview, path: Path) -> None:
        self._view = view
        self._path = path
        (version,) = struct.unpack_from("<I", view, _META_OFFSET + 4)
        if version != _DATA_VERSION:
            raise NotAStoreError(
                f"{path} is an LMDB file of data version {version}, which LMDB 1.x writes; packshift stores have "
                f"version {_DATA_VERSION} (LMDB 0.9)"
            )
        metas = [meta for meta in (self._meta(0), self._meta(PAGE)) if meta is not None]
        if not metas:
            raise self._damaged("neither of its two meta pages is whole")
        _, self._root, self._depth, last_page = max(metas)
        self.file_size = (last_page + 1) * PAGE
        if self.file_size != len(view):
            raise DamagedStoreError(
                f"{path} is damaged: it has {len(view):,} bytes where {self.file_size:,} were written "
                "(a copy that was cut short?); copy it again or convert again"
            )

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"{self._path} is damaged: {what}; copy it again or convert again")

    def _meta(self, offset: int) -> tuple[int, int, int, int] | None:
        """(transaction, root, depth, last page) of one meta page, or None where it is none."""
        if offset + _TAIL_OFFSET + _META_TAIL.size > len(self._view):
            return None
        magic, version, _, _ = _META_HEAD.unpack_from(self._view, offset + _META_OFFSET)
        (page_size, *_) = _DB.unpack_from(self._view, offset + _META_OFFSET + _META_HEAD.size)
        _, _, depth, *_, root = _DB.unpack_from(self._view, offset + _MAIN_DB_OFFSET)
        last_page, transaction = _META_TAIL.unpack_from(self._view, offset + _TAIL_OFFSET)
        if magic != _MAGIC or version != _DATA_VERSION:
            return None
        if page_size != PAGE:
            raise NotAStoreError(
                f"{self._path} is an LMDB file with pages of {page_size} bytes; packshift stores have {PAGE}"
            )
        return transaction, root, depth, last_page

    def find(self, key: bytes) -> tuple[int, int] | None:
        """(byte offset, size in bytes) of the value under `key`, or None where there is no such key on big pages."""
        if self._root == _NO_PAGE:
            return None
        page = self._root
        for _ in range(min(self._depth, 32)):
            offset = self._page(page)
            _, _, flags, lower, upper = _PAGE_HEAD.unpack_from(self._view, offset)
            if not _PAGE_HEAD.size <= lower <= upper <= PAGE:
                raise self._damaged(f"page {page} has impossible bounds")
            nodes = self._nodes(offset, (lower - _PAGE_HEAD.size) // _POINTER.size)
            if flags & _LEAF:
                return next((self._value(node) for node in nodes if self._key(node) == key), None)
            if not flags & _BRANCH:
                raise self._damaged(f"page {page} is not part of a tree")
            child = None
            for position, node in enumerate(nodes):
                if position and self._key(node) > key:
                    break
                low, middle, high, _ = _NODE_HEAD.unpack_from(self._view, node)
                child = low | middle << 16 | high << 32
            if child is None:
                raise self._damaged(f"page {page} has no children")
            page = child
        raise self._damaged("its tree has no leaves where it should")

    def _page(self, page: int) -> int:
        if not 2 <= page < len(self._view) // PAGE:
            raise self._damaged(f"it refers to page {page}, which is not in the file")
        return page * PAGE

    def _nodes(self, page_offset: int, count: int) -> list[int]:
        pointers = struct.unpack_from(f"<{count}H", self._view, page_offset + _PAGE_HEAD.size)
        if any(pointer + _NODE_HEAD.size > PAGE for pointer in pointers):
            raise self._damaged("a node lies outside its page")
        return [page_offset + pointer for pointer in pointers]

    def _key(self, node: int) -> bytes:
        size = _NODE_HEAD.unpack_from(self._view, node)[3]
        return bytes(self._view[node + _NODE_HEAD.size : node + _NODE_HEAD.size + size])

    def _value(self, node: int) -> tuple[int, int] | None:
        low, high, flags, key_size = _NODE_HEAD.unpack_from(self._view, node)
        size = low | high << 16
        if not flags & _BIG_DATA:
            return None
        place = node + _NODE_HEAD.size + key_size
        if place + _PAGE_NUMBER.size > len(self._view):
            raise self._damaged("a node lies outside the file")
        offset = self._page(_PAGE_NUMBER.unpack_from(self._view, place)[0]) + _OVERFLOW_HEAD.size
        if offset + size > len(self._view):
            raise self._damaged("a value lies outside the file")
        return offset, size


FORMAT = LMDBFormat()
