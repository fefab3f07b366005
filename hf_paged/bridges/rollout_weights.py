"""The weights that draw the rollouts of a trainer, and how they compute meanwhile. Knows trainers; never engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.bridges.sharded import WholeCopy
from hf_paged.model.devices import device_of

_HELD_BY = "_hf_paged_copy"
"""The attribute of a trainer that keeps its whole copy, and the step whose weights that has; None = gather them."""


def own_model(trainer: Any) -> Any:
    """Return the trained model, which TRL calls `generate` of: without what accelerate wraps around it."""
    return trainer.accelerator.unwrap_model(trainer.model)


def is_divided(trainer: Any) -> bool:
    """Return True if each process holds, or will hold, a part of each weight, as ZeRO-3 and FSDP2 leave it."""
    from torch.distributed.fsdp import FSDPModule

    # Accelerate divides when training begins; transformers, or the trainer's user, before.
    is_now = isinstance(own_model(trainer), FSDPModule)
    return bool(is_now or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def check_weights(trainer: Any, exact: bool) -> None:
    """Raise ValueError for divided weights that cannot be copied whole before rollouts, or not with `exact`."""
    state = trainer.accelerator.state
    if trainer.is_fsdp_enabled and state.fsdp_plugin.fsdp_version != 2:
        raise ValueError("FSDP1 flattens weights, which the engine needs whole; use FSDP2 (fsdp_version: 2)")
    if trainer.is_deepspeed_enabled and state.deepspeed_plugin.zero_stage != 3:
        stage = state.deepspeed_plugin.zero_stage
        raise ValueError(
            f"zero_optimization.stage={stage}: rollouts were tried with stage 3 of DeepSpeed alone; use it"
        )
    if trainer.is_deepspeed_enabled and getattr(trainer.args, "ds3_gather_for_generation", False):
        raise ValueError("ds3_gather_for_generation=True: the engine has a whole copy of the weights; set it to False")
    if exact and is_divided(trainer):
        raise ValueError("exact=True: a trainer whose weights are divided computes by itself; use exact=False")


def whole_model(trainer: Any) -> Any:
    """Return a whole copy of divided weights as they are after `global_step` steps.

    All processes call it after the same steps: the first call after a step gathers the weights, which is collective.
    """
    copy, step = vars(trainer).get(_HELD_BY) or (WholeCopy(trainer.model_wrapped, _dtype_of(trainer)), None)
    if step != trainer.state.global_step:
        copy.refresh()
    setattr(trainer, _HELD_BY, (copy, trainer.state.global_step))
    return copy.model


def _dtype_of(trainer: Any) -> torch.dtype | None:
    """Return the dtype in which FSDP2 computes with weights that are kept wider; else None."""
    state = getattr(own_model(trainer), "_get_fsdp_state", None)
    return None if state is None else state()._mp_policy.param_dtype


def outdate(trainer: Any, *, free: bool = False) -> None:
    """Have the next `whole_model` gather the weights again, and give the copy's memory back until then if `free`."""
    copy, _ = vars(trainer).get(_HELD_BY) or (None, None)
    if copy is not None:
        setattr(trainer, _HELD_BY, (copy, None))
        if free:
            copy.free()


@contextmanager
def rollout_weights(trainer: Any) -> Iterator[Model]:
    """Yield the model whose weights draw the rollouts now: whole, in evaluation mode, with the active adapters.

    On a CPU it computes in the dtype of its weights: accelerate's autocast, by which the trainer computes gradients
    faster, rounds by the batch. Of weights that are divided, it is a copy.
    """
    if is_divided(trainer):
        yield whole_model(trainer)
        return
    model = own_model(trainer)
    modes = [(module, module.training) for module in model.modules()]
    # In training mode it may leave out the cache.
    model.eval()
    try:
        with _without_autocast(model):
            yield model
    finally:
        for module, mode in modes:  # a part may be frozen in evaluation mode
            module.training = mode


@contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Take away accelerate's autocast on a CPU: what it wraps around `forward`, and what is on in this thread."""
    device = device_of(model)
    wrapped, before = vars(model).get("forward"), vars(model).get("_original_forward")
    if device.type != "cpu" or wrapped is None or before is None:
        yield
        return
    model.forward = before
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        model.forward = wrapped
