"""TensorBoard event files with scalars, written without TensorBoard.

A file is a sequence of records: length, masked CRC-32C of the length, data, masked CRC-32C of the data
(TFRecord). The data is an `Event` in protocol buffer encoding, of which four fields are used here.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VERSION = b"brain.Event:2"


class EventFile:
    """One event file, appended to. Every `write` is flushed, so that a viewer sees it and a kill loses nothing.

    Args:
      folder: made if need be; each start of a run adds a file of its own.
      first_step: points at this step and beyond, of files of earlier starts, are no longer shown.
    """

    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = open(path / name, "ab")  # noqa: SIM115
        self._append(event(now, version=_VERSION))
        self._append(event(now, step=first_step, start=True))
        self._file.flush()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one point to each of the named curves."""
        self._append(event(time.time(), step=step, scalars=scalars))
        self._file.flush()

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        self._file.write(record(data))


def record(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def event(
    wall_time: float,
    *,
    step: int = 0,
    scalars: Mapping[str, float] | None = None,
    version: bytes | None = None,
    start: bool = False,
) -> bytes:
    """A serialised `tensorflow.Event`: with scalars, or with the file's version, or the start of a session."""
    data = b"\x09" + struct.pack("<d", wall_time)  # field 1, double
    if step:
        data += b"\x10" + _varint(step)  # field 2, int64
    if version is not None:
        data += _bytes(3, version)
    if scalars is not None:
        values = (
            _bytes(1, _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
            for tag, value in scalars.items()
        )
        data += _bytes(5, b"".join(values))  # Summary
    if start:
        data += _bytes(7, b"\x08\x01")  # SessionLog with status START
    return data


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32 with the Castagnoli polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
