"""One array over many files: segments mapped side by side in one stretch of addresses.

A batch touches steps of many segments. Were each segment mapped on its own, a gather would be one call per segment and
a second copy to put the pieces in order. An arena reserves addresses for many equal slots and maps each file into one,
so a whole column is a single numpy array, and a batch is a single ``take``.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from hilt.core.errors import StorageError
from hilt.core.tree import Array

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class Arena:
    """Slots of equal size, each empty or the map of one file, as one array of items.

    An empty slot reads as zeros. A file may be shorter than its slot and may grow under the map; only bytes that were
    written are ever read.
    """

    def __init__(self, item_bytes: int, items_per_slot: int):
        self._item_bytes = item_bytes
        self._slot_bytes = item_bytes * items_per_slot
        self._mapped: dict[int, int] = {}
        self._slots = 0
        self.grow(16)

    def grow(self, slots: int) -> None:
        """Room for this many slots. Arrays taken before stay valid; mapped files appear in the new one too."""
        size = slots * self._slot_bytes
        holder = _Reservation(size)
        raw = (ctypes.c_uint8 * size).from_address(holder.address)
        raw._holder = holder  # type: ignore[attr-defined]  # the addresses live as long as any array over them
        self._address, self._slots = holder.address, slots
        for slot, fd in self._mapped.items():
            self._map(slot, fd)
        self.array: Array = np.frombuffer(raw, np.uint8).reshape(-1, self._item_bytes)  # [slots * items_per_slot, item_bytes]
        self.array.flags.writeable = False

    def map(self, slot: int, fd: int) -> None:
        """Shows a file's bytes in a slot. The file stays open until `unmap`."""
        self.unmap(slot)
        if slot >= self._slots:
            self.grow(max(2 * self._slots, slot + 1))
        self._mapped[slot] = fd
        self._map(slot, fd)

    def unmap(self, slot: int) -> None:
        """Empties a slot."""
        if self._mapped.pop(slot, None) is not None:
            _mmap(self._address + slot * self._slot_bytes, self._slot_bytes, _RESERVE | _MAP_FIXED, -1)

    def close(self) -> None:
        for slot in list(self._mapped):
            self.unmap(slot)

    def _map(self, slot: int, fd: int) -> None:
        _mmap(self._address + slot * self._slot_bytes, self._slot_bytes, mmap.MAP_SHARED | _MAP_FIXED, fd)


class _Reservation:
    """A stretch of addresses, given back when nothing refers to it."""

    def __init__(self, size: int):
        self.size = size
        self.address = _mmap(None, size, _RESERVE, -1)

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc.munmap(self.address, self.size)


def _mmap(address: int | None, size: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, size, mmap.PROT_READ, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        reason = os.strerror(ctypes.get_errno())
        raise StorageError(f"mapping {size:,} bytes: {reason}. Raise the limit on address space (ulimit -v) or use larger segments.")
    return int(result)
