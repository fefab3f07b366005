"""HostPool: host memory for swapped blocks (SOSP'23 section 4.5). A host block holds all layers contiguously.

Blocks of a CUDA device pass through staging buffers of the same layout. One kernel launch copies blocks of all layers
between the K/V tensors and a buffer; a second stream copies the buffer to or from the host while the model computes.
Knows block ids and tensors; never sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from hf_paged.cache.kv_pool import KVPool
from hf_paged.kernels import buffers, ops
from hf_paged.kernels.metadata import to_device

# A cache line, as torch aligns tensors; views of another dtype need a start that its size divides.
ALIGNMENT = 64
"""Alignment in bytes of each layer's K and V within a host block."""

PINNED_BYTES = 1 << 30
"""Size of each allocation of pinned memory. torch rounds it up to a power of two, and pinning more at once is slow."""

STAGING_BYTES = 64 << 20
"""Size of a device's two staging buffers together. One takes about a millisecond on PCIe, far more than a launch."""


class HostPool:
    """Host memory for `num_blocks` blocks of `pool`, allocated at the first swap (pinned memory as it is needed).

    A host block is the K and V of all layers one after the other. The blocks of one device are rows of tensors
    uint8 [n, bytes].

    Swaps run in the order of the calls, and in order with the other work on the current stream. After `swap_out`
    returns, the blocks may be overwritten; after `swap_in`, they may be read. The host does not wait for the device,
    except when the first swaps allocate memory. Raises ValueError if the pool has gained layers since the first swap.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = pool
        self._stores: dict[torch.device, _Store | _StagedStore] = {}

    @property
    def nbytes(self) -> int:
        """Host memory in use so far."""
        return sum(host.nbytes for store in self._stores.values() for host in store.hosts)

    def swap_out(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer to the host. `copies`: (block, host block), no host block twice."""
        if copies:
            # By host block, so that neighbours are one transfer.
            hosts, blocks = np.array(sorted((host, block) for block, host in copies), dtype=np.int64).T
            for tensors, store in self._parts():
                store.swap_out(tensors, blocks, hosts)

    def swap_in(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of every layer back. `copies`: (host block, block), no block twice."""
        if copies:
            # By host block, so that neighbours are one transfer.
            hosts, blocks = np.array(sorted(copies), dtype=np.int64).T
            for tensors, store in self._parts():
                store.swap_in(tensors, blocks, hosts)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of these host blocks to the system, unless it is pinned. Their contents are undefined."""
        for store in self._stores.values():
            if isinstance(store, _Store):
                buffers.give_back(store.hosts[0], blocks)

    def _parts(self) -> Iterator[tuple[list[torch.Tensor], _Store | _StagedStore]]:
        for device, tensors in self._pool.by_device().items():
            if device not in self._stores:
                kind = _StagedStore if device.type == CudaStreams.device_type else _Store
                self._stores[device] = kind(tensors, self.num_blocks)
            yield tensors, self._stores[device]


# -- layout --------------------------------------------------------------------------------------------------------


def bytes_per_host_block(pool: KVPool) -> int:
    """Bytes that one host block takes, over all layers that have written so far."""
    return sum(_block_bytes(tensors) for tensors in pool.by_device().values())


def _block_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(map(_aligned_bytes, tensors))


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor[0].nbytes // ALIGNMENT) * ALIGNMENT


def _views(memory: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of memory, uint8 [n, bytes of a block]: one per tensor [num_blocks, ...], [n, ...] of the same dtype."""
    views, start = [], 0
    for tensor in tensors:
        part = memory[:, start : start + tensor[0].nbytes]
        views.append(part.view(tensor.dtype).view(len(memory), *tensor.shape[1:]))
        start += _aligned_bytes(tensor)
    return views


def _pairs(sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.stack([sources, targets], axis=1)


# -- K/V in host memory ----------------------------------------------------------------------------------------------


class _Store:
    """Host blocks of K/V tensors that are in host memory too. `blocks` and `hosts` int64 [n], `hosts` ascending."""

    def __init__(self, tensors: list[torch.Tensor], num_blocks: int) -> None:
        if tensors[0].device.type != "cpu":
            raise ValueError(f"blocks on {tensors[0].device} cannot be swapped; use preemption='recompute'")
        self.hosts = [torch.empty(num_blocks, _block_bytes(tensors), dtype=torch.uint8, device="cpu")]
        self._views = _views(self.hosts[0], tensors)

    def swap_out(self, tensors: list[torch.Tensor], blocks: np.ndarray, hosts: np.ndarray) -> None:
        ops.copy_blocks(tensors, torch.from_numpy(_pairs(blocks, hosts)), into=self._views)

    def swap_in(self, tensors: list[torch.Tensor], blocks: np.ndarray, hosts: np.ndarray) -> None:
        ops.copy_blocks(self._views, torch.from_numpy(_pairs(hosts, blocks)), into=tensors)


# -- K/V on a device -------------------------------------------------------------------------------------------------


class CudaStreams:
    """The current stream of a CUDA device, a side stream for transfers, and memory that both may use.

    The memory may be freed at any time: torch does not reuse it while either stream may still access it.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device)

    @property
    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Call `work` with `stream` as the current stream."""
        with torch.cuda.stream(stream):
            work()

    def staging(self, *shape: int) -> torch.Tensor:
        """A uint8 tensor on the device; its first use must wait for the work now on the current stream."""
        memory = torch.empty(shape, dtype=torch.uint8, device=self._device)
        # Else torch would use freed memory again while the side stream still works on it.
        memory.record_stream(self.side)
        return memory

    def host(self, *shape: int) -> torch.Tensor:
        """A uint8 tensor in pinned memory for non-blocking copies, whose streams torch records."""
        return torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=True)


@dataclass(slots=True)
class _Buffer:
    """A staging buffer: uint8 [n, bytes of a block], its views by K/V tensor, and the event that ends its last use."""

    memory: torch.Tensor
    views: list[torch.Tensor]
    idle: torch.cuda.Event


class _StagedStore:
    """Host blocks of K/V tensors on a device. `blocks` and `hosts` int64 [n], `hosts` ascending.

    Invariants: only the side stream accesses host blocks, so that a swap-in reads what a swap-out wrote; only the
    current stream accesses K/V. A buffer is filled on one of the streams and drained on the other.
    """

    def __init__(self, tensors: list[torch.Tensor], num_blocks: int) -> None:
        self._device = tensors[0].device
        self._streams = CudaStreams(self._device)
        self._block_bytes = _block_bytes(tensors)
        # Half for each buffer, so that one is filled while the other is drained.
        self._capacity = max(1, min(num_blocks, STAGING_BYTES // 2 // self._block_bytes))
        self._buffers: deque[_Buffer] = deque()
        self._num_blocks = num_blocks
        self._per_host = max(1, PINNED_BYTES // self._block_bytes)
        self._hosts: dict[int, torch.Tensor] = {}  # `_per_host` blocks each

    @property
    def hosts(self) -> list[torch.Tensor]:
        return list(self._hosts.values())

    def swap_out(self, tensors: list[torch.Tensor], blocks: np.ndarray, hosts: np.ndarray) -> None:
        current, side = self._streams.current, self._streams.side
        copies = to_device(_pairs(blocks, self._rows(hosts)), self._device)
        for buffer, part in self._rounds(tensors, len(hosts)):
            gather = partial(ops.copy_blocks, tensors, copies[part], into=buffer.views, in_bounds=True)
            self._relay(buffer, current, gather, side, partial(self._send, buffer, hosts[part]))

    def swap_in(self, tensors: list[torch.Tensor], blocks: np.ndarray, hosts: np.ndarray) -> None:
        current, side = self._streams.current, self._streams.side
        copies = to_device(_pairs(self._rows(hosts), blocks), self._device)
        for buffer, part in self._rounds(tensors, len(hosts)):
            scatter = partial(ops.copy_blocks, buffer.views, copies[part], into=tensors, in_bounds=True)
            self._relay(buffer, side, partial(self._fetch, buffer, hosts[part]), current, scatter)

    def _rows(self, hosts: np.ndarray) -> np.ndarray:
        """The row of a staging buffer for each block, int64 [n]."""
        return np.arange(len(hosts)) % self._capacity

    def _rounds(self, tensors: list[torch.Tensor], count: int) -> Iterator[tuple[_Buffer, slice]]:
        """The buffers in turn, each with the slice of the `count` blocks that it transfers."""
        # The buffers are detached meanwhile, so that an interrupted swap leaves none in an unknown state.
        buffers, self._buffers = self._buffers or self._new_buffers(tensors), deque()
        for start in range(0, count, self._capacity):
            yield buffers[0], slice(start, start + self._capacity)
            buffers.rotate()
        self._buffers = buffers

    def _new_buffers(self, tensors: list[torch.Tensor]) -> deque[_Buffer]:
        memories = [self._streams.staging(self._capacity, self._block_bytes) for _ in range(2)]
        return deque(_Buffer(m, _views(m, tensors), self._streams.current.record_event()) for m in memories)

    def _relay(
        self,
        buffer: _Buffer,
        first: torch.cuda.Stream,
        fill: Callable[[], None],
        second: torch.cuda.Stream,
        drain: Callable[[], None],
    ) -> None:
        """Fill the buffer on one stream, then drain it on the other."""
        # The last drain of the buffer may still run on the other stream.
        first.wait_event(buffer.idle)
        self._streams.run(first, fill)
        second.wait_event(first.record_event())
        self._streams.run(second, drain)
        buffer.idle = second.record_event()

    def _send(self, buffer: _Buffer, hosts: np.ndarray) -> None:
        for staged, host in self._runs(buffer, hosts):
            host.copy_(staged, non_blocking=True)

    def _fetch(self, buffer: _Buffer, hosts: np.ndarray) -> None:
        for staged, host in self._runs(buffer, hosts):
            staged.copy_(host, non_blocking=True)

    def _runs(self, buffer: _Buffer, hosts: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Matching rows of the buffer and of host memory, one pair for each run of consecutive ids in `hosts`."""
        parts, rows = np.divmod(hosts, self._per_host)
        # A transfer cannot go over the end of an allocation.
        starts = (np.flatnonzero((np.diff(hosts) != 1) | (np.diff(parts) != 0)) + 1).tolist()
        for start, end in pairwise([0, *starts, len(hosts)]):
            first = int(rows[start])
            yield buffer.memory[start:end], self._host(int(parts[start]))[first : first + end - start]

    def _host(self, part: int) -> torch.Tensor:
        host = self._hosts.get(part)
        if host is None:
            count = min(self._per_host, self._num_blocks - part * self._per_host)
            host = self._hosts[part] = self._streams.host(count, self._block_bytes)
        return host
