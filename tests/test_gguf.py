"""GGUF files: the command line answers as transformers does with the same file."""

from __future__ import annotations

import importlib
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged
from hf_paged.cli.main import main
from hf_paged.fused.cpu.coded import coded_weight
from hf_paged.fused.cpu.groups import Codes
from hf_paged.serving.checkpoints import load_model, pretrained
from tests.versions.marks import since

gguf = pytest.importorskip("gguf")
gguf_files = importlib.import_module("tests.gguf_files")

HEADS, LAYERS, LETTERS = 4, 2, "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"


def write(path: Path, size: int, kinds: tuple[str, ...]) -> Path:
    """Write a Llama whose words are letters, its matrices in blocks of these types, in turns."""
    words = ["<s>", "</s>", "Ġ", *LETTERS, "ab", "abc"]
    writer = gguf.GGUFWriter(path, "llama")
    facts = {
        "context_length": 256, "embedding_length": size, "block_count": LAYERS, "feed_forward_length": 2 * size,
        "head_count": HEADS, "head_count_kv": HEADS // 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": len(words), "tokenizer_model": "gpt2", "tokenizer_pre": "default", "token_list": words,
        "token_types": [3, 3, *[1] * (len(words) - 2)], "token_merges": ["a b", "ab c"], "bos_token_id": 0,
        "eos_token_id": 1, "chat_template": TEMPLATE,
    }  # fmt: skip
    for field, fact in facts.items():
        getattr(writer, f"add_{field}")(fact)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(words), size), "output.weight": (len(words), size)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_q": (size, size), "attn_k": (size // 2, size), "attn_v": (size // 2, size),
                "attn_output": (size, size), "ffn_gate": (2 * size, size), "ffn_up": (2 * size, size),
                "ffn_down": (size, 2 * size), "attn_norm": (size,), "ffn_norm": (size,),
            }.items()
        }  # fmt: skip
    shapes["output_norm.weight"] = (size,)
    for number, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            values = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, values / 9 + 1)
        else:
            kind = kinds[number % len(kinds)]
            data = gguf_files.blocks(kind, *shape, seed=number)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", 32, ("Q8_0",))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "mixed.gguf", 256, gguf_files.KINDS)


def plain(path: Path, prompt: str, new: int) -> str:
    given: dict[str, Any] = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **given).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **given)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


@since("5.23", "reads other tokenizers of GGUF files")
def test_the_command_answers_as_transformers_does(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny), "abc", "--max-new-tokens", "12", "--no-chat"]) == 0
    assert f"\n{plain(tiny, 'abc', 12)}\n" in capsys.readouterr().out
    assert main(["check", str(tiny)]) == 0
    assert "every layer attends through AttentionInterface" in capsys.readouterr().out


@since("5.23", "reads other tokenizers of GGUF files")
def test_other_files_of_the_folder_are_not_read(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Any] = []
    build = gguf.GGUFReader.__init__
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda own, *args: (readers.append(own), build(own, *args))[0])
    for each in (tiny, Path("examples/pydoc-lm-base/tokenizer.json")):
        shutil.copy(each, tmp_path)
    name = str(tmp_path / tiny.name)
    made = pretrained(AutoTokenizer, name, "tokenizer")
    assert (made.chat_template, made.eos_token, made.name_or_path) == (TEMPLATE, "</s>", name)
    known = AutoTokenizer.from_pretrained(tiny.parent, gguf_file=tiny.name)
    assert made("abc")["input_ids"] == known("abc")["input_ids"]
    # A memory map for each token takes several times the memory of an array.
    assert [type(each.tensors[0].data) for each in (readers[0], readers[-1])] == [np.ndarray, np.memmap]


def test_weights_stay_in_the_codes_of_the_file(mixed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """With the values and the tokens of transformers' model, of every type of blocks, and without copies in plain."""
    model = load_model(str(mixed), device="cpu")
    assert re.search(r": \d+ weights in Q\d_., .* stay as they lie in the file; --weights dequantised", caplog.text)
    assert {coded_weight(each) is not None for each in model.modules() if type(each) is nn.Linear} == {True}
    assert coded_weight(model.get_input_embeddings()) is not None
    known = load_model(str(mixed), device="cpu", weights="dequantised")
    assert all(map(torch.equal, model.state_dict().values(), known.state_dict().values()))
    ids = torch.tensor([[5, 6, 7, 8, 20], [9, 4, 3, 3, 12]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = known.generate(ids, **options)
    monkeypatch.setattr(Codes, "values", None)
    for rows in (3, 9), ():
        cut = [torch.ops.aten.slice(each.get_input_embeddings().weight, 0, *rows) for each in (model, known)]
        assert cut[0].equal(cut[1])
    assert model.generate(ids, **options).equal(expected)
    assert model.generate(ids, cache_implementation="paged", **options).equal(expected)
    with hf_paged.Engine(model) as engine:
        found = engine.generate(ids.tolist(), GenerationConfig(**options))
    assert [each.outputs[0].token_ids for each in found] == expected[:, 5:].tolist()
    report = hf_paged.check(model)
    assert report.int8_layers + report.int4_layers == 15 and report.int4_layers
    for weights, bits in ("a16", 16), ("a8", 8):
        coded = [coded_weight(each) for each in load_model(str(mixed), device="cpu", weights=weights).modules()]
        assert {each.codes.form.activations for each in coded if each is not None} == {bits}


def test_weights_can_be_plain_ones(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(str(tiny), device="cpu", weights="dequantised")
    assert "its 0 MiB are read into weights of torch.float32, which take 0 MiB (--weights dequantised)" in caplog.text
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    for weights, reason in ("dequantised", "is no GGUF file; leave it out"), ("a8", "in no codes.* or give w8a8"):
        with pytest.raises(ValueError, match=f"--weights {weights}: .* {reason}"):
            load_model(str(tmp_path), device="cpu", weights=weights)


def test_a_broken_file_is_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, broken = tiny.read_bytes(), tmp_path / "broken.gguf"
    for content, reason in {
        whole[:-1]: rf"cut off: 1 of {len(whole)} bytes are missing; fetch it again",
        whole[:3000]: rf"cut off: {len(whole) - 3000} of {len(whole)} bytes are missing; fetch it again",
        whole[:600]: r"cut off: at least \d of at least 60\d bytes are missing; fetch it again",
        whole[:6]: r"cut off: at least 2 of at least 8 bytes are missing; fetch it again",
        b"": r"it is no GGUF file: it begins with b'', not b'GGUF'; give another file",
        struct.pack(
            "<4sI3Q20sIQ5sQsIIQ", b"GGUF", 3, 1, 1, 20, b"general.architecture", 8, 5, b"llama", 1, b"t", 0, 0, 0
        ): "",
        b"GGUF\x01" + whole[5:]: r"it is a GGUF file of version 1, not 2 or 3; convert the checkpoint again",
    }.items():
        broken.write_bytes(content)
        assert main(["check", str(broken)]) == 2
        assert re.fullmatch(rf".*cannot load the \w+ of .*broken\.gguf: .*{reason}\n", capsys.readouterr().err)


def test_what_is_missing_is_named(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["check", str(tmp_path / "none.gguf")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["check", str(tiny)]) == 2
    assert "the package gguf is missing that reads it; pip install gguf" in capsys.readouterr().err
