"""Which faster parts a model's packed steps get, for whoever makes a PackedModel. Knows models, never requests."""

from __future__ import annotations

from typing import Any

from hf_paged.fused.cpu.decoder import TRIAL_TOKENS as TRIAL_TOKENS
from hf_paged.fused.cpu.decoder import native_decoder
from hf_paged.fused.cpu.norms import native_layers
from hf_paged.fused.cpu.weights import PackedWeights, packed_weights, weights_for_calls
from hf_paged.model.overrides import Override


def overrides_for_engine(model: Any, prepack: bool | None) -> list[Override]:
    """For an engine's steps. prepack: as for `Engine`; raises ValueError for True where it cannot be done."""
    return _overrides(model, packed_weights(model, prepack))


def overrides_for_calls(model: Any) -> list[Override]:
    """For calls of `generate`: with packed weights where `hf_paged.prepack` has asked for them."""
    return _overrides(model, weights_for_calls(model))


def _overrides(model: Any, weights: PackedWeights | None) -> list[Override]:
    found = native_layers(model), weights, native_decoder(model, weights)
    return [override for override in found if override is not None]
