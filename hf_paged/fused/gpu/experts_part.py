"""Experts of transformers' `ExpertsInterface`, computed in four launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_paged.fused.expert_modules import KnownExperts, known_experts
from hf_paged.fused.gpu.parts import Part
from hf_paged.fused.gpu.trace import Call, Place, at, place_of


class ExpertsPart(Part):
    """The experts of the tokens, and the weighted sums of their results."""

    kind = "expert mixture"

    def __init__(self, call: Call, places: tuple[Place, Place, Place], known: KnownExperts) -> None:
        super().__init__(call.module, call.module._modules)
        self._places, self._known = places, known

    def compute(self, *args: object, **kwargs: object) -> Any:
        return self._compute(None, *args, **kwargs)

    def trials(self, call: Call) -> Iterator[Any]:
        """Yield results with every size of tiles: all are checked, and compiled before the first request."""
        from hf_paged.fused.gpu.kernels.experts import SIZES

        for size in SIZES:
            yield self._compute(size, *call.args, **call.kwargs)

    def _compute(self, size: str | None, *args: object, **kwargs: object) -> Any:
        from hf_paged.fused.gpu.kernels.experts import assign, combine, product

        operands = self._known.operands(self.module, *(at(place, args, kwargs) for place in self._places))
        if operands is None:
            return self.plain(*args, **kwargs)
        rows, index, weights, up, down = operands
        assignment = assign(index, up.weight.shape[0])
        inner = product(rows, assignment, up, gate=self._known.gate(self.module), size=size)
        return combine(product(inner, assignment, down, size=size), weights)


def experts_part(call: Call) -> ExpertsPart | None:
    """The part for a module of transformers' interface of which the gate is known; else None."""
    rows = call.input
    places = (
        place_of(call, lambda x: x is rows),
        place_of(call, lambda x: isinstance(x, torch.Tensor) and not x.is_floating_point()),
        place_of(call, lambda x: isinstance(x, torch.Tensor) and x.is_floating_point() and x is not rows),
    )
    if None in places or len(call.args) + len(call.kwargs) != 3:
        return None
    known = known_experts(call.module, rows)
    return None if known is None else ExpertsPart(call, places, known)  # type: ignore[arg-type]
