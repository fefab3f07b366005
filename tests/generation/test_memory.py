"""Memory of engines and calls: sized by what the process may allocate, touched as needed, kept within bounds."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.cache.host_memory import HostMemory
from hf_paged.cache.layers import WHOLE
from hf_paged.cache.memory import PagedMemory
from hf_paged.generation import idle, paged_generate
from hf_paged.generation.engine import room, sizing
from hf_paged.generation.idle import IdlePools
from tests import models

MIB = 2**20
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # layers, K and V, block_size, KV heads, head_dim, fp32
GREEDY = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=models.VOCAB, pad_token_id=models.PAD)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host, or a container, with 10 MiB."""
    for module in (room, sizing):
        monkeypatch.setattr(module, "host_memory", lambda: HostMemory(20 * MIB, 10 * MIB))


def test_the_default_pool_and_swap_space_are_a_share_of_what_the_process_may_take(host: None) -> None:
    with Engine(models.shared("llama")) as engine:
        assert engine.stats().num_blocks == 3 * MIB // BLOCK_BYTES
        assert engine._scheduler.host_manager.allocator.num_blocks == 3 * MIB // BLOCK_BYTES
    with Engine(models.shared("llama"), CacheConfig(memory_fraction=0.5)) as engine:
        assert engine.stats().num_blocks == 5 * MIB // BLOCK_BYTES
        assert engine._scheduler.host_manager.allocator.num_blocks == 3 * MIB // BLOCK_BYTES


def test_a_pool_that_the_host_cannot_hold_is_warned_of(host: None) -> None:
    with pytest.warns(RuntimeWarning, match=r"pool of 0\.02 GiB is larger than the 0\.01 GiB"):
        Engine(models.shared("llama"), CacheConfig(memory="20MiB")).close()


def test_an_engine_tells_how_large_its_pool_is(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "hf_paged"),
        Engine(models.shared("llama"), CacheConfig(num_blocks=512)) as engine,
    ):
        assert caplog.messages == ["K/V pool of 512 blocks of 16 tokens: 0.00 GiB on cpu"]
        assert repr(engine) == (
            "<Engine of LlamaForCausalLM: 512 blocks of 16 tokens, 2.0 MiB reserved, 0.0 MiB touched>"
        )


def test_the_device_with_room_for_the_fewest_blocks_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = torch.device("meta"), torch.device("cpu")
    monkeypatch.setattr(room, "_free_bytes", {few: 1000, many: 900}.__getitem__)
    half, sizes = CacheConfig(memory_fraction=0.5), {few: 50, many: 30}
    assert room.blocks_in_memory(half, sizes) == 500 // 50
    assert room.blocks_in_memory(half, sizes, idle={few: 1000}) == 450 // 30
    assert room.blocks_in_memory(CacheConfig(memory=800), sizes) == 800 // 80
    with pytest.raises(ValueError, match=r"0\.5 of 900 free bytes on cpu holds no block: one takes 451 bytes"):
        room.blocks_in_memory(half, {few: 50, many: 451})


def unique_requests(engine: Engine, count: int) -> list[int]:
    """Bytes touched after each of `count` consecutive requests without common prefixes."""
    touched = []
    for prompt in models.prompts(*[33] * count):
        engine.generate([prompt], GREEDY)
        touched.append(engine.stats().kv_bytes_touched)
    engine.check_integrity()
    return touched


def test_a_stream_of_unique_requests_takes_a_bounded_part_of_the_default_pool(host: None) -> None:
    with Engine(models.shared("llama")) as engine:
        eighth = engine.stats().num_blocks // 8
        touched = unique_requests(engine, 100)
        stats = engine.stats()
        assert touched[-1] == touched[60] == eighth * BLOCK_BYTES
        assert stats.blocks_cached > eighth - 4, "what is touched is used for prefixes"


def test_without_a_prefix_cache_a_stream_of_requests_takes_what_one_does() -> None:
    with Engine(models.shared("llama"), None, SchedulerConfig(prefix_caching=False)) as engine:
        assert set(unique_requests(engine, 20)) == {3 * BLOCK_BYTES}


def test_a_pool_of_a_given_size_is_the_prefix_cache_s_to_fill() -> None:
    with Engine(models.shared("llama"), CacheConfig(num_blocks=40)) as engine:
        assert unique_requests(engine, 40)[-1] == 40 * BLOCK_BYTES


def test_requests_take_what_they_need_at_once_whatever_the_prefix_cache_may(host: None) -> None:
    with Engine(models.shared("llama"), None, SchedulerConfig(max_num_batched_tokens=10_000)) as engine:
        prompts = models.prompts(*[65] * 50)
        engine.generate(prompts, GREEDY)
        stats = engine.stats()
        assert stats.kv_bytes_touched == 250 * BLOCK_BYTES > stats.num_blocks * BLOCK_BYTES / 8
        assert stats.blocks_cached == 200, "and what they have touched, it keeps"


