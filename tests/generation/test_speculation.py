"""Drafts in the engine: the same tokens, log-probabilities and endings as without them, in fewer steps."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.features.speculation import draft_model
from hf_paged.features.speculation.drafts import Lookup, PromptLookup, Wanted
from tests import models
from tests.architectures.tiny import tiny_model
from tests.generation.drafters import Oracle
from tests.generation.grammars import QA, tokenizer

NEW = 24
REPEATING = [[5, 6, 7, 8] * 4, [9, 3, 4] * 5 + [9], [11, 12, 13, 14, 15, 16, 17] * 2, [20, 21], [7] * 9]


class Ban:
    """A processor of the caller: it reads the whole history and keeps a count of its calls."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(ids.shape[1])
        scores = scores.clone()
        scores[:, int(ids.sum()) % 96] = -torch.inf
        return scores


def some_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, NEW),
        "eos_token_id": rng.choice([None, [2, 31, 44, 60]]),
    }
    options["do_sample"] = rng.random() < 0.6
    if options["do_sample"]:
        options |= {"temperature": rng.choice([0.2, 1.0]), "top_k": rng.choice([0, 3]), "top_p": rng.choice([1.0, 0.8])}
    for name, values in {
        "repetition_penalty": [1.3], "no_repeat_ngram_size": [3], "min_new_tokens": [6], "output_scores": [True],
        "bad_words_ids": [[[33], [8, 9]]], "exponential_decay_length_penalty": [(4, 1.2)],
    }.items():  # fmt: skip
        if rng.random() < 0.25:
            options[name] = rng.choice(values)
    if rng.random() < 0.2:
        options |= rng.choice([{"num_return_sequences": 2, "do_sample": True}, {"num_beams": 3}])
    if "num_beams" in options:
        options.pop("output_scores", None)
    return options


def config(seed: int, drafts: dict[str, Any], **options: Any) -> GenerationConfig:
    return GenerationConfig(**{"pad_token_id": 0, "eos_token_id": None, **options, **drafts, "seed": seed})


def results(outputs: list[Any]) -> list[Any]:
    return [
        (each.error, [(o.token_ids, o.finish_reason, o.logprobs, o.top_logprobs) for o in each.outputs])
        for each in outputs
    ]


HYBRIDS = ("lfm2", "qwen3_next")
"""Models with recurrent states, which go on with several tokens at once."""


@functools.cache
def hybrid(name: str) -> Any:
    model = tiny_model(name)
    model.generation_config.eos_token_id = 2
    return model


ALWAYS = {"num_assistant_tokens_schedule": "constant"}
EXACT = {"batch_invariant": True}  # log-probabilities are equal to the last bit: the rows of drafts are rows of a batch


class Load:
    """Requests with random options, which engines with and without drafts serve."""

    def __init__(self, rng: random.Random, family: str, storage: str | None, preemption: str) -> None:
        self.model = hybrid(family) if family in HYBRIDS else models.shared(family)
        self.cache = CacheConfig(
            num_blocks=14, block_size=4, key_dtype=storage, value_dtype=storage, swap_memory="1MiB"
        )
        self.scheduler = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "preemption": preemption, **EXACT}
        self.prompts = [rng.choice(REPEATING) for _ in range(5)]
        self.options = [some_options(rng) for _ in self.prompts]
        for prompt, options in zip(self.prompts[:2], self.options):  # these two alone need more than the 14 blocks
            options |= {"max_new_tokens": 36 - len(prompt), "min_new_tokens": 36 - len(prompt)}
        self.own = [[Ban()] if rng.random() < 0.3 else None for _ in self.prompts]
        self.logprobs = [None if "num_beams" in each else 2 for each in self.options]

    def run(self, drafts: dict[str, Any], drafter: Any = None) -> tuple[list[Any], Any]:
        configs = [config(index, drafts, **each) for index, each in enumerate(self.options)]
        own = {"logits_processor": self.own, "logprobs": self.logprobs, "raise_on_error": False}
        with Engine(self.model, self.cache, self.scheduler, assistant_model=drafter) as engine:
            outputs = engine.generate(self.prompts, configs, **own)
            engine._scheduler.check_integrity()
            assert engine.stats().blocks_used == 0
            return outputs, engine.stats()


