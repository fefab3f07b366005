"""The command line on the shipped checkpoint: texts equal plain generate's, errors are one line and exit code 2."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged
from hf_paged.cli import generate as generate_command
from hf_paged.cli.check import needs
from hf_paged.cli.main import main
from hf_paged.integration.names import ENCODES_MEDIA
from hf_paged.kernels.native import build as native_build
from hf_paged.serving.loading import load_engine
from tests import models
from tests.architectures.tiny import tiny_config, tiny_model
from tests.serving import seeing

EXAMPLES = Path(__file__).parent.parent / "examples"
QA = str(EXAMPLES / "pydoc-lm-qa")
BASE = str(EXAMPLES / "pydoc-lm-base")
QUESTIONS = ["What does str.capitalize() do?", "Explain the if statement."]


@functools.cache
def loaded(checkpoint: str) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)


@functools.cache
def plain(checkpoint: str, prompt: str, *, chat: bool, **options: Any) -> list[str]:
    tokenizer, model = loaded(checkpoint)
    if chat:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids = inputs["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return list(tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    status = main(list(argv))
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in run(capsys, "generate", "--json", *argv).splitlines()]
    return lines[:-1], lines[-1]["stats"]


def texts(answer: dict[str, Any]) -> list[str]:
    return [output["text"] for output in answer["outputs"]]


def test_standard_output_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as Python does
    assert main(["--version"]) == 0


def test_compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain generate's texts are equal, also where tokens are drawn. A difference is said, and the status is 1."""
    options = ("--max-new-tokens", "12", "--do-sample", "--num-return-sequences", "2", "--compare")
    _, figures = run_json(capsys, QA, *QUESTIONS, *options)
    assert figures["plain"].items() >= {"equal": 4, "texts": 4}.items() and figures["plain"]["seconds"] > 0
    out = run(capsys, "generate", QA, QUESTIONS[0], "--max-new-tokens", "4", "--compare")
    for line in ("compared    equal, token for token", "time        paged", "memory      paged"):
        assert line in out
    original = generate_command._generate_batch

    def other(*args: Any, paged: bool = True, few: bool = False) -> Any:
        rows = original(*args, paged=paged, few=few)
        return rows if paged else [[replace(answer, tokens=(1,)) for answer in row] for row in rows]

    monkeypatch.setattr(generate_command, "_generate_batch", other)
    assert main(["generate", QA, *QUESTIONS, "--max-new-tokens", "4", "--compare"]) == 1
    assert "DIFFERENT in 2 of 2 texts" in capsys.readouterr().out


def test_ranks_that_cannot_share_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", QA, "x"], ["serve", QA]):
        assert main([*command, "--tensor-parallel-size", "3"]) == 2
        error = capsys.readouterr().err
        assert "4 heads with 2 K/V heads are not divisible by 3; use 1 or 2" in error and error.count("\n") == 1


