"""Checkpoints in the formats of GPTQ and AWQ are read as codes, with the values that the formats define."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import hf_paged
from hf_paged.serving import gptq_files
from hf_paged.serving.checkpoints import CODED_FORMATS, load_model

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
CASES = {
    "awq": AWQ,
    "gptq": GPTQ,
    "one group": GPTQ | {"group_size": -1},
    "eight bits": GPTQ | {"bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
    "act-order": GPTQ | {"desc_act": True},
    "a reader and a line": GPTQ | {"quant_method": "mine"},
}


def load_mine(checkpoint: str, config: Any, *others: Any) -> Any:
    """Read a format of which only the name is new."""
    config.quantization_config = GPTQ
    return gptq_files.load_in_codes(checkpoint, config, *others)


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Codes [..., n] in 32-bit words, the first of `order` in the low bits."""
    parts = codes.long().unflatten(-1, (-1, len(order)))[..., order]
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return (words - (words >> 31 << 32)).int().contiguous()


def write(folder: Path, fields: dict[str, Any]) -> Any:
    """Write a random checkpoint; returns the model with the values of its codes."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    bits, is_awq, found, known = fields["bits"], fields["quant_method"] == "awq", {}, {}
    order = (0, 2, 4, 6, 1, 3, 5, 7) if is_awq else tuple(range(32 // bits))
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.state_dict().items():
        if not name.endswith("proj.weight"):
            found[name] = torch.randn(weight.shape, generator=generator).half()
            known[name] = found[name].float()
            continue
        columns, depth = weight.shape
        index = torch.arange(depth) // (fields["group_size"] if fields["group_size"] > 0 else depth)
        index = index[torch.randperm(depth, generator=generator)] if fields.get("desc_act") else index
        codes = torch.randint(0, 2**bits, (columns, depth), generator=generator)
        zeros = torch.randint(1, 2**bits, (columns, int(index.max()) + 1), generator=generator)
        scales = (torch.rand(zeros.shape, generator=generator) / 2**bits).half()
        known[name] = (codes - zeros[:, index]) * scales.float()[:, index]
        layer, added = name.removesuffix(".weight"), not is_awq and "checkpoint_format" not in fields
        words = packed(codes.T, bits, order) if is_awq else packed(codes, bits, order).T.contiguous()
        found |= {f"{layer}.qweight": words, f"{layer}.qzeros": packed(zeros.T - int(added), bits, order)}
        found |= {f"{layer}.scales": scales.T.contiguous()} | ({} if is_awq else {f"{layer}.g_idx": index.int()})
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": fields}))
    model.load_state_dict(known)
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_values_and_tokens_of_the_format(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CODED_FORMATS, "mine", f"{__name__}:load_mine")
    known = write(tmp_path, CASES[case])
    model = load_model(str(tmp_path), "float32", "cpu")
    assert all(map(torch.equal, model.state_dict().values(), known.state_dict().values()))
    kept = "no weights stay .*, 14 are plain, because their groups are out" if case == "act-order" else "14 weights in"
    assert re.search(kept, caplog.text)
    ids = torch.tensor([[5, 6, 7, 8, 20], [9, 4, 3, 3, 12]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = known.generate(ids, **options)
    assert model.generate(ids, cache_implementation="paged", **options).equal(expected)
    with hf_paged.Engine(model) as engine:
        found = engine.generate(ids.tolist(), transformers.GenerationConfig(**options))
    assert [each.outputs[0].token_ids for each in found] == expected[:, 5:].tolist()
    report = hf_paged.check(model)
    assert report.int4_layers + report.int8_layers == (0 if case == "act-order" else 14)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, AWQ)
    with pytest.raises(ValueError, match=r"--weights int4: .* is in awq already; leave it out"):
        load_model(str(tmp_path), "float32", "cpu", weights="int4")
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, reason in ((GPTQ | {"group_size": 48}, "group_size=48 is"), (GPTQ | {"bits": 3}, "bits=3 and format")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
        with pytest.raises(ValueError, match=f"{reason}.*; save the dequantised model with the package"):
            load_model(str(tmp_path), "float32", "cpu")
