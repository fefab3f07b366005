"""Grammars: the same answers from plain `generate`, paged `generate` and the engine, and all of them in the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

import hf_paged
from hf_paged.features.grammar import constraints
from hf_paged.features.grammar import vocabulary as vocabulary_module
from hf_paged.generation.sampling.edits import _forbidden, keep_only
from tests.generation.grammars import QA, tokenizer
from tests.generation.solo import ended

PROMPT = "<|bos|><|user|>What does str.capitalize() do?<|assistant|>"
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["int", "str"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 20}, "maxItems": 3}},
    "required": ["name", "kind", "sizes"], "additionalProperties": False,
}  # fmt: skip


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(QA, dtype=torch.float32).eval()


def _is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


LIST = 'root ::= item (", " item){0,3}\nitem ::= "str" | "list" | "a" [0-9]{1,3}\n'
CASES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json_schema": ({"json_schema": SCHEMA}, _is_json),
    "regex": ({"regex": r"[A-C]{2,4}-\d{2} (é|日本)+!"}, _matches(r"[A-C]{2,4}-\d{2} (é|日本)+!")),
    "grammar": ({"grammar": LIST}, _matches(r"(str|list|a\d{1,3})(, (str|list|a\d{1,3})){0,3}")),
    "choice": ({"choice": ["yes", "no", 'may"be\n', "日本"]}, lambda text: text in ("yes", "no", 'may"be\n', "日本")),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 0},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "drawn beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "top_k": 0},
}


@cache
def processor(case: str) -> Any:
    return hf_paged.grammar(tokenizer(), **CASES[case][0])


@cache
def prompt() -> tuple[int, ...]:
    return tuple(tokenizer()(PROMPT, add_special_tokens=False)["input_ids"])


def generated(ids: list[int], processors: list[Any], *, seed: int = 5, paged: bool = False, **options: Any) -> Any:
    """What `generate` returns after the prompt, one list of tokens for each sequence, without padding."""
    torch.manual_seed(seed)
    inputs = torch.tensor([ids])
    options |= {"cache_implementation": "paged"} if paged else {}
    rows = model().generate(inputs, attention_mask=torch.ones_like(inputs), logits_processor=processors, **options)
    return [trimmed(row) for row in rows[:, len(ids) :].tolist()]


def trimmed(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def seeded(seed: int = 5, **options: Any) -> Any:
    return GenerationConfig(seed=seed, **options)


def text_of(tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return str(tokenizer().decode(tokens[:-1], clean_up_tokenization_spaces=False))


def engine(**options: Any) -> Any:
    return hf_paged.Engine(model(), hf_paged.CacheConfig(**{"num_blocks": 256, **options}))


def answers(output: Any) -> list[list[int]]:
    output.raise_for_error()
    return [list(each.token_ids) for each in output.outputs]


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_all_doors_give_the_same_answers_in_the_grammar(case: str, mode: str) -> None:
    options = {"max_new_tokens": 80, "eos_token_id": EOS, "pad_token_id": 0, **MODES[mode]}
    plain = generated(list(prompt()), [processor(case)], **options)
    assert generated(list(prompt()), [processor(case)], paged=True, **options) == plain
    with engine() as running:
        request = running.add_request(list(prompt()), seeded(**options), logits_processor=[processor(case)])
        outputs = ended(running)
        assert answers(outputs[request]) == plain
    for tokens in plain:
        assert CASES[case][1](text_of(tokens))
    assert any(tokens != trimmed(free) for tokens, free in zip(plain, generated(list(prompt()), [], **options)))


def requests() -> list[tuple[list[int], str | None, dict[str, Any]]]:
    made = []
    for number, (case, mode) in enumerate(zip([*CASES, None] * 2, [*MODES, *MODES])):
        ids = [*prompt()[: 4 + number % 5], *prompt()]
        made.append((ids, case, {"max_new_tokens": 70, "eos_token_id": EOS, "pad_token_id": 0, **MODES[mode]}))
    return made


@cache
def alone() -> list[list[list[int]]]:
    return [
        generated(tokens, [] if case is None else [processor(case)], seed=number, **options)
        for number, (tokens, case, options) in enumerate(requests())
    ]


def test_requests_share_steps_and_objects_and_are_preempted() -> None:
    with engine(num_blocks=40, block_size=4, swap_memory="1MiB") as running:
        ids = {}
        for number, (tokens, case, options) in enumerate(requests()):
            processors = [] if case is None else [processor(case)]
            ids[running.add_request(tokens, seeded(number, **options), logits_processor=processors)] = number
        outputs = {ids[name]: answers(output) for name, output in ended(running).items()}
        stats = running.stats()
        assert stats.preemptions_swap > 0 and stats.blocks_used == 0
    for number, wanted in enumerate(alone()):
        assert outputs[number] == wanted, number


class Nudge(LogitsProcessor):
    """Of a caller: the request's processors run alone."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + torch.linspace(0, 3, scores.shape[1])


