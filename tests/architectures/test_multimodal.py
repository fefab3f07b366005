"""Multimodal models: which calls run packed, which through the dense view, and which are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import hf_paged
from hf_paged.integration.attention import _pattern, pattern_of_call
from hf_paged.integration.names import CACHE
from tests.architectures import vision
from tests.architectures.multimodal import llava, randomised
from tests.architectures.sweep import examine_engine
from tests.architectures.tiny import tiny_config, tiny_model
from tests.versions.marks import needs_media, since


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    result: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **options)
    return result


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask int64 [3, 9], left-padded."""
    ids = torch.randint(6, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :6] = 0
    return ids * mask, mask


@needs_media
def test_requests_to_a_vision_language_model_are_packed() -> None:
    model = randomised(llava())
    ids, mask = prompts()
    for options in ({}, {"num_beams": 3}):
        plain = generate(model, ids, mask, **options)
        with hf_paged.record_calls() as records:
            assert torch.equal(generate(model, ids, mask, cache_implementation="paged", **options), plain)
        assert (records[0].route, records[0].reason) == ("packed", None)


def _decoder(model_type: str, class_name: str) -> Any:
    config = tiny_config(model_type)
    config.add_cross_attention, config.cross_attention_hidden_size = True, 64
    model = randomised(getattr(transformers, class_name)(config))
    for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
    return model


def test_cross_attention_that_a_model_keeps_apart_stays_out_of_the_blocks() -> None:
    """The model wraps only a DynamicCache in an EncoderDecoderCache. Any other class would mix up the K/V."""
    model = _decoder("whisper", "WhisperForCausalLM")
    states = torch.randn(2, 11, 64, generator=torch.Generator().manual_seed(3))
    given = {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "return_dict_in_generate": True}
    ids = prompts()[0][:2, 3:]
    plain = generate(model, ids, **given)
    assert isinstance(plain.past_key_values, EncoderDecoderCache)
    with hf_paged.record_calls() as records:
        paged = generate(model, ids, cache_implementation="paged", cache_config={"block_size": 4}, **given)
    assert torch.equal(paged.sequences, plain.sequences)
    assert records[0].peak_blocks_used == 2 * -(-(ids.shape[1] + 11) // 4)
    # The returned cache can be continued.
    turn = torch.cat([plain.sequences, ids[:, :2]], dim=1)
    expected = generate(model, turn, **{CACHE: plain.past_key_values}, **given)
    actual = generate(model, turn, **{CACHE: paged.past_key_values}, cache_implementation="paged", **given)
    assert torch.equal(actual.sequences, expected.sequences)


def test_cross_attention_that_a_model_keeps_among_its_tokens() -> None:
    """As over a DynamicCache: each step appends the encoder's K/V to the tokens', and the next step attends to it."""
    model = _decoder("prophetnet", "ProphetNetForCausalLM")
    states = torch.randn(2, 11, 64, generator=torch.Generator().manual_seed(3))
    given = {"encoder_hidden_states": states, "return_dict_in_generate": True}
    ids = prompts()[0][:2, 3:]
    plain = generate(model, ids, **given)
    paged = generate(model, ids, cache_implementation="paged", **given)
    assert torch.equal(paged.sequences, plain.sequences)
    assert paged.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length() > ids.shape[1] + 12


def test_attention_in_both_directions_without_a_mask_is_not_packed() -> None:
    model = vision.build(vision.paligemma)
    report = hf_paged.check(model)
    assert report.supported and not report.native
    ids = prompts()[0][1:2]  # not padded: the model gets no mask
    plain = generate(model, ids)
    changed = ids.clone()
    changed[0, -1] = 7
    states = [model(x, output_hidden_states=True).hidden_states[-1][0, 0] for x in (ids, changed)]
    assert not torch.allclose(*states)  # the first token sees the last one
    config = transformers.GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with hf_paged.Engine(model) as engine:
        (output,) = engine.generate([ids[0].tolist()], config)
    assert list(output.outputs[0].token_ids) == plain[0, ids.shape[1] :].tolist()


def test_a_mask_of_both_directions_is_refused_by_its_mechanism() -> None:
    from transformers.masking_utils import blockwise_overlay, causal_mask_function, or_masks

    mask = or_masks(causal_mask_function, blockwise_overlay(torch.tensor([[-1, 0, 0, -1]])))
    pattern = _pattern(mask_function=mask)
    assert pattern is not None and "attend to later ones, as within an image" in str(pattern.obstacle)
    with pytest.raises(hf_paged.UnsupportedModelError, match="attend to later ones"):
        pattern_of_call(torch.nn.Identity(), pattern, None)


@pytest.mark.slow
def test_positions_that_a_model_counts_itself() -> None:
    """The model starts at padding_idx + 1 and ignores the positions from generate."""
    model = tiny_model("Kosmos2_5ForConditionalGeneration")
    ids, mask = prompts()
    assert torch.equal(generate(model, ids, mask, cache_implementation="paged"), generate(model, ids, mask))
    assert examine_engine(model, ids, mask) == "identical"


@pytest.mark.parametrize(("class_name", "reason"), [
    pytest.param("UnlimitedOcrForConditionalGeneration",
                 "its cache layers .*ReferenceSlidingWindowLayer.* hold something other than",
                 marks=since("5.20", "has no such class")),
    ("IdeficsForVisionText2Text", "cannot be tried on a few tokens of text alone .*pixel_values"),
])  # fmt: skip
def test_refusals_name_the_mechanism(class_name: str, reason: str) -> None:
    model = tiny_model(class_name)
    assert re.search(reason, hf_paged.check(model).reason), hf_paged.check(model).reason
    with pytest.raises(hf_paged.UnsupportedModelError, match=reason):
        hf_paged.Engine(model)
