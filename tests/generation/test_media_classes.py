"""Every class that generates text from images, videos or sound in the engine: tokens and log-probabilities of plain
`generate`, with whole prompts and with chunks that cut media."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from tests.architectures.media import CASES, build, rows
from tests.architectures.vision import Row

QUICK: frozenset[str] = frozenset()
TOLERANCE = 2e-5
LARGER = dict.fromkeys(
    ("llava_next-image", "llava_next_video-image", "ovis2-image", "video_llama_3-video", "video_llava-image"), 3e-5
)
"""With these weights, plain `generate` in float32 differs from float64 by 6e-5 to 3e-4."""


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def config() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)


def plain(model: Any, row: Row) -> tuple[list[int], torch.Tensor]:
    ids = torch.tensor([row.ids])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **row.inputs, generation_config=config(),
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = output.sequences[0, len(row.ids) :]
    logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs


def other(row: Row) -> Row:
    """The same prompt with other media."""
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: value + 0.5 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in row.inputs.items()
    }
    return Row(row.ids, changed)


@pytest.mark.parametrize("name", cases())
def test_equal_to_generate(name: str) -> None:
    model = build(CASES[name])
    prompts = rows(model, CASES[name])
    expected = [plain(model, row) for row in prompts]
    changed = plain(model, other(prompts[0]))[1]
    assert (changed - expected[0][1]).abs().max() > 1e-3, "the model does not see its media"
    for budget in (512, 16, 5):
        with Engine(model, CacheConfig(memory="1MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
            names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in prompts]
            finished = {}
            while engine.has_unfinished_requests():
                finished.update({output.request_id: output for output in engine.step() if output.finished})
        for request, (tokens, logprobs) in zip(names, expected):
            output = finished[request]
            assert output.error is None and output.outputs[0].token_ids == tokens
            torch.testing.assert_close(
                torch.tensor(output.outputs[0].logprobs), logprobs, atol=LARGER.get(name, TOLERANCE), rtol=0
            )
