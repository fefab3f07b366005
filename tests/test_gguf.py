"""GGUF files: the command line answers as transformers does with the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged.cli.main import main
from hf_paged.model.loading import load_model
from tests.versions.marks import since

gguf = pytest.importorskip("gguf")

SIZE, HEADS, LAYERS, LETTERS = 32, 4, 2, "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose words are letters, its matrices in blocks of eight bits."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    words = ["<s>", "</s>", "Ġ", *LETTERS, "ab", "abc"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, *[1] * (len(words) - 2)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(words), SIZE), "output.weight": (len(words), SIZE)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_q": (SIZE, SIZE), "attn_k": (SIZE // 2, SIZE), "attn_v": (SIZE // 2, SIZE),
                "attn_output": (SIZE, SIZE), "ffn_gate": (2 * SIZE, SIZE), "ffn_up": (2 * SIZE, SIZE),
                "ffn_down": (SIZE, 2 * SIZE), "attn_norm": (SIZE,), "ffn_norm": (SIZE,),
            }.items()
        }  # fmt: skip
    shapes["output_norm.weight"] = (SIZE,)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = generator.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values / 9 + 1)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values / 4, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def test_weights_are_plain_ones(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(str(tiny), device="cpu")
    assert "its 0 MiB are read into weights of torch.float32, which take 0 MiB" in caplog.text
    model.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))


def test_a_broken_file_is_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.gguf").write_bytes(tiny.read_bytes()[:3000])
    assert main(["check", str(tmp_path / "half.gguf")]) == 2
    assert "cannot load the" in capsys.readouterr().err


def test_what_is_missing_is_named(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "none.gguf")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["check", str(tiny)]) == 2
    assert "the package gguf is missing that reads it; pip install gguf" in capsys.readouterr().err
