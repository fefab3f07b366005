"""Global and shared memory of a program, with what may go wrong there.

Global: every access lies within one of the tensors that a launch was given, is aligned, and reads what was written: by
another program (in what order of memory is not looked at here), or by another warp before a barrier.
Shared: what one warp writes is read or overwritten by another only after a barrier; what an asynchronous copy brings is
read only after its wait, and what `wgmma` reads is left alone until its wait. Lanes of one warp run in lock step here,
so that races within a warp are not seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.ptx.formats import Array


class Fault(Exception):
    """What a program did wrong, and with which instruction."""


@dataclass
class Region:
    """The memory of one tensor. readable: which bytes were written; None: all. writer, epoch: of each byte, the last
    warp that wrote it, and when: the number of programs and barriers so far."""

    start: int
    bytes: Array
    readable: Array | None

    def __post_init__(self) -> None:
        self.writer, self.epoch = (np.full(len(self.bytes), NONE, np.int32) for _ in range(2))


NONE = -1


class GlobalMemory:
    """epoch: how many programs have begun and barriers were reached so far."""

    epoch = 0

    def __init__(
        self, tensors: Sequence[torch.Tensor], blank: Sequence[torch.Tensor] = (), poisoned: Sequence[torch.Tensor] = ()
    ) -> None:
        """blank: those of the tensors that nobody has written. poisoned: those whose NaN elements are not to be read,
        because nobody owns them."""
        self.regions: list[Region] = []
        unwritten, owned = ({tensor.untyped_storage().data_ptr() for tensor in each} for each in (blank, poisoned))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if not size or any(region.start == start for region in self.regions):
                continue
            content = np.frombuffer((ctypes.c_char * size).from_address(start), dtype=np.uint8)
            readable = None
            if start in unwritten:
                readable = np.zeros(size, np.bool_)
            elif start in owned:
                assert tensor.is_contiguous() and tensor.nbytes == size
                readable = (~tensor.isnan()).flatten().numpy().repeat(tensor.element_size())
            self.regions.append(Region(start, content, readable))

    def _found(self, addresses: Array, size: int, who: Array, text: str) -> Iterator[tuple[Region, Array, Array]]:
        """The regions that the threads `who` access at their addresses: offsets [n, size], and which threads."""
        if (addresses[who] % size).any():
            raise Fault(f"misaligned access of global memory: {text}")
        left = who
        for region in self.regions:
            inside = (addresses[left] >= region.start) & (addresses[left] + size <= region.start + len(region.bytes))
            if inside.any():
                yield region, (addresses[left[inside]] - region.start)[:, None] + np.arange(size), left[inside]
                left = left[~inside]
            if not len(left):
                return
        raise Fault(f"access of global memory outside of all tensors at {int(addresses[left[0]]):#x}: {text}")

    def load(self, addresses: Array, size: int, who: Array, text: str, *, is_atomic: bool = False) -> Array:
        """addresses [threads]; who: indices of threads -> bytes [threads, size], 0 for other threads."""
        out = np.zeros((len(addresses), size), np.uint8)
        for region, places, threads in self._found(addresses, size, who, text) if len(who) else ():
            if region.readable is not None and not region.readable[places].all():
                raise Fault(f"read of global memory that was never written: {text}")
            others = region.writer[places] != threads[:, None] // 32
            if not is_atomic and (others & (region.epoch[places] == self.epoch)).any():
                raise Fault(f"global memory read that another warp has written since the last barrier: {text}")
            out[threads] = region.bytes[places]
        return out

    def store(self, addresses: Array, values: Array, who: Array, text: str) -> None:
        """values: bytes [threads, size]."""
        for region, places, threads in self._found(addresses, values.shape[1], who, text) if len(who) else ():
            region.bytes[places] = values[threads]
            region.writer[places], region.epoch[places] = threads[:, None] // 32, self.epoch
            if region.readable is not None:
                region.readable[places] = True


@dataclass
class Copy:
    """What one instruction copies asynchronously: bytes [n, size] to `places` [n, size], for threads of `warps` [n]."""

    places: Array
    values: Array
    warps: Array


@dataclass
class SharedMemory:
    """Bytes that begin undefined; records are kept for each word of four bytes. notes: what the ISA forbids and is no
    fault here.

    epoch: number of barriers so far. A word's last writer and readers are warps, and the epoch in which they did it.
    """

    size: int
    text: str = ""  # of the instruction at work
    epoch: int = 0
    notes: set[str] = field(default_factory=set)
    open_group: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = -(-self.size // 4)
        self.bytes = np.full(self.size, 0xFF, np.uint8)
        self.written = np.zeros(self.size, np.bool_)
        self.pending = np.zeros(self.size, np.bool_)
        self.writer, self.write_epoch = np.full(words, NONE), np.full(words, NONE)
        self.readers, self.read_epoch = np.zeros(words, np.int64), np.full(words, NONE)
        # For the asynchronous proxy, by which wgmma reads: words written since the last fence, and words being read.
        self.unfenced, self.in_use = np.zeros(words, np.bool_), np.zeros(words, np.int64)
        self.copied = np.zeros(words, np.bool_)  # by cp.async, last of all

    def _places(self, addresses: Array, size: int) -> Array:
        if len(addresses) and (addresses.min() < 0 or addresses.max() + size > self.size):
            raise Fault(f"access outside of shared memory: {self.text}")
        if (addresses % size).any():
            raise Fault(f"misaligned access of shared memory: {self.text}")
        return addresses[:, None] + np.arange(size)

    def _words(self, addresses: Array, size: int, warps: Array) -> tuple[Array, Array]:
        words = (addresses[:, None] + np.arange(0, max(size, 4), 4)) // 4
        return words.ravel(), np.repeat(warps, words.shape[1])

    def _write(self, addresses: Array, size: int, warps: Array) -> None:
        words, warps = self._words(addresses, size, warps)
        now = self.epoch
        if ((self.write_epoch[words] == now) & (self.writer[words] != warps)).any():
            raise Fault(f"shared memory overwritten that another warp has written since the last barrier: {self.text}")
        if ((self.read_epoch[words] == now) & (self.readers[words] & ~(1 << warps) != 0)).any():
            raise Fault(f"shared memory overwritten that another warp has read since the last barrier: {self.text}")
        if self.in_use[words].any():
            raise Fault(f"shared memory overwritten while wgmma reads it: {self.text}")
        self.writer[words], self.write_epoch[words], self.unfenced[words] = warps, now, True
        self.copied[words] = False

    def _read(self, addresses: Array, size: int, warps: Array) -> None:
        words, warps = self._words(addresses, size, warps)
        now = self.epoch
        if ((self.write_epoch[words] == now) & (self.writer[words] != warps)).any():
            raise Fault(f"shared memory read that another warp has written since the last barrier: {self.text}")
        self.readers[words] = np.where(self.read_epoch[words] == now, self.readers[words], 0)
        self.read_epoch[words] = now
        np.bitwise_or.at(self.readers, words, 1 << warps)

    def load(self, addresses: Array, size: int, warps: Array) -> Array:
        """addresses, warps [n] -> bytes [n, size]."""
        places = self._places(addresses, size)
        self._read(addresses, size, warps)
        if self.pending[places].any():
            raise Fault(f"shared memory read before the wait for its asynchronous copy: {self.text}")
        if not self.written[places].all():
            raise Fault(f"read of shared memory that was never written: {self.text}")
        return self.bytes[places]

    def store(self, addresses: Array, values: Array, warps: Array) -> None:
        places = self._places(addresses, values.shape[1])
        self._write(addresses, values.shape[1], warps)
        if self.pending[places].any():
            raise Fault(f"shared memory written before the wait for its asynchronous copy: {self.text}")
        self.bytes[places], self.written[places] = values, True

    def barrier(self) -> None:
        self.epoch += 1

    # -- cp.async

    def copy(self, addresses: Array, values: Array, warps: Array) -> None:
        """Begin to copy. The values arrive with the wait for the group that is committed next."""
        places = self._places(addresses, values.shape[1])
        self._write(addresses, values.shape[1], warps)
        self.pending[places] = True
        self.open_group.append(Copy(places, values, warps))

    def commit(self) -> None:
        self.groups.append(self.open_group)
        self.open_group = []

    def wait(self, num_left: int) -> None:
        """All but the last `num_left` groups arrive: for the warps that copied them now, for others with a barrier."""
        while len(self.groups) > num_left:
            for each in self.groups.pop(0):
                self.pending[each.places], self.written[each.places] = False, True
                self.bytes[each.places] = each.values
                words = each.places[:, ::4] // 4
                self.writer[words], self.write_epoch[words] = each.warps[:, None], self.epoch
                self.unfenced[words], self.copied[words] = True, True

    # -- the asynchronous proxy

    def fence(self) -> None:
        self.unfenced[:] = False

    def matrix(self, addresses: Array, warp: int) -> tuple[Array, Array]:
        """What wgmma reads: uint16 at these byte addresses, and the words, in use until they are released."""
        flat = addresses.ravel()
        if len(flat) and (flat.min() < 0 or flat.max() + 2 > self.size):
            raise Fault(f"access outside of shared memory: {self.text}")
        words = np.unique(flat // 4)
        if (self.unfenced & self.copied)[words].any():
            self.notes.add("wgmma reads what cp.async has written without fence.proxy.async")
        if (self.unfenced & ~self.copied)[words].any():
            raise Fault(f"wgmma reads shared memory that was written without fence.proxy.async: {self.text}")
        whole = words * 4
        self.load(whole, 4, np.full(len(words), warp))
        self.in_use[words] += 1
        return self.bytes.view(np.uint16)[addresses // 2], words

    def release(self, words: Array, warp: int) -> None:
        """wgmma has read them; until the next barrier other warps must not write them."""
        self.in_use[words] -= 1
        self._read(words * 4, 4, np.full(len(words), warp))
