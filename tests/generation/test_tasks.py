"""`Engine.embed`, `decide`, `classify`, `reward`, `rank`: what the model's own forward gives for each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from hf_paged import CacheConfig, Engine, EngineError, SchedulerConfig, UnsupportedModelError, weights_changed
from hf_paged.model.hidden import HiddenStates
from tests import models
from tests.generation import solo
from tests.model import adapted
from tests.serving.harness import tokenizer

PROMPTS = [prompt.tolist() for prompt in models.prompts(9, 33, 1, 20)]
MEMORY, STEPS = CacheConfig(num_blocks=64, block_size=4), SchedulerConfig(max_num_batched_tokens=14)
close = torch.testing.assert_close


def labelled(family: str, kind: str = "SequenceClassification", num_labels: int = 3, **options: Any) -> Any:
    config: Any = models._CONFIGS[family]()
    config.num_labels = num_labels
    vars(config).update(options)
    torch.manual_seed(0)
    auto: Any = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    return auto.from_config(config, dtype=torch.float32).eval()


def test_dimensions_of_a_head_on_a_projection() -> None:
    narrow = {"word_embed_proj_dim": 16, "hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 4, "vocab_size": 99}
    config = transformers.OPTConfig(**narrow, num_hidden_layers=1, max_position_embeddings=64)
    with Engine(transformers.OPTForCausalLM(config).eval(), MEMORY) as engine:
        assert [len(each) for each in engine.embed(PROMPTS, dimensions=16)] == [16] * len(PROMPTS)
        with pytest.raises(ValueError, match="dimensions=17: a vector of this model has 16"):
            engine.embed(PROMPTS, dimensions=17)


@torch.no_grad()
def own(model: Any, ids: list[int]) -> Any:
    return model(torch.tensor([ids]))


def test_embeddings() -> None:
    model, headless = models.shared("qwen3"), labelled("qwen3", "")
    states = [own(model.model, prompt).last_hidden_state[0] for prompt in PROMPTS]
    poolings: dict[Any, Any] = {"last": lambda s: s[-1], "cls": lambda s: s[0], "mean": lambda s: s.mean(0)}
    with Engine(model, MEMORY, STEPS) as engine, Engine(headless, MEMORY, STEPS) as bare:
        for name, pool in poolings.items():
            found = engine.embed(PROMPTS, name, normalize=False)
            close(found, [pool(each) for each in states], atol=2e-5, rtol=2e-5)
            unit = torch.nn.functional.normalize(pool(states[1])[:8], dim=0)
            close(engine.embed(PROMPTS[1:2], name, dimensions=8), [unit], atol=2e-5, rtol=2e-5)
            wanted = [pool(own(headless, prompt).last_hidden_state[0]) for prompt in PROMPTS]
            close(bare.embed(PROMPTS, name, False), wanted, atol=2e-5, rtol=2e-5)
        for wrong in ({"pooling": "max"}, {"dimensions": 0}, {"dimensions": True}, {"normalize": 1}, {"prompts": [[]]}):
            with pytest.raises(ValueError, match=r"pooling=|dimensions=|normalize=|prompt is empty"):
                engine.embed(**{"prompts": PROMPTS, **wrong})  # type: ignore[arg-type]
        steps = engine.stats().steps
        with pytest.raises(ValueError, match="dimensions=33: a vector of this model has 32; give at most so many"):
            engine.embed(PROMPTS, dimensions=33)
        assert engine.stats().steps == steps
        with pytest.raises(RuntimeError, match=r"prompt 1 was not computed .*\(deadline\)"):
            engine.embed(PROMPTS, deadline=1e-9)
        with pytest.raises(UnsupportedModelError, match="Qwen3Model has no language-modelling head"):
            bare.generate(PROMPTS)
        solo.assert_idle(engine)


def test_decisions() -> None:
    model, options = models.shared("llama"), [[5], [6, 7], [5, 9, 9]]
    with Engine(model, MEMORY, STEPS) as engine:
        found = engine.decide(PROMPTS[1], options)
        assert engine.stats().prefix_cache_hit_tokens == 2 * 32
        close(torch.tensor(found), torch.stack([s.sum() for s in engine.score([PROMPTS[1]] * 3, options)]))
        with pytest.raises(ValueError, match="options: the prompt is empty"):
            engine.decide(PROMPTS[1], [[5], []])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_labels(family: str) -> None:
    model = labelled(family)
    pad = model.config.pad_token_id
    prompts = [*PROMPTS, [5, 6, pad], [pad, pad]]
    with Engine(model, MEMORY, STEPS) as engine:
        close(engine.classify(prompts), [own(model, prompt).logits[0] for prompt in prompts], atol=2e-5, rtol=2e-5)
        with pytest.raises(ValueError, match="ForSequenceClassification have no types"):
            engine.classify(prompts, prompts)
        for method, words in ((engine.reward, "has 3 labels"), (engine.score, "score: .*has no language-modelling")):
            with pytest.raises(UnsupportedModelError, match=words):
                method(PROMPTS, PROMPTS)
    with Engine(models.shared(family)) as engine, pytest.raises(UnsupportedModelError, match="no head for labels"):
        engine.classify(PROMPTS)


def test_an_engine_follows_a_classifier() -> None:
    model = labelled("llama", attention_dropout=0.5)
    with Engine(model, MEMORY, STEPS) as engine:
        first = engine.classify(PROMPTS)
        model.model.layers[0].self_attn.v_proj.weight.data[0] *= 9
        weights_changed(model)
        found = engine.classify(PROMPTS)
        assert not torch.allclose(found[1], first[1], atol=1e-3)
        close(found, [own(model, prompt).logits[0] for prompt in PROMPTS], atol=2e-5, rtol=2e-5)
        model.train()
        with pytest.raises(UnsupportedModelError, match="in training mode, where dropout"):
            engine.classify(PROMPTS)
    model.eval().forward = model.model.forward
    with pytest.raises(UnsupportedModelError, match="forward of this LlamaForSequenceClassification was replaced"):
        Engine(model, MEMORY)


def test_an_embedding_needs_nothing_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    model.generation_config.stop_strings, model.generation_config.guidance_scale = ["x"], 2.0
    adapted.add(model, adapted.lora(["q_proj"]), "x")
    with Engine(model, MEMORY, STEPS) as engine:
        engine.embed(PROMPTS, adapter="x")
        for name, value in {"logprobs": 1, "logits_processor": [max], "stopping_criteria": [max]}.items():
            with pytest.raises(ValueError, match=rf"{name}=.*: no token follows the prompt of task=Embedding"):
                engine.embed(PROMPTS[:1], **{name: value})
        monkeypatch.setattr(HiddenStates, "take", lambda _: None)
        with pytest.raises(EngineError, match="without the forward of its base model"):
            engine.embed(PROMPTS[2:3])


def test_labels_of_tokens_rewards_pairs_and_adapters() -> None:
    tokens, texts = labelled("qwen3", "TokenClassification"), tokenizer()
    with Engine(tokens, MEMORY, STEPS) as engine:
        close(engine.classify(PROMPTS), [own(tokens, p).logits[0] for p in PROMPTS], atol=2e-5, rtol=2e-5)
    model = labelled("llama", num_labels=1, vocab_size=len(texts))
    adapted.add(model, adapted.lora(["q_proj"]), "x")
    with Engine(model, MEMORY, STEPS, tokenizer=texts) as engine:
        wanted = [float(own(model, prompt + PROMPTS[0]).logits) for prompt in PROMPTS]
        assert engine.reward(PROMPTS, [PROMPTS[0]] * 4, adapter="x") == pytest.approx(wanted, abs=2e-5)
        assert engine.reward(PROMPTS, [PROMPTS[0]] * 4, adapter="__base__") != pytest.approx(wanted, abs=1e-2)
        pairs = [float(own(model, texts("a list", document).input_ids).logits) for document in ("of", "a tuple")]
        assert engine.rank("a list", ["of", "a tuple"], adapter="x") == pytest.approx(pairs, abs=2e-5)
        with pytest.raises(ValueError, match="a list of documents"):
            engine.rank("a list", "of")
        with pytest.raises(UnsupportedModelError, match=r"rank with answers: .* no language-modelling head"):
            engine.rank("a", ["b"], answers=("a", "b"), template="{query}{document}")
    writer = labelled("llama", "CausalLM", vocab_size=len(texts))
    template = "{document}: {query}?"
    with Engine(writer, MEMORY, STEPS, tokenizer=texts) as engine:
        found = engine.rank("a {document}", ["of", "a tuple"], answers=(" is", " of"), template=template)
        yes, no = (texts(each, add_special_tokens=False).input_ids[0] for each in (" is", " of"))
        for document, logit in zip(("of", "a tuple"), found):
            ids = texts(f"{document}: a {{document}}?", add_special_tokens=False).input_ids
            assert logit == pytest.approx(float((row := own(writer, ids).logits[0, -1])[yes] - row[no]), abs=2e-5)
        for answers, given, message in (
            ((" is", " of"), None, "belong together"), (("Zqx", "a"), template, "of one token each"),
            ((" is", " is"), template, "both of these are token"), ((1, 2), template, "give two texts"),
            (None, None, "has no head for labels; .* give answers="), ((" is", " of"), 5, "template: give a text"),
            ((" is", " of"), "{query}", "write {query} and {document}"),
        ):  # fmt: skip
            with pytest.raises((ValueError, UnsupportedModelError), match=message):
                engine.rank("a", ["b"], answers=answers, template=given)
