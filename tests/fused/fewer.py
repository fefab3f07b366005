"""Fewer launches on a CPU: our kernels for GPUs in triton's interpreter or, faster, by their definitions in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.fused import experts as expert_definitions
from hf_paged.fused import overrides
from hf_paged.fused import router as router_definitions
from hf_paged.fused import rows as definitions
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu.kernels import experts, gate, norm, rotary, router
from hf_paged.fused.gpu.kernels.norm import NormedSum
from hf_paged.fused.rows import ACTIVATIONS, Norm, RotaryKind
from hf_paged.kernels.triton.launch import INTERPRET
from hf_paged.model import state
from tests import models
from tests.architectures.tiny import tiny_model
from tests.generation import tape
from tests.poison import poison

OPERATIONS = (
    (norm, "add_norm"), (gate, "gated"), (rotary, "rotate"), (router, "route"), (experts, "assign"),
    (experts, "product"), (experts, "combine"),
)  # fmt: skip
"""What our kernels compute in one launch each."""

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available() or not INTERPRET, reason="needs triton's interpreter")
NEW_TOKENS = 4
ROTARY = "apply_rotary_pos_emb"
ALL = {"attention", "MLP", "layer"}


def on_cpu(patch: pytest.MonkeyPatch, *, by_torch: bool = False) -> None:
    """From here on models on a CPU are treated as on a GPU, but for their attention."""
    patch.setattr(fused_model, "DEVICE_TYPE", "cpu")
    for native in ("native_layers", "native_experts", "layers_for_engine", "layers_for_calls"):
        patch.setattr(overrides, native, lambda *_: None)
    if by_torch:
        for module, name in OPERATIONS:
            patch.setattr(module, name, tape.as_one(globals()[name]))
    elif INTERPRET:
        poison(patch)
    state.release()


def add_norm(
    rows: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    before: Norm | None = None,
    after: Norm | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> NormedSum:
    total = rows if before is None else definitions.normalise(rows, before)
    total = total if scale is None else total * scale
    total = total if residual is None else residual + total
    out = None if after is None else definitions.normalise(total, after)
    total = total if bias is None else total + bias
    return NormedSum(None if residual is None else total, out)


def gated(gate: torch.Tensor, up: torch.Tensor | None, activation: str) -> torch.Tensor:
    return ACTIVATIONS[activation](gate) if up is None else ACTIVATIONS[activation](gate) * up


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    angles: definitions.Angles | None,
    kind: RotaryKind,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    norm_is_last: bool = False,
    factor: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    heads: list[Any] = []
    for x, own in ((query, norms[0]), (key, norms[1])):
        if own is not None and not norm_is_last:
            x = definitions.normalise(x, own)
        x = x if angles is None else definitions.rotate(x, *definitions.cos_and_sin(angles), kind)
        if own is not None and norm_is_last:
            x = definitions.normalise(x, own)
        heads.append(x.contiguous())
    if factor is not None:
        heads[0] = (heads[0] * factor[:, None, None]).to(query.dtype)
    if into is None:
        return heads[0], heads[1]
    written = into[2] >= 0
    for cache, x in zip(into[:2], (heads[1], value), strict=True):
        slots = into[2][written]
        cache[slots // cache.shape[1], slots % cache.shape[1]] = x[written]
    return heads[0], None


def product(*args: Any, size: str | None = None, **kwargs: Any) -> torch.Tensor:
    return expert_definitions.product(*args, **kwargs)


route, assign, combine = router_definitions.route, expert_definitions.assign, expert_definitions.combine


def computes_as_plain(engine: Engine, model: Any, length: int = 5) -> bool:
    """Whether an engine computes what another one without these kernels does."""
    found = complete(engine, length)
    with Engine(model, CacheConfig(num_blocks=64), fuse=False) as plain:
        expected = complete(plain, length)
    return found.token_ids == expected.token_ids and found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


class Limited(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x).clamp(max=50.0)


def run(engine: Engine, length: int = 5, count: int = NEW_TOKENS) -> list[int]:
    return complete(engine, length, count).token_ids


def complete(engine: Engine, length: int = 5, count: int = NEW_TOKENS) -> Any:
    engine.clear_prefix_cache()
    options = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return engine.generate(models.prompts(length), options)[0].outputs[0]


def by_generate(model: Any, length: int = 5, count: int = NEW_TOKENS) -> list[int]:
    ids = torch.stack(models.prompts(length))
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()
    return out


def shortened(model: Any, count: int = 2) -> Any:
    """The model with its first layers; two are of all kinds that it has."""
    config = model.config
    model.model.layers = model.model.layers[:count].eval()
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:count]
    return model


def kinds(model: Any) -> set[str]:
    parts = fused_model.fused_parts(model)
    return set() if parts is None else set(parts.counts())


def new(name: str) -> Any:
    """A tiny model whose biases and norms are random too."""
    model = tiny_model(name)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    return model
