"""The entry point of `model.generate(..., cache_implementation="paged")`.

Five functions wrap transformers' methods of the same names (see `plugin.py`). A call that does not request a paged
cache passes through unchanged, unless calls are paged by default. A paged call is checked; then transformers' own loop
decodes it. If every option of the call allows it, the loop's model is a PackedDecoder (route "packed"). Else the loop
runs the model itself, over a PagedKVCache (route "hf_loop").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hf_paged.annotations import Model
from hf_paged.cache.layers import WHOLE, Layout
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.config import CacheConfig, as_config
from hf_paged.errors import UnsupportedModelError, UnsupportedVersionError
from hf_paged.features.ways import decoder_of, given_to_model, open_decoder, open_dense_view, way_of
from hf_paged.generation.decoder import PackedDecoder, RecordingCriteria
from hf_paged.generation.engine.room import DeviceBytes, blocks_in_memory, layout_for, token_sizes
from hf_paged.generation.idle import IdlePools, MemoryKey, kind_of
from hf_paged.generation.obstacles import Asked, argument_obstacle
from hf_paged.generation.options import option
from hf_paged.generation.records import CallRecord, add_record, is_recording
from hf_paged.generation.sampling.processors import is_known
from hf_paged.generation.validation import (
    COUNTS,
    check_cache,
    check_pool,
    check_values,
    refuse_no_cache,
)
from hf_paged.integration.names import CACHE, given_cache, paged_part, set_cache
from hf_paged.kernels.ops import release_workspaces
from hf_paged.kernels.quantised import storage_of
from hf_paged.model.state import Slot, release, unwrapped
from hf_paged.model.support import SupportReport, refuse_unsupported
from hf_paged.model.trial import is_trying

PAGED = "paged"
_ASSISTED_KWARGS = ("inputs_tensor", "assistant_model", "assistant_tokenizer", "tokenizer")

# -- memory kept between calls -------------------------------------------------------------------------------------

_idle: Slot[IdlePools] = Slot("idle memory of calls")


def _idle_pools(model: nn.Module) -> IdlePools:
    return _idle.setdefault(model, IdlePools())


def release_memory(model: nn.Module | None = None) -> None:
    """Free what is kept for later calls and engines on a model, or on all models.

    This frees CUDA graphs, packed weights (those of `prepack` too), and the workspace of this thread's kernels on a
    CPU. It also frees the K/V memory of paged calls: that of the last call, and up to three other pools within 1 GiB.

    Args:
        model: A transformers model, or a PEFT model over one. None = all models.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, cache_implementation="paged")
        hf_paged.release_memory(model)
        ```
    """
    release(unwrapped(model))
    release_workspaces()


# -- one call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A way to decode a paged call: by a `decoder` with packed rows, or else by transformers' loop over `cache`.

    key: names the idle pool to which the memory returns. It is None if the memory belongs to the caller's `cache`,
    which then lends its rows to the decoder. keeps_cache: the caller gets the cache, so its blocks stay in use.
    """

    memory: PagedMemory
    key: MemoryKey | None
    keeps_cache: bool
    decoder: PackedDecoder | None = None
    cache: PagedKVCache | None = None

    @property
    def num_rows(self) -> int:
        if self.decoder is not None:
            return len(self.decoder.rows)
        return 0 if self.cache is None else self.cache.num_rows

    def close(self, model: Model, *, failed: bool) -> None:
        """Free every block, unless the caller has the cache."""
        if self.key is None and self.cache is not None and self.decoder is not None:
            self.cache.return_rows(*self.decoder.give_back())
        if self.key is None or (self.keeps_cache and not failed):
            return
        if self.decoder is not None:
            self.decoder.free()
        if self.cache is not None:
            self.cache.reset()
        if len(self.memory.manager):
            return  # an error has interrupted a block manager, so this memory is not reused
        _idle_pools(model).give_back(self.key, self.memory)


@dataclass(slots=True)
class _Call:
    """A paged call in progress. `decoding` is None until transformers asks for a cache."""

    model: Model
    report: SupportReport
    record: CallRecord
    obstacle: str | None  # why the call's arguments do not allow packed rows
    prompt_length: int  # padding included
    by_default: bool = False  # the call did not ask for a paged cache
    decoding: _Decoding | None = None


_current: ContextVar[_Call | None] = ContextVar("hf_paged_call", default=None)


def _active(model: Model) -> _Call | None:
    call = _current.get()
    return call if call is not None and call.model is model else None


def generate(
    function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], *, by_default: bool
) -> Any:
    """Replace GenerationMixin.generate. by_default: calls that name no cache are paged if they can be."""
    if _is_paged(model, args, kwargs):
        call = _open_call(model, args, kwargs)
    elif by_default and not is_trying() and (opened := _opened_by_default(model, args, kwargs)) is not None:
        call = opened
    else:
        # A plain call may run within a paged one of the same model, and must not use its memory.
        token = _current.set(None)
        try:
            return function(model, *args, **kwargs)
        finally:
            _current.reset(token)
    # Removed, because transformers has a branch of its own for the name "paged".
    kwargs.pop("cache_implementation", None)
    # The request for a paged cache overrides a checkpoint's default. A caller's own use_cache=False was refused before.
    if model.generation_config.use_cache is False:
        kwargs["use_cache"] = True
    failed = True
    token = _current.set(call)
    try:
        result = function(model, *args, **kwargs)
        if call.decoding is not None and is_recording():
            _observe_end(call.record, call.decoding, result)
        if call.decoding is not None or not call.by_default:
            add_record(call.record)
        failed = False
        return result
    finally:
        _current.reset(token)
        if call.decoding is not None:
            call.decoding.close(model, failed=failed)


def _is_paged(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Custom code that a string names gets all arguments, `cache_implementation` too, and calls generate again.
    if isinstance(kwargs.get("custom_generate"), str):
        return False
    generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    name = "cache_implementation"
    wanted = kwargs[name] if name in kwargs else option(generation_config, model.generation_config, name)
    if wanted is None:  # a given PagedKVCache asks for paging too, unless it has no blocks
        cache = paged_part(given_cache(kwargs))
        return isinstance(cache, PagedKVCache) and not cache.has_only_states
    return bool(wanted == PAGED)


def _opened_by_default(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
    """Return the call if it names no cache and can be paged. If it cannot be, warn and return None."""
    if _current.get() is not None or _has_cache_of_its_own(model, args, kwargs):
        return None
    # A copy, because the arguments must stay as they are if the call cannot be paged.
    copied = dict(kwargs)
    try:
        call = _open_call(model, args, copied)
    except (UnsupportedVersionError, ValueError) as error:
        _warn_of_plain(model, error)
        return None
    call.by_default = True
    kwargs.update(copied)
    return call


def _has_cache_of_its_own(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the call names its cache, wants none, or leaves the choice to custom code."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    configs = (given, model.generation_config)
    names = [kwargs.get("cache_implementation"), *(getattr(each, "cache_implementation", None) for each in configs)]
    uses_cache = kwargs.get("use_cache", getattr(given, "use_cache", None))
    is_other = given_cache(kwargs) is not None or kwargs.get("custom_generate") is not None
    return is_other or uses_cache is False or any(name is not None for name in names)


def _warn_of_plain(model: Model, error: Exception) -> None:
    warnings.warn(
        f"a call of generate of {type(model).__name__} runs without a paged cache: {error}",
        RuntimeWarning,
        stacklevel=4,
    )


def _open_call(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Check the arguments of a call, and raise whatever can be raised before transformers starts."""
    generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    if isinstance(kwargs.get("cache_config"), CacheConfig):
        # A GenerationConfig must be writable as JSON.
        kwargs["cache_config"] = asdict(kwargs["cache_config"])
    inputs = args[0] if args else kwargs.get("inputs")
    report = refuse_unsupported(model)  # first, because the inputs of a refused model may be of any kind
    way = way_of(report)
    way.check(model, inputs, generation_config, kwargs)
    if (given := given_cache(kwargs)) is not None:
        check_cache(model, report, paged_part(given))
    obstacle = way.obstacle(model, report) or argument_obstacle(model, report, kwargs)
    return _Call(model, report, CallRecord(report.model), obstacle, way.prompt_length(inputs, kwargs))


def prepare_cache_for_generation(
    function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replace GenerationMixin._prepare_cache_for_generation: give a paged call its memory and its route."""
    call = _active(model)
    if call is None:
        return function(model, *args, **kwargs)
    names = ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length")
    values = {**dict(zip(names, args)), **kwargs}
    config, model_kwargs = values["generation_config"], values["model_kwargs"]
    # Cleared, because the assistant of an assisted call copies this config, and is a call of its own.
    config.cache_implementation = None
    cache_config = as_config(CacheConfig, config.cache_config, "cache_config")
    refuse_no_cache(config.use_cache)
    check_values(COUNTS, vars(config))
    mode = str(values["generation_mode"].value)
    asked = Asked(model, call.report, config, model_kwargs, mode, values["batch_size"], call.prompt_length)
    decoder = decoder_of(asked)
    try:
        obstacle = call.obstacle or decoder.obstacle(asked)
    except UnsupportedModelError as error:
        if not call.by_default:
            raise
        _warn_of_plain(model, error)
        return function(model, *args, **kwargs)
    if obstacle is not None:
        decoder.fall_back(obstacle)
    call.record.route, call.record.reason = ("packed", None) if obstacle is None else ("hf_loop", obstacle)
    given = asked.cache
    if given is not None:
        given._is_user_defined = True
        if obstacle is None:
            _continue_rows(call, asked)
        else:
            call.decoding = _Decoding(paged_part(given).memory, None, True, cache=paged_part(given))
    elif obstacle is None:
        call.decoding = _open_packed_rows(call, asked, cache_config, is_whole=decoder.one_group)
        model_kwargs[CACHE] = call.decoding.decoder.cache  # type: ignore[union-attr]
    else:
        cache = _open_dense_view(call, asked, cache_config)
        model_kwargs[CACHE] = given_to_model(asked, cache)
    call.record.start(call.decoding.memory)  # type: ignore[union-attr]
    return None


def _open_packed_rows(call: _Call, asked: Asked, cache_config: CacheConfig, *, is_whole: bool) -> _Decoding:
    keeps_cache = asked.returns_cache
    # A cache that the caller will own has one group, because it may be cropped, continued and read.
    is_whole = is_whole or keeps_cache or not call.report.native
    layout = WHOLE if is_whole else layout_for(call.report, cache_config, asked.config.max_length)
    memory, key = _take_memory(call, cache_config, layout)
    decoder = open_decoder(
        asked,
        memory,
        keep_finished=keeps_cache,
        check_pool=lambda lengths: _check_prompts(lengths, cache_config, memory),
        on_step=call.record.observe if is_recording() else None,
    )
    return _Decoding(memory, key, keeps_cache, decoder)


def _continue_rows(call: _Call, asked: Asked) -> None:
    """Lend the rows of the given cache to a decoder, whose cache replaces it in `model_kwargs`."""
    cache: PagedKVCache = asked.cache
    length, num_new = cache.get_seq_length(), asked.new_columns
    on_step = call.record.observe if is_recording() else None
    decoder = open_decoder(asked, cache.memory, keep_finished=True, on_step=on_step)
    rows, padding = cache.lend_rows()
    # Before the next line, so that the rows go back when the call ends, even if that line fails.
    call.decoding = _Decoding(cache.memory, None, True, decoder=decoder, cache=cache)
    decoder.continue_rows(rows, padding, length, num_new)
    asked.model_kwargs[CACHE] = decoder.cache


def _open_dense_view(call: _Call, asked: Asked, cache_config: CacheConfig) -> PagedKVCache:
    memory, key = _take_memory(call, cache_config, WHOLE)
    _check_prompts([call.prompt_length] * asked.num_rows, cache_config, memory)
    cache = open_dense_view(asked, memory)
    call.decoding = _Decoding(memory, key, asked.returns_cache, cache=cache)
    return cache


def _take_memory(call: _Call, cache_config: CacheConfig, layout: Layout) -> tuple[PagedMemory, MemoryKey]:
    """Take an idle or new pool for the call, and set its limit."""
    pools = _idle_pools(call.model)
    key = (kind_of(call.model), cache_config, layout)
    # Before the pool is taken, because its idle memory counts as free for this call.
    max_blocks = _max_blocks(call.model, call.report, cache_config, layout, pools.num_bytes(key))
    memory = pools.take(key)
    memory.max_blocks = max_blocks
    return memory, key


def _check_prompts(lengths: Sequence[int], cache_config: CacheConfig, memory: PagedMemory) -> None:
    """Raises ValueError if prompts of these lengths, in tokens, do not fit into the memory together."""
    limit = None if memory.max_blocks is None else memory.max_blocks // len(memory.groups)
    check_pool(lengths, cache_config, limit)


def _max_blocks(
    model: Model, report: SupportReport, cache_config: CacheConfig, layout: Layout, idle: DeviceBytes
) -> int | None:
    """Return how many blocks a call may use; None: as many as it needs. idle: bytes of the pool that it will reuse."""
    if cache_config.memory is None and cache_config.memory_fraction is None:
        return None if cache_config.num_blocks is None else cache_config.num_blocks * len(layout.groups)
    autocast = kind_of(model)[2]
    itemsize = (autocast or model.dtype).itemsize
    sizes = token_sizes(report, cache_config, itemsize)
    if layout.block_sizes:
        is_exact = storage_of(cache_config.key_dtype, cache_config.value_dtype).is_exact
        sizes = {device: n * (itemsize if is_exact else 1) for device, n in layout.block_sizes}  # type: ignore[misc]
    return blocks_in_memory(
        cache_config, {device: n * cache_config.block_size for device, n in sizes.items()}, idle=idle
    )


def _packed(model: Model) -> tuple[PackedDecoder, PagedKVCache | None] | None:
    """Return the decoder of the call in progress, and the cache whose rows it continues. None: no packed rows."""
    call = _active(model)
    if call is None or call.decoding is None or call.decoding.decoder is None:
        return None
    return call.decoding.decoder, call.decoding.cache


def sample(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace GenerationMixin._sample: run it over packed rows, if the call has them."""
    packed = _packed(model)
    if packed is None:
        return function(model, *args, **kwargs)
    decoder, given = packed
    # The decoder must know which rows have ended, because it drops their blocks.
    decoder.criteria = RecordingCriteria(kwargs["stopping_criteria"])
    # Without an EOS id, the loop does not pad a row after its end. It writes further tokens, which must be computed.
    pads = any(hasattr(criterion, "eos_token_id") for criterion in decoder.criteria)
    if not pads or kwargs.get("synced_gpus") or _sees_every_row(kwargs):
        decoder.keep_finished = True
    result = function(decoder, *args, **{**kwargs, "stopping_criteria": decoder.criteria})
    return _with_cache(decoder, given, result)


def beam_search(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace GenerationMixin._beam_search: run it over packed rows, if the call has them."""
    packed = _packed(model)
    if packed is None:
        return function(model, *args, **kwargs)
    decoder, given = packed
    return _with_cache(decoder, given, function(decoder, *args, **kwargs))


def assisted_decoding(function: Callable[..., Any], model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace GenerationMixin._assisted_decoding. Packed rows decode in the loop of `_sample`; the decoder's forwards
    compute drafts as well."""
    packed = _packed(model)
    if packed is None:
        return function(model, *args, **kwargs)
    decoder: Any = packed[0]
    given = {name: kwargs.pop(name, None) for name in _ASSISTED_KWARGS}
    input_ids = args[0] if args else kwargs["input_ids"]
    tokenizers = {"tokenizer": given["tokenizer"], "own_tokenizer": given["assistant_tokenizer"]}
    decoder.begin(given["assistant_model"], len(input_ids), **tokenizers)
    return model._sample(*args, **kwargs)


def _sees_every_row(kwargs: dict[str, Any]) -> bool:
    """Return True if a processor or criterion is third-party code. It may mix rows, so finished rows stay computed."""
    objects = [*kwargs["logits_processor"], *kwargs["stopping_criteria"]]
    return not all(is_known(item) for item in objects)


def _with_cache(decoder: PackedDecoder, given: PagedKVCache | None, result: Any) -> Any:
    """Put a PagedKVCache of the rows into a ModelOutput, so that the caller can pass it back. A cache that the caller
    gave is put there again; it gets its rows when the call ends."""
    if isinstance(result, torch.Tensor):
        return result
    set_cache(result, decoder.returned_cache() if given is None else given)
    return result


def _observe_end(record: CallRecord, decoding: _Decoding, result: object) -> None:
    if decoding.decoder is None:
        record.observe(decoding.memory)
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if sequences is not None:
        # The larger number, because beam search returns fewer rows than it computes.
        beside = 0 if decoding.decoder is None else decoding.decoder.length_beside
        record.finish(decoding.memory, max(sequences.shape[0], decoding.num_rows), sequences.shape[1] + beside)
