"""Layers over several devices: a `device_map` of accelerate, on simulated devices that refuse to compute together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged.cache import swap
from hf_paged.features.watch.guards import ModelWatch
from hf_paged.generation.engine import room
from hf_paged.integration.attention import LayerHandle
from hf_paged.model import packed_step
from hf_paged.model.packed_step import PackedCache
from tests.architectures.tiny import NUM_LAYERS, tiny_model
from tests.logical_devices import KIND, in_child, logical_devices
from tests.models import ragged

pytestmark = pytest.mark.slow  # each test starts a process, and torch's modes are slow
accelerate = pytest.importorskip("accelerate")

NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
BEAMS = GenerationConfig(max_new_tokens=NEW, num_beams=3, pad_token_id=0)
FIRST, SECOND = f"{KIND}:0", f"{KIND}:1"


def generate(model: Any, config: GenerationConfig, rows: int = 2, **options: Any) -> torch.Tensor:
    ids, mask = (each.to(model.device) for each in ragged(rows))
    result: torch.Tensor = model.generate(ids, attention_mask=mask, generation_config=config, **options)
    return result.cpu()


def engine_tokens(model: Any, rows: int = 2, **options: Any) -> tuple[torch.Tensor, hf_paged.EngineStats]:
    requests = [row[keep.bool()].tolist() for row, keep in zip(*ragged(rows))]
    with hf_paged.Engine(model, **{"cache_config": hf_paged.CacheConfig(block_size=4), **options}) as engine:
        outputs = engine.generate(requests, GREEDY)
        return torch.tensor([list(output.outputs[0].token_ids) for output in outputs]), engine.stats()


def spread(model: Any, places: list[str]) -> None:
    """Place layer i on `places[i]`, what is before them on the first device, what is after them on the second."""
    layers = {f"model.layers.{index}": place for index, place in enumerate(places)}
    beside = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": SECOND, "lm_head": SECOND}
    # Without main_device, accelerate takes any of the devices; with a device_map of numbers, as "auto" is, the first.
    accelerate.dispatch_model(model, beside | layers, main_device=FIRST)


@contextmanager
def spread_model(kind: str, *places: str) -> Iterator[tuple[Any, Callable[..., torch.Tensor]]]:
    """A model over two devices, and plain `generate` of the same model on a CPU."""
    model, whole = tiny_model(kind, 1).requires_grad_(False), tiny_model(kind, 1)
    with logical_devices():
        spread(model, list(places) or [FIRST, FIRST, SECOND, SECOND])
        yield model, functools.partial(generate, whole)


def forked(check: Callable[[], None]) -> Callable[[], None]:
    """The test runs in a child process, where devices are added to torch."""

    @functools.wraps(check)
    def test() -> None:
        in_child(check)

    return test


@forked
def test_both_entry_points() -> None:
    with spread_model("llama", FIRST, SECOND, FIRST, SECOND) as (model, plain):
        assert ModelWatch(model).obstacle == f"its weights lie on {FIRST} and {SECOND}"  # no graph
        with hf_paged.record_calls() as records:
            assert torch.equal(generate(model, GREEDY, cache_implementation="paged"), plain(GREEDY))
        assert records[0].route == "packed"
        assert torch.equal(engine_tokens(model)[0], plain(GREEDY)[:, -NEW:])
        report = hf_paged.check(model)
        assert [str(layer.device) for layer in report.layers] == [FIRST, SECOND, FIRST, SECOND]
        assert report.native and f"layer 3: native, 2 KV heads of size 16, on {SECOND}" in str(report)


@forked
def test_all_of_a_layer_is_on_its_device() -> None:
    """K/V, block tables and slots; and these are sent to the second device once a step, not for each layer."""
    steps, seen, sent = [], [], []
    with spread_model("gemma2") as (model, plain):  # its layers take turns between a window and none: two groups
        begin, update, send = (PackedCache.begin_step, PackedCache.update, packed_step.metadata_on)

        def updated(cache: PackedCache, key: torch.Tensor, value: torch.Tensor, index: int, **kwargs: Any) -> Any:
            result = update(cache, key, value, index, **kwargs)
            handle: LayerHandle = cache.handles[-1]
            tensors = [*handle.kv.tensors, key, value, handle.metadata.block_tables, handle.metadata.slot_mapping]
            tensors += [handle.metadata.seq_lens, handle.metadata.query_start_loc]
            weight = next(model.model.layers[index].parameters())
            seen.append((index, {tensor.device for tensor in [*tensors, weight]}))
            return result

        with (
            mock.patch.object(PackedCache, "update", updated),
            mock.patch.object(PackedCache, "begin_step", lambda *args: (steps.append(1), begin(*args))),
            mock.patch.object(packed_step, "metadata_on", lambda *args: (sent.append(1), send(*args))[1]),
        ):
            assert torch.equal(generate(model, GREEDY, cache_implementation="paged"), plain(GREEDY))
            assert torch.equal(engine_tokens(model)[0], plain(GREEDY)[:, -NEW:])
        places = [torch.device(place) for place in (FIRST, FIRST, SECOND, SECOND)]
        assert len(steps) > 2 * NEW and len(sent) == len(steps)
        assert seen == [(i, {places[i]}) for _ in steps for i in range(NUM_LAYERS)]


class HostStreams:
    """In the place of `swap.CudaStreams`: work is done at once."""

    device_type = KIND
    made: ClassVar[list[torch.device]] = []

    def __init__(self, device: torch.device) -> None:
        self.made.append(device)
        self._device = device
        self.side = self.current = mock.Mock()

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        work()

    def staging(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def host(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)


@forked
def test_swapped() -> None:
    with spread_model("llama") as (model, plain), mock.patch.object(swap, "CudaStreams", HostStreams):
        config = hf_paged.CacheConfig(block_size=4, num_blocks=9)
        limits = hf_paged.SchedulerConfig(preemption="swap", prefix_caching=False)
        tokens, stats = engine_tokens(model, 4, cache_config=config, scheduler_config=limits)
        assert torch.equal(tokens, plain(GREEDY, 4)[:, -NEW:]) and stats.preemptions_swap > 0
        assert {str(device) for device in HostStreams.made} == {FIRST, SECOND}


@forked
def test_the_pool_fits_every_device() -> None:
    """Three of four layers are on the second device, so its memory decides although the first has less."""
    per_layer = 2 * 2 * 16 * 4 * 4  # K and V, heads, head size, bytes, tokens of a block
    with spread_model("llama", FIRST, SECOND, SECOND, SECOND) as (model, _):
        free = {torch.device(FIRST): 30_000, torch.device(SECOND): 60_000}
        half = hf_paged.CacheConfig(block_size=4, memory_fraction=0.5)
        blocks = 60_000 // 2 // (3 * per_layer)
        with mock.patch.object(room, "_free_bytes", free.__getitem__):
            assert engine_tokens(model, cache_config=half)[1].num_blocks == blocks
            with hf_paged.record_calls() as records:
                generate(model, GREEDY, cache_implementation="paged", cache_config=half)
            assert 0 < records[0].peak_blocks_used <= blocks
            hf_paged.release_memory(model)  # idle memory of the call counts as free
            free[torch.device(SECOND)] = 2 * 3 * per_layer - 1
            with pytest.raises(ValueError, match=f"0.5 of {6 * per_layer - 1} free bytes on {SECOND} holds no block"):
                hf_paged.Engine(model, half)
            with pytest.raises(ValueError, match=f"free bytes on {SECOND} holds no block"):
                generate(model, GREEDY, cache_implementation="paged", cache_config=half)
        whole = hf_paged.CacheConfig(block_size=4, memory=10 * 4 * per_layer)
        assert engine_tokens(model, cache_config=whole)[1].num_blocks == 10


@forked
def test_offloaded_layers() -> None:
    """A layer in host memory is loaded to the first device for each forward; the dense view serves such a model."""
    with spread_model("llama", FIRST, "cpu", SECOND, SECOND) as (model, plain):
        report = hf_paged.check(model)
        assert report.supported and not report.native and "offloaded" in report.reason
        assert [str(layer.device) for layer in report.layers] == [FIRST, FIRST, SECOND, SECOND]
        assert torch.equal(generate(model, GREEDY, cache_implementation="paged"), plain(GREEDY))
        assert torch.equal(engine_tokens(model)[0], plain(GREEDY)[:, -NEW:])


@forked
def test_devices_do_not_compute_together() -> None:
    """The devices of these tests: what real ones refuse, they refuse, and what those allow, they allow."""
    with logical_devices():
        first, second = torch.ones(3, device=FIRST), torch.ones(3, device=SECOND)
        with pytest.raises(RuntimeError, match=f"tensors on {FIRST} and {SECOND}"):
            first + second
        with pytest.raises(RuntimeError, match=f"tensors on cpu and {FIRST}"):
            first + torch.ones(3)
        with pytest.raises(RuntimeError, match=f"tensors on {FIRST} and {SECOND}"):
            first[second.long()]
        assert (first + second.to(FIRST)).tolist() == [2, 2, 2] and first[torch.tensor([0])].device == first.device
        with pytest.raises(TypeError, match="no numpy array"):
            first.numpy()
