"""Selects the overrides (faster parts) that a PackedModel applies in its steps. Knows models, never requests."""

from __future__ import annotations

import torch

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.config import Switches
from hf_paged.fused.cpu.decoder import TRIAL_TOKENS as TRIAL_TOKENS
from hf_paged.fused.cpu.decoder import native_decoder
from hf_paged.fused.cpu.mixtures import native_experts
from hf_paged.fused.cpu.norms import native_layers
from hf_paged.fused.cpu.weights import is_prepacked, layers_for_calls, layers_for_engine
from hf_paged.fused.gpu.model import fused_parts, is_on_gpu, obstacle
from hf_paged.model.calls import without_modes
from hf_paged.model.overrides import Override
from hf_paged.model.packed import PackedModel


@without_modes()
def overrides_for_engine(model: Model, switches: Switches) -> list[Override]:
    """Overrides for an engine's steps, in the order in which they are applied.

    Raises ValueError for prepack=True if the weights cannot be packed, for fuse=True if no part of the model is known.
    """
    on_gpu, prepack, fuse = is_on_gpu(model), switches.prepack, switches.fuse
    # On a GPU `prepack` is about weights side by side, below.
    linears = layers_for_engine(model, None if on_gpu else prepack)
    parts = None if fuse is False else fused_parts(model)
    if fuse and not parts:
        raise ValueError(f"fuse=True: {obstacle(model) or 'no part of the model is known'}; leave it out")
    packed = parts.pack() if parts and prepack is not False else 0
    if on_gpu and prepack and not packed:
        why_none = obstacle(model) or ("fuse=False" if fuse is False else "no part of the model is known")
        reason = "no weights of the model can be placed side by side" if parts else why_none
        raise ValueError(f"prepack=True: {reason}; leave it out")
    return _overrides(model, linears, native_decoder(model, linears), native_experts(model, prepack), parts)


@without_modes()
def overrides_for_calls(model: Model) -> list[Override]:
    """Overrides for calls of `generate`, with packed weights if `hf_paged.prepack` was called for the model."""
    linears = layers_for_calls(model)
    decoder = native_decoder(model, linears)
    overrides = _overrides(model, linears, decoder, native_experts(model, is_prepacked(model)), fused_parts(model))
    # Under autocast the layers are left to the model, and a trial would find nothing.
    may_try = model.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if decoder is not None and decoder.needs_trial and may_try:
        # Dropout, in training mode, draws random numbers.
        with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=model.training):
            _try_on_few_tokens(model, overrides)
        decoder.needs_trial = False
    return overrides


@without_modes()
def overrides_for_rows(model: Model, *, is_call: bool, prepack: bool | None = None) -> list[Override]:
    """Overrides for forwards in which sequences are rows of a batch. is_call: of `generate`, not of an engine, which
    has this `prepack`."""
    linears = layers_for_calls(model) if is_call else layers_for_engine(model, prepack)
    return [override for override in (native_layers(model), linears) if override is not None]


def _overrides(model: Model, *others: Override | None) -> list[Override]:
    """In the order in which they are applied."""
    # Norms and linear layers before whole layers, of which they are parts (`NativeDecoder.apply`).
    return [override for override in (native_layers(model), *others) if override is not None]


def _try_on_few_tokens(model: Model, overrides: list[Override]) -> None:
    """Run a step, so that overrides that must be tried first are not tried on the long prompt of a call."""
    memory = PagedMemory(TRIAL_TOKENS, 1)
    memory.append([(0, TRIAL_TOKENS)])
    metadata, positions = memory.step_metadata([0], [TRIAL_TOKENS], torch.device("cpu"))
    ids = torch.zeros(TRIAL_TOKENS, dtype=torch.int64, device="cpu")
    PackedModel(model, memory, overrides).forward(ids, positions, metadata, ids[:1] + TRIAL_TOKENS - 1)
