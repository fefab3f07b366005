"""Chunked attention (Llama 4): a token sees its own chunk only, so that blocks of former chunks are freed."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.cache import kv_pool
from hf_paged.cache.block_manager import NULL_BLOCK
from hf_paged.cache.layers import Chunk
from tests.architectures.tiny import tiny_model
from tests.preempting import force_preempt

NEW = 21
CHUNK = 8


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama4_text")


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options)


def prompts(*lengths: int) -> list[list[int]]:
    text = torch.randint(6, 90, (max(lengths),), generator=torch.Generator().manual_seed(3)).tolist()
    return [text[:length] for length in lengths]


def plain(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config(**options))
    return [row[len(prompt) :].tolist() for row in rows]


@pytest.mark.quick_cases("[5-16]")
@pytest.mark.covering(1)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("tokens", [512, 5])
def test_tokens_and_blocks_across_chunks(model: Any, block_size: int, tokens: int) -> None:
    given = prompts(7, 8, 24, 41)
    options: list[dict[str, Any]] = [{"num_beams": 3}, {}, {"num_beams": 2}, {}]
    scheduler = {"max_num_batched_tokens": tokens}
    with Engine(model, {"block_size": block_size, "num_blocks": 120}, scheduler) as engine:
        kinds = [group.kind for group in engine._memory.groups]
        assert Chunk(CHUNK) in kinds
        for _ in range(2):  # the second time with cached prefixes
            ids = [engine.add_request(prompt, config(**own)) for prompt, own in zip(given, options)]
            done: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                done.update({output.request_id: output for output in engine.step() if output.finished})
                engine.check_integrity()
                manager = engine._memory.manager
                for seq_id in manager.seq_ids:
                    for kind, table in zip(kinds, manager.block_tables(seq_id)):
                        held = sum(block != NULL_BLOCK for block in table)
                        assert kind == kinds[0] or held <= kind.most_blocks(len(table), block_size)
            for key, prompt, own in zip(ids, given, options):
                assert [each.token_ids for each in done[key].outputs] == plain(model, prompt, **own)[:1]
        cached = [done[key].metrics.num_cached_tokens for key in ids]
        assert cached == [(len(prompt) - 1) // block_size * block_size for prompt in given]


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_preempted_across_chunks(model: Any, way: Any) -> None:
    given, rng = prompts(11, 30, 16, 7), random.Random(0)
    with Engine(model, {"block_size": 4, "num_blocks": 120}) as engine:
        ids = [engine.add_request(prompt, config()) for prompt in given]
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            done.update({output.request_id: output for output in engine.step() if output.finished})
            if rng.random() < 0.3 and (running := [key for key in ids if key not in done]):
                force_preempt(engine._scheduler, rng.choice(running), way)
            engine.check_integrity()
    for key, prompt in zip(ids, given):
        assert [each.token_ids for each in done[key].outputs] == plain(model, prompt)


def test_generate_frees_blocks_of_former_chunks(model: Any) -> None:
    (prompt,) = prompts(33)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "generation_config": config(num_beams=2)}
    assert torch.equal(model.generate(ids, cache_implementation="paged", **options), model.generate(ids, **options))


def test_what_stands_for_blocks_of_former_chunks_is_numbers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written may hold NaN, and 0 times NaN is NaN."""
    empty = kv_pool._empty
    monkeypatch.setattr(kv_pool, "_empty", lambda *args: empty(*args).fill_(float("nan")))
    own = copy.deepcopy(model)
    own.model.layers[0].register_forward_hook(lambda *_: None)  # so that the model's own attention runs
    drawn = torch.Generator().manual_seed(3)
    texts = [torch.randint(6, 90, (length,), generator=drawn).tolist() for length in (40, 23, 70)]
    outputs = Engine(own, CacheConfig(num_blocks=64)).generate(texts, config(num_beams=2))
    wanted = [plain(own, prompt, num_beams=2)[0] for prompt in texts]
    assert [output.outputs[0].token_ids for output in outputs] == wanted
