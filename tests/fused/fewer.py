"""Fewer launches on a CPU: our kernels for GPUs compute the layers of models there, in triton's interpreter or, faster,
by their definitions in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.fused import overrides
from hf_paged.fused.gpu import model as fused_model
from hf_paged.kernels import experts as expert_definitions
from hf_paged.kernels import router as router_definitions
from hf_paged.kernels import rows as definitions
from hf_paged.kernels.rows import ACTIVATIONS, Norm, RotaryKind
from hf_paged.kernels.triton import experts, gate, norm, rotary, router
from hf_paged.kernels.triton.launch import INTERPRET
from hf_paged.kernels.triton.norm import Rows
from hf_paged.model import state
from tests.generation import tape
from tests.poison import poison

OPERATIONS = (
    (norm, "add_norm"), (gate, "gated"), (rotary, "rotate"), (router, "route"), (experts, "assign"),
    (experts, "product"), (experts, "combine"),
)  # fmt: skip
"""What our kernels compute in one launch each."""


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
) -> Rows:
    total = rows if before is None else definitions.normalise(rows, before)
    total = total if scale is None else total * scale
    total = total if residual is None else residual + total
    out = None if after is None else definitions.normalise(total, after)
    total = total if bias is None else total + bias
    return Rows(None if residual is None else total, out)


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
