"""Format version 1 of a rank's record: a slot in a memory-mapped file of its node.

    file  = header (4096 bytes) + one slot a local rank
    slot  = process cell + process cell + exit cell + exit cell
    cell  = magic, version, length, sequence, CRC-32 of those and of the JSON, then the JSON

The ranks' processes write the process cells, the parent that waits for them the exit cells. Each
write goes to the older of the two cells with the next sequence number, so a kill in the middle of
a write leaves the one before it whole. A shared mapping outlives SIGKILL: the kernel keeps the
pages. The file is allocated in full at the start, so that a full disk is an error then and not a
SIGBUS in the middle of training.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
FILE_MAGIC = b"MTLREC01"
CELL_MAGIC = b"CELL"
HEADER_BYTES = 4096
PROCESS_CELL_BYTES = 6144
EXIT_CELL_BYTES = 2048
SLOT_BYTES = 2 * PROCESS_CELL_BYTES + 2 * EXIT_CELL_BYTES

# magic, version, reserved, payload length, sequence; then the CRC-32 of these and the payload.
# Without the head in it, a write torn after the sequence would make an old payload the newest.
_HEAD = struct.Struct("<4sHHIQ")
_CRC = struct.Struct("<I")
_CELL_HEAD_BYTES = _HEAD.size + _CRC.size

# Dropped one after the other, from the left, when a record outgrows its cell.
_DROPPABLE = ("traceback", "modules", "versions", "error")


class Cell:
    """A pair of places for one JSON object; `write` never leaves both torn."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self._memory, self._offset, self._size = memory, offset, size
        newest = _newest(memory, offset, size)
        self._sequence = newest[0] if newest else 0

    def write(self, content: Mapping[str, Any]) -> None:
        payload = _fit(content, self._size - _CELL_HEAD_BYTES)
        self._sequence += 1
        start = self._offset + (self._sequence % 2) * self._size
        cell = pack(self._sequence, payload)
        self._memory[start : start + len(cell)] = cell


def pack(sequence: int, payload: bytes) -> bytes:
    """A cell as it lies in the file."""
    head = _HEAD.pack(CELL_MAGIC, FORMAT_VERSION, 0, len(payload), sequence)
    return head + _CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


def _fit(content: Mapping[str, Any], room: int) -> bytes:
    """JSON of at most `room` bytes: droppable keys go first, then everything but numbers."""
    content = dict(content)
    for name in (None, *_DROPPABLE):
        if name is not None:
            content.pop(name, None)
        payload = _json(content)
        if len(payload) <= room:
            return payload
    numbers = {key: value for key, value in content.items() if isinstance(value, (int, float))}
    payload = _json(numbers)
    return payload if len(payload) <= room else b"{}"


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), default=str).encode()


def _newest(memory: mmap.mmap | bytes, offset: int, size: int) -> tuple[int, dict[str, Any]] | None:
    """Sequence and content of the newest whole cell of a pair."""
    found: tuple[int, dict[str, Any]] | None = None
    for index in range(2):
        start = offset + index * size
        body = start + _CELL_HEAD_BYTES
        head = memory[start : start + _HEAD.size]
        stored = memory[start + _HEAD.size : body]
        if len(stored) < _CRC.size:
            continue
        magic, version, _, length, sequence = _HEAD.unpack(head)
        if magic != CELL_MAGIC or version != FORMAT_VERSION or length > size - _CELL_HEAD_BYTES:
            continue
        payload = memory[body : body + length]
        if _CRC.pack(zlib.crc32(payload, zlib.crc32(head))) != stored:
            continue
        if found is not None and sequence <= found[0]:
            continue
        try:
            content = json.loads(payload)
        except ValueError:
            continue
        if isinstance(content, dict):
            found = (sequence, content)
    return found


class Slot:
    """The slot of one local rank, mapped for writing.

    Raises OSError when the file cannot be created or allocated.
    """

    def __init__(self, path: Path, node: str, local_rank: int, slots: int) -> None:
        slots = max(slots, local_rank + 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        size = HEADER_BYTES + slots * SLOT_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.posix_fallocate(descriptor, 0, size)  # same size from every rank: idempotent
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        header = {"format": FORMAT_VERSION, "node": node, "slots": slots, "slot_bytes": SLOT_BYTES}
        text = FILE_MAGIC + json.dumps(header).encode()
        self._memory[: len(text)] = text  # every rank writes the same bytes
        start = HEADER_BYTES + local_rank * SLOT_BYTES
        self.process = Cell(self._memory, start, PROCESS_CELL_BYTES)
        self.exit = Cell(self._memory, start + 2 * PROCESS_CELL_BYTES, EXIT_CELL_BYTES)

    def flush(self) -> None:
        """Push the pages to the file system; other nodes see them after that."""
        self._memory.flush()


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a slot holds: the process's own last state, and how it ended.

    `exit` has `ended_s` only once the rank has ended: a TERM is noted there before.
    """

    node: str
    local_rank: int
    process: dict[str, Any] = field(default_factory=dict)
    exit: dict[str, Any] = field(default_factory=dict)
    file: str = ""

    @property
    def rank(self) -> int | None:
        rank = self.process.get("rank", self.exit.get("rank"))
        return rank if isinstance(rank, int) else None


def read_file(path: Path) -> Iterator[RankRecord]:
    """The used slots of a node's file. A torn or foreign file yields what is whole in it.

    Raises OSError when the file cannot be read, ValueError when it is not a record file.
    """
    data = path.read_bytes()
    if data[: len(FILE_MAGIC)] != FILE_MAGIC:
        raise ValueError(f"{path.name} is not a record file of format {FORMAT_VERSION}")
    header = _header(data) or {}
    if header.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise ValueError(
            f"{path.name} is a record file of format {header['format']}, "
            f"this mtlaunch reads {FORMAT_VERSION}"
        )
    slots = (len(data) - HEADER_BYTES + SLOT_BYTES - 1) // SLOT_BYTES
    for local_rank in range(max(0, slots)):
        start = HEADER_BYTES + local_rank * SLOT_BYTES
        process = _newest(data, start, PROCESS_CELL_BYTES)
        exit_ = _newest(data, start + 2 * PROCESS_CELL_BYTES, EXIT_CELL_BYTES)
        if process or exit_:
            yield RankRecord(
                str(header.get("node", path.stem)),
                local_rank,
                process[1] if process else {},
                exit_[1] if exit_ else {},
                path.name,
            )


def _header(data: bytes) -> dict[str, Any] | None:
    text = data[len(FILE_MAGIC) : HEADER_BYTES].split(b"\0", 1)[0]
    try:
        header = json.loads(text)
    except ValueError:
        return None
    return header if isinstance(header, dict) else None
