"""Invalid arguments of paged generate: a one-line error names the value and the remedy, and no state is left behind."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_paged
from hf_paged.integration.names import CACHE
from tests import conftest, models

IDS = models.prompts(9)[0][None]
BATCH = models.batch(5, 9)

# name -> (arguments, words the message has to contain)
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no prompts": ({"input_ids": torch.zeros(0, 4, dtype=torch.int64)}, (r"\(0, 4\)", "at least one prompt")),
    "empty prompt": ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, (r"\(1, 0\)", "at least one token")),
    "one empty prompt among others": (
        {"input_ids": BATCH["input_ids"], "attention_mask": BATCH["attention_mask"] * torch.tensor([[1], [0]])},
        ("row 1 of attention_mask", "empty prompt", "leave it out")),
    "prompt longer than the model": ({"input_ids": torch.full((1, models.MAX_POSITIONS + 1), 5)},
        (str(models.MAX_POSITIONS + 1), f"max_position_embeddings is {models.MAX_POSITIONS}", "shorten")),
    "float ids": ({"input_ids": IDS.float()}, ("torch.float32", "integer")),
    "unsigned ids": ({"input_ids": IDS.to(torch.uint64)}, ("torch.uint64", "integer")),
    "ids without contents": ({"input_ids": IDS.to("meta")}, ("input_ids is on the device 'meta'", "give its values")),
    "a mask without contents": ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS, device="meta")},
        ("attention_mask is on the device 'meta'",)),
    "embeddings without contents": ({"inputs_embeds": torch.zeros(1, 9, 32, device="meta")},
        ("inputs_embeds is on the device 'meta'",)),
    "bool ids": ({"input_ids": IDS > 4}, ("torch.bool", "integer")),
    "a list of ids": ({"input_ids": IDS.tolist()}, ("list", "tensor")),
    "a string": ({"input_ids": "hello"}, ("str", "tensor")),
    "one dimension": ({"input_ids": IDS[0]}, (r"\(9,\)", r"input_ids\[None\]")),
    "id beyond the vocabulary": ({"input_ids": torch.tensor([[3, 4, models.VOCAB]])}, ("token id 96", "0 to 95")),
    "negative id": ({"input_ids": torch.tensor([[3, -100, 4]])}, ("token id -100", "0 to 95")),
    "mask of another shape": ({"input_ids": IDS, "attention_mask": torch.ones(1, 8, dtype=torch.int64)},
        (r"\(1, 8\)", r"\(1, 9\)")),
    "mask of another batch": ({"input_ids": IDS, "attention_mask": torch.ones(2, 9, dtype=torch.int64)},
        (r"\(2, 9\)", r"\(1, 9\)")),
    "4-D mask": ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 9, 9)}, (r"\(1, 1, 9, 9\)", "2D")),
    "a list as mask": ({"input_ids": IDS, "attention_mask": [1] * 9}, ("list", "tensor")),
    "mask and embeddings": (
        {"inputs_embeds": torch.zeros(1, 9, 32), "attention_mask": torch.ones(1, 8, dtype=torch.int64)},
        (r"\(1, 8\)", "inputs_embeds")),
    "use_cache=False": ({"input_ids": IDS, "use_cache": False}, ("use_cache=False", "drop one")),
    "another cache": ({"input_ids": IDS, CACHE: DynamicCache()}, ("DynamicCache", "PagedKVCache")),
    "misspelt cache implementation": ({"input_ids": IDS, "cache_implementation": "pagd"}, ("pagd",)),
    "greedy with several sequences": ({"input_ids": IDS, "num_return_sequences": 3, "do_sample": False},
        ("num_return_sequences", "3")),
    "more sequences than beams": ({"input_ids": IDS, "num_return_sequences": 3, "num_beams": 2},
        ("num_return_sequences", "3", "num_beams", "2")),
    "no beams": ({"input_ids": IDS, "num_beams": 0}, ("num_beams",)),
    "no new tokens": ({"input_ids": IDS, "max_new_tokens": 0}, ("max_new_tokens", "0")),
    "negative temperature": ({"input_ids": IDS, "do_sample": True, "temperature": -1.0}, ("temperature", "-1.0")),
    "bad early_stopping": ({"input_ids": IDS, "early_stopping": "soon", "num_beams": 2}, ("early_stopping", "soon")),
    "stop_strings without a tokenizer": ({"input_ids": IDS, "stop_strings": ["a"]}, ("stop string", "tokenizer")),
    "misspelt option": ({"input_ids": IDS, "max_new_token": 4}, ("max_new_token",)),
    "beams that are no number": ({"input_ids": IDS, "num_beams": 2.5}, (r"num_beams=2\.5", "integer")),
    "sequences that are no number": ({"input_ids": IDS, "num_return_sequences": "2"}, ("num_return_sequences='2'",)),
    "a dict as generation config": ({"input_ids": IDS, "generation_config": {"max_length": 20}},
        ("generation_config=.*dict", r"GenerationConfig\(\*\*options\)")),
    "a number as logits processor": ({"input_ids": IDS, "logits_processor": 3}, ("logits_processor=3", "a list")),
    "a number as streamer": ({"input_ids": IDS, "streamer": 3}, ("streamer=3", "put and end")),
    "misspelt cache option": ({"input_ids": IDS, "cache_config": {"blocksize": 4}}, ("blocksize", "block_size")),
    "a number as cache config": ({"input_ids": IDS, "cache_config": 5}, ("cache_config=5", "CacheConfig")),
    "memory for no block": ({"input_ids": IDS, "cache_config": {"memory": 100}}, ("memory=100 holds no block", "4096")),
    "prompts larger than the memory": ({**BATCH, "cache_config": {"memory": "4KiB", "block_size": 4}},
        ("the prompts need 5 blocks", r"memory='4KiB' \(4 blocks\)", "raise memory")),
    "no block size": ({"input_ids": IDS, "cache_config": {"block_size": 0}}, ("block_size=0",)),
    "no blocks": ({"input_ids": IDS, "cache_config": {"num_blocks": 0}}, ("num_blocks=0",)),
    "prompt larger than the pool": ({"input_ids": IDS, "cache_config": {"num_blocks": 2, "block_size": 4}},
        ("3 blocks", "num_blocks=2", "raise num_blocks")),
    "prompts larger than the pool": ({**BATCH, "num_beams": 2, "cache_config": {"num_blocks": 4, "block_size": 4}},
        ("5 blocks", "num_blocks=4", "raise num_blocks")),
    "prompt larger than the pool, dense view": (
        {"inputs_embeds": torch.zeros(1, 9, 32), "num_beams": 2, "cache_config": {"num_blocks": 5, "block_size": 4}},
        ("6 blocks", "num_blocks=5", "raise num_blocks")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    model = models.shared("llama")
    arguments, words = CASES[case]
    arguments = {"max_new_tokens": 4, **arguments}
    before, random = conftest.state_of(model), torch.random.get_rng_state()
    with pytest.raises(ValueError) as caught:
        model.generate(**{"cache_implementation": "paged", **arguments})
    message = str(caught.value)
    assert "\n" not in message.strip()
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    assert conftest.state_of(model) == before
    assert torch.equal(torch.random.get_rng_state(), random)
    assert conftest.blocks_in_use() == 0


def test_a_pool_that_runs_full_on_the_way() -> None:
    """The prompts fit, the new tokens do not: OutOfBlocks, no block in use afterwards, and the model still works."""
    model = models.shared("llama")
    before = conftest.state_of(model)
    options = {"max_new_tokens": 30, "eos_token_id": None, "cache_implementation": "paged"}
    for extra in ({}, {"num_beams": 2}, {"return_dict_in_generate": True}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(hf_paged.OutOfBlocks, match="num_blocks"):
            model.generate(IDS, **options, **extra, cache_config={"num_blocks": 6, "block_size": 4})
        assert conftest.state_of(model) == before
        assert conftest.blocks_in_use() == 0
    with hf_paged.record_calls() as records:
        model.generate(IDS, **options, cache_config={"num_blocks": 10, "block_size": 4})
    assert records[0].peak_blocks_used <= 10


def test_exactly_enough_blocks() -> None:
    """9 + 8 - 1 tokens in 4 blocks of 4: the K/V of the last new token is never stored."""
    model = models.shared("llama")
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    paged = model.generate(
        IDS, **options, cache_implementation="paged", cache_config={"num_blocks": 4, "block_size": 4}
    )
    assert torch.equal(paged, model.generate(IDS, **options))


MEMORY_CONFIGS = [
    {"memory": "16KiB", "block_size": 4},
    {"memory": 16384, "block_size": 4, "swap_memory": "1MiB"},
    {"memory_fraction": 1.0},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("as_object", [False, True], ids=["dict", "object"])
@pytest.mark.parametrize("fields", MEMORY_CONFIGS, ids=lambda fields: " ".join(fields))
@pytest.mark.parametrize("route", ["packed", "hf_loop"])
def test_every_field_of_cache_config_is_honoured(fields: dict[str, Any], as_object: bool, route: str) -> None:
    model = models.shared("llama")
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": models.VOCAB, "pad_token_id": models.PAD}
    if route == "hf_loop":
        options["prompt_lookup_num_tokens"] = 2
    expected = model.generate(IDS, **options)
    cache_config = hf_paged.CacheConfig(**fields) if as_object else fields
    with hf_paged.record_calls() as records:
        paged = model.generate(IDS, **options, cache_implementation="paged", cache_config=cache_config)
    assert torch.equal(paged, expected)
    assert records[0].route == route and records[0].block_size == fields.get("block_size", 16)
    if "memory" in fields:
        assert 0 < records[0].kv_bytes_reserved <= 16384
        with pytest.raises(hf_paged.OutOfBlocks):
            model.generate(
                IDS, **{**options, "max_new_tokens": 60}, cache_implementation="paged", cache_config=cache_config
            )
    assert conftest.blocks_in_use() == 0


def test_a_cache_of_another_model() -> None:
    model, other = models.shared("llama"), models.shared("gemma3")
    ids = torch.cat([IDS, IDS], dim=1)
    options = {
        "max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "cache_implementation": "paged",
    }  # fmt: skip
    filled = model.generate(IDS, **options).past_key_values
    length = filled.get_seq_length()
    with pytest.raises(ValueError, match=rf"{CACHE} has 2 layers, Gemma3ForCausalLM 3.*another model"):
        other.generate(ids, **{CACHE: filled}, **options)
    wide = models.shared("qwen3").generate(IDS, **options).past_key_values
    with pytest.raises(ValueError, match=rf"layer 0 of {CACHE} has 2 K/V heads of size 16.*2 of size 8"):
        model.generate(ids, **{CACHE: wide}, **options)
    with pytest.raises(ValueError, match=r"writes layer 2.*made for 2 layers.*another model"):
        other(IDS, **{CACHE: hf_paged.PagedKVCache(model.config)})
    assert filled.get_seq_length() == length
    for cache in (filled, wide):
        cache.check_integrity()
        cache.reset()
