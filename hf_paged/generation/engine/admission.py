"""Admission: makes the request that a prepared call of `generate` asks for."""

from __future__ import annotations

import time
from typing import Any

import torch

from hf_paged.generation.engine.sequence import SequenceGroup
from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.sampling.beam_request import BeamRequest
from hf_paged.generation.sampling.group import GroupRequest
from hf_paged.generation.sampling.request import Request, SingleRequest
from hf_paged.model.devices import device_of


def new_request(
    prepared: PreparedRequest,
    request_id: str,
    *,
    priority: int,
    cache_root: bytes | None,
    adapters: object,
    generator: torch.Generator | None,
) -> Request:
    """A request of the kind that `prepared` asks for, with its `group` for the scheduler.

    cache_root: of the prefixes it may share. adapters: the choice of adapters that computes it. generator: None =
    torch's default random numbers.
    """
    config = prepared.generation_config
    group = SequenceGroup(
        request_id,
        prepared.input_ids[0].tolist(),
        width=config.num_beams if prepared.uses_beams else prepared.input_ids.shape[0],
        priority=priority,
        arrival=time.monotonic(),
        cache_root=cache_root,
        adapters=adapters,
    )
    if prepared.uses_beams:
        return BeamRequest(group, prepared, generator)
    return (GroupRequest if prepared.input_ids.shape[0] > 1 else SingleRequest)(group, prepared, generator)


def seeded_generator(model: Any, generation_config: Any) -> torch.Generator | None:
    """The random numbers of a request whose config has a `seed`; None otherwise."""
    config = model.generation_config if generation_config is None else generation_config
    seed = getattr(config, "seed", None)
    return None if seed is None else torch.Generator(device=device_of(model)).manual_seed(seed)
