"""lm-eval's model `hf-paged` against its model `hf`, on the shipped checkpoint, where lm-eval is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import hf_paged
from tests import conftest
from tests.serving.harness import QA, tokenizer

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402

from hf_paged.bridges.lm_eval import PagedLM  # noqa: E402

CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
GENERATION = """
task: generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", " the"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def models_of_both() -> Iterator[tuple[Any, Any]]:
    from lm_eval.models.huggingface import HFLM

    arguments = {"pretrained": QA, "device": "cpu", "dtype": "float32"}
    paged = PagedLM(**arguments, kv_cache_memory="64MiB")
    yield HFLM(**arguments, batch_size=3), paged
    paged._engine.close()
    assert conftest.blocks_in_use() == 0


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def test_loglikelihoods(models_of_both: tuple[Any, Any]) -> None:
    plain, paged = models_of_both
    long = "The if statement is used for conditional execution. " * 120  # beyond the model's positions
    pairs = [
        (context, continuation)
        for context in ("What does str.join do?", "A function definition", long, "")
        for continuation in (" It", " It returns a string", " the", " a list of the words in the string, separated")
    ]
    greedy = plain.generate_until(requests("generate_until", ("A function definition", {"max_gen_toks": 6})))
    pairs.append(("A function definition", greedy[0]))
    expected = plain.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    answers = paged.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected] and expected[-1][1]
    assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected], abs=2e-3, rel=1e-5)
    stats = paged._engine.stats()
    assert stats.prefix_cache_hit_rate > 0.4 and stats.blocks_used == 0


def test_the_context_of_several_choices_is_computed_once(models_of_both: tuple[Any, Any]) -> None:
    _, paged = models_of_both
    paged._engine.clear_prefix_cache()
    before = paged._engine.stats()
    context = " ".join(["statement"] * 60)
    size = len(tokenizer()(context)["input_ids"])
    pairs = [(context, ending) for ending in (" one", " two words", " three more words", " four")]
    paged.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    after = paged._engine.stats()
    hits = after.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    assert hits == 3 * ((size - 1) // 16 * 16)


def test_rolling(models_of_both: tuple[Any, Any]) -> None:
    plain, paged = models_of_both
    texts = [("The if statement is used.",), ("A list. " * 700,), ("x",)]
    expected = plain.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    answers = paged.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    assert answers == pytest.approx(expected, rel=1e-5)


def test_generation(models_of_both: tuple[Any, Any]) -> None:
    plain, paged = models_of_both
    arguments = [
        ("What does str.join do?", {"until": ["\n"], "max_gen_toks": 20}),
        ("A function\n", {"until": ["\n\n", " is"], "max_gen_toks": 20}),
        ("The", {"until": [], "max_gen_toks": 9}),
        ("A class definition defines a class object", {"until": ["."], "max_gen_toks": 30, "repetition_penalty": 1.3}),
        ("The if statement", {"until": "e", "max_gen_toks": 20, "do_sample": False, "temperature": 0.0}),
        ("word " * 2000, {"until": ["\n"], "max_gen_toks": 5}),
    ]
    arguments += [(f"Number {number}", {"until": ["\n"], "max_gen_toks": 20}) for number in range(8)]
    expected = plain.generate_until(requests("generate_until", *arguments), disable_tqdm=True)
    assert paged.generate_until(requests("generate_until", *arguments), disable_tqdm=True) == expected
    with pytest.raises(ValueError, match="no_such_option=1"):
        paged.generate_until(requests("generate_until", ("The", {"no_such_option": 1, "max_gen_toks": 3})))


def test_whole_evaluations(models_of_both: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [
        {"question": "What does str.join do?", "choices": [" It joins strings", " It sorts", " None"], "answer": 0},
        {"question": "What is a list?", "choices": [" A number", " A mutable sequence", " A"], "answer": 1},
        {"question": "What does len return?", "choices": [" The length", " True", " Nothing at all"], "answer": 0},
    ]
    rows = [{**row, "text": f"{row['question']}{row['choices'][0]}"} for row in rows]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    for name, text in (("choices", CHOICES), ("rolling", ROLLING), ("generation", GENERATION)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = []
    for model in models_of_both:
        results = lm_eval.simple_evaluate(
            model, tasks=["choices", "rolling", "generation"], num_fewshot=2, task_manager=tasks, bootstrap_iters=0
        )["results"]
        found.append({f"{task} {name}": value for task, each in results.items() for name, value in each.items()})
    plain, paged = ({name: value for name, value in each.items() if isinstance(value, float)} for each in found)
    assert paged == pytest.approx(plain, rel=1e-5) and len(plain) >= 5


def test_it_is_in_the_registry() -> None:
    from lm_eval.api.registry import get_model, model_registry

    assert get_model("hf-paged") is PagedLM
    hf_paged.uninstall()
    assert "hf-paged" not in model_registry
    hf_paged.install()
    assert get_model("hf-paged") is PagedLM


@pytest.mark.parametrize("name", ["mixed_precision_dtype", "softmax_dtype"])
def test_dtypes_that_the_engine_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='float32'.*leave it out"):
        PagedLM(QA, device="cpu", **{name: "float32"})


def test_a_call_that_is_interrupted_leaves_the_next_alone(models_of_both: tuple[Any, Any], monkeypatch: Any) -> None:
    _, paged = models_of_both
    pairs = requests("loglikelihood", ("A function", " is"), ("The if", " statement"))
    expected = paged.loglikelihood(pairs, disable_tqdm=True)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(paged._engine, "step", mock.Mock(side_effect=KeyboardInterrupt))
        paged.loglikelihood(pairs, disable_tqdm=True)
    assert paged.loglikelihood(pairs, disable_tqdm=True) == expected


def test_what_the_arguments_stand_for() -> None:
    model = PagedLM(QA, device="cpu", batch_size="7", block_size=8, kv_cache_memory="2MiB", enable_prefix_caching=False)
    engine = model._engine
    assert (engine.cache_config.block_size, engine.cache_config.memory) == (8, "2MiB")
    assert (engine.scheduler_config.max_num_seqs, engine.scheduler_config.prefix_caching) == (7, False)
    engine.close()
