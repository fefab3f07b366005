"""The loop that computes all tokens of a draft in one native call: what the model's own steps draft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GraniteConfig, LlamaConfig, MistralConfig, Qwen3Config

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.config import SchedulerConfig
from hf_paged.features.speculation.draft_model import ModelDrafter
from hf_paged.features.speculation.drafts import Wanted
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.draft import DraftLoop
from tests.noted import note_calls

pytestmark = pytest.mark.skipif(
    not (fused_ops.is_available(torch.bfloat16) and fused_ops.packs()), reason="AVX-512 with BF16 is needed"
)

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 523, "max_position_embeddings": 512,
}  # fmt: skip
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def build(config: type, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, "initializer_range": 0.3, **options}))
    model.generation_config.assistant_confidence_threshold = 0.0
    return model.to(torch.bfloat16).eval()


def made(model: Any, num_blocks: int = 64) -> ModelDrafter:
    return ModelDrafter(model, num_blocks, 4, SchedulerConfig(max_num_seqs=16))


def texts(count: int, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, 500, (count, length), generator=generator).tolist()


def drafts_of(drafter: ModelDrafter, known: list[list[int]], most: int = 5) -> list[list[int]]:
    return drafter.draft([Wanted(number, text, most) for number, text in enumerate(known)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 3, 11])
@pytest.mark.parametrize("kind", [*KINDS, "llama in int8"])
def test_the_loop_drafts_what_steps_draft(kind: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(KINDS[kind.split()[0]], tie_word_embeddings=kind == "llama")
    if "int8" in kind:
        hf_paged.prepack(model, dtype="int8")
    calls = note_calls(monkeypatch, DraftLoop, "draft", lambda loop, memory, seq_ids, *_, **__: len(seq_ids))
    quick, slow = made(model, 400), made(model, 400)
    slow._attempts, slow._loop = 0, None
    known, right, first = texts(count), 0, 0
    for round_ in range(6):
        calls.clear()
        one = drafts_of(quick, known)
        assert calls == [count]
        other = drafts_of(slow, known)
        right += sum(a == b for x, y in zip(one, other) for a, b in zip(x, y, strict=True))
        first += sum(x[0] == y[0] for x, y in zip(one, other))
        # Some drafts are right to their end, some in part, some are wrong.
        known = [[*text, *draft[: number % 7], 7] for number, (text, draft) in enumerate(zip(known, other), round_)]
    # Logits in bf16 have ties; after another token all are others.
    assert first >= 0.8 * 6 * count and right >= 0.7 * 6 * 5 * count
    for drafter in (quick, slow):
        drafter.close()


def test_a_model_that_computes_otherwise_is_not_trusted() -> None:
    drafter = made(build(GraniteConfig, embedding_multiplier=4.0, residual_multiplier=1.0, attention_multiplier=0.2))
    assert drafter._loop is None and not drafter._is_trusted
    assert all(len(draft) == 5 for draft in drafts_of(drafter, texts(2)))


def test_the_loop_stays_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it a step may read more chunks than the last one, for which there is memory."""

    def end_of(loop: DraftLoop, memory: Any, seq_ids: Any, computed: Any, new: Any, steps: int, *args: Any) -> int:
        return max(before + len(tokens) for before, tokens in zip(computed, new)) + steps

    ends = note_calls(monkeypatch, DraftLoop, "draft", end_of)
    drafter = made(build(MistralConfig, sliding_window=24))
    assert drafter._is_trusted
    ends.clear()
    known = texts(2, 18)
    for _ in range(6):
        assert [len(draft) for draft in drafts_of(drafter, known)] == [5, 5]
        known = [[*text, 7] for text in known]
    assert ends == [22, 23, 24]
    drafter.close()


def test_other_weights_make_another_loop() -> None:
    model = build(LlamaConfig)
    drafter = made(model)
    loop, known = drafter._loop, texts(1)
    assert loop is not None and drafter._is_trusted
    before = drafts_of(drafter, known)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    known[0].append(5)
    for _ in range(4):
        known[0].append(6)
        drafts_of(drafter, known)
    assert drafter._loop is not loop and drafter._is_trusted
    expected, found = 0, 0
    for length in range(8, 24):
        known = texts(1, 40)[0][:length]
        with torch.no_grad():
            logits = model(torch.tensor([known])).logits[0, -1]
        (draft,) = drafts_of(drafter, [known], 1)
        found += bool(logits[draft[0]] >= logits.max() - 0.1)
        expected += 1
    assert found >= 0.85 * expected and drafts_of(drafter, texts(1)) != before


def test_another_loop_has_the_new_weights_of_layers() -> None:
    model = build(LlamaConfig)
    drafter = made(model)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.copy_(model.model.layers[1].mlp.down_proj.weight.flip(0))
    for length in range(8, 12):
        drafts_of(drafter, [texts(1)[0][:length]])
    assert drafter._is_trusted
    drafter.close()


def test_a_threshold_ends_drafts_of_the_loop() -> None:
    model = build(LlamaConfig)
    model.generation_config.assistant_confidence_threshold = 0.1
    quick, slow = made(model), made(model)
    slow._attempts, slow._loop = 0, None
    lengths, same = [], 0
    for length in range(8, 20):
        known = [text[:length] for text in texts(2)]
        one, other = drafts_of(quick, known, 8), drafts_of(slow, known, 8)
        lengths += map(len, one)
        same += sum(a == b for a, b in zip(map(len, one), map(len, other)))
    assert same > 0.6 * len(lengths) and 0 < sum(lengths) < 8 * len(lengths)


def test_an_engine_with_the_loop_returns_what_it_returns_without() -> None:
    model, small = build(LlamaConfig, num_hidden_layers=4), build(LlamaConfig)
    config = GenerationConfig(max_new_tokens=24, eos_token_id=None, pad_token_id=0, do_sample=False)
    always = GenerationConfig(**{**config.to_dict(), "num_assistant_tokens_schedule": "constant"})
    for cache in (CacheConfig(memory="4MiB"), CacheConfig(num_blocks=22, block_size=4)):
        exact = {"batch_invariant": True}
        with Engine(model, cache, exact) as engine:
            plain = engine.generate(texts(5), config)
        for assistant in (small, model):
            with Engine(model, cache, exact, assistant_model=assistant) as engine:
                drafter = engine._stepper.drafting.drafter
                assert isinstance(drafter, ModelDrafter) and drafter._is_trusted
                outputs = engine.generate(texts(5), always)
                assert engine.stats().drafted_tokens and engine.stats().blocks_used == 0
                assert assistant is small or engine.stats().accepted_tokens > 0.6 * engine.stats().drafted_tokens
            assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    hf_paged.release_memory()