@pytest.mark.parametrize("mode", ["samples", "beams"])
def test_beside_processors_of_other_kinds(mode: str) -> None:
    """One of the caller's, before and after it; and transformers' own."""
    chains = [[Nudge(), processor("json_schema")], [processor("json_schema"), Nudge()], [processor("json_schema")]]
    options = {"max_new_tokens": 60, "eos_token_id": EOS, "pad_token_id": 0, **MODES[mode]}
    with engine() as running:
        for chain in chains:
            extra = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 6} if len(chain) == 1 else {}
            request = running.add_request(list(prompt()), seeded(**options, **extra), logits_processor=chain)
            (output,) = ended(running).values()
            assert output.request_id == request
            assert answers(output) == generated(list(prompt()), chain, **options, **extra)


def test_a_batch_of_prompts_with_padding() -> None:
    texts = ["What is a list?", "Explain str.join to me, please."]
    tokenizer().padding_side = "left"
    inputs = tokenizer()(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    options = {
        "max_new_tokens": 60, "do_sample": True, "num_return_sequences": 2, "logits_processor": [processor("grammar")],
    }  # fmt: skip
    rows = []
    for more in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(3)
        rows.append(model().generate(**inputs, **options, **more)[:, inputs["input_ids"].shape[1] :].tolist())
    assert rows[0] == rows[1]
    assert all(CASES["grammar"][1](text_of(trimmed(row))) for row in rows[0])


def test_assisted_decoding_goes_back_some_tokens() -> None:
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    plain = generated(list(prompt()), [processor("json_schema")], **options)
    assert generated(list(prompt()), [processor("json_schema")], prompt_lookup_num_tokens=3, **options) == plain


def test_an_object_serves_calls_one_after_another() -> None:
    """Each call begins a new answer; one whose prompt is the last result goes on with it."""
    once = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
    used = hf_paged.grammar(tokenizer(), **CASES["json_schema"][0])
    whole = generated(list(prompt()), [used], max_new_tokens=60, **once)[0]
    begun = generated(list(prompt()), [used], max_new_tokens=9, **once)[0]
    assert begun == whole[:9]
    assert generated([*prompt(), *begun], [used], max_new_tokens=51, **once)[0] == whole[9:]
    other = [*prompt(), *whole, *prompt()]
    assert CASES["json_schema"][1](text_of(generated(other, [used], max_new_tokens=80, **once)[0]))


def test_scores_wider_and_narrower_than_the_vocabulary() -> None:
    width = len(tokenizer())
    for scores in (torch.zeros(2, width + 77), torch.zeros(2, width - 40)):
        ids = torch.tensor([prompt(), prompt()])
        kept = hf_paged.grammar(tokenizer(), regex="[a-z]+")(ids, scores)
        allowed = kept[0].isfinite().nonzero().flatten().tolist()
        assert kept.shape == scores.shape and torch.equal(kept[0], kept[1])
        assert allowed and max(allowed) < width
        assert all(re.fullmatch("[a-z]+", tokenizer().decode([token])) for token in allowed)
        assert len(allowed) == sum(
            re.fullmatch("[a-z]+", tokenizer().decode([token])) is not None
            for token in range(min(width, scores.shape[1]))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_keep_what_they_name(dtype: torch.dtype) -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 4)).astype(np.int32)
    allowed = [[bool(int(row[token // 32]) >> token % 32 & 1) for token in range(101)] for row in words]
    scores = torch.arange(303, dtype=dtype).view(3, 101)
    wanted = scores.clone()
    wanted[[2, 0]] = torch.where(torch.tensor(allowed), wanted[[2, 0]], -torch.inf)
    keep_only(scores, [2, 0], words)
    assert torch.equal(scores, wanted)
    assert _forbidden(torch.from_numpy(words))[:, :101].logical_not().tolist() == allowed


def test_an_answer_ends_where_it_is_complete_and_only_there() -> None:
    """By any of the given tokens; special tokens are no text, and after the end there is nothing else."""
    made = hf_paged.grammar(tokenizer(), regex=r"[^x]{2,3}", eos_token_id=[EOS, 300])
    special = set(tokenizer().all_special_ids)

    def allowed(*answer: int) -> set[int]:
        ids = torch.tensor([[*prompt(), *answer]])
        return set(
            made.at(len(prompt()))(ids, torch.zeros(1, len(tokenizer())))[0].isfinite().nonzero().flatten().tolist()
        )

    a, b, c = (tokenizer()(letter, add_special_tokens=False)["input_ids"][-1] for letter in "abc")
    assert not allowed() & {*special, 300} and a in allowed()
    assert not allowed(a) & {*special, 300} and b in allowed(a)
    assert {EOS, 300} < allowed(a, b) and not allowed(a, b) & (special - {EOS})
    assert allowed(a, b, c) == allowed(a, b, EOS) == allowed(a, b, 300, 7) == {EOS, 300}
    assert allowed(a, EOS) == {EOS, 300}  # it has left the grammar
    made = hf_paged.grammar(tokenizer(), regex=r".{2,40}")
    assert len(allowed()) > 1000 and not allowed() & special


@pytest.mark.parametrize("mode", ["greedy", "samples"])
def test_a_grammar_that_other_options_contradict(mode: str) -> None:
    """No token is left: the request fails, and its neighbour does not."""
    options = {"max_new_tokens": 20, "eos_token_id": EOS, "pad_token_id": 0, **MODES[mode]}
    yes = [token for text, token in tokenizer().get_vocab().items() if text.startswith("y")]
    with engine() as running:
        made = hf_paged.grammar(tokenizer(), choice=["yes"])
        wrong = running.add_request(list(prompt()), seeded(suppress_tokens=yes, **options), logits_processor=[made])
        right = running.add_request(list(prompt()), seeded(**options), logits_processor=[made])
        outputs = ended(running)
    assert "after the logits processors no token has a probability" in outputs[wrong].error
    assert {text_of(tokens) for tokens in answers(outputs[right])} == {"yes"}


def test_what_is_refused() -> None:
    tools = tokenizer()
    for wrong, words in (
        ({}, "none"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice"),
        ({"regex": "(a"}, "regular expression"),
        ({"regex": ""}, "regex"),
        ({"regex": r"(?=a)b"}, "regular expression"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": 5}, "int"),
        ({"json_schema": {"type": "no such type"}}, "'type' (at #)"),
        ({"regex": "a", "eos_token_id": []}, "eos_token_id"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            hf_paged.grammar(tools, **wrong)


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "find_spec", lambda name: None)
    monkeypatch.setattr(vocabulary_module, "_vocabularies", {})
    with pytest.raises(ImportError, match=r"pip install .*\[grammar\]"):
        hf_paged.grammar(tokenizer(), regex="a")


def test_compiled_grammars_are_kept() -> None:
    vocabulary = vocabulary_module.vocabulary_of(tokenizer())
    schemas = [constraints.json_schema({"enum": [number]}) for number in range(2)]
    assert vocabulary.compiled(schemas[0]) is vocabulary.compiled(schemas[0])
    assert vocabulary.compiled(schemas[0]) is not vocabulary.compiled(schemas[1])
    assert constraints.key_of(constraints.json_schema({"properties": {"a": {}, "b": {}}})) != constraints.key_of(
        constraints.json_schema({"properties": {"b": {}, "a": {}}})
    )


def test_its_locks_are_free_in_a_forked_child() -> None:
    from hf_paged import locks

    for lock in (vocabulary_module._lock, vocabulary_module.vocabulary_of(tokenizer())._lock):
        assert lock in locks._locks