@pytest.mark.filterwarnings("ignore:Unfeasible length")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3", *HYBRIDS))]
)
@pytest.mark.covering(1)
def test_random_options(family: str, storage: str | None, preemption: str) -> None:
    rng = random.Random(f"{family} {storage} {preemption}")
    num_right, num_preempted, rounds = 0, 0, 1 if family in HYBRIDS else 3
    for _ in range(rounds):
        load = Load(rng, family, storage, preemption)
        plain, stats = load.run({})
        num_preempted += stats.preemptions_recompute + stats.preemptions_swap
        texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(load.prompts, plain)]
        for drafts, drafter in (
            ({"prompt_lookup_num_tokens": rng.randint(1, 6), **ALWAYS}, None),
            ({"num_assistant_tokens": rng.randint(1, 6), **ALWAYS}, Oracle(texts, 0.7)),
            ({}, Oracle(texts, 0.9)),
        ):
            outputs, stats = load.run(drafts, drafter)
            assert results(outputs) == results(plain)
            num_right += stats.accepted_tokens
    assert num_right > 5 * rounds and num_preempted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_states_go_back_to_before_a_wrong_draft(name: str) -> None:
    """With memory for one more state, few sequences draft at once; prefixes are shared. Last bits may differ."""
    model = hybrid(name)
    for memory in ("4MiB", "256KiB" if name == "mamba2" else "96KiB"):
        cache = CacheConfig(memory=memory, block_size=4)
        with Engine(model, cache) as engine:
            plain = engine.generate(REPEATING, config(0, {}, max_new_tokens=NEW))
        texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(REPEATING, plain)]
        for drafter in (Oracle(texts, 0.7), Oracle(texts), Oracle(texts, 0.0), Lookup(3)):
            with Engine(model, cache, assistant_model=drafter) as engine:
                for _ in range(2):
                    outputs = engine.generate(REPEATING, config(0, ALWAYS, max_new_tokens=NEW))
                    for one, other in zip(outputs, plain):
                        assert one.outputs[0].token_ids == other.outputs[0].token_ids
                        pair = torch.tensor([one.outputs[0].logprobs, other.outputs[0].logprobs])
                        torch.testing.assert_close(*pair, atol=1e-4, rtol=0)
                engine._scheduler.check_integrity()
                assert engine.stats().drafted_tokens > 0


def test_a_model_that_computes_tokens_one_by_one_refuses_drafts() -> None:
    model, lookup = tiny_model("jamba"), config(0, {"prompt_lookup_num_tokens": 3})
    message = r"prompt_lookup_num_tokens=3: Jamba.* computes next tokens one by one"
    with Engine(model, CacheConfig(memory="4MiB")) as engine, pytest.raises(ValueError, match=message):
        engine.add_request([5, 6, 7], lookup)
    with pytest.raises(ValueError, match=r"assistant_model: Jamba.* computes next tokens one by one"):
        Engine(model, CacheConfig(memory="4MiB"), assistant_model=Lookup(3))


