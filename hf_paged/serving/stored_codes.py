"""Loads models some of whose weights a file has in codes, and keeps these in codes, without their values in between.

transformers loads the model and all other weights. In place of those in codes it gets tensors without memory. Knows no
file format.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.fused.cpu.coded import modules_by_weight, put_codes
from hf_paged.fused.cpu.groups import Form, Heads, empty, store
from hf_paged.kernels.buffers import in_large_pages, trim


class Stored(NamedTuple):
    """A weight [columns, depth] that a file has in codes. kind: how users call its format. pieces: yields the
    codes and heads of columns from a first one on, as `groups.store` takes them."""

    kind: str
    columns: int
    depth: int
    form: Form
    pieces: Callable[[], Iterator[tuple[int, torch.Tensor, Heads]]]


def takes_codes(model: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    """Return True if the parameter of this name and shape is the weight of a linear layer or an embedding."""
    owner, _, last = name.rpartition(".")
    try:
        layer = model.get_submodule(owner)
    except AttributeError:
        return False
    if type(layer) is not nn.Linear and not isinstance(layer, nn.Embedding):
        return False
    weight: Any = layer.weight
    return last == "weight" and tuple(weight.shape) == shape


def load(
    kind: Any, config: Any, dtype: torch.dtype, state: Mapping[str, torch.Tensor], stored: dict[str, Stored]
) -> Any:
    """Load the model of this class, of the weights in `state` and those in codes, by their names."""
    places = {name: torch.zeros((), dtype=dtype, device="cpu").expand(*each[1:3]) for name, each in stored.items()}
    model = kind.from_pretrained(None, config=config, state_dict={**state, **places}, dtype=dtype)
    sizes = [each.form.num_bytes(each.columns, each.depth) for each in stored.values()]
    parts = in_large_pages(sum(sizes)).split(sizes)
    holders = modules_by_weight(model)
    # What others have read and freed, such as vocabularies, does not stay beside the codes.
    gc.collect()
    trim()
    for (name, each), part in zip(stored.items(), parts, strict=True):
        codes = empty(each.columns, each.depth, each.form, part)
        for piece in each.pieces():
            store(codes, *piece)
        weight = model.get_parameter(name)
        put_codes(holders[id(weight)], codes, dtype)
    trim()
    return model


def summary(stored: Mapping[str, Stored]) -> str:
    """Return a sentence about what is in codes, such as "210 weights in Q4_1, 1 in Q8_0 stay as ..."."""
    counts = Counter(each.kind for each in stored.values()).most_common()
    parts = (f"{count}{'' if i else ' weights'} in {kind}" for i, (kind, count) in enumerate(counts))
    return (", ".join(parts) or "no weights") + " stay as they lie in the file"
