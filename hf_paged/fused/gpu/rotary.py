"""The rotary function of a modeling module in one launch, for attentions whose other parts are not known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_paged.integration.attention import in_packed_step
from hf_paged.kernels.rows import ROTARY_KINDS, RotaryKind, are_alike
from hf_paged.kernels.rows import rotate as rotate_by_torch
from hf_paged.model.overrides import Overrides, Patch, mark, without_override

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
        """Whether no other code has replaced the function since."""
        return self._current() is self._own


def rotary_functions(model: nn.Module) -> dict[str, RotaryFunction]:
    """Those of all modules in which classes of the model are defined, by the modules' names."""
    names = sorted({type(module).__module__ for module in model.modules()})
    return {name: RotaryFunction(name) for name in names if name in sys.modules}


def _override(name: str, space: dict[str, Any], function: Function) -> Overrides:
    """Calls that it does not know go to the function."""

    def rotated(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs or not in_packed_step() or not _fits(*args):
            return function(*args, **kwargs)
        query, key, cos, sin = args
        signature = name, function, query.dtype, cos.dtype, query.device, query.shape[-1], cos.shape[-1]
        if signature not in _kinds and not _is_capturing(query):
            _kinds[signature] = _probe(function, query, cos)
        kind = _kinds.get(signature)
        if kind is None:
            return function(query, key, cos, sin)
        return _rotate(query, key, cos, sin, kind)

    return Overrides([Patch(space, _NAME, mark(rotated, function), function)])


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _fits(query: Any, key: Any, cos: Any, sin: Any) -> bool:
    if not all(isinstance(x, torch.Tensor) for x in (query, key, cos, sin)):
        return False
    tokens, dim = query.shape[-2:]
    shape = (1, tokens, cos.shape[-1])
    return bool(
        query.dim() == key.dim() == 4
        and query.shape[0] == 1
        and key.shape == (1, key.shape[1], tokens, dim)
        and cos.shape == sin.shape == shape
        and cos.stride() == sin.stride()
        and query.dtype == key.dtype
        and query.stride(3) == key.stride(3) == cos.stride(2) == 1
    )


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: RotaryKind
) -> tuple[torch.Tensor, torch.Tensor]:
    from hf_paged.kernels.triton.rotary import rotate

    rows = query[0].transpose(0, 1), key[0].transpose(0, 1)
    turned_query, turned_key = rotate(*rows, angles=(cos[0], sin[0]), kind=kind)
    assert turned_key is not None
    return turned_query.transpose(0, 1)[None], turned_key.transpose(0, 1)[None]


@torch.no_grad()
def _probe(function: Function, like: torch.Tensor, angles: torch.Tensor) -> RotaryKind | None:
    """How the function rotates heads of this size by angles of this number; None if in no way that we know."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dim, count = like.shape[-1], angles.shape[-1]
    query, key = (random(1, 7, heads, dim).to(like).transpose(1, 2) for heads in (4, 2))
    cos, sin = random(1, 7, count).to(angles), random(1, 7, count).to(angles)
    expected = function(query, key, cos, sin)
    for kind in ROTARY_KINDS:
        turned = count * (2 if kind.doubles else 1)
        if turned > dim or turned % 2:
            continue
        actual = [
            rotate_by_torch(x[0].transpose(0, 1), cos[0], sin[0], kind).transpose(0, 1)[None] for x in (query, key)
        ]
        if all(map(are_alike, actual, expected)):
            return kind
    return None
