"""Encodes several images in one call of the model's encoder, where that gives what each call of its own does.

Knows models and tensors; never prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.errors import LayersChanged
from hf_paged.features.media.media import Features, Unit
from hf_paged.features.media.media_encoders import encoded_by, features_of, num_features, outputs_of
from hf_paged.model.state import Slot

Encodings = Mapping[str, Features]
_JOINS: Slot[dict[frozenset[str], bool]] = Slot("joined encoders", is_released=False)
"""By the names of inputs: whether units with them may be encoded together."""


def encoded_together(
    model: Model, units: Sequence[Unit], *, alone: bool
) -> Iterator[tuple[Unit, dict[str, Features] | Exception]]:
    """The features of each unit by kind, or the error that the model raises for it. alone: each has a call of its own.

    Units share a call if their inputs have the same shape but for the first dimension, and if features were the same,
    but for rounding, when two of the first ones were encoded alone and together.
    """
    batches: dict[Any, list[Unit]] = {}
    for unit in units:
        shape = tuple(sorted((name, each.dtype, each.shape[1:]) for name, each in unit.inputs.items()))
        batches.setdefault(unit if alone else repr(shape), []).append(unit)
    joins = _JOINS.setdefault(model, {})
    for batch in batches.values():
        names = frozenset(batch[0].inputs)
        # The first two units that could share a call show whether units of their kind may.
        if len(batch) > 1 and names not in joins:
            tried, batch = batch[:2], batch[2:]
            results = [(unit, _alone(model, unit)) for unit in tried]
            yield from results
            found = [result for _, result in results if not isinstance(result, Exception)]
            if len(found) == len(tried):
                joint = _joint(model, tried)
                joins[names] = joint is not None and all(map(_are_close, joint, found))
        joint = _joint(model, batch) if len(batch) > 1 and joins.get(names) else None
        yield from zip(batch, joint) if joint is not None else ((unit, _alone(model, unit)) for unit in batch)


def _alone(model: Model, unit: Unit) -> dict[str, Features] | Exception:
    try:
        return encoded_by(model, unit.inputs)
    except LayersChanged:
        raise
    except Exception as error:  # of these inputs; others are encoded
        return error


def _joint(model: Model, units: Sequence[Unit]) -> list[dict[str, Features]] | None:
    """None: the model does not encode them in one call, or does not show where the features of each end."""
    inputs = {name: torch.cat([unit.inputs[name] for unit in units]) for name in units[0].inputs}
    try:
        ((kind, output),) = outputs_of(model, inputs).items()
        counts = num_features(output)
    except LayersChanged:
        raise
    except Exception:  # code that is not ours, and was not made for that; each is encoded alone then
        return None
    if len(counts) != len(units):
        return None
    features, end, found = features_of(output), 0, []
    for count in counts:
        # Copies, because a part would keep the whole in memory.
        found.append({kind: features.rows(end, end + count).copy()})
        end += count
    return found


def _are_close(ours: Encodings, theirs: Encodings) -> bool:
    if ours.keys() != theirs.keys():
        return False
    pairs = [
        pair
        for kind, own in ours.items()
        for pair in zip((own.pooled, *(own.deep or ())), (theirs[kind].pooled, *(theirs[kind].deep or ())))
    ]
    # A batch may take other kernels than one unit, which sum in another order.
    limit = 1e-4 if pairs[0][0].dtype in (torch.float32, torch.float64) else 2e-2
    return all(
        own.shape == other.shape and bool((own - other).abs().max() <= limit * other.abs().max())
        for own, other in pairs
    )
