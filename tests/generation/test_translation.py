"""Drafts by models with other tokenizers: what they guess, and that results are those without them."""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.speculation.draft_model import ModelDrafter
from hf_paged.features.speculation.drafts import Wanted
from hf_paged.features.speculation.translation import TranslatedDrafter
from hf_paged.serving.loading import load_engine
from hf_paged.serving.speculative import SpeculativeConfig
from tests import models
from tests.generation.grammars import QA, tokenizer
from tests.generation.test_speculation import ALWAYS, EXACT, config

TEXTS = ["<|bos|><|user|>What does str.capitalize() do?<|assistant|>", "<|bos|>A list of", "<|bos|>The 日本é"]


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def qa() -> Any:
    return AutoModelForCausalLM.from_pretrained(QA, dtype=torch.float32).eval()


@functools.cache
def shuffled() -> tuple[Any, Any]:
    """The checkpoint with other token ids, and a larger vocabulary: the model and its tokenizer."""
    data = json.loads(tokenizer().backend_tokenizer.to_str())
    ids = list(range(len(tokenizer())))
    random.Random(0).shuffle(ids)
    data["model"]["vocab"] = {token: ids[index] for token, index in data["model"]["vocab"].items()}
    for token in data["added_tokens"]:
        token["id"] = ids[token["id"]]
    data["post_processor"]["special_tokens"]["<|bos|>"]["ids"] = [ids[tokenizer().bos_token_id]]
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    model, weight = qa(), qa().get_input_embeddings().weight
    head = qa().get_output_embeddings().weight
    model.resize_token_embeddings(len(ids) + 5)
    with torch.no_grad():
        for part, values in ((model.get_input_embeddings(), weight), (model.get_output_embeddings(), head)):
            part.weight.zero_()
            part.weight[torch.tensor(ids)] = values
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = 4
    return model, own


class Quoting:
    """Drafts in characters from a text."""

    def __init__(self, text: str, own: Any) -> None:
        self.text, self.own = text, own
        self.known: dict[int, list[int]] = {}

    def go_back(self, seq_id: int, num_tokens: int) -> None:
        del self.known.setdefault(seq_id, [])[num_tokens:]

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts = []
        for seq_id, ids, most in wanted:
            known = self.known[seq_id]
            assert ids[: len(known)] == known  # what has not been taken back is the same
            self.known[seq_id] = list(ids)
            text = self.own.decode(ids)
            assert self.text.startswith(text)
            drafts.append(self.own(self.text[len(text) : len(text) + most])["input_ids"])
        return drafts


def characters(text: str) -> Any:
    """A tokenizer of characters, "ab" and "abc"."""
    tokens = ["[UNK]", *sorted({*text, *"abc"}), "ab", "abc"]
    merges = [("a", "b"), ("ab", "c")]
    own = Tokenizer(token_models.BPE({token: index for index, token in enumerate(tokens)}, merges, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    own.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=own)


def test_text_is_what_both_have_in_common() -> None:
    text = "The list abc of strings, the list of abcabc and é日本 strings and the ab list. " * 3
    ids, own = encode(text), characters(text)
    drafter = TranslatedDrafter(Quoting(text, own), tokenizer(), own)
    rng, at, other, right, drafted = random.Random(0), 1, 2, 0, 0
    while at < len(ids) - 4:
        wanted = [Wanted(7, ids[:at], 8), Wanted(8, ids[:other], 8)]
        for (_, known, most), draft in zip(wanted, drafter.draft(wanted), strict=True):
            assert len(draft) <= most
            count = len(known)
            drafted += len(draft)
            right += next((i for i, token in enumerate(draft) if token != ids[count + i]), len(draft))
        at, other = at + rng.choice([1, 1, 2, 5]), min(other + 1, len(ids) - 4)
    assert right > 0.8 * drafted > 50  # a draft may end within a token


def test_no_draft_within_a_character() -> None:
    text = "A日本 list"
    ids, own = encode(text), characters(text)
    halves = [at for at in range(1, len(ids)) if tokenizer().decode(ids[:at]).endswith("\ufffd")]
    assert halves
    drafter = TranslatedDrafter(Quoting(text, own), tokenizer(), own)
    drafts = {at: drafter.draft([Wanted(7, ids[:at], 4)])[0] for at in range(1, len(ids))}
    assert [at for at, draft in drafts.items() if not draft] == halves


@pytest.mark.parametrize("do_sample", [False, True])
def test_results_are_those_without_drafts(do_sample: bool) -> None:
    options = {"max_new_tokens": 48, "eos_token_id": 2, "do_sample": do_sample}
    model, (small, own) = qa(), shuffled()
    prompts = [encode(text) for text in TEXTS]

    def run(**given: Any) -> tuple[list[Any], Any]:
        configs = [config(seed, {"num_assistant_tokens": 4, **ALWAYS}, **options) for seed in range(3)]
        with Engine(model, CacheConfig(memory="8MiB"), EXACT, tokenizer=tokenizer(), **given) as engine:
            outputs = engine.generate(prompts, configs)
            return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], engine.stats()

    plain, _ = run()
    drafted, stats = run(assistant_model=small, assistant_tokenizer=own)
    assert drafted == plain
    # A model that reads other tokens before a boundary may guess others.
    assert stats.accepted_tokens > (0.25 if do_sample else 0.6) * stats.drafted_tokens > 10