@pytest.mark.parametrize(("family", "length"), [("llama", 1), ("llama", 7), ("lfm2", 3)])
def test_perfect_drafts_need_as_many_steps_as_they_say(family: str, length: int) -> None:
    model = hybrid(family) if family in HYBRIDS else models.shared(family)
    options = {"max_new_tokens": NEW, "do_sample": family not in HYBRIDS, "temperature": 2.0}

    def run(drafter: Any) -> tuple[list[list[int]], Any]:
        with Engine(model, CacheConfig(memory="4MiB"), assistant_model=drafter) as engine:
            configs = [config(seed, {"num_assistant_tokens": length, **ALWAYS}, **options) for seed in range(5)]
            outputs = engine.generate(REPEATING, configs)
            return [output.outputs[0].token_ids for output in outputs], engine.stats()

    tokens, stats = run(None)
    assert stats.drafted_tokens == 0 and stats.steps == NEW == max(map(len, tokens))
    drafted, stats = run(Oracle([[*prompt, *own] for prompt, own in zip(REPEATING, tokens)]))
    assert drafted == tokens
    assert stats.steps == 1 + -(-(NEW - 1) // (length + 1))
    by_position = stats.accepted_by_position
    assert sum(by_position) == stats.accepted_tokens and by_position[0] == stats.num_drafts >= by_position[-1] > 0
    assert stats.accepted_tokens == stats.drafted_tokens and stats.generated_tokens == sum(map(len, tokens))


@pytest.mark.parametrize("do_sample", [False, True])
def test_several_samples_go_on_together(do_sample: bool) -> None:
    """They fork and end within drafts, and draw from one generator."""
    model = models.shared("llama")
    options = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0 if do_sample else 0.01, "top_k": 3}

    def run(drafter: Any) -> tuple[list[Any], Any]:
        with Engine(model, CacheConfig(memory="1MiB", block_size=4), EXACT, assistant_model=drafter) as engine:
            drafts = {"num_assistant_tokens": 3, **ALWAYS, "num_return_sequences": 3}
            outputs = engine.generate(REPEATING, [config(seed, drafts, **options) for seed in range(5)])
            engine._scheduler.check_integrity()
            assert engine.stats().blocks_used == 0
            return results(outputs), engine.stats()

    plain, stats = run(None)
    texts = [[*prompt, *each[0]] for prompt, (_, own) in zip(REPEATING, plain) for each in own]
    drafted, fewer = run(Oracle(texts))
    assert drafted == plain and fewer.steps < stats.steps == NEW
    assert do_sample or fewer.steps == 1 + -(-(NEW - 1) // 4)


def test_wrong_drafts_change_nothing_and_are_given_up() -> None:
    model = models.shared("llama")
    with Engine(model, CacheConfig(memory="1MiB"), EXACT) as engine:
        plain = engine.generate(REPEATING, config(0, {}, max_new_tokens=40))
    wrong = Oracle([[*prompt, *o.outputs[0].token_ids] for prompt, o in zip(REPEATING, plain)], share=0.0)
    with Engine(model, CacheConfig(memory="1MiB"), EXACT, assistant_model=wrong) as engine:
        assert results(engine.generate(REPEATING, config(0, {}, max_new_tokens=40))) == results(plain)
        stats = engine.stats()
    assert stats.accepted_tokens == 0 and 0 < wrong.calls < stats.steps - 5


def test_a_stream_gets_the_tokens_of_a_step_together() -> None:
    model = models.shared("llama")
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        (plain,) = engine.generate([REPEATING[0]], config(0, {}, max_new_tokens=12))
    text = [*REPEATING[0], *plain.outputs[0].token_ids]
    drafts = {"num_assistant_tokens": 3, **ALWAYS}
    with Engine(model, CacheConfig(memory="1MiB"), assistant_model=Oracle([text])) as engine:
        lengths = [
            len(output.outputs[0].token_ids)
            for output in engine.stream([REPEATING[0]], config(0, drafts, max_new_tokens=12))
        ]
    assert lengths == [1, 5, 9, 12]


def test_prefixes_of_accepted_tokens_alone_are_kept() -> None:
    model = models.shared("llama")
    options = {"max_new_tokens": 21}
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        (plain,) = engine.generate([REPEATING[0]], config(0, {}, **options))
        text = [*REPEATING[0], *plain.outputs[0].token_ids]
    noisy = Oracle([text], 0.5, seed=3)
    with Engine(model, CacheConfig(memory="1MiB", block_size=4), assistant_model=noisy) as engine:
        (first,) = engine.generate([REPEATING[0]], config(0, {"num_assistant_tokens": 6, **ALWAYS}, **options))
        assert engine.stats().accepted_tokens < engine.stats().drafted_tokens
        engine._scheduler.check_integrity()
        (again,) = engine.generate([text], config(0, {}, max_new_tokens=8))
        assert again.metrics.num_cached_tokens == 36  # of the 37, in blocks of 4
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        (expected,) = engine.generate([text], config(0, {}, max_new_tokens=8))
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids
    assert again.outputs[0].token_ids == expected.outputs[0].token_ids


# -- a model that drafts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_drafts(family: str) -> None:
    model, other = models.shared(family), models.build(family, seed=1)
    other.generation_config.assistant_confidence_threshold = 0.0
    model_itself = models.build(family)
    model_itself.generation_config.assistant_confidence_threshold = 0.0
    options = {"max_new_tokens": 30, "num_assistant_tokens": 4}
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        plain = engine.generate(REPEATING, config(0, {}, **options))
    for assistant in (model_itself, other):
        with Engine(model, CacheConfig(memory="1MiB"), assistant_model=assistant) as engine:
            outputs = engine.generate(REPEATING, config(0, ALWAYS, **options))
            stats = engine.stats()
            assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
            if assistant is model_itself:
                assert stats.accepted_tokens > 0.9 * stats.drafted_tokens  # all but those after the end
                assert stats.steps <= 7
            else:
                assert 0 < stats.drafted_tokens > stats.accepted_tokens


@pytest.mark.parametrize("family", ["gemma3"])
def test_a_model_drafts_with_its_first_layers(family: str) -> None:
    """What they draft is what transformers' early exit would; all but one of them draft what all do here."""
    model = models.build(family)
    layers = model.base_model.layers
    with torch.no_grad():  # a last layer that adds nothing
        for name, weight in layers[-1].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or "post_" in name:
                weight.zero_()
    own, count = hf_paged.first_layers(model, len(layers) - 1), len(layers)
    own.generation_config.assistant_confidence_threshold = 0.0
    assert len(own.base_model.layers) == count - 1 == own.config.num_hidden_layers
    assert model.config.num_hidden_layers == len(model.base_model.layers) == count
    options = {"max_new_tokens": 20, "num_assistant_tokens": 4}
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        plain = engine.generate(REPEATING, config(0, {}, **options))
    with Engine(model, CacheConfig(memory="1MiB"), assistant_model=own) as engine:
        outputs = engine.generate(REPEATING, config(0, ALWAYS, **options))
        stats = engine.stats()
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 0
    with pytest.raises(ValueError, match=f"count={count}: .* has {count} layers; give 1 to one less"):
        hf_paged.first_layers(model, count)


def test_a_drafting_model_with_little_memory_and_sleep() -> None:
    model, assistant = models.shared("llama"), models.build("llama")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    cache, scheduler = CacheConfig(num_blocks=16, block_size=4), {"max_num_batched_tokens": 24, "max_num_seqs": 6}
    with Engine(model, cache, scheduler) as engine:
        plain = engine.generate(REPEATING * 2, config(0, {}, max_new_tokens=12))
    with Engine(model, cache, scheduler, assistant_model=assistant) as engine:
        for _ in range(2):
            outputs = engine.generate(REPEATING * 2, config(0, ALWAYS, max_new_tokens=12))
            assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
            right = engine.stats().accepted_tokens
            assert right
            engine.sleep()
            engine.wake()
    assert engine.stats().accepted_tokens == right


def test_a_threshold_shortens_drafts() -> None:
    model, assistant = models.shared("llama"), models.build("llama")
    drafted = []
    for threshold in (0.0, 0.4, 1.0):
        assistant.generation_config.assistant_confidence_threshold = threshold
        with Engine(model, CacheConfig(memory="1MiB"), assistant_model=assistant) as engine:
            engine.generate(REPEATING, config(0, ALWAYS, max_new_tokens=20))
            drafted.append(engine.stats().drafted_tokens)
    assert drafted[0] > drafted[1] > drafted[2] == 0


# -- what is refused, and what fails ----------------------------------------------------------------------------------


def test_refusals() -> None:
    model = models.shared("llama")
    with pytest.raises(ValueError, match="vocabulary of 40 tokens, the engine's model one of 96; give a model with"):
        Engine(model, CacheConfig(memory="1MiB"), assistant_model=models.build("llama", vocab_size=40))
    with pytest.raises(ValueError, match="assistant_model='small': a causal LM of transformers is needed, or"):
        Engine(model, CacheConfig(memory="1MiB"), assistant_model="small")
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        for name, value in (
            ("prompt_lookup_num_tokens", 0),
            ("max_matching_ngram_size", -1),
            ("num_assistant_tokens", 129),
        ):
            wrong = {"prompt_lookup_num_tokens": 3, name: value}
            with pytest.raises(ValueError, match=f"{name}={value}: an integer from 1 to 128 is needed"):
                engine.add_request([5, 6], config(0, {}, **wrong))
        with pytest.raises(ValueError, match="use_mtp=True: the engine does not draft in this way"):
            engine.add_request([5, 6], config(0, {}, use_mtp=True))


@pytest.mark.parametrize("draft", [[[1] * 99, [96]], [[-1], []], [[3]], "no", [["x"], []]])
def test_a_drafter_that_fails_is_not_asked_again(draft: Any) -> None:
    class Wrong:
        calls = 0

        def draft(self, wanted: Any) -> Any:
            self.calls += 1
            return draft

    model, drafter = models.shared("llama"), Wrong()
    with Engine(model, CacheConfig(memory="1MiB"), EXACT) as engine:
        plain = engine.generate(REPEATING[:2], config(0, {}, max_new_tokens=9))
    with Engine(model, CacheConfig(memory="1MiB"), EXACT, assistant_model=drafter) as engine:
        with pytest.warns(RuntimeWarning, match="assistant_model failed .* drafts no more; its results are the same"):
            outputs = engine.generate(REPEATING[:2], config(0, ALWAYS, max_new_tokens=9))
        assert results(outputs) == results(plain) and drafter.calls == 1


def test_a_request_that_fails_at_its_first_token_fails_alone() -> None:
    """Its prompt was computed but for one token, so that the step has a draft for it, too."""

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the caller")

    model, prompts = models.shared("llama"), [[5, 6], [7] * 14]
    texts = [[*prompt, *range(9, 40)] for prompt in prompts]
    scheduler = {"max_num_batched_tokens": 15, "max_num_seqs": 4}
    with Engine(model, CacheConfig(memory="1MiB"), scheduler, assistant_model=Oracle(texts)) as engine:
        options = {"raise_on_error": False, "logits_processor": [None, [fails]]}
        outputs = engine.generate(prompts, config(0, ALWAYS, max_new_tokens=9), **options)
    assert [output.error for output in outputs] == [None, "RuntimeError: of the caller"]


def test_ctrl_c_in_a_drafter_loses_nothing() -> None:
    class Interrupted(Oracle):
        def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
            drafts = super().draft(wanted)
            if self.calls == 2:
                raise KeyboardInterrupt
            return drafts

    model = models.shared("llama")
    with Engine(model, CacheConfig(memory="1MiB"), EXACT) as engine:
        plain = engine.generate(REPEATING[:2], config(0, {}, max_new_tokens=9))
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(REPEATING, plain)]
    drafter = Interrupted(texts)
    with Engine(model, CacheConfig(memory="1MiB"), EXACT, assistant_model=drafter) as engine:
        drafts = {**ALWAYS, "num_assistant_tokens": 2}
        names = [engine.add_request(prompt, config(0, drafts, max_new_tokens=9)) for prompt in REPEATING[:2]]
        finished = {}
        while engine.has_unfinished_requests():
            try:
                finished.update({output.request_id: output for output in engine.step()})
            except KeyboardInterrupt:
                assert drafter.calls == 2
        assert drafter.calls > 2
        assert results([finished[name] for name in names]) == results(plain)


