"""Selects the overrides (faster parts) that a PackedModel applies in its steps. Knows models, never requests."""

from __future__ import annotations

from typing import Any

from hf_paged.fused.cpu.decoder import TRIAL_TOKENS as TRIAL_TOKENS
from hf_paged.fused.cpu.decoder import native_decoder
from hf_paged.fused.cpu.norms import native_layers
from hf_paged.fused.cpu.weights import PackedWeights, packed_weights, weights_for_calls
from hf_paged.model.overrides import Override


def overrides_for_engine(model: Any, prepack: bool | None) -> list[Override]:
    """Overrides for an engine's steps, in the order in which they are applied. prepack: as for `Engine`.

    Raises ValueError for prepack=True if the weights cannot be packed.
    """
    return _overrides(model, packed_weights(model, prepack))


def overrides_for_calls(model: Any) -> list[Override]:
    """Overrides for calls of `generate`: they include packed weights if `hf_paged.prepack` was called for the model."""
    return _overrides(model, weights_for_calls(model))


def _overrides(model: Any, weights: PackedWeights | None) -> list[Override]:
    found = native_layers(model), weights, native_decoder(model, weights)
    return [override for override in found if override is not None]
