"""The ways to decode paged calls of `generate`: which decoder takes a call, and what computes it. Knows all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.features.encoder_decoder.cross_attention import cache_of_call
from hf_paged.features.encoder_decoder.cross_decoder import CrossDecoder, check_encoder_inputs, executor_of
from hf_paged.features.media.media_decoder import MediaDecoder
from hf_paged.features.rows.row_trial import batch_obstacle, bind_rows
from hf_paged.features.speculation.drafting_decoder import DraftingDecoder
from hf_paged.features.watch.foreign import foreign_code
from hf_paged.fused.overrides import overrides_for_calls, overrides_for_rows
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.generation.obstacles import Asked
from hf_paged.generation.validation import check_inputs
from hf_paged.model.packed import PackedModel
from hf_paged.model.support import SupportReport
from hf_paged.sockets import Executor

DECODERS: tuple[type[PackedDecoder], ...] = (CrossDecoder, DraftingDecoder, MediaDecoder, PackedDecoder)
"""The first of them that takes a call says whether it decodes it, and else why not."""


def decoder_of(asked: Asked) -> type[PackedDecoder]:
    """Return the class of decoders for such calls."""
    return next(each for each in DECODERS if each.takes(asked))


class Way(NamedTuple):
    """The way in which calls of some models are computed.

    takes: whether a model with this report is one of them. prompts: the arguments of a call that begin its rows, the
    first that is given counts. check: raises ValueError for arguments that cannot be served. obstacle: why the model is
    not computed on packed rows; None: it is. bind: makes the executor.
    """

    takes: Callable[[SupportReport], bool]
    prompts: tuple[str, ...]
    check: Callable[[Model, Any, Any, dict[str, Any]], None]
    obstacle: Callable[[Model, SupportReport], str | None]
    bind: Callable[[Model, SupportReport, PagedMemory], Executor]

    def prompt_length(self, inputs: Any, kwargs: dict[str, Any]) -> int:
        """Tokens a row that the call starts with, padding included. The arguments have been checked."""
        given = {**kwargs, "inputs": inputs}
        prompts = (given[name] for name in self.prompts if given.get(name) is not None)
        return next((int(each.shape[1]) for each in prompts), 1)  # BOS


_PROMPTS = ("inputs_embeds", "inputs", "input_ids")

WAYS = (
    Way(
        lambda report: report.has_encoder,
        ("decoder_input_ids",),
        check_encoder_inputs,
        lambda model, report: None if report.native or report.gathers else report.reason,
        executor_of,
    ),
    Way(
        lambda report: report.native,
        _PROMPTS,
        check_inputs,
        lambda model, report: None,
        lambda model, report, memory: PackedModel(model, memory, overrides_for_calls(model)),
    ),
    Way(
        lambda report: True,
        _PROMPTS,
        check_inputs,
        batch_obstacle,
        lambda model, report, memory: bind_rows(model, memory, None, overrides_for_rows(model, is_call=True)),
    ),
)


def way_of(report: SupportReport) -> Way:
    """Return how calls of a model are computed."""
    return next(each for each in WAYS if each.takes(report))


def open_decoder(asked: Asked, memory: PagedMemory, **options: Any) -> PackedDecoder:
    """Make the decoder of a call over a memory. options: see PackedDecoder."""
    model = asked.model
    executor = way_of(asked.report).bind(model, asked.report, memory)
    return decoder_of(asked)(executor, asked, check_code=foreign_code(model).refuse, **options)


def open_dense_view(asked: Asked, memory: PagedMemory) -> PagedKVCache:
    """Make the cache of a call over which transformers' loop runs."""
    # No config for an encoder-decoder model, because it may describe the encoder's layers.
    own = PagedKVCache(None if asked.report.has_encoder else asked.model.config, memory=memory)
    if asked.config.is_assistant:
        own.activate_past_recording()  # type: ignore[no-untyped-call]
    return own


def given_to_model(asked: Asked, cache: PagedKVCache) -> Cache:
    """Return what the model gets of this cache: a pair, if it keeps the K/V of an encoder's states apart."""
    return cache_of_call(asked.model, cache, asked.model_kwargs)
