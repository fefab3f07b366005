"""What eight and four bits cost in quality: a model's next-token distributions over three texts, exact and rounded.

    python scripts/real_models.py smollm2 gemma3
    python benchmarks/quality.py build/real/smollm2 build/real/gemma3 --length 600 --out benchmarks/results/quality.json

KL: divergence in nats of the rounded distribution from the exact one, the mean over all tokens. changed: share of the
places whose most likely token is another one. perplexity: of the texts. All in fp32 but for what is named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kernels import environment
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged.fused.cpu import coded
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.int8 import as_int8

HERE = Path(__file__).parents[1]
TEXTS = ["docs/prefixes.md", "hf_paged/cache/allocator.py", "LICENSE"]
FORMATS: dict[str, dict[str, Any]] = {
    "exact": {},
    "K/V int8": {"key_dtype": "int8", "value_dtype": "int8"},
    "K int8": {"key_dtype": "int8"},
    "V int8": {"value_dtype": "int8"},
    "K/V fp8": {"key_dtype": "fp8", "value_dtype": "fp8"},
}


@torch.inference_mode()
def distributions(model: Any, texts: list[torch.Tensor], **formats: Any) -> list[torch.Tensor]:
    """Of each text: log-probabilities fp32 [length, vocab]."""
    found = []
    for ids in texts:
        cache = hf_paged.PagedKVCache(model.config, **formats)
        found.append(model(ids[None], past_key_values=cache).logits[0].float().log_softmax(-1))
    return found


def compared(exact: list[torch.Tensor], other: list[torch.Tensor], texts: list[torch.Tensor]) -> dict[str, float]:
    count = sum(map(len, texts))
    kl = sum((p.exp() * (p - q)).sum().item() for p, q in zip(exact, other))
    changed = sum((p.argmax(-1) != q.argmax(-1)).sum().item() for p, q in zip(exact, other))
    loss = -sum(q[:-1].gather(1, ids[1:, None]).sum().item() for q, ids in zip(other, texts))
    perplexity = torch.tensor(loss / (count - len(texts))).exp().item()
    return {"kl": float(f"{kl / count:.2e}"), "changed %": round(100 * changed / count, 2),
            "perplexity": round(perplexity, 3)}  # fmt: skip


def rounded_rows(model: Any) -> None:
    """Give each linear layer the weights of `prepack(model, dtype="int8")`, whose kernels run in engines and `generate`
    only. An embedding that is tied to one stays as it is."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            rounded = as_int8(layer.weight)
            layer.weight = torch.nn.Parameter(rounded.data * rounded.scale, requires_grad=False)


def in_groups(dtype: str, head_bits: int = coded.HEAD_BITS) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with mock.patch.object(coded, "HEAD_BITS", head_bits):
            hf_paged.prepack(model, dtype, group_size=32)

    return change


def with_activations(dtype: str) -> Callable[[Any], None]:
    """Linear layers are computed by the kernels, which round the activations too."""

    def change(model: Any) -> None:
        hf_paged.prepack(model, dtype, group_size=32)
        for layer in model.modules():
            if type(layer) is torch.nn.Linear:
                codes, how = layer.weight.codes, fused_ops.InGroups(*layer.weight.codes.form, torch.float32)
                weight = fused_ops.LinearWeight(codes.memory, layer.bias, codes.columns, codes.depth, True, None, how)
                layer.forward = partial(fused_ops.linear, weight)

    return change


WEIGHTS: dict[str, Callable[[Any], None]] = {
    "weights int8 (prepack)": rounded_rows,
    "weights int8 in groups": in_groups("int8"),
    "weights int4": in_groups("int4"),
    "weights int4, head too": in_groups("int4", 4),
    **{f"weights and activations {name}": with_activations(name) for name in ("w8a16", "w8a8", "w4a8")},
}


def measured(checkpoint: str, length: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [torch.tensor(tokenizer((HERE / name).read_text())["input_ids"][:length]) for name in TEXTS]
    exact = distributions(model, texts)
    found: dict[str, Any] = {"tokens": sum(map(len, texts))}
    for name, formats in FORMATS.items():
        found[name] = compared(exact, distributions(model, texts, **formats), texts)
    for name, change in WEIGHTS.items():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        change(model)
        found[name] = compared(exact, distributions(model, texts), texts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--length", type=int, default=1000, help="tokens of each text, at most")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {Path(each).name: measured(each, args.length) for each in args.checkpoints}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps({**result, "environment": environment("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
