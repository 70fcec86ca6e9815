"""Records of a SQLite file read page by page, without SQLite: what is whole is found, whatever is broken around it.

After SQLite's "Database File Format", sections 1.5 to 2.1 and 4. Pure: bytes in, values out. Every page is looked
at by itself, so neither the schema nor the upper pages of a tree are needed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

PAGE_BYTES = 4096  # SQLite's default, which archives have
MAGIC = b"SQLite format 3\0"
HEADER_BYTES, WAL_HEADER_BYTES, FRAME_HEADER_BYTES = 100, 32, 24
TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR = 0x0D, 0x0A, 0x02
PAYLOAD_MAX = 1 << 30
INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}

Value = int | float | str | bytes | None


@dataclass(frozen=True, slots=True)
class Record:
    """`rowid` is None in the pages of an index and of a table without row ids."""

    rowid: int | None
    values: tuple[Value, ...]


def read_records(database: bytes, log: bytes = b"") -> Iterator[Record]:
    """Every record that can be read, of all tables and indexes. `log` is the -wal file, as far as it is whole."""
    size = _page_size(database)
    pages = {n + 1: database[n * size : (n + 1) * size] for n in range(-(-len(database) // size))}
    pages.update(_logged(log, size))
    for number, page in pages.items():
        if (number - 2) % (size // 5 + 1) != 0:  # those hold only back references
            yield from _records(pages, page, HEADER_BYTES if number == 1 else 0, size)


def _page_size(database: bytes) -> int:
    size = int.from_bytes(database[16:18], "big")
    valid = database[:16] == MAGIC and (size == 1 or (512 <= size <= 32768 and size & (size - 1) == 0))
    return (65536 if size == 1 else size) if valid else PAGE_BYTES


def _logged(log: bytes, size: int) -> dict[int, bytes]:
    """Page number -> page as of the last commit in the log; the log ends where its checksums do."""
    magic, salts = int.from_bytes(log[:4], "big"), log[16:24]
    if magic not in (0x377F0682, 0x377F0683) or int.from_bytes(log[8:12], "big") != size:
        return {}
    order = ">" if magic & 1 else "<"
    sums = _checksum(log[:24], (0, 0), order)
    if struct.pack(">2I", *sums) != log[24:32]:
        return {}
    committed: dict[int, bytes] = {}
    waiting: dict[int, bytes] = {}
    for start in range(WAL_HEADER_BYTES, len(log) - FRAME_HEADER_BYTES - size + 1, FRAME_HEADER_BYTES + size):
        head = log[start : start + FRAME_HEADER_BYTES]
        page = log[start + FRAME_HEADER_BYTES : start + FRAME_HEADER_BYTES + size]
        sums = _checksum(page, _checksum(head[:8], sums, order), order)
        if head[8:16] != salts or struct.pack(">2I", *sums) != head[16:24]:
            break
        waiting[int.from_bytes(head[:4], "big")] = page
        if head[4:8] != b"\0\0\0\0":
            committed.update(waiting)
            waiting = {}
    return committed


def _checksum(data: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    one, two = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for first, second in zip(words[::2], words[1::2], strict=True):
        one = (one + first + two) & 0xFFFFFFFF
        two = (two + second + one) & 0xFFFFFFFF
    return one, two


def _records(pages: dict[int, bytes], page: bytes, start: int, size: int) -> Iterator[Record]:
    kind = page[start] if len(page) > start else 0
    if kind not in (TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR):
        return
    first = start + (12 if kind == INDEX_INTERIOR else 8)
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    for i in range(min(count, (size - first) // 2)):
        try:
            cell = int.from_bytes(page[first + 2 * i : first + 2 * i + 2], "big")
            yield _cell(pages, page, cell + (4 if kind == INDEX_INTERIOR else 0), kind == TABLE_LEAF, size)
        except (ValueError, IndexError, struct.error):
            continue


def _cell(pages: dict[int, bytes], page: bytes, at: int, has_rowid: bool, size: int) -> Record:
    total, at = _varint(page, at)
    rowid = None
    if has_rowid:
        rowid, at = _varint(page, at)
        rowid -= (rowid >> 63) << 64
    if total > PAYLOAD_MAX:
        raise ValueError("no payload is that long")
    most = size - 35 if has_rowid else (size - 12) * 64 // 255 - 23
    local = total
    if total > most:
        least = (size - 12) * 32 // 255 - 23
        local = least + (total - least) % (size - 4)
        local = local if local <= most else least
    payload = [page[at : at + local]]
    if total > local:
        rest, number = total - local, int.from_bytes(page[at + local : at + local + 4], "big")
        while rest > 0:
            more = pages.get(number, b"")
            part = more[4 : 4 + min(rest, size - 4)]
            if not part:
                raise ValueError("an overflow page is missing")
            payload.append(part)
            rest, number = rest - len(part), int.from_bytes(more[:4], "big")
    whole = b"".join(payload)
    if len(whole) != total:
        raise ValueError("the payload is cut off")
    return Record(rowid, tuple(_values(whole)))


def _values(payload: bytes) -> Iterator[Value]:
    end, at = _varint(payload, 0)
    body = end
    while at < end:
        kind, at = _varint(payload, at)
        length = (kind - 12) // 2 if kind >= 12 else 8 if kind == 7 else INTEGER_BYTES.get(kind, 0)
        raw = payload[body : body + length]
        if len(raw) != length or kind in (10, 11):
            raise ValueError("a value is cut off")
        body += length
        if kind >= 12:
            yield raw.decode("utf-8", "replace") if kind & 1 else raw
        elif kind == 7:
            yield float(struct.unpack(">d", raw)[0])
        elif kind in (8, 9):
            yield kind - 8
        else:
            yield int.from_bytes(raw, "big", signed=True) if kind else None
    if body != len(payload):
        raise ValueError("bytes are left over")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(8):
        byte = data[at + i]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + i + 1
    return value << 8 | data[at + 8], at + 9
