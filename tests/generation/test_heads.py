"""Models with other heads than that of a language model: what their own forward gives for each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing
from transformers import AutoConfig, PreTrainedTokenizerFast

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig, UnsupportedModelError
from tests import models
from tests.model import adapted

PROMPTS = [prompt.tolist() for prompt in models.prompts(9, 33, 1, 20, 9)]
STEPS = SchedulerConfig(max_num_batched_tokens=14)
DECODERS = ("llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt2")
pytestmark = adapted.IGNORED
ENCODERS = ("bert", "modernbert", "roberta", "distilbert", "electra")

KINDS = ("SequenceClassification", "TokenClassification", "")
CASES = [(name, kind) for name in (*DECODERS, *ENCODERS) for kind in KINDS if (name, kind[:5]) != ("gemma3", "Token")]


def built(family: str, kind: str, **options: Any) -> Any:
    """A tiny model of a class for `kind`; "": without a head."""
    if family in models._CONFIGS:
        config: Any = models._CONFIGS[family]()
    elif family == "distilbert":
        config = AutoConfig.for_model(family, dim=32, hidden_dim=48, n_layers=3, n_heads=4, vocab_size=96)
    else:
        config = AutoConfig.for_model(
            family, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=96,
            local_attention=8, global_attn_every_n_layers=2, embedding_size=32,
            pad_token_id=1, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
        )  # fmt: skip
    vars(config).update({"initializer_range": 0.3, "num_labels": 3} | options)
    config.num_labels = options.get("num_labels", 3)
    torch.manual_seed(0)
    auto: Any = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    made = auto.from_config(config, dtype=torch.float32)
    if family == "gemma2":  # SDPA of transformers 5.17 leaves its cap out
        made.set_attn_implementation("eager")
    return made.eval()


@torch.no_grad()
def own(model: Any, ids: list[int], **given: Any) -> Any:
    return model(torch.tensor([ids]), **given)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_heads(family: str, kind: str) -> None:
    """Of prompts that share steps, and are cut by their budget."""
    model = built(family, kind)
    wanted = [own(model, prompt)[0][0] for prompt in PROMPTS]
    assert family in DECODERS or not torch.allclose(own(model, [5, 6])[0][0], own(model, [5, 7])[0][0], atol=1e-3)
    with Engine(model, CacheConfig(), STEPS) as engine:
        found = engine.classify(PROMPTS) if kind else engine.embed(PROMPTS, "mean", normalize=False)
        close(found, wanted if kind else [states.mean(0) for states in wanted])
        assert engine.stats().num_running == 0


def test_encoders_whose_row_depends_on_a_token_or_on_its_length() -> None:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    esm, bert = {"token_dropout": True, "mask_token_id": 32}, {"num_key_value_heads": 4, "rope_parameters": rope}
    for model in (built("esm", KINDS[0], **esm), built("eurobert", KINDS[0], **bert)):
        prompts = [*PROMPTS, [5, 32, 32, 8]]
        with Engine(model) as engine:
            close(engine.classify(prompts), [own(model, prompt)[0][0] for prompt in prompts])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_encoders_with_other_attention_adapters_and_hooks(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.features.encoders.both_ways._PADDED", 0)
    model = built("modernbert", "TokenClassification")
    model.set_attn_implementation(implementation)
    adapted.add(model, adapted.lora(["Wqkv"]), "x")
    with Engine(model, CacheConfig(), STEPS) as engine:
        with_adapter = [own(model, prompt).logits[0] for prompt in PROMPTS]
        close(engine.classify(PROMPTS, adapter="x"), with_adapter)
        assert not torch.allclose(engine.classify(PROMPTS[:1], adapter="__base__")[0], with_adapter[0], atol=1e-3)
        with pytest.raises(ValueError, match="have no types"):
            engine.classify([[5, 6]], [[0, 1]])
        handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 0.9)
        close(engine.classify(PROMPTS, adapter="x"), [own(model, prompt).logits[0] for prompt in PROMPTS])
        handle.remove()


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_cross_encoder(family: str) -> None:
    """The texts of a pair have token types, where the model has them."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", "[SEP]", "[CLS]", *"abcdefg"])}, "?"))
    words.pre_tokenizer, words.post_processor = Whitespace(), BertProcessing(("[SEP]", 1), ("[CLS]", 2))
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=names, pad_token="?")
    model, query, documents = built(family, "SequenceClassification", num_labels=1), "a b", ["c", "d e f", "g a"]
    pairs = [tokenizer(query, document, return_tensors="pt") for document in documents]
    with torch.no_grad():
        wanted = [float(model(**pair).logits) for pair in pairs]
    assert family == "roberta" or wanted[1] != pytest.approx(float(own(model, pairs[1].input_ids[0].tolist()).logits))
    with Engine(model, CacheConfig(), tokenizer=tokenizer) as engine:
        assert engine.rank(query, documents) == pytest.approx(wanted, abs=2e-5)
        with pytest.raises(ValueError, match="token_types has 2; the types of this model are 0 to"):
            engine.classify([[3, 4]], [[0, 2]])
        if family == "bert":
            ids, types = ([pair[name][0].tolist() for pair in pairs] for name in ("input_ids", "token_type_ids"))
            assert [*map(float, engine.classify(ids, types))] == pytest.approx(wanted, abs=2e-5)
            halves = [row[:3] for row in ids], [row[3:] for row in ids]
            assert engine.reward(*halves, token_types=types) == pytest.approx(wanted, abs=2e-5)
            with pytest.raises(ValueError, match="one number for each token"):
                engine.classify(ids, types[::-1])


