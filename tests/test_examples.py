"""Every example runs on the shipped checkpoints, and the checkpoints are what the README says they are."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_paged.kernels import ops

EXAMPLES = Path(__file__).parent.parent / "examples"
CHECKPOINTS = ["pydoc-lm-base", "pydoc-lm-qa"]

Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(name: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *argv])
        threads = torch.get_num_threads()
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return run


def test_draw_blocks(run: Run, tmp_path: Path) -> None:
    text = run("draw_blocks.py", "--svg", str(tmp_path / "beams.svg"))
    assert re.search(r"step 4: \d+ blocks, [1-9]\d* shared, [1-9]\d* copied", text)
    assert (tmp_path / "beams.svg").read_text().startswith("<svg")
    assert "shared" in run("draw_blocks.py", "--samples", "2", "--steps", "3")


@pytest.mark.skipif(ops.default_impl("cpu") != "native", reason="only the native kernels sum in one order")
def test_grpo(run: Run) -> None:
    out = run("grpo.py", "--steps", "2", "--generations", "4", "--length", "16")
    assert re.findall(r"ratio - 1\| (\S+)", out) == ["0", "0"]


@pytest.mark.slow
def test_generate_batch(run: Run) -> None:
    assert re.search(r"paged / plain = \d+\.\d\d", run("generate_batch.py"))


def test_pipeline_chat(run: Run) -> None:
    out = run("pipeline_chat.py", "What does str.join() do?")
    assert "user: What does str.join() do?\nassistant: " in out


def test_beam_search(run: Run) -> None:
    out = run("beam_search.py")
    assert len(re.findall(r"^-\d+\.\d{3}  ", out, re.M)) == 3
    shared = re.search(r"(\d+) used, (\d+) shared", out)
    copied = re.search(r"copied on write: (\d+)", out)
    assert shared and 0 < int(shared[2]) < int(shared[1])
    assert copied and int(copied[1]) > 0


def test_engine_stream(run: Run) -> None:
    out = run("engine_stream.py")
    assert out.count("request-") == 3
    assert re.search(r"\d+ steps, \d+ tokens", out)


@pytest.mark.slow
def test_describe_image(run: Run) -> None:
    out = run("describe_image.py")
    assert re.search(r"the same, with another question: .*, 16 tokens of the prompt found", out)
    assert "2 images encoded, 1 found" in out


@pytest.mark.slow
def test_training_script(run: Run, tmp_path: Path) -> None:
    run("train_pydoc_lm.py", "--out", str(tmp_path), "--base-steps", "1", "--qa-steps", "1", "--threads", "1")
    for name in CHECKPOINTS:
        shipped, made = EXAMPLES / name, tmp_path / name
        assert {file.name for file in made.iterdir()} == {file.name for file in shipped.iterdir()}
        assert AutoModelForCausalLM.from_pretrained(made).num_parameters() > 10**6


def test_every_example_has_a_test() -> None:
    source = Path(__file__).read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f'"{file.name}"' in source, f"{file.name} is run by no test"


def test_checkpoints_are_small() -> None:
    sizes = [file.stat().st_size for name in CHECKPOINTS for file in (EXAMPLES / name).iterdir()]
    assert sum(sizes) <= 6 * 10**6


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_loads_quietly(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / name)
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / name)
        inputs = tokenizer("Python", return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=2)
    finally:
        logging.enable_progress_bar()
    assert capfd.readouterr().err == ""
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.padding_side == "left"


def test_greedy_text_is_english() -> None:
    """Nearly every word is one of the documentation's, and few are repeated."""
    known = set(re.findall(r"[A-Za-z]+", " ".join(topics.topics.values()).lower()))
    for name, prompts in zip(CHECKPOINTS, (['The "if" statement is used'], ["What is a list?", "Explain str.join."])):
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / name)
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / name)
        words: list[str] = []
        for text in prompts:
            if tokenizer.chat_template:
                message = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")["input_ids"]
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)
            answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            words += re.findall(r"[A-Za-z]+", answer.lower())
        assert len(words) > 10
        assert sum(word in known for word in words) / len(words) > 0.9
        assert len(set(words)) / len(words) > 0.3
