"""Where the server's work is done: not on the event loop, not between steps, and not again for what is known."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.generation.prepare import Preparer
from hf_paged.generation.requests.outputs import CompletionOutput, Lists
from hf_paged.serving.choices import Choice, Delta, joined
from hf_paged.serving.loading import load_engine
from hf_paged.serving.recipe import completion_recipe
from hf_paged.serving.schema import CompletionRequest, Options, Warper
from tests.noted import note_calls
from tests.serving.harness import QA, Running, tokenizer

PROMPT = "A list is"


def test_requests_are_prepared_in_the_thread_that_tokenizes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between steps they would hold up the others: those with stop strings or penalties are prepared one by one."""
    threads = note_calls(monkeypatch, Preparer, "_prepare", lambda *_: threading.current_thread().name)
    answer = server.post(
        "/v1/completions", prompt=["one", "two", "three"], presence_penalty=0.5, stop="x", max_tokens=2
    )
    assert answer.status_code == 200
    assert len(threads) == 3 and all(name.startswith("hf-paged-tokenizer") for name in threads)
    kind = type(server.service.served.tokenizer)  # token strings are made there too
    threads = note_calls(monkeypatch, kind, "convert_ids_to_tokens", lambda *_, **__: threading.current_thread().name)
    assert server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()["token_strs"]
    assert threads and all(name.startswith("hf-paged-tokenizer") for name in threads)


def test_what_a_server_has_loaded_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By collections of garbage, also in replicas: they would hold up steps for as long as the model is large."""
    frozen: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(len(gc.get_objects())))
    engine, found = load_engine(QA, CacheConfig(num_blocks=8), SchedulerConfig(), dtype="float32", device="cpu")
    engine.close()
    assert len(frozen) == 1 and not engine.model.training and engine.model.dtype is torch.float32
    assert found is engine.tokenizer


def recipe_of(server: Running, **fields: Any) -> Any:
    return completion_recipe(CompletionRequest(prompt=PROMPT, **fields), server.service.served, None)


@pytest.mark.parametrize("fields", [{}, {"stop": "never"}, {"logprobs": 1}], ids=str)
def test_an_update_copies_only_what_is_new(server: Running, fields: dict[str, Any]) -> None:
    ids = tokenizer()("The list is a sequence of items that may be changed", add_special_tokens=False)["input_ids"]
    logprobs, tops = [-1.0] * len(ids), [[(5, -1.0)]] * len(ids)
    choice, deltas = Choice(0, recipe_of(server, **fields), tokenizer()), []
    for end in range(1, len(ids) + 1):
        lists = Lists(ids, 0, logprobs, None, tops)
        output = CompletionOutput(0, lists, end, 0.0, None, "length" if end == len(ids) else None)
        new = choice.update(output)
        assert all(len(delta.token_ids) == 1 for delta in new)
        deltas += new
        assert output._copies is None
    (whole,) = joined(deltas, 1)
    assert whole.token_ids == ids and whole.text == tokenizer().decode(ids) and whole.finish_reason == "length"
    assert len(whole.logprobs) == len(whole.top_logprobs) == (len(ids) if fields.get("logprobs") else 0)


def test_marked_fields_need_no_other_place(server: Running) -> None:
    """A field of the schema that is marked as a warper is an option of `generate` by that name."""
    marked = [name for name, field in Options.model_fields.items() if any(type(m) is Warper for m in field.metadata)]
    assert len(marked) >= 4
    for name in marked:
        config = recipe_of(server, **{name: 1}).submissions[0].options.generation_config
        assert config.do_sample and getattr(config, name) == 1
        others = [other for other in marked if other not in (name, "temperature")]
        assert all(getattr(config, other) in (0, 1.0) for other in others)


def test_an_output_without_its_beginning() -> None:
    tokens = [1, 2, 3, 4, 5]
    for lists in (Lists([0, *tokens, 6], 1, []), Lists(list(tokens), 0, [])):
        output = CompletionOutput(3, lists, 5, -2.0, None, "length", 4)
        rest = output.since(2)
        assert (rest.token_ids, rest.new_token_ids, rest.num_tokens, rest.index) == ([3, 4, 5], [5], 3, 3)
        assert output.since(9).token_ids == [] and output.token_ids == tokens


def test_choices_without_a_delta_are_empty() -> None:
    deltas = [Delta(1, "a", [1], []), Delta(1, "b", [2], [], finish_reason="stop", stop_reason="x")]
    empty, whole = joined(deltas, 2)
    assert (empty.text, empty.token_ids, empty.finish_reason) == ("", [], None)
    assert (whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason) == ("ab", [1, 2], "stop", "x")
