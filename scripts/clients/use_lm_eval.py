"""lm-eval's models `local-completions` and `local-chat-completions` on small tasks, made here from files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from calls import close, run, same, task

os.environ["OPENAI_API_KEY"] = task.key

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
metadata:
  version: 1.0
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs:
  until: {until}
  max_gen_toks: %d
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def evaluate(kind: str, name: str, rest: str, doc: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The results of a task of two equal documents, with its samples."""
    path = "completions" if kind == "local-completions" else "chat/completions"
    arguments = {
        "model": task.model,
        "base_url": f"{task.url}/v1/{path}",
        "max_retries": 1,
        "num_concurrent": 2,
        **options.pop("model_args"),
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        data.write_text(f"{json.dumps(doc)}\n" * 2, encoding="utf-8")
        (Path(folder) / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest, encoding="utf-8")
        manager = TaskManager(include_path=folder, include_defaults=False)
        return lm_eval.simple_evaluate(
            model=kind, model_args=arguments, tasks=[name], task_manager=manager, log_samples=True, **options
        )


# lm-eval tokenizes, and by itself it leaves out the BOS token that the checkpoint's tokenizer puts before a prompt.
TOKENIZER = {"tokenizer": task.checkpoint, "tokenizer_backend": "huggingface", "add_bos_token": True}


def generates(kind: str, name: str, question: str, answer: str, until: list[str], **options: Any) -> None:
    rest = GENERATE.replace("{until}", json.dumps(until)) % task.limit
    results = evaluate(kind, name, rest, {"question": question, "answer": answer}, **options)
    same([sample["resps"][0][0] for sample in results["samples"][name]], [answer] * 2)
    same(results["results"][name]["exact_match,none"], 1.0)


def local_completions_generate() -> None:
    generates("local-completions", "write", task.prompt, task.completion, ["\n\n\n"], model_args=TOKENIZER)


def local_completions_until() -> None:
    generates("local-completions", "stop", task.prompt, task.stopped, [task.stop], model_args=TOKENIZER)


def local_completions_choices() -> None:
    doc = {"question": task.prompt, "choices": task.choices, "gold": task.gold}
    for name, arguments in (("choose", {}), ("choose_batched", {"batch_size": 2, "num_concurrent": 1})):
        results = evaluate("local-completions", name, CHOOSE, doc, model_args={**TOKENIZER, **arguments})
        for sample in results["samples"][name]:
            close([float(each[0][0]) for each in sample["resps"]], task.choice_logprobs)
        same(results["results"][name]["acc,none"], 1.0)


def local_chat_completions_generate() -> None:
    (message,) = task.messages
    generates(
        *("local-chat-completions", "ask", message["content"], task.chat, ["\n\n\n"]),
        model_args={},
        apply_chat_template=True,
    )


run(
    "lm_eval",
    *(local_completions_generate, local_completions_until, local_completions_choices),
    local_chat_completions_generate,
)
