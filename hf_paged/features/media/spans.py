"""Runs of a prompt's tokens that attend to one another both ways, as the tokens of an image in Gemma 3 do.

They are read from the model's own masks. Knows models and tensors; never block tables.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from transformers.masking_utils import create_masks_for_generate

from hf_paged.annotations import Model
from hf_paged.integration.attention import IMPLEMENTATION, NAME, mask_functions
from hf_paged.integration.names import CACHE, TYPES

Span = tuple[int, int]
"""The first and the last position of a run."""


def _maker(model: Model) -> Callable[..., object]:
    """Return the function that makes the model's masks before a forward of `generate`."""
    made: Callable[..., object] = getattr(type(model), "create_masks_for_generate", create_masks_for_generate)
    return made


def types_of(model: Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The types of the prompt's tokens, on which the model's masks depend: [1, length] each, by name."""
    known = inspect.signature(_maker(model)).parameters
    return {name: inputs[name] for name in TYPES if name in known and name in inputs}


def spans_of(model: Model, types: Mapping[str, torch.Tensor], length: int) -> list[Span] | None:
    """The runs in a prompt of `length` tokens, in ascending order. None: its masks do not depend on types of tokens."""
    if not types:
        return None
    # A copy, because the model's config must keep the names of its own functions.
    config = copy.deepcopy(model.config)
    for each in (config, config.get_text_config(decoder=True)):
        setattr(each, IMPLEMENTATION, NAME)
    device = next(iter(types.values())).device
    arguments = {
        "config": config,
        # Of the embeddings, masks read shape, dtype and device only.
        "inputs_embeds": torch.zeros(1, length, 1, dtype=torch.float32, device=device),
        "attention_mask": None,
        CACHE: None,
        "position_ids": torch.arange(length, dtype=torch.int64, device=device)[None],
        "is_first_iteration": True,
        **types,
    }
    make = _maker(model)
    known = inspect.signature(make).parameters
    functions = mask_functions(partial(make, **{name: value for name, value in arguments.items() if name in known}))
    position = torch.arange(length - 1, dtype=torch.int64, device=device)
    goes_on = torch.zeros(length, dtype=torch.bool, device=device)  # whether a token sees the next one
    for function in functions:
        goes_on[:-1] |= function(0, 0, position, position + 1)
    # Where seeing begins and ends: a run's first token, and its last one, which sees no further.
    edges = np.flatnonzero(np.diff(np.concatenate(([False], goes_on.cpu().numpy(), [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def reach_of(spans: Sequence[Span], start: int, stop: int) -> np.ndarray:
    """int32 [stop - start]: the last position that each token from `start` to `stop` attends to."""
    reach = np.arange(start, stop, dtype=np.int32)
    for first, last in spans:
        reach[max(first - start, 0) : max(last + 1 - start, 0)] = last
    return reach