def test_where_a_checkpoint_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision reaches everything that is loaded: configuration, options, tokenizer, weights."""
    loaded: list[dict[str, Any]] = []
    expected = {"revision": "v2", "trust_remote_code": True}
    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM, GenerationConfig):
        original = kind.from_pretrained

        def record(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            loaded.append({name: kwargs.pop(name) for name in ("revision", "trust_remote_code") if name in kwargs})
            return _original(*args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", record)
    flags = ["--revision", "v2", "--trust-remote-code"]
    assert main(["generate", QA, "x", "--max-new-tokens", "1", *flags]) == 0
    assert len(loaded) >= 5 and loaded.count(expected) >= 5
    loaded.clear()
    load_engine(QA, hf_paged.CacheConfig(num_blocks=8), hf_paged.SchedulerConfig(), source=expected)[0].close()
    assert loaded.count(expected) >= 3


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "--show-completion" in run(capsys, "--help")


# -- what it prints ------------------------------------------------------------------------------------------------


def test_prints_texts_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "generate", QA, *QUESTIONS, "--max-new-tokens", "24")
    for number, question in enumerate(QUESTIONS, 1):
        assert f"[{number}/2] {question}" in out
        assert plain(QA, question, chat=True, max_new_tokens=24)[0] in out
    for words in (
        *("tokens/s", "used at the peak", "shared", "copied on write", "filled with tokens"),
        *("padded to one length", "reserved: it starts with 16 blocks"),  # of contiguous tensors; more than is used
    ):
        assert words in out.split("-" * 40)[1]


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"num_beams": 4, "num_return_sequences": 2}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}],
    ids=["greedy", "beams", "processors"],
)
def test_texts_equal_plain_generate(capsys: pytest.CaptureFixture[str], kwargs: dict[str, Any]) -> None:
    options = [word for name, value in kwargs.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    answers, stats = run_json(capsys, QA, *QUESTIONS, "--max-new-tokens", "20", *options)
    assert [answer["prompt"] for answer in answers] == QUESTIONS
    for answer in answers:
        assert texts(answer) == plain(QA, answer["prompt"], chat=True, max_new_tokens=20, **kwargs)
    generated = [output["num_tokens"] for answer in answers for output in answer["outputs"]]
    assert stats["generated_tokens"] == sum(generated)
    assert 0 < stats["kv_bytes_filled"] <= stats["kv_bytes_used"] <= stats["kv_bytes_reserved"]
    assert stats["route"] == "packed" and stats["block_size"] == 16


def test_without_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = 'The "if" statement is used'
    answers, _ = run_json(capsys, BASE, prompt, "--max-new-tokens", "20", "--block-size", "4")
    assert texts(answers[0]) == plain(BASE, prompt, chat=False, max_new_tokens=20)
    answers, _ = run_json(capsys, QA, QUESTIONS[0], "--no-chat", "--max-new-tokens", "12")
    assert texts(answers[0]) == plain(QA, QUESTIONS[0], chat=False, max_new_tokens=12)


def test_sampling_is_reproducible_and_shares_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    question = "What does the documentation say about the class definitions and their decorators?"
    options = [QA, question, "--do-sample", "--temperature", "1.5", "--num-return-sequences", "3"]
    first, stats = run_json(capsys, *options, "--seed", "1", "--max-new-tokens", "16")
    second, _ = run_json(capsys, *options, "--seed", "1", "--max-new-tokens", "16")
    third, _ = run_json(capsys, *options, "--seed", "2", "--max-new-tokens", "16")
    assert first == second
    assert first != third
    assert stats["peak_blocks_shared"] >= 1
    assert stats["cow_copies"] >= 1


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that takes images, and a picture of two."""
    folder = tmp_path_factory.mktemp("eyes")
    seeing.model().save_pretrained(folder)
    seeing.processor().save_pretrained(folder)
    for shade in (5, 60):
        (folder / f"{shade}.png").write_bytes(seeing.picture(shade))
    return folder


