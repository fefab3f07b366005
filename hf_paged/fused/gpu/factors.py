"""Factors of an attention's query that follow from the positions: it grows with the logarithm of the context (Scalable
softmax, https://arxiv.org/abs/2501.19399). Recognised by the operations that compute them, with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_paged.fused.gpu.trace import Call, Operation
from hf_paged.model.packed_step import PackedCache

Numbers = tuple[float, float]
"""The factor's growth, and the number of positions after which it begins."""


@dataclass(frozen=True, slots=True)
class _Formula:
    """One way to compute the factor. operations: torch's, but conversions, the last of them the query's product with
    it; "limit" and "growth" stand for these numbers of the module. rounds: the factor, to the query's dtype. is_given:
    whether the positions are an argument of the module; else it asks the cache."""

    operations: tuple[tuple[str, float | str | None], ...]
    numbers: Callable[[Any], Numbers]
    factor: Callable[[torch.Tensor, float, float], torch.Tensor]
    rounds: bool
    is_given: bool


def _of_rope(parameters: Any) -> Numbers:
    return parameters["llama_4_scaling_beta"], parameters["original_max_position_embeddings"]


FORMULAS = (
    _Formula(  # Llama 4
        (
            ("add", 1.0), ("div", "limit"), ("floor", None), ("log1p", None), ("mul", "growth"), ("add", 1.0),
            ("mul", None),
        ),
        lambda module: (module.attn_scale, module.floor_scale),
        lambda positions, growth, limit: torch.log1p(torch.floor((positions.float() + 1) / limit)) * growth + 1,
        rounds=False,
        is_given=False,
    ),
    _Formula(  # Ministral 3
        (
            ("div", "limit"), ("floor", None), ("add", 1.0), ("log", None), ("mul", "growth"), ("add", 1.0),
            ("mul", None),
        ),
        lambda module: _of_rope(module.config.rope_parameters),
        lambda positions, growth, limit: 1 + growth * torch.log(1 + torch.floor(positions / limit)),
        rounds=True,
        is_given=True,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Factor:
    """The factor of one module's query, with its current numbers."""

    formula: int

    @property
    def is_given(self) -> bool:
        """Return True if the positions are an argument of the module."""
        return FORMULAS[self.formula].is_given

    def __call__(self, module: nn.Module, cache: PackedCache, rows: torch.Tensor) -> torch.Tensor:
        """[num_tokens], of the step's positions, on the device of `rows`; computed by the first layer that asks."""
        formula = FORMULAS[self.formula]
        growth, limit = formula.numbers(module)

        def compute() -> torch.Tensor:
            factor = formula.factor(cache.positions.to(rows.device), growth, limit)
            return factor.to(rows.dtype) if formula.rounds else factor

        # All layers of a step have the same positions.
        return cache.once((self.formula, growth, limit, rows.dtype, rows.device), compute)


def factor_of(call: Call) -> tuple[Factor | None, list[Operation]]:
    """The factor by which a module multiplied its query at last, and the operations before it."""
    # Conversions only round, which the queries of the trial show.
    operations = [each for each in call.operations if each[0] != "_to_copy"]
    for number, formula in enumerate(FORMULAS):
        start = len(operations) - len(formula.operations)
        if start < 0 or [name for name, _ in operations[start:]] != [name for name, _ in formula.operations]:
            continue
        try:
            growth, limit = formula.numbers(call.module)
        except (AttributeError, KeyError, TypeError):
            continue
        named: dict[Any, float] = {"growth": growth, "limit": limit}
        expected = [() if each is None else (named.get(each, each),) for _, each in formula.operations]
        if expected == [numbers for _, numbers in operations[start:]]:
            return Factor(number), operations[:start]
    return None, operations