def test_requests_beside_hooks_are_forgotten() -> None:
    model = models.build("llama")
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        hook = model.lm_head.register_forward_hook(lambda *_: None)
        for _ in range(3):
            engine.generate([[5, 6, 7]], config(0, {"prompt_lookup_num_tokens": 3}, max_new_tokens=3))
        assert not engine.stats().drafted_tokens and len(engine._stepper.speculation.requests) == 1
        hook.remove()


@pytest.mark.parametrize("why", ["hooks", "few positions"])
def test_a_model_that_cannot_draft_when_its_loop_is_sought(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "has_loops", lambda _: True)
    assistant = models.build("gpt2", **({"n_positions": 8} if why == "few positions" else {}))
    if why == "hooks":
        assistant.lm_head.register_forward_hook(lambda *_: None)
    with Engine(models.shared("llama"), CacheConfig(memory="1MiB"), assistant_model=assistant) as engine:
        engine.generate([[5, 6, 7]], config(0, ALWAYS, max_new_tokens=3))


def test_lookup_takes_the_longest_and_latest_match() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert PromptLookup(3).draft(text, 2) == [9, 2]
    assert PromptLookup(2).draft(text, 2) == [8, 1]
    assert PromptLookup(2).draft([4, 5, 6], 3) == []
    assert PromptLookup(2).draft([6, 7, 6, 7], 5) == [6, 7, 6, 7, 6]
    lookup = PromptLookup(2)
    for length in range(1, len(text) + 1):
        assert lookup.draft(text[:length], 2) == PromptLookup(2).draft(text[:length], 2)


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}},
                               "required": ["a", "b"], "additionalProperties": False}},
    "regex": {"regex": r"[A-C]{2,4}-\d{2} (é|日本)+!"},
    "choice": {"choice": ["yes", "no", "perhaps not"]},
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", [*CONSTRAINTS, "stop strings"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_endings_within_drafts(case: str, do_sample: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 48, "eos_token_id": 2, "do_sample": do_sample, "temperature": 1.2}
    own = [hf_paged.grammar(tokenizer(), **CONSTRAINTS[case])] if case in CONSTRAINTS else None
    if own is None:
        options["stop_strings"] = ["the", "ing", "a s"]
    model = AutoModelForCausalLM.from_pretrained(QA, dtype=torch.float32).eval()
    texts = ["<|bos|><|user|>What does str.capitalize() do?<|assistant|>", "<|bos|>A list of", "<|bos|>The"]
    prompts = [tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]

    def run(drafter: Any) -> tuple[list[Any], Any]:
        configs = [config(seed, {"num_assistant_tokens": 6, **ALWAYS}, **options) for seed in range(3)]
        with Engine(model, CacheConfig(memory="8MiB"), EXACT, tokenizer=tokenizer(), assistant_model=drafter) as engine:
            return engine.generate(prompts, configs, logits_processor=own), engine.stats()

    plain, _ = run(None)
    known = [[*ids, *output.outputs[0].token_ids, 9, 9, 9, 9] for ids, output in zip(prompts, plain)]
    for drafter in (Oracle(known), Oracle(known, 0.8), Lookup(6)):
        outputs, stats = run(drafter)
        assert results(outputs) == results(plain)
        assert stats.accepted_tokens or isinstance(drafter, Lookup) or case == "choice"