def test_images(eyes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [word for shade in (5, 60) for word in ("--image", str(eyes / f"{shade}.png"))]
    prompts = [seeing.QUESTION, "And that?"]
    answers, _ = run_json(capsys, str(eyes), *prompts, *files, "--max-new-tokens", "12", "--compare")
    pictures = [seeing.picture(shade) for shade in (5, 60)]
    assert [texts(each) for each in answers] == [[seeing.expected(*pictures, text=prompt)[0]] for prompt in prompts]


def test_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model that only the auto class of sequence-to-sequence models knows, though it has no encoder of text."""
    seeing.hearing_model().save_pretrained(tmp_path)
    seeing.hearing_processor().save_pretrained(tmp_path)
    (tmp_path / "noise.wav").write_bytes(seeing.sound())
    words = ["--audio", str(tmp_path / "noise.wav"), "--max-new-tokens", "12", "--compare"]
    answers, _ = run_json(capsys, str(tmp_path), seeing.QUESTION, *words)
    prompt = f"<|user|><audio>{seeing.QUESTION}<|assistant|>"
    samples = seeing.noise(1.0).astype(np.float32) / 2**15
    expected = seeing.answer_of(seeing.hearing_model(), seeing.hearing_processor(), prompt, audio=[samples])
    assert [texts(each) for each in answers] == [[expected[0]]]


WRONG_FILES = [
    (["--image", "config.json"], "the data is no image in PNG"),
    (["--image", "missing.png"], "missing.png: No such file or directory; give a file"),
    (["--audio", "5.png"], "takes none; drop --audio"),
    (["--image", "5.png", "--tensor-parallel-size", "2"], "drop --tensor-parallel-size 2"),
]
if ENCODES_MEDIA:
    refused = "the processor refuses the prompt 'What is this?' with these files"
    WRONG_FILES.append((["--image", "5.png", "--no-chat"], refused))


def test_wrong_images(eyes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(eyes)
    for words, message in WRONG_FILES:
        assert main(["generate", str(eyes), seeing.QUESTION, *words]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_stream_prints_the_same_texts(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "generate", QA, *QUESTIONS, "--stream", "--no-stats", "--max-new-tokens", "12")
    expected = [plain(QA, question, chat=True, max_new_tokens=12)[0] for question in QUESTIONS]
    assert out == "".join(f"[{i}/2] {q}\n{text}\n" for i, (q, text) in enumerate(zip(QUESTIONS, expected), 1))


def test_prompts_from_standard_input_and_file(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    options = ["--max-new-tokens", "4", "--batch-size", "2"]
    expected, _ = run_json(capsys, QA, "one", "two", "three", *options)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\nthree\n"))
    assert run_json(capsys, QA, *options)[0] == expected
    (tmp_path / "prompts").write_text("two\nthree")
    assert run_json(capsys, QA, "one", "--file", str(tmp_path / "prompts"), *options)[0] == expected
    assert run_json(capsys, QA, "one", *options, "two", "--", "three")[0] == expected


def test_stop_strings_and_finish_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    whole = plain(QA, QUESTIONS[0], chat=True, max_new_tokens=30)[0]
    stop = whole.split()[3]
    answers, _ = run_json(capsys, QA, *QUESTIONS, "--max-new-tokens", "30", "--stop-strings", stop)
    output = answers[0]["outputs"][0]
    assert output["finish_reason"] == "stop"
    assert output["text"].endswith(stop) and whole.startswith(output["text"])
    cut = answers[1]["outputs"][0]
    assert stop in cut["text"] or (cut["finish_reason"], cut["num_tokens"]) == ("length", 30)


def test_default_length_stays_inside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "is " * 1000
    answers, stats = run_json(capsys, BASE, prompt)
    limit = AutoModelForCausalLM.from_pretrained(BASE).config.max_position_embeddings
    assert stats["prompt_tokens"] + answers[0]["outputs"][0]["num_tokens"] <= limit


WRONG = [
    ([], ["Missing command", "--help"]), (["genrate", QA], ["'genrate'", "Did you mean 'generate'"]),
    (["generate"], ["CHECKPOINT"]), (["check", QA, "--tokens", "9"], ["--tokens 9 is for --users"]),
    (["generate", QA], ["no prompt", "--file"]),
    (["generate", QA, "x", ""], ["prompt 2", "empty"]), (["generate", QA, "  "], ["prompt 1", "empty"]),
    (["generate", QA, "x", "--num-beam", "4"], ["--num-beam", "No such option", "--num-beams"]),
    (["generate", QA, "x", "--temprature=1"], ["--temprature", "No such option", "--temperature"]),
    (["generate", QA, "x", "--top-k", "many"], ["--top-k many", "valid integer"]),
    (["generate", QA, "x", "--top-p", "1.5", "--do-sample"], ["--top-p 1.5", "less than or equal to 1"]),
    (["generate", QA, "x", "--max-new-tokens", "0"], ["--max-new-tokens 0", "equal to 1"]),
    (["generate", QA, "x", "--batch-size", "0"], ["--batch-size 0", "equal to 1"]),
    (["generate", QA, "x", "--temperature", "0.5"], ["`temperature`", "0.5", "do_sample"]),
    (["generate", QA, "x", "--length-penalty", "2"], ["`length_penalty`", "2.0", "num_beams"]),
    (["generate", QA, "x", "--num-return-sequences", "3"], ["num_return_sequences", "got 3"]),
    (["generate", QA, "x", "--num-return-sequences", "5", "--num-beams", "2"], ["5", "num_beams"]),
    (["generate", QA, "x", "--stream", "--num-beams", "2"], ["--stream", "--num-beams 2"]),
    (["generate", QA, "x", "--stream", "--json"], ["--stream", "--json"]),
    (["generate", QA, "x", "--min-new-tokens", "9", "--max-new-tokens", "3"], ["--min-new-tokens 9"]),
    (["generate", QA, "x", "--block-size", "0"], ["block_size=0", "at least 1"]),
    (["generate", QA, "x", "--device", "mars"], ["the device mars", "cpu"]),
    (["generate", QA, "is " * 2000], ["prompt 1", "1024", "shorten"]),
    (["generate", QA, "x", "--max-new-tokens", "5000"], ["--max-new-tokens 5000", "1024", "or less"]),
    (["generate", QA, "What is a list? " * 4, "--num-blocks", "1"], ["num_blocks=1", "raise"]),
    (["generate", BASE, "x", "--chat"], ["--chat", "no chat template"]),
    (["generate", str(EXAMPLES), "x"], [str(EXAMPLES), "config.json", "save_pretrained"]),
    (["generate", "no/such/folder", "x"], ["no/such/folder", "folder"]),
    (["generate", str(EXAMPLES / "pydoc-lm-qx"), "x"], ["pydoc-lm-qx", "no folder"]),
    (["generate", __file__, "x"], ["test_cli.py", "file"]),
    (["generate", QA, "--file", "no-such-file"], ["no-such-file", "No such file"]),
    (["check", str(EXAMPLES)], ["config.json"]),
]  # fmt: skip


def test_one_line_errors(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for argv, words in WRONG:
        assert main(argv) == 2, argv
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and captured.err.startswith("hf-paged: error: "), argv
        assert [word for word in words if word not in captured.err] == [], argv


def test_a_broken_checkpoint_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for file in Path(QA).iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:1000] if file.suffix == ".safetensors" else data)
    assert main(["generate", str(tmp_path), "x"]) == 2
    assert str(tmp_path) in capfd.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["generate", str(tmp_path), "x"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "config" in error


# -- check, build --------------------------------------------------------------------------------------------------


def test_check_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(QA)
    for options in ([], ["--config-only"]):
        *report, plugin = run(capsys, "check", QA, *options).splitlines()
        assert report == str(hf_paged.check(model)).splitlines()
        assert plugin.startswith("plugin: installed") and "hf_paged.install()" in plugin
    hf_paged.uninstall()
    try:
        assert "plugin: not installed" in run(capsys, "check", QA)
    finally:
        hf_paged.install()


@pytest.mark.parametrize(
    ("family", "tokens", "prompt"), [("llama", 150, 145), ("llama", 50, 5), ("gemma3", 50, 30), ("jamba", 50, 30)]
)
def test_the_memory_that_check_names_holds_the_users(family: str, tokens: int, prompt: int) -> None:
    """All at once without preemption, the first one beside the watermark; not one more, and not in a byte less."""
    model = models.build(family) if family in models.FAMILIES else tiny_model(family)
    flags = needs(hf_paged.check(model), model, 12, tokens)[1].split()
    assert flags[1] == "--kv-cache-memory" and flags[3:5] == ["--max-num-seqs", "12;"]
    config = GenerationConfig(min_new_tokens=tokens - prompt, max_new_tokens=tokens - prompt)
    for users, less in ((12, 0), (13, 0), (12, 1)):
        memory, most = hf_paged.CacheConfig(memory=int(flags[2]) - less), 0
        with hf_paged.Engine(model, memory, hf_paged.SchedulerConfig(max_num_seqs=users)) as engine:
            for seed in range(users):
                engine.add_request(models.prompts(prompt, seed=seed)[0], config)
            while engine.has_unfinished_requests():
                engine.step()
                most = max(most, engine.stats().num_running)
            preempted = engine.stats().preemptions_recompute + engine.stats().preemptions_swap
        assert (most == users and not preempted) == ((users, less) == (12, 0))


def test_check_says_that_a_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny_config("openai-gpt").save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--config-only"]) == 1
    assert "refused" in capsys.readouterr().out
    tiny_config("mamba2").save_pretrained(tmp_path)  # which only the engine runs
    assert main(["check", str(tmp_path), "--config-only", "--users", "2"]) == 1
    assert "2 sequences of 4,096 tokens" in capsys.readouterr().out


def test_build(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise native_build.NativeBuildError("no C compiler\nwas found")

    monkeypatch.setattr(native_build, "build", lambda: None)
    assert run(capsys, "build").strip() == native_build.status()
    monkeypatch.setattr(native_build, "build", fail)
    assert main(["build"]) == 1
    assert capsys.readouterr().err == "hf-paged: no C compiler was found\n"


# -- as a process --------------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "hf_paged.cli"]


def test_help_is_light() -> None:
    """No torch and no transformers, which take seconds to import."""
    code = (
        "import contextlib, sys\nfrom hf_paged.cli.main import main\n"
        "for arguments in (['--help'], ['--version'], ['generate', '--help']):\n"
        "    with contextlib.suppress(SystemExit):\n        main(arguments)\n"
        "assert not {'torch', 'transformers', 'numpy', 'triton'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert all(word in result.stdout for word in ("generate", hf_paged.__version__, "--num-return-sequences"))


@pytest.mark.slow
def test_a_reader_that_goes_away() -> None:
    # More text than fits into the pipe, so that the process cannot end before its reader goes.
    prompts = ["0", *["x " * 700] * 100]
    argv = [*COMMAND, "generate", QA, *prompts, "--max-new-tokens", "4", "--batch-size", "1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "[1/101] 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


@pytest.mark.slow
def test_interrupt() -> None:
    # More text than fits into the pipe, so that the process cannot end before it is interrupted.
    argv = [*COMMAND, "generate", QA, *["x"] * 100, "--stream", "--max-new-tokens", "1000", "--min-new-tokens", "1000"]
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "[1/100] x\n"
        process.send_signal(signal.SIGINT)
        error = process.stderr.read()
        assert process.wait() == 130
    assert error.strip() == "hf-paged: interrupted"


def test_interrupt_of_code_from_a_string(tmp_path: Path) -> None:
    # Python's dataclasses run such code on import. Without care, the process kills itself by SIGINT at its end.
    command = "lambda *_, **__: exec('raise KeyboardInterrupt')"
    code = f"from hf_paged.cli import main\nmain.command = {command}\nmain.program()"
    (tmp_path / "interrupted.py").write_text(code)
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "hf-paged: interrupted")
