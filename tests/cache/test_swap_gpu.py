"""Swaps between a GPU and pinned memory: data is restored, and nothing waits. See test_swap.py for the order."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_paged.cache import swap
from hf_paged.cache.swap import HostPool, bytes_per_host_block
from tests.cache.swaps import HOST_BLOCKS, Twin, busy_steps, filled_pool
from tests.waiting import no_waits_for_a_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]

WIDTH = 500  # transfers of megabytes, long enough to be overtaken
ALL = [(block, block) for block in range(HOST_BLOCKS)]


def warm_twin(patch: pytest.MonkeyPatch, blocks: int) -> Twin:
    """Blocks on the GPU, swapped in rounds of `blocks`; both buffers have been used in both directions."""
    pool = filled_pool("cuda", WIDTH)
    patch.setattr(swap, "STAGING_BYTES", 2 * blocks * bytes_per_host_block(pool))
    twin = Twin(pool=pool)
    for moves in ({"swap_out": ALL}, {"swap_out": ALL}, {"swap_in": ALL}, {"swap_in": ALL}):
        twin.step(**moves)
    torch.cuda.synchronize()
    return twin


@pytest.fixture(params=[1, 3, HOST_BLOCKS])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Twin:
    return warm_twin(monkeypatch, request.param)


def test_what_went_out_comes_back(twin: Twin) -> None:
    for seed in range(20):
        busy_steps(twin, seed)
        assert twin.is_right(), seed
    (store,) = twin.host._stores.values()
    assert store.hosts[0].is_pinned() and twin.host.nbytes == HOST_BLOCKS * bytes_per_host_block(twin.pool)


def test_the_host_waits_for_nothing(twin: Twin) -> None:
    """The device is busy for a second; both calls return during that time."""
    with no_waits_for_a_device():
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        twin.host.swap_out(ALL)
        twin.host.swap_in(ALL)
        assert not busy.query()
    assert twin.is_right()


def test_the_current_stream_does_not_wait_for_what_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are written and the current stream finishes while the transfer is delayed."""
    twin = warm_twin(monkeypatch, HOST_BLOCKS)
    (store,) = twin.host._stores.values()
    with torch.cuda.stream(store._streams.side):
        torch.cuda._sleep(2_000_000_000)
        held_up = torch.cuda.Event()
        held_up.record()
    twin.step(ALL, written=[block for block, _ in ALL])
    torch.cuda.current_stream().synchronize()
    assert not held_up.query()
    twin.step(swap_in=ALL)
    assert twin.is_right()


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_freed_while_a_transfer_is_under_way(twin: Twin, direction: str) -> None:
    """torch reuses the pinned memory only after the transfer has finished."""
    (store,) = twin.host._stores.values()
    size = store.hosts[0].nbytes
    with torch.cuda.stream(store._streams.side):
        torch.cuda._sleep(1_000_000_000)
    twin.step(**{direction: ALL})
    del store
    twin.host = HostPool(twin.pool, 1)
    gc.collect()
    host = torch.full((size,), 7, dtype=torch.uint8, pin_memory=True)
    assert twin.is_right()
    assert (host == 7).all()
