"""HostPool: swapped-out blocks are restored bit for bit, under any order of the streams that the events allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged.cache import swap
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.swap import ALIGNMENT, HostPool, bytes_per_host_block
from hf_paged.kernels import ops
from tests import streams
from tests.cache.swaps import HOST_BLOCKS, Twin, busy_steps, filled_pool, tensors_of
from tests.noted import Counted, note_calls
from tests.streams import Device, FakeStreams

SCHEDULES = ("current", "side", *"0123")


def staged(patch: pytest.MonkeyPatch, blocks: int = 3, pinned: int = 7, **options: Any) -> tuple[Twin, Device]:
    """Swaps over a device's streams, in rounds of `blocks` blocks, to host tensors of `pinned` blocks."""
    device = Device(**options)
    streams.install(patch, device)
    patch.setattr(swap, "STAGING_BYTES", 2 * blocks * bytes_per_host_block(filled_pool()) + 1)
    patch.setattr(swap, "PINNED_BYTES", pinned * bytes_per_host_block(filled_pool()) + 1)
    return Twin(device.current.add), device


@pytest.mark.parametrize("seed", range(4))
def test_in_host_memory(seed: int) -> None:
    twin = Twin()
    busy_steps(twin, seed)
    assert twin.is_right()


@pytest.mark.covering(1)
@pytest.mark.parametrize("blocks", [1, 3, HOST_BLOCKS])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_a_device(schedule: str, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        twin, device = staged(monkeypatch, blocks)
        busy_steps(twin, seed)
        device.synchronize(schedule)
        assert twin.is_right(), seed


def test_less_staging_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, device = staged(monkeypatch, 0)
    busy_steps(twin, 0)
    device.synchronize("side")
    assert twin.is_right()


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_out_and_in_of_the_same_host_blocks_in_one_step(schedule: str, count: int, monkeypatch: Any) -> None:
    twin, device = staged(monkeypatch)
    for shift in range(4):
        out = [(block, (block + shift) % count) for block in range(count)]
        twin.step(out, [(host, block + 12) for block, host in out], written=[*range(count)])
        twin.step(swap_in=[(host, block) for block, host in out], copies=[(12, 11)], written=[12])
    device.synchronize(schedule)
    assert twin.is_right()


def many_waits(twin: Twin) -> None:
    """Swaps of several rounds; each direction follows itself and the other."""
    twin.step([(block, block) for block in range(13)], written=[*range(13)])
    twin.step([(block, block) for block in range(13, 20)], written=[*range(13, 20)])
    twin.step(swap_in=[(block, block) for block in range(10)], copies=[(3, 23)], written=[19])
    twin.step([(b, b) for b in range(10)], [(b, b) for b in range(10, 20)], written=[*range(10)])
    twin.step(swap_in=[(block, block) for block in range(10)])


def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the waits, a stream that runs ahead gives wrong data: these tests notice a missing wait."""
    twin, device = staged(monkeypatch)
    many_waits(twin)
    assert device.waits > 20
    unnoticed = []
    for left_out in range(device.waits):
        right = []
        for schedule in ("current", "side"):
            twin, device = staged(monkeypatch, left_out=left_out)
            many_waits(twin)
            device.synchronize(schedule)
            right.append(twin.is_right())
        if all(right):
            unnoticed.append(left_out)
    assert not unnoticed


def test_the_current_stream_does_not_wait_for_what_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds fit into the staging buffers: the step continues and writes the blocks before the transfer starts."""
    twin, device = staged(monkeypatch, blocks=5)
    twin.step([(block, block) for block in range(10)], written=[*range(10)])
    (store,) = twin.host._stores.values()
    while device.current.is_ready:
        device.current.step()
    assert not device.current.work and not store.hosts
    twin.step(swap_in=[(block, block) for block in range(10)])
    device.synchronize("current")
    assert twin.is_right()


@pytest.mark.parametrize(("hosts", "rounds", "transfers"), [
    ([4, 5, 6, 7], 1, 1), ([7, 5, 6, 4], 1, 1), ([0, 2, 4, 6], 1, 4), ([9, 3, 8, 2], 1, 2), ([*range(12)], 3, 3),
    ([8, 9, 10, 11], 1, 2),  # of two tensors of ten
])  # fmt: skip
def test_one_launch_a_round_and_one_transfer_a_run(
    hosts: list[int], rounds: int, transfers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, device = staged(monkeypatch, blocks=4, pinned=10 if hosts[0] == 8 else HOST_BLOCKS)
    launches = note_calls(monkeypatch, ops, "copy_blocks", lambda *_, **__: None)
    for move in (twin.host.swap_out, twin.host.swap_in):
        launches.clear()
        move([(i, host) if move == twin.host.swap_out else (host, i) for i, host in enumerate(hosts)])
        with Counted(lambda each: each is torch.ops.aten.copy_.default) as copies:
            device.synchronize("side")
        assert len(launches) == rounds
        assert copies.count == transfers


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_host_block_is_one_run(is_staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all layers' K and V, aligned. Memory is allocated at the first swap, pinned memory only when used."""
    twin, device = staged(monkeypatch) if is_staged else (Twin(), Device())
    assert twin.host.nbytes == 0
    twin.step([(7, 3), (8, HOST_BLOCKS - 1)])
    device.synchronize("side")
    assert twin.host.nbytes == (7 + HOST_BLOCKS % 7 if is_staged else HOST_BLOCKS) * bytes_per_host_block(twin.pool)
    (store,) = twin.host._stores.values()
    assert store.hosts[0].is_contiguous()
    row, start = store.hosts[0][3], 0
    for tensor in tensors_of(twin.pool):
        assert torch.equal(row[start : start + tensor[0].nbytes], tensor[7].flatten().view(torch.uint8))
        start += -(-tensor[0].nbytes // ALIGNMENT) * ALIGNMENT
    assert start == len(row)


@pytest.mark.parametrize("is_staged", [False, True])
def test_layers_on_several_devices(is_staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own host blocks, streams and buffers."""
    by_device = KVPool.by_device

    def split(pool: KVPool) -> dict[torch.device, list[torch.Tensor]]:
        (tensors,) = by_device(pool).values()
        return {torch.device("cpu", 0): tensors[:3], torch.device("cpu", 1): tensors[3:]}

    monkeypatch.setattr(KVPool, "by_device", split)
    twin, device = staged(monkeypatch) if is_staged else (Twin(), Device())
    busy_steps(twin, 0)
    device.synchronize("side")
    assert twin.is_right() and len(twin.host._stores) == 2
    assert twin.host.nbytes == sum(host.nbytes for store in twin.host._stores.values() for host in store.hosts)


class BreakingStreams(FakeStreams):
    """Raises after a given number of pieces of work has been enqueued."""

    left = 0

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        super().run(stream, work)
        BreakingStreams.left -= 1
        if BreakingStreams.left == 0:
            raise KeyboardInterrupt


@pytest.mark.covering(1)
@pytest.mark.parametrize("schedule", ["current", "side"])
@pytest.mark.parametrize("at", range(1, 13))
def test_a_swap_that_is_broken_off_does_no_harm_to_the_next(at: int, schedule: str, monkeypatch: Any) -> None:
    """What it has enqueued may still be under way."""
    twin, device = staged(monkeypatch)
    monkeypatch.setattr(swap, "CudaStreams", BreakingStreams)
    twin.step([(block, block) for block in range(8)])
    BreakingStreams.left = at
    with pytest.raises(KeyboardInterrupt):
        twin.host.swap_out([(block, block) for block in range(8, 16)])
        twin.host.swap_in([(block, block + 8) for block in range(8)])
    # The blocks that it was to fill are lost.
    twin.step(swap_in=[(block, block) for block in range(8)], written=[*range(8, 16)])
    twin.step([(block, block) for block in range(16)], written=[*range(16)])
    twin.step(swap_in=[(block, block) for block in range(16)])
    device.synchronize(schedule)
    assert twin.is_right()


@pytest.mark.parametrize("is_staged", [False, True])
def test_layers_that_come_later_are_refused(is_staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = staged(monkeypatch, is_eager=True)[0] if is_staged else Twin()
    twin.step([(0, 0)])
    twin.pool.layer_for(9, torch.empty(1, 2, 8), torch.empty(1, 2, 8))
    with pytest.raises(ValueError, match="into has 5 tensors for 7 caches"):
        twin.host.swap_out([(0, 0)])


def test_other_devices_are_refused() -> None:
    pool = KVPool(4, 4)
    pool.layer_for(0, torch.empty(1, 2, 8, device="meta"), torch.empty(1, 2, 8, device="meta"))
    with pytest.raises(ValueError, match="blocks on meta cannot be swapped"):
        HostPool(pool, 4).swap_out([(0, 0)])
