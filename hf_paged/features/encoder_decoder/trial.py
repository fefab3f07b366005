"""Find how an encoder-decoder model can run, by running its decoder on a few tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.features.encoder_decoder.cross_attention import PagedPair
from hf_paged.features.encoder_decoder.encoder_decoder import packed_steps
from hf_paged.features.encoder_decoder.positions import find_positions
from hf_paged.integration.names import paged_part
from hf_paged.model import inputs
from hf_paged.model.support import (
    BY_INTERFACE,
    GATHERED,
    NOT_PAGED,
    REMEDY,
    SupportReport,
    kernels_of,
    layers_in,
    refused_report,
    run_trial,
)
from hf_paged.model.trial import Refusal, Trial, attempt


def report(model: Model, why: str | None) -> SupportReport:
    """Run two steps of two rows over states that an encoder might have computed: with the model's own cache, packed,
    and over a PagedKVCache. why: the reason not to try packed rows."""
    failed = f"its decoder cannot be tried on states of an encoder alone ({{}}); {REMEDY}"
    own = attempt(lambda: (given := inputs.encoder_batch(model), inputs.own_steps(model, given)), failed)
    if isinstance(own, Refusal):
        count = _num_codebooks(model)
        of_codebooks = f"each position of its decoder has tokens of {count} codebooks; {REMEDY}"
        return refused_report(model, of_codebooks if count > 1 else own.reason, has_encoder=True)
    given, expected = own
    memory, is_bare = PagedMemory(2, growable=True), why is None
    if is_bare:
        # Packed rows are the fastest way, so they are tried first.
        refusal = _refuses_rows(model, given, expected, memory, gathers=False)
        if refusal is None:
            reason = "every layer attends through AttentionInterface, to its tokens and to the encoder's states"
            return SupportReport(
                type(model).__name__, True, True, reason, layers_in(memory, "native", BY_INTERFACE),
                kernels_of(model.device), has_encoder=True, **_limits(model, given, gathers=False),
            )  # fmt: skip
        why = refusal.reason
    pair = PagedPair(PagedKVCache())
    refusal = run_trial(model, "paged", lambda: [inputs.own_steps(model, given, pair)], [expected], NOT_PAGED)
    if refusal is not None:
        return refused_report(model, f"{refusal.reason}; packed: {why}; {REMEDY}", has_encoder=True)
    gathers = is_bare and not _refuses_rows(model, given, expected, PagedMemory(2, growable=True), gathers=True)
    layers = layers_in(paged_part(pair).memory, "dense view", GATHERED)
    return SupportReport(
        type(model).__name__, True, False, str(why), layers, has_encoder=True, gathers=gathers,
        together="rows of a batch, from K/V gathered for its own attention" if gathers else "",
        **(_limits(model, given, gathers=True) if gathers else {}),
    )  # fmt: skip


def _refuses_rows(
    model: Model, given: dict[str, Any], expected: torch.Tensor, memory: PagedMemory, *, gathers: bool
) -> Refusal | None:
    steps = partial(packed_steps, model, given, memory, gathers=gathers)
    return run_trial(model, "packed", lambda: [steps()], [expected], "it does not run on packed rows ({})")


def _limits(model: Model, given: dict[str, Any], *, gathers: bool) -> dict[str, Any]:
    """Fields of the report of rows beside an encoder: what else they do not do as the model's own forward does."""
    padded = inputs.with_padding(given)
    # A router may read the mask too. A model that takes none fails; such a call then runs in transformers' loop.
    padding = Trial(
        model,
        lambda: [packed_steps(model, padded, PagedMemory(2, growable=True), gathers=gathers)],
        lambda: [inputs.own_steps(model, padded)],
    )
    return {
        "counts_padding": padding.refusal() is not None,
        "positions": find_positions(model, given, gathers=gathers),
    }


def _num_codebooks(model: Model) -> int:
    config = model.config.get_text_config(decoder=True)
    found = (getattr(config, name, None) for name in ("num_codebooks", "num_channels"))
    return next((count for count in found if isinstance(count, int)), 1)
