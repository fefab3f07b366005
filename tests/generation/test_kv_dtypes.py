"""K/V in eight bits: the tokens are those of plain `generate` over rounded K/V, for each request alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, EncoderDecoderCache

import hf_paged
from hf_paged import CacheConfig, Engine, PagedKVCache, SchedulerConfig
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.layers import FULL, LayerGroup, Layout
from hf_paged.cache.memory import PagedMemory
from hf_paged.integration.names import CACHE
from hf_paged.kernels.quantised import storage_of
from hf_paged.model.packed import PackedModel
from tests import encoder_models, models
from tests.architectures.tiny import tiny_model
from tests.generation.solo import assert_as_solo, assert_idle, requests, row_by_row
from tests.rounded import RoundedCache

STORED = [("int8", "int8"), ("fp8", "fp8"), ("int8", None), (None, "fp8")]
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")
stored = pytest.mark.parametrize("dtypes", STORED, ids=str)
families = pytest.mark.parametrize("name", FAMILIES)


@cache
def model_of(name: str) -> Any:
    if name != "gpt_oss":
        return models.shared(name)
    model = tiny_model(name)
    model.generation_config.eos_token_id = models.EOS
    return model


def config(dtypes: tuple[str | None, str | None], **options: Any) -> CacheConfig:
    return CacheConfig(key_dtype=dtypes[0], value_dtype=dtypes[1], **options)  # type: ignore[arg-type]


def rows(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": models.VOCAB, **options}
    tokens: torch.Tensor = model.generate(**inputs, **arguments)
    return tokens


@families
@stored
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.covering(1)
def test_generate(name: str, dtypes: tuple[str | None, str | None], options: dict[str, Any]) -> None:
    model, inputs = model_of(name), models.batch(20, 7, 33, seed=3)
    expected = rows(model, inputs, **{CACHE: RoundedCache(model, *dtypes)}, **options)
    given = {"key_dtype": dtypes[0], "value_dtype": dtypes[1], "block_size": 4}
    actual = rows(model, inputs, cache_implementation="paged", cache_config=given, **options)
    assert torch.equal(actual, expected)
    own = PagedKVCache(model.config, block_size=4, key_dtype=dtypes[0], value_dtype=dtypes[1])  # type: ignore[arg-type]
    assert torch.equal(rows(model, inputs, **{CACHE: own}, **options), expected)


def requests_to(name: str) -> list[Any]:
    return requests(16, seed=7 if name == "gpt_oss" else 1)


@cache
def alone(name: str, dtypes: tuple[str | None, str | None]) -> list[list[list[int]]]:
    with Engine(model_of(name), config(dtypes)) as engine:
        outputs = [engine.generate([prompt], made)[0] for prompt, made in requests_to(name)]
    return [[each.token_ids for each in output.outputs] for output in outputs]


@families
@stored
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.covering(1)
def test_a_small_pool_changes_nothing(name: str, dtypes: tuple[str | None, str | None], preemption: Any) -> None:
    """In chunks, beside others, after swaps and recomputation. Rounding may change scores of beams of some seeds."""
    model, wanted = model_of(name), requests_to(name)
    scheduler = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, preemption=preemption)
    with Engine(model, config(dtypes, num_blocks=26, block_size=4), scheduler) as engine:
        outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted])
        assert_idle(engine)
        stats = engine.stats()
    for output, other in zip(outputs, alone(name, dtypes)):
        assert [each.token_ids for each in output.outputs] == other
    assert stats.preemptions_recompute + stats.preemptions_swap > 0 and stats.cow_copies > 0
    assert_as_solo(model, outputs, wanted, **{CACHE: partial(RoundedCache, model, *dtypes)})


def test_prefixes_stored_otherwise_have_other_digests() -> None:
    model, roots = model_of("qwen3"), set()
    for dtypes in (*STORED, (None, None)):
        with Engine(model, config(dtypes, num_blocks=4)) as engine:
            roots.add(engine._admission.cache_root(engine._adapters.choose(None), None))
    assert len(roots) == 5


def test_rows_that_gather_their_kv() -> None:
    """Models that do not run packed gather K/V for their own attention."""
    model, wanted = row_by_row(), requests(6, seed=2)
    with Engine(model, config(("int8", "fp8"), num_blocks=64, block_size=4)) as engine:
        outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted])
        assert_idle(engine)
    assert_as_solo(model, outputs, wanted, **{CACHE: partial(RoundedCache, model, "int8", "fp8")})


def test_a_cache_is_cropped_and_forked() -> None:
    model, (ids,) = model_of("llama"), models.prompts(30)
    paged, rounded = PagedKVCache(model.config, key_dtype="int8", value_dtype="fp8"), RoundedCache(model, "int8", "fp8")
    with torch.no_grad():
        for each in (paged, rounded):
            model(ids[None], **{CACHE: each})
            each.crop(-9)
        assert paged.fork(0) == 1
        rounded.batch_repeat_interleave(2)
        new = torch.tensor([[5, 6, 7], [8, 9, 10]])
        actual, expected = (model(new, **{CACHE: each}).logits for each in (paged, rounded))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert paged.layers[0].keys.dtype == torch.float32
    torch.testing.assert_close(paged.layers[0].keys, rounded.layers[0].keys, atol=1e-4, rtol=1e-4)


def test_a_memory_in_bytes_holds_nearly_twice_the_blocks() -> None:
    model = models.build("llama", hidden_size=256, head_dim=64).to(torch.bfloat16)
    with (
        Engine(model, CacheConfig(memory="4MiB")) as exact,
        Engine(model, config(("int8", "int8"), memory="4MiB")) as small,
    ):
        sizes = [engine._memory.pool.bytes_per_block for engine in (exact, small)]
        counts = [engine.stats().num_blocks for engine in (exact, small)]
    assert sizes[1] <= 0.54 * sizes[0]
    assert counts[1] >= 1.8 * counts[0]
    inputs, limit = models.batch(30, 30, 30, 30), {"memory": sizes[0] * 8}
    with pytest.raises((hf_paged.OutOfBlocks, ValueError)):
        rows(model, inputs, cache_implementation="paged", cache_config=limit, max_new_tokens=17)
    rows(model, inputs, cache_implementation="paged", cache_config=limit | {"key_dtype": "int8", "value_dtype": "int8"},
         max_new_tokens=17)  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@stored
def test_odd_sizes_are_aligned(dtypes: tuple[str | None, str | None], block_size: int) -> None:
    """Scales follow the elements of a block where numbers of fp32 may lie, whatever the sizes of heads."""
    pool = KVPool(3, block_size, storage=storage_of(*dtypes))
    new = torch.randn(block_size, 3, 5, dtype=torch.bfloat16), torch.randn(block_size, 3, 7, dtype=torch.bfloat16)
    kv = pool.layer_for(0, *new)
    assert kv.key.shape == (3, block_size, 3, 5) and kv.value.shape == (3, block_size, 3, 7)
    for scales in kv.scales:
        assert scales is None or scales.data_ptr() % 4 == 0
    before = [tensor.clone() for tensor in kv.tensors]
    pool.resize(5)
    for old, now in zip(before, pool[0].tensors):
        assert torch.equal(old.contiguous().view(torch.uint8), now[:3].contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtypes", STORED[2:], ids=str)
def test_what_is_larger_than_its_place_overwrites_nothing(dtypes: tuple[str | None, str | None]) -> None:
    """Under autocast a layer may write fp32 where the layout has room for bf16."""
    storage, cpu = storage_of(*dtypes), torch.device("cpu")
    key, value = storage.bytes_per_token(3, (8, 8), 2)
    places, size = ((0, 0, key), (1, key + value, 2 * key + value)), 2 * (key + value)
    pool = KVPool(2, 4, Layout((LayerGroup(FULL, frozenset({0, 1})),), places, ((cpu, size),)), storage)
    parts = [part for layer in (0, 1) for part in pool.layer_for(layer, *torch.zeros(2, 1, 3, 8)).tensors]
    for number, part in enumerate(parts):
        part.view(torch.uint8).fill_(number)
    assert all((part.view(torch.uint8) == number).all() for number, part in enumerate(parts))


@pytest.mark.parametrize("name", ["key_dtype", "value_dtype"])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='int4': use 'int8', 'fp8' or None"):
        CacheConfig(**{name: "int4"})
    with pytest.raises(ValueError, match=name):
        PagedKVCache(**{name: "bf16"})


def test_old_gpus_refuse_floats_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.cache.kv_pool import check_storage

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    device = torch.device("cuda")
    check_storage(storage_of("int8", "int8"), device)
    with pytest.raises(ValueError, match=r"'fp8': an A100 has no such numbers .*; use 'int8'"):
        check_storage(storage_of(None, "fp8"), device)


class RoundedPair(EncoderDecoderCache):
    def __init__(self, model: Any, key_dtype: str, value_dtype: str) -> None:
        super().__init__(*(RoundedCache(model, key_dtype, value_dtype) for _ in range(2)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "t5", "whisper"])
def test_encoder_decoder_models(name: str, beams: int) -> None:
    model = encoder_models.model(name)
    given = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, **encoder_models.inputs(name)}
    expected = model.generate(**given, **{CACHE: RoundedPair(model, "int8", "fp8")})
    dtypes = {"key_dtype": "int8", "value_dtype": "fp8"}
    options = {"cache_implementation": "paged", "cache_config": dtypes}
    with hf_paged.record_calls() as records:
        actual = model.generate(**given, **options)
    assert [record.route for record in records] == ["packed"]
    assert torch.equal(actual, expected)
    kept = model.generate(**given, **options, return_dict_in_generate=True).past_key_values
    states = kept.cross_attention_cache.layers[0]
    assert states.keys.dtype == states.values.dtype == torch.float32


CHECKPOINT = Path(__file__).parents[2] / "examples" / "pydoc-lm-base"


@torch.no_grad()
def test_error_on_the_shipped_model() -> None:
    """The bounds that docs/sizing.md states."""
    from pydoc_data.topics import topics

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    text = "\n".join(list(topics.values())[10:14])
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : model.config.max_position_embeddings - 1]

    def logits(*dtypes: str | None) -> torch.Tensor:
        memory, found = PagedMemory(16, growable=True, storage=storage_of(*dtypes)), []
        packed = PackedModel(model, memory)
        for start in range(0, ids.shape[1], 16):
            part = ids[0, start : start + 16]
            memory.append([(0, len(part))])
            metadata, positions = memory.step_metadata([0], [len(part)], torch.device("cpu"))
            found.append(packed.forward(part, positions, metadata))
        return torch.cat(found).log_softmax(-1)

    exact = logits(None, None)
    for dtypes, most, least in ((("int8", "int8"), 4e-4, 0.985), (("fp8", "fp8"), 9e-3, 0.96)):
        rounded = logits(*dtypes)
        divergence = float((exact.exp() * (exact - rounded)).sum(-1).mean())
        same = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
        print(dtypes, divergence, same, len(exact))
        assert divergence <= most and same >= least