@pytest.mark.parametrize("rows", [1, 3])
def test_generate(rows: int) -> None:
    model, (small, own) = qa(), shuffled()
    prompts = [encode(text) for text in TEXTS[:rows]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    tokenizers = {"tokenizer": tokenizer(), "assistant_tokenizer": own}
    with hf_paged.record_calls() as calls:
        found = model.generate(ids, cache_implementation="paged", assistant_model=small, **tokenizers, **options)
    assert torch.equal(found, plain)
    assert calls[-1].route == ("packed" if rows > 1 else "hf_loop")
    assert rows == 1 or calls[-1].steps < 16  # rows go on alone


def test_equal_vocabularies_need_no_translation() -> None:
    model, same = qa(), qa()
    same.resize_token_embeddings(model.config.vocab_size + 3)  # padded otherwise
    with Engine(
        model, CacheConfig(memory="8MiB"), tokenizer=tokenizer(), assistant_model=same, assistant_tokenizer=tokenizer()
    ) as engine:
        assert not isinstance(engine._stepper.speculation.drafter, TranslatedDrafter)


@pytest.mark.slow
def test_a_server_translates(tmp_path: Path) -> None:
    """Also if only the numbers of the tokens differ, not how many there are."""
    small, own = copy.deepcopy(shuffled()[0]), shuffled()[1]
    small.resize_token_embeddings(len(tokenizer()))
    small.save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    with served_with(tmp_path) as engine:
        assert isinstance(engine._stepper.speculation.drafter, TranslatedDrafter)
        engine.generate([encode(TEXTS[0])], config(0, ALWAYS, max_new_tokens=12))
        assert engine.stats().accepted_tokens > 0


def test_a_server_does_not_translate_needlessly(tmp_path: Path) -> None:
    """A tokenizer with one more special token numbers the others alike. Without any, that of the model is taken."""
    qa().save_pretrained(tmp_path)
    with pytest.warns(RuntimeWarning, match=f"cannot load the tokenizer of {tmp_path}.* taken to be those of {QA}"):
        engine = served_with(tmp_path)
    with engine:
        assert isinstance(engine._stepper.speculation.drafter, ModelDrafter)
    own = copy.deepcopy(tokenizer())
    own.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    own.save_pretrained(tmp_path)
    with served_with(tmp_path) as engine:
        assert isinstance(engine._stepper.speculation.drafter, ModelDrafter)


def served_with(folder: Path) -> Engine:
    """The engine of a server for which the checkpoint in this folder drafts."""
    speculative = SpeculativeConfig("draft_model", str(folder), 4)
    engine, _ = load_engine(QA, CacheConfig(memory="8MiB"), SchedulerConfig(), speculative=speculative)
    return engine


def test_refusals() -> None:
    model, own = models.shared("llama"), tokenizer()
    small = models.build("llama", vocab_size=40)
    for given, message in (
        ({"assistant_model": small}, r"or both tokenizers \(tokenizer=, assistant_tokenizer=\)"),
        ({"assistant_model": small, "assistant_tokenizer": own}, "give tokenizer=, that of the engine's model, too"),
        ({"tokenizer": own, "assistant_tokenizer": own}, "give assistant_model=, or leave it out"),
        ({"assistant_model": small, "assistant_tokenizer": 3}, "assistant_tokenizer=3: a tokenizer of transformers"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, CacheConfig(memory="1MiB"), **given)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_goes_back(family: str) -> None:
    """Behind tokens whose K/V a window has dropped, too."""
    model = models.build(family)
    model.generation_config.assistant_confidence_threshold = 0.0
    text, other = [5, 6, 7, 8, 9, 3] * 10, [5, 6, 7, 8, 9, 3] * 8 + [11, 12, 13, 14] * 4
    drafters = [ModelDrafter(model, 64, 4, SchedulerConfig()) for _ in range(2)]
    for length in range(20, len(text)):
        drafters[0].draft([Wanted(1, text[:length], 4)])
    drafters[0].go_back(1, 48)
    first, second = (drafter.draft([Wanted(1, other, 8)]) for drafter in drafters)
    assert first == second
    for drafter in drafters:
        drafter.close()