def test_an_adapter_for_labels_an_instruction_and_a_reward() -> None:
    peft = pytest.importorskip("peft")
    labels = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(built("llama", "SequenceClassification"), labels).eval()
    with Engine(tuned, CacheConfig(num_blocks=64), STEPS) as engine:
        close(engine.classify(PROMPTS), [own(tuned, prompt).logits[0] for prompt in PROMPTS])
    valued = built("qwen3", "SequenceClassification", num_labels=1)
    with Engine(valued, CacheConfig(num_blocks=64), STEPS) as engine:
        wanted = [float(own(valued, PROMPTS[1] + prompt).logits) for prompt in PROMPTS]
        assert engine.reward([PROMPTS[1]] * len(PROMPTS), PROMPTS) == pytest.approx(wanted, abs=2e-5)
    embedder, instruction = built("mistral", ""), PROMPTS[1][:32]
    with Engine(embedder, CacheConfig(num_blocks=64, block_size=16), STEPS) as engine:
        for prompts in (PROMPTS[:1], PROMPTS):
            found = engine.embed([instruction + prompt for prompt in prompts])
            states = [own(embedder, instruction + prompt)[0][0, -1] for prompt in prompts]
            close(found, [torch.nn.functional.normalize(each, dim=0) for each in states])
        assert engine.stats().prefix_cache_hit_tokens >= 32 * len(PROMPTS)


def test_encoders_that_do_not_run_are_refused() -> None:
    for kind, does in (("", "embeds"), ("SequenceClassification", "classifies")):
        report = hf_paged.check(built("bert", kind))
        assert report.encodes and f"no language-modelling head: the engine {does} with it" in report.reason
    with pytest.raises(
        UnsupportedModelError, match=r"computes attention with code of its own.*; call the model itself"
    ):
        Engine(built("deberta-v2", "SequenceClassification"))
    model = built("bert", "", max_position_embeddings=24)
    with pytest.raises(ValueError, match="num_blocks=8: BertModel keeps no K/V"):
        Engine(model, CacheConfig(num_blocks=8))
    with pytest.raises(ValueError, match="memory='1GB': BertModel is an encoder and keeps no K/V"):
        Engine(model, CacheConfig(memory="1GB"))
    with pytest.raises(ValueError, match="batch_invariant=True: BertModel is an encoder"):
        Engine(model, None, SchedulerConfig(batch_invariant=True))
    with Engine(model) as engine, pytest.raises(ValueError, match="24"):
        engine.embed(PROMPTS)
