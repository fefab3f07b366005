"""The rotary function of a modeling module in one launch, for attentions whose other parts are not known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_paged.fused.rows import ROTARY_KINDS, RotaryKind, are_alike
from hf_paged.fused.rows import rotate as rotate_by_torch
from hf_paged.integration.attention import in_packed_step
from hf_paged.model.overrides import Overrides, Patch, mark, without_override
from hf_paged.model.trial import random_numbers

_NAME = "apply_rotary_pos_emb"  # of transformers' function in every modeling module that has one

Function = Callable[..., Any]

# By the name of a module, its function, dtype, device, size of heads and number of angles.
_kinds: dict[tuple[Any, ...], RotaryKind | None] = {}


class RotaryFunction:
    """The function of one modeling module, and its override in packed steps."""

    def __init__(self, name: str) -> None:
        self._space = vars(sys.modules[name])
        self._own = self._current()
        self.override = Overrides() if self._own is None else _override(name, self._space, self._own)

    def _current(self) -> Any:
        return without_override(self._space.get(_NAME))

    def is_own(self) -> bool:
        """Return True if nobody has replaced the function since."""
        return self._current() is self._own


def rotary_functions(model: nn.Module) -> dict[str, RotaryFunction]:
    """Return the rotary functions of the modules in which the model's classes are defined, by the modules' names."""
    names = sorted({name for module in model.modules() for name in names_of(module)})
    return {name: RotaryFunction(name) for name in names if name in sys.modules}


def names_of(module: nn.Module) -> set[str]:
    """The Python modules of its class and base classes, whose code may rotate."""
    return {owner.__module__ for owner in type(module).__mro__}


def _override(name: str, space: dict[str, Any], function: Function) -> Overrides:
    """Make the override, which passes calls of an unknown form to the function."""

    def rotated(*args: Any, **kwargs: Any) -> Any:
        if not in_packed_step() or len(args) not in (3, 4) or not _is_known(kwargs):
            return function(*args, **kwargs)
        *heads, cos, sin = args
        # 2: of heads [1, heads, num_tokens, dims]; 1: after a transpose.
        tokens = 3 - kwargs.get("unsqueeze_dim", 1)
        if not _fits(heads, cos, sin, tokens):
            return function(*args, **kwargs)
        x = heads[0]
        signature = name, function, len(heads), tokens, x.dtype, cos.dtype, x.device, x.shape[-1], cos.shape[-1]
        # A probe waits for the device, which a capture must not do.
        if signature not in _kinds and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            _kinds[signature] = _probe(function, heads, cos, tokens, kwargs)
        kind = _kinds.get(signature)
        if kind is None:
            return function(*args, **kwargs)
        return _rotate(heads, cos, sin, kind, tokens)

    return Overrides([Patch(space, _NAME, mark(rotated, function), function)])


def _is_known(kwargs: dict[str, Any]) -> bool:
    return not kwargs or (list(kwargs) == ["unsqueeze_dim"] and kwargs["unsqueeze_dim"] in (1, 2))


def _fits(heads: list[Any], cos: Any, sin: Any, tokens: int) -> bool:
    """tokens: the dimension of heads with the tokens, here and below."""
    if not all(isinstance(x, torch.Tensor) and x.dim() > 2 for x in (*heads, cos, sin)):
        return False
    dtype, dim, count = heads[0].dtype, heads[0].shape[-1], cos.shape[-2]
    return bool(
        all(x.dim() == 4 and x.shape[0] == 1 and x.shape[tokens] == count for x in heads)
        and all(x.shape[3] == dim and x.dtype == dtype and x.stride(3) == 1 for x in heads)
        and cos.shape == sin.shape == (1, count, cos.shape[-1])
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
    )


def _rows(heads: torch.Tensor, tokens: int) -> torch.Tensor:
    return heads.transpose(1, tokens)[0]


def _rotate(heads: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, kind: RotaryKind, tokens: int) -> Any:
    from hf_paged.fused.gpu.kernels.rotary import rotate

    rows = [_rows(x, tokens) for x in heads]
    # The kernel always takes both: a key without heads costs nothing.
    query, key = rows[0], rows[1] if len(rows) == 2 else rows[0][:, :0]
    results = rotate(query, key, angles=(cos[0], sin[0]), kind=kind)
    turned = [x[None].transpose(1, tokens) for x in results if x is not None]
    return (turned[0], turned[1]) if len(heads) == 2 else turned[0]


@torch.no_grad()
def _probe(
    function: Function, like: list[torch.Tensor], angles: torch.Tensor, tokens: int, kwargs: dict[str, Any]
) -> RotaryKind | None:
    """Find the way in which the function rotates such heads by so many angles; None if it is unknown."""
    random = random_numbers()
    dim, count = like[0].shape[-1], angles.shape[-1]
    # Unequal numbers, so that query and key cannot be exchanged unseen.
    heads = [random(1, 7, number, dim).to(like[0]).transpose(1, tokens) for number in (4, 2)[: len(like)]]
    cos, sin = random(1, 7, count).to(angles), random(1, 7, count).to(angles)
    expected = function(*heads, cos, sin, **kwargs)
    expected = [expected] if len(like) == 1 else list(expected)
    for kind in ROTARY_KINDS:
        turned = count * (2 if kind.doubles else 1)
        if turned > dim or turned % 2:
            continue
        results = [rotate_by_torch(_rows(x, tokens), cos[0], sin[0], kind) for x in heads]
        if all(are_alike(r, _rows(e, tokens)) for r, e in zip(results, expected, strict=True)):
            return kind
    return None