def memory_of(num_blocks: int) -> PagedMemory:
    memory = PagedMemory(16, num_blocks)
    memory.pool.layer_for(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    return memory


def key_of(number: int, kind: str = "fp32") -> Any:
    return (kind,), CacheConfig(num_blocks=number + 1), WHOLE


def test_few_idle_pools_are_kept_the_last_used_ones() -> None:
    pools = IdlePools()
    memories = [memory_of(4) for _ in range(7)]
    for number, memory in enumerate(memories):
        pools.give_back(key_of(number), memory)
        pools.give_back(key_of(0), pools.take(key_of(0)))
    assert list(pools) == [memories[n] for n in (4, 5, 6, 0)]
    assert pools.take(key_of(5)) is memories[5]
    assert pools.take(key_of(5)) is not memories[5], "it is in use"
    assert pools.take(key_of(1)) is not memories[1]


def test_idle_pools_beside_the_last_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = memory_of(4), memory_of(40)
    monkeypatch.setattr(idle, "MAX_BYTES", 10 * small.nbytes - 1)
    pools = IdlePools()
    for number, memory in enumerate((small, large)):
        pools.give_back(key_of(number), memory)
    assert list(pools) == [small, large], "the last one is kept whatever its size"
    pools.give_back(key_of(2), other := memory_of(4))
    assert list(pools) == [other]


def test_pools_of_what_the_model_was_are_forgotten() -> None:
    pools = IdlePools()
    pools.give_back(key_of(1, "fp32"), memory_of(4))
    pools.take(key_of(1, "bf16"))
    assert not list(pools)


@pytest.mark.parametrize("route", [{}, {"prompt_lookup_num_tokens": 2}], ids=["packed", "dense"])
def test_a_share_of_free_memory_is_measured_with_the_idle_pool(route: dict[str, Any], monkeypatch: Any) -> None:
    """Free memory differs from call to call and is less while a pool is idle: the pool is reused all the same."""
    model, ids = models.build("llama", attn_implementation="eager"), models.prompts(20)[0][None]
    free, pools = [10 * MIB], paged_generate._idle_pools(model)

    def memory() -> HostMemory:
        free[0] -= 4096
        return HostMemory(20 * MIB, free[0] - sum(pool.nbytes for pool in pools))

    monkeypatch.setattr(room, "host_memory", memory)
    kept = []
    for _ in range(3):
        model.generate(
            ids, generation_config=GREEDY, cache_implementation="paged", cache_config={"memory_fraction": 0.5}, **route
        )
        kept.append(list(pools))
        (pool,) = kept[-1]
        assert pool.max_blocks is not None and abs(pool.max_blocks - 5 * MIB // BLOCK_BYTES) < 5
    assert kept[0] == kept[1] == kept[2]


def test_a_closed_engine_keeps_no_tensors() -> None:
    model = models.build("llama")
    engine = Engine(model, CacheConfig(num_blocks=64))
    engine.generate(models.prompts(9), GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0))
    keys = weakref.ref(engine._memory.pool[0].key)
    engine.close()
    assert keys() is None


@pytest.mark.parametrize(("full", "windowed", "least"), [(2, 10, 5), (3, 3, 5)])
def test_a_model_with_windows_uses_all_of_its_memory(full: int, windowed: int, least: int) -> None:
    """As many requests run at once as the bytes of their K/V allow, and none is preempted."""
    torch.manual_seed(0)
    layer_types = ["full_attention"] * full + ["sliding_attention"] * windowed
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.Gemma3TextConfig(
        **sizes, head_dim=16, vocab_size=models.VOCAB, num_hidden_layers=full + windowed, layer_types=layer_types,
        sliding_window=32, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    length, bytes_per_layer = 400, 2 * 16 * 4
    bytes_each = bytes_per_layer * (full * length + windowed * 32)
    memory = int(6.5 * bytes_each)
    with Engine(transformers.Gemma3ForCausalLM(config).eval(), CacheConfig(memory=memory)) as engine:
        for prompt in models.prompts(*[length - 8] * 7):
            engine.add_request(prompt, GenerationConfig(max_new_tokens=8, do_sample=False))
        most = 0
        while engine.has_unfinished_requests():
            engine.step()
            most = max(most, engine.stats().num_running)
        stats = engine.stats()
        assert most >= least and stats.preemptions_recompute == stats.preemptions_swap == 0
        assert stats.kv_bytes_reserved > 0.98 * memory
