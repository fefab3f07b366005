"""Pools on a device and in host memory, and steps that swap between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch

from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.swap import HostPool

BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 24, 20, 4
# (K heads, head size, dtype), the same of V, of each layer; some blocks are no multiple of 64 bytes.
LAYERS = [
    ((2, 8, torch.float32), (2, 12, torch.float32)),
    ((1, 20, torch.bfloat16), (1, 3, torch.bfloat16)),
    ((3, 5, torch.float32), (3, 7, torch.bfloat16)),
]


def filled_pool(device: str = "cpu", width: int = 1) -> KVPool:
    """Random numbers in all blocks of all layers, whose head sizes are multiplied by `width`."""
    pool = KVPool(BLOCKS, BLOCK_SIZE)
    for index, states in enumerate(LAYERS):
        like = (torch.empty(1, heads, size * width, dtype=dtype, device=device) for heads, size, dtype in states)
        for tensor in pool.layer_for(index, *like).tensors:
            tensor.normal_()
    return pool


def tensors_of(pool: KVPool) -> list[torch.Tensor]:
    return [tensor for tensors in pool.by_device().values() for tensor in tensors]


class Twin:
    """A pool with its host blocks, and a model of what both should hold. `now` does or enqueues other work."""

    def __init__(self, now: Callable[..., object] = lambda work: work(), pool: KVPool | None = None) -> None:
        self.pool = pool or filled_pool()
        self.host = HostPool(self.pool, HOST_BLOCKS)
        self._now = now
        self._expected = [tensor.clone() for tensor in tensors_of(self.pool)]
        self._hosts = [tensor.new_empty(HOST_BLOCKS, *tensor.shape[1:]) for tensor in tensors_of(self.pool)]

    def step(
        self,
        swap_out: list[tuple[int, int]] | None = None,
        swap_in: list[tuple[int, int]] | None = None,
        copies: list[tuple[int, int]] | None = None,
        written: list[int] | None = None,
    ) -> None:
        swap_out, swap_in, copies, written = swap_out or [], swap_in or [], copies or [], written or []
        self.host.swap_out(swap_out)
        self.host.swap_in(swap_in)
        self._now(lambda: self.pool.copy_blocks(copies))
        for device, host in zip(self._expected, self._hosts):
            for blocks, source, target in ((swap_out, device, host), (swap_in, host, device), (copies, device, device)):
                for src, dst in blocks:
                    target[dst] = source[src]
        for tensor, expected in zip(tensors_of(self.pool), self._expected):
            for block in written:
                new = torch.randn_like(tensor[block])
                expected[block] = new
                self._now(partial(tensor[block].copy_, new))

    def is_right(self) -> bool:
        pairs = zip(tensors_of(self.pool), self._expected)
        return all(torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8)) for actual, wanted in pairs)


def busy_steps(twin: Twin, seed: int, steps: int = 12) -> None:
    """Steps like a scheduler's: blocks are reused right after a swap-out; ids are consecutive or scattered."""
    rng = random.Random(seed)
    outside: dict[int, None] = {}  # host blocks in use

    def some(ids: list[int], most: int) -> list[int]:
        count = rng.randint(0, min(most, len(ids)))
        start = rng.randint(0, len(ids) - count)
        return ids[start : start + count] if rng.random() < 0.5 else rng.sample(ids, count)

    for _ in range(steps):
        out = some(list(range(BLOCKS)), 14)
        swap_out = list(zip(out, some([h for h in range(HOST_BLOCKS) if h not in outside], 14)))
        outside.update(dict.fromkeys(host for _, host in swap_out))
        back = some(list(outside), 14)
        targets = rng.sample(range(BLOCKS), len(back))
        for host in back:
            del outside[host]
        free = [block for block in range(BLOCKS) if block not in targets]
        copies = list(zip(rng.sample(free[:5], 2), rng.sample(free[5:], 2)))
        twin.step(swap_out, list(zip(back, targets)), copies, some(free, 8))
    twin.step(swap_in=list(zip(outside, rng.sample(range(BLOCKS), len(outside)))))
