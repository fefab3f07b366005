"""Checkpoints of GPTQ, AWQ, bitsandbytes and torchao are read as codes, with the values that the formats define."""

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
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "nf4, nested, longer blocks": {"quant_method": "bitsandbytes", "load_in_4bit": True, "block": 256, "nested": True},
    "torchao": {"quant_method": "torchao", "quant_type": {}},
    "torchao, zeros": {"quant_method": "torchao", "quant_type": {}, "zeros": True, "scale": torch.bfloat16},
    "torchao, zeros, fp32": {"quant_method": "torchao", "quant_type": {}, "zeros": True},
    "torchao, eight bits": {"quant_method": "torchao", "quant_type": {}, "bits": 8, "scale": torch.float16},
}
KEPT = {"act-order": 0, "nf4": 12, "nf4, nested, longer blocks": 12, "torchao, zeros, fp32": 0}  # others: all 14


def load_mine(checkpoint: str, config: Any, *others: Any) -> Any:
    """Read a format of which only the name is new."""
    config.quantization_config = GPTQ
    return gptq_files.load_in_codes(checkpoint, config, *others)


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Codes [..., n] in 32-bit words, the first of `order` in the low bits."""
    parts = codes.long().unflatten(-1, (-1, len(order)))[..., order]
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return (words - (words >> 31 << 32)).int().contiguous()


def of_gptq(fields: dict[str, Any], name: str, shape: Any, generator: Any, about: Any) -> Any:
    """Values of a random weight, and its tensors."""
    bits, is_awq, (columns, depth) = fields["bits"], fields["quant_method"] == "awq", shape
    order = (0, 2, 4, 6, 1, 3, 5, 7) if is_awq else tuple(range(32 // bits))
    index = torch.arange(depth) // (fields["group_size"] if fields["group_size"] > 0 else depth)
    index = index[torch.randperm(depth, generator=generator)] if fields.get("desc_act") else index
    codes = torch.randint(0, 2**bits, (columns, depth), generator=generator)
    zeros = torch.randint(1, 2**bits, (columns, int(index.max()) + 1), generator=generator)
    scales = (torch.rand(zeros.shape, generator=generator) / 2**bits).half()
    values = (codes - zeros[:, index]) * scales.float()[:, index]
    layer, added = name.removesuffix(".weight"), not is_awq and "checkpoint_format" not in fields
    words = packed(codes.T, bits, order) if is_awq else packed(codes, bits, order).T.contiguous()
    parts = {f"{layer}.qweight": words, f"{layer}.qzeros": packed(zeros.T - int(added), bits, order)}
    parts |= {f"{layer}.scales": scales.T.contiguous()} | ({} if is_awq else {f"{layer}.g_idx": index.int()})
    return values, parts


def of_bitsandbytes(fields: dict[str, Any], name: str, shape: Any, generator: Any, about: Any) -> Any:
    block, count = fields.get("block", 64), shape.numel()
    codes, table = torch.randint(0, 16, (count,), generator=generator), torch.randn(16, generator=generator)
    scales = torch.rand(-(-count // block), generator=generator) / 8
    parts = {name: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], f"{name}.quant_map": table}
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(shape)}
    if fields.get("nested"):
        inner, outer = torch.rand(256, generator=generator), torch.rand(-(-len(scales) // 16), generator=generator)
        index = torch.randint(0, 256, scales.shape, generator=generator)
        parts |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": inner, f"{name}.absmax": index.byte()}
        state |= {"nested_blocksize": 16, "nested_offset": 0.125, "nested_dtype": "float32"}
        scales = inner[index] * outer.repeat_interleave(16)[: len(scales)] + 0.125
    parts.setdefault(f"{name}.absmax", scales)
    parts[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return (table[codes] * scales.repeat_interleave(block)[:count]).view(shape), parts


def of_torchao(fields: dict[str, Any], name: str, shape: Any, generator: Any, about: dict[str, str]) -> Any:
    most, groups = 2 ** (fields.get("bits", 4) - 1), (shape[0], shape[1] // 32)
    codes, zeros = (torch.randint(-most, most, each, generator=generator).char() for each in (shape, groups))
    zeros = zeros if fields.get("zeros") else zeros * 0
    scales = (torch.rand(groups, generator=generator) / most).to(fields.get("scale", torch.float32))
    dtype = {"_data": f"int{most.bit_length()}"}
    data = {"target_dtype": dtype, "block_size": [1, 32], "activation_quantization": None}
    about[name] = json.dumps({"_type": fields.get("type", "IntxUnpackedToInt8Tensor"), "_data": data})
    prefix = name.removesuffix("weight")
    parts = {f"{prefix}_weight_qdata": codes, f"{prefix}_weight_scale": scales, f"{prefix}_weight_zero_point": zeros}
    zero, scale = (each.float().repeat_interleave(32, 1) for each in (zeros, scales))
    return (codes - zero) * scale, parts


def write(folder: Path, fields: dict[str, Any], **damaged: torch.Tensor) -> Any:
    """Write a random checkpoint, but for damaged parts; returns the model with the values of its codes."""
    inner = 168 if fields["quant_method"] == "bitsandbytes" else 160  # 168: in blocks of 64, no whole groups of 16
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 96, "intermediate_size": inner, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    found, known, about = dict[str, Any](), dict[str, Any](), dict[str, str]()
    generator = torch.Generator().manual_seed(0)
    writer = {"bitsandbytes": of_bitsandbytes, "torchao": of_torchao}.get(fields["quant_method"], of_gptq)
    for name, weight in model.state_dict().items():
        if name.endswith("proj.weight"):
            known[name], parts = writer(fields, name, weight.shape, generator, about)
        else:
            parts = {name: torch.randn(weight.shape, generator=generator).half()}
            known[name] = parts[name].float()
        found |= parts
    found |= {f"model.layers.1.mlp.up_proj.{part}": each for part, each in damaged.items()}
    save_file(found, folder / "model.safetensors", about)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"quantization_config": fields}, default=str))
    model.load_state_dict(known)
    return model


@pytest.mark.parametrize("case", CASES)
def test_the_values_and_tokens_of_the_format(case: str, tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(CODED_FORMATS, "mine", f"{__name__}:load_mine")
    known = write(tmp_path, CASES[case])
    model = load_model(str(tmp_path), "float32", "cpu")
    assert all(map(torch.equal, model.state_dict().values(), known.state_dict().values()))
    kept = KEPT.get(case, 14)
    others = f".*, {14 - kept} are plain, because" if kept < 14 else ""
    assert re.search(f"{kept or 'no'} weights{others}", caplog.text)
    ids = torch.tensor([[5, 6, 7, 8, 20], [9, 4, 3, 3, 12]])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = known.generate(ids, **options)
    assert model.generate(ids, cache_implementation="paged", **options).equal(expected)
    with hf_paged.Engine(model) as engine:
        found = engine.generate(ids.tolist(), transformers.GenerationConfig(**options))
    assert [each.outputs[0].token_ids for each in found] == expected[:, 5:].tolist()
    report = hf_paged.check(model)
    assert report.int4_layers + report.int8_layers == kept


@pytest.mark.slow
@pytest.mark.parametrize("package", ["bitsandbytes", "torchao"])
def test_what_the_package_writes(package: str, tmp_path: Path) -> None:
    own: Any = pytest.importorskip(f"{package}.{'quantization' if package == 'torchao' else 'functional'}")
    config: Any = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    if package == "torchao":
        config = transformers.TorchAoConfig(own.IntxWeightOnlyConfig(torch.int4, own.PerGroup(32)))
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    known = load(tmp_path, quantization_config=config, dtype=torch.float32, device_map="cpu")
    known.save_pretrained(tmp_path / "coded")
    model = load_model(str(tmp_path / "coded"), "float32", "cpu")
    for name, layer in known.model.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            read, weight = model.model.layers.get_submodule(name).weight.codes.values(), layer.weight
            state = getattr(weight, "quant_state", None)
            assert read.equal(own.dequantize_4bit(weight.data, state) if state else weight.dequantize())


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    for case, reason in (
        (CASES["torchao"] | {"type": "Int4TilePackedTo4dTensor"}, "weights are Int4TilePackedTo4dTensor of torchao"),
        (CASES["nf4"], "--weights a16: .*: its codes are numbers of values in a table, .*; leave it out$"),
        (CASES["act-order"], "--weights a16: .*: none of its weights can be kept in codes, .*; leave it out$"),
    ):
        write(tmp_path, case)
        with pytest.raises(ValueError, match=reason):
            load_model(str(tmp_path), "float32", "cpu", weights="a16")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--weights a16: .* \(its weights are not in safetensors\); leave it out$"):
        load_model(str(tmp_path), "float32", "cpu", weights="a16")
    write(tmp_path, AWQ)
    with pytest.raises(ValueError, match=r"--weights int4: .* is in awq already; leave it out"):
        load_model(str(tmp_path), "float32", "cpu", weights="int4")
    config = json.loads((tmp_path / "config.json").read_text())
    for fields, reason in ((GPTQ | {"group_size": 48}, "group_size=48 is"), (GPTQ | {"bits": 3}, "bits=3 and format")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
        with pytest.raises(ValueError, match=f"{reason}.*; save the dequantised model with the package"):
            load_model(str(tmp_path), "float32", "cpu")
    for name, part, content, reason in (
        ("nf4", "weight.quant_map", torch.ones(3), "quant_map has 3 elements, and its weight needs 16; fetch"),
        ("torchao", "_weight_scale", torch.ones(160, 1), "has 160 elements, and its weight needs 480; fetch"),
        ("torchao", "_weight_qdata", torch.full((160, 96), -9, dtype=torch.int8), "codes beyond 4 bits; fetch"),
    ):
        write(tmp_path, CASES[name], **{part: content})
        with pytest.raises(ValueError, match=reason):
            load_model(str(tmp_path), "float32", "cpu")
    (file := tmp_path / "model.safetensors").write_bytes(file.read_bytes().replace(b"[97,96]", b"[97,95]"))
    with pytest.raises(ValueError, match=r"bytes \d+ to \d+ of .* and needs 18430; fetch the file again"):
        load_model(str(tmp_path), "float32", "cpu")
