"""The generate door: what `model.generate(..., cache_implementation="paged")` does.

Four functions stand before transformers' methods of the same names (see `integration.hook`). A call that does not ask
for a paged cache passes through untouched. A paged call is checked, then decoded by transformers' own loop: over a
PackedDecoder where every option of the call allows it (route "engine"), else over a PagedKVCache (route "hf_loop").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.config import CacheConfig, as_config
from hf_paged.errors import UnsupportedModelError
from hf_paged.fused.overrides import overrides_for_calls
from hf_paged.generation.decoder import MAX_PREFILL_TOKENS, PackedDecoder, RecordingCriteria
from hf_paged.generation.engine.sizing import blocks_in_memory, draws_dropout, window_groups
from hf_paged.generation.idle import IdlePools, MemoryKey, kind_of
from hf_paged.generation.validation import (
    check_cache,
    check_counts,
    check_inputs,
    check_pool,
    extends_positions,
    refuse_no_cache,
)
from hf_paged.model.devices import device_of
from hf_paged.model.packed import PackedModel
from hf_paged.model.state import Slot, release, unwrapped
from hf_paged.model.support import SupportReport, refuse_unsupported

PAGED = "paged"

# What a packed row can carry. Anything else in the model's arguments goes to transformers' loop, which passes it on.
_PACKED_KWARGS = frozenset({"attention_mask", "position_ids", "logits_to_keep", "use_cache", "past_key_values"})


@dataclass(slots=True)
class CallRecord:
    """What one paged generate call did. Block counts are peaks over its steps, bytes at the peak.

    `route`: "engine" (packed rows, our kernels) or "hf_loop" (transformers' loop over a PagedKVCache, for `reason`).
    `kv_bytes_contiguous`: what contiguous K/V tensors of the same rows at the final length take.
    """

    model: str
    route: Literal["engine", "hf_loop"] = "hf_loop"
    reason: str | None = None
    steps: int = 0
    block_size: int = 0
    peak_blocks_used: int = 0
    peak_blocks_shared: int = 0
    cow_copies: int = 0
    kv_bytes_reserved: int = 0
    kv_bytes_used: int = 0
    kv_bytes_filled: int = 0
    kv_bytes_contiguous: int = 0
    _copies_before: int = 0  # of earlier calls, in the memory that this call takes over

    def start(self, memory: PagedMemory) -> None:
        self._copies_before = memory.stats().cow_copies

    def observe(self, memory: PagedMemory) -> None:
        """Note the state after one step."""
        self.steps += 1
        stats = memory.stats()
        self.block_size = memory.block_size
        self.peak_blocks_shared = max(self.peak_blocks_shared, stats.blocks_shared)
        self.kv_bytes_reserved = max(self.kv_bytes_reserved, stats.bytes_reserved)
        self.cow_copies = stats.cow_copies - self._copies_before
        if stats.blocks_used >= self.peak_blocks_used:
            self.peak_blocks_used = stats.blocks_used
            self.kv_bytes_used = stats.bytes_used
            self.kv_bytes_filled = stats.bytes_filled

    def finish(self, memory: PagedMemory, num_rows: int, length: int) -> None:
        per_token = sum(group.pool.bytes_per_block for group in memory.groups) // memory.block_size
        self.kv_bytes_contiguous = num_rows * length * per_token


_recorders: ContextVar[tuple[list[CallRecord], ...]] = ContextVar("hf_paged_recorders", default=())


@contextlib.contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """Collect a CallRecord for every paged generate call inside the `with` block (this thread, this task)."""
    records: list[CallRecord] = []
    token = _recorders.set((*_recorders.get(), records))
    try:
        yield records
    finally:
        _recorders.reset(token)


# -- memory kept between calls -------------------------------------------------------------------------------------

_idle: Slot[IdlePools] = Slot("idle memory of calls")


def _idle_pools(model: nn.Module) -> IdlePools:
    return _idle.setdefault(model, IdlePools())


def release_memory(model: nn.Module | None = None) -> None:
    """Free what is kept for the next call or engine on a model, or on all: K/V memory of paged calls (that of the last
    call, and up to three pools of other kinds of call within 1 GiB), CUDA graphs, packed weights (what `prepack` has
    asked for too)."""
    release(unwrapped(model))


# -- one call --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A paged call in progress."""

    model: Any
    report: SupportReport
    record: CallRecord
    observed: bool
    obstacle: str | None  # why the call's arguments need transformers' loop, as far as they tell by themselves
    prompt_length: int  # padding included
    key: MemoryKey | None = None
    memory: PagedMemory | None = None
    cache: PagedKVCache | None = None
    decoder: PackedDecoder | None = None
    expand: int = 1
    given: bool = False  # the caller's own cache is continued
    returned: bool = False  # the caller keeps the cache

    def close(self, *, failed: bool) -> None:
        """No block stays in use, unless the caller has the cache."""
        if self.given or self.memory is None or self.key is None or (self.returned and not failed):
            return
        if self.decoder is not None:
            self.decoder.free()
        if self.cache is not None:
            self.cache.reset()
        if any(len(manager) for manager in self.memory.managers):
            return  # an error struck inside a verb: this memory is not reused
        _idle_pools(self.model).give_back(self.key, self.memory)


_current: ContextVar[_Call | None] = ContextVar("hf_paged_call", default=None)


def _active(model: Any) -> _Call | None:
    call = _current.get()
    return call if call is not None and call.model is model else None


def generate(function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before GenerationMixin.generate."""
    if not _is_paged(model, args, kwargs):
        token = _current.set(None)
        try:
            return function(model, *args, **kwargs)
        finally:
            _current.reset(token)
    call = _open_call(model, args, kwargs)
    kwargs.pop("cache_implementation", None)
    # A checkpoint's default, which the request for a paged cache overrides; a caller's own use_cache=False was refused.
    if model.generation_config.use_cache is False:
        kwargs["use_cache"] = True
    failed = True
    token = _current.set(call)
    try:
        result = function(model, *args, **kwargs)
        _observe_end(call, result)
        for records in _recorders.get():
            records.append(call.record)
        failed = False
        return result
    finally:
        _current.reset(token)
        call.close(failed=failed)


def _is_paged(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # Custom code named by a string receives the arguments as they are, this one included, and calls generate again.
    if isinstance(kwargs.get("custom_generate"), str):
        return False
    if "cache_implementation" in kwargs:
        return bool(kwargs["cache_implementation"] == PAGED)
    generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    for config in (generation_config, model.generation_config):
        wanted = getattr(config, "cache_implementation", None)
        if wanted is not None:
            return bool(wanted == PAGED)
    return False


def _open_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    """Everything that can be refused before transformers starts."""
    generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    if isinstance(kwargs.get("cache_config"), CacheConfig):
        # A GenerationConfig holds what JSON can hold.
        kwargs["cache_config"] = asdict(kwargs["cache_config"])
    inputs = args[0] if args else kwargs.get("inputs")
    report = refuse_unsupported(model)  # first: the inputs of a model that is refused may be of any kind
    check_inputs(model, inputs, generation_config, kwargs)
    if kwargs.get("past_key_values") is not None:
        check_cache(report, kwargs["past_key_values"])
    observed = bool(_recorders.get())
    obstacle = _argument_obstacle(model, report, kwargs)
    return _Call(model, report, CallRecord(report.model), observed, obstacle, _prompt_length(inputs, kwargs))


def _prompt_length(inputs: Any, kwargs: dict[str, Any]) -> int:
    """Tokens a row that the call starts with, padding included. The inputs have been checked."""
    for given in (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids")):
        if given is not None:
            return int(given.shape[1])
    return 1  # BOS


def _argument_obstacle(model: Any, report: SupportReport, kwargs: dict[str, Any]) -> str | None:
    from transformers import GenerationMixin

    if not report.native:
        return report.reason
    if kwargs.get("custom_generate") is not None:
        return "custom_generate is a callable that drives the model itself"
    for name in ("_sample", "_beam_search", "_prefill", "_update_model_kwargs_for_generation"):
        if name in vars(model) or getattr(type(model), name) is not getattr(GenerationMixin, name):
            return f"{report.model} has a {name} of its own"
    if kwargs.get("position_ids") is not None:
        return "position_ids are given explicitly"
    if kwargs.get("past_key_values") is not None:
        return "the conversation continues a given cache"
    if model.training and draws_dropout(model):
        return "the model is in training mode, where dropout depends on the batch layout"
    return None


def prepare_cache_for_generation(
    function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Before GenerationMixin._prepare_cache_for_generation: a paged call gets its memory and its route here."""
    call = _active(model)
    if call is None:
        return function(model, *args, **kwargs)
    names = ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length")
    values = {**dict(zip(names, args)), **kwargs}
    config, model_kwargs = values["generation_config"], values["model_kwargs"]
    # Seen and served: the assistant of an assisted call, which copies this config, is a call of its own.
    config.cache_implementation = None
    cache_config = as_config(CacheConfig, config.cache_config, "cache_config")
    refuse_no_cache(config.use_cache)
    check_counts(vars(config))
    given = model_kwargs.get("past_key_values")
    call.returned = bool(config.return_dict_in_generate) or config.is_assistant
    obstacle = call.obstacle or _config_obstacle(config, model_kwargs, str(values["generation_mode"].value))
    if obstacle is None and _prepares_otherwise(model):
        obstacle = f"{call.report.model} prepares the inputs of a step in a way of its own"
    obstacle = obstacle or _layout_obstacle(call.report, config.max_length, model_kwargs.get("attention_mask"))
    call.record.route, call.record.reason = ("engine", None) if obstacle is None else ("hf_loop", obstacle)
    if given is not None:
        given._is_user_defined = True
        call.cache, call.memory, call.given = given, given.memory, True
        call.record.start(call.memory)
        return None
    num_blocks = _max_blocks(model, call.report, cache_config)
    call.expand = max(config.num_beams, config.num_return_sequences)
    if obstacle is None:
        # A cache that the caller will own is one group: it may be cropped, continued, read.
        windows = ((None, None),) if call.returned else window_groups(call.report, config.max_length)
        lengths = _prompt_lengths(call, values["batch_size"], model_kwargs.get("attention_mask"))
        at_once = min(sum(lengths), MAX_PREFILL_TOKENS, config.prefill_chunk_size or MAX_PREFILL_TOKENS)
        # Blocks that leave every window between two chunks of prompts are not needed together.
        if at_once == sum(lengths) or any(window is None for _, window in windows):
            check_pool(lengths, cache_config, num_blocks)
        call.key = (kind_of(model), cache_config.block_size, num_blocks, windows)
        call.memory = _idle_pools(model).take(call.key)
        call.record.start(call.memory)
        model_kwargs["past_key_values"] = _open_decoder(call, config, model_kwargs).cache
        return None
    check_pool([call.prompt_length] * values["batch_size"] * call.expand, cache_config, num_blocks)
    call.key = (kind_of(model), cache_config.block_size, num_blocks, ((None, None),))
    call.memory = _idle_pools(model).take(call.key)
    call.record.start(call.memory)
    call.cache = PagedKVCache(model.config, memory=call.memory)
    if config.is_assistant:
        call.cache.activate_past_recording()
    model_kwargs["past_key_values"] = call.cache
    return None


def _prompt_lengths(call: _Call, batch_size: int, mask: torch.Tensor | None) -> list[int]:
    """Tokens of each prompt without its padding; mask: left padding, [batch_size * expand, length]."""
    if mask is None:
        return [call.prompt_length] * batch_size
    lengths: list[int] = (mask[:: call.expand] != 0).sum(dim=1).tolist()
    return lengths


def _max_blocks(model: Any, report: SupportReport, cache_config: CacheConfig) -> int | None:
    """Blocks of a group that a call may use; None: as many as its tokens need."""
    if cache_config.memory is None and cache_config.memory_fraction is None:
        return cache_config.num_blocks
    _, _, autocast = kind_of(model)
    itemsize = (autocast or model.dtype).itemsize
    bytes_per_block = report.kv_values_per_token * itemsize * cache_config.block_size
    return blocks_in_memory(cache_config, bytes_per_block, device_of(model))


def _config_obstacle(config: Any, model_kwargs: dict[str, Any], mode: str) -> str | None:
    """Why this call needs transformers' loop over a PagedKVCache; None if packed rows can serve it."""
    if mode not in ("greedy_search", "sample", "beam_search", "beam_sample"):
        return f"{mode.replace('_', ' ')} rolls the cache back"
    if config.is_assistant:
        return "this model drafts for another one"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            return f"{name} shows tensors of the padded batch"
    for name, value in model_kwargs.items():
        # An empty dictionary is no input: transformers adds one for the images of a prompt that has none.
        is_empty = value is None or (isinstance(value, dict) and not value)
        if not is_empty and name not in _PACKED_KWARGS:
            return f"the model is given {name}"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        return "the attention mask is not a padding mask"
    if mask is not None and not _is_left_padding(mask):
        return "the attention mask is not left padding"
    return None


def _prepares_otherwise(model: Any) -> bool:
    """Whether a step's inputs may be other than the support probe saw: packed rows ask nobody for them."""
    from transformers import GenerationMixin

    name = "prepare_inputs_for_generation"
    if name in vars(model):
        # Patched on this model, as PEFT does for prompts of virtual tokens.
        adapter = getattr(getattr(vars(model)[name], "__self__", None), "active_peft_config", None)
        kind = getattr(adapter, "peft_type", None)
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedModelError(
                f"the {kind.value} adapter brings its K/V in a cache of its own; call generate without "
                "cache_implementation"
            )
        return True
    # Rotary factors that change with the length make some models start their cache anew on the way.
    own = getattr(type(model), name) is not getattr(GenerationMixin, name)
    return own and extends_positions(model.config.get_text_config(decoder=True))


def _is_left_padding(mask: torch.Tensor) -> bool:
    """mask [rows, length]: zeros, then ones, in every row."""
    binary = (mask == 0) | (mask == 1)
    return bool(binary.all() & (mask[:, 1:] >= mask[:, :-1]).all())


def _layout_obstacle(report: SupportReport, max_length: int, mask: torch.Tensor | None) -> str | None:
    """Why packed rows would not be what this model computes for this batch."""
    if report.native_length is not None and max_length > report.native_length:
        return f"the rotary embedding changes with the length beyond {report.native_length} tokens"
    if report.counts_padding and mask is not None and not bool(mask.all()):
        return "the model numbers tokens with the left padding"
    return None


def _open_decoder(call: _Call, config: Any, model_kwargs: dict[str, Any]) -> PackedDecoder:
    assert call.memory is not None
    call.decoder = PackedDecoder(
        PackedModel(call.model, call.memory, overrides_for_calls(call.model)),
        expand=call.expand,
        keep_finished=call.returned,
        prefill_chunk_size=config.prefill_chunk_size,
        on_step=call.record.observe if call.observed else None,
    )
    return call.decoder


def sample(function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before GenerationMixin._sample."""
    call = _active(model)
    if call is None or call.decoder is None:
        return function(model, *args, **kwargs)
    decoder = call.decoder
    decoder.criteria = RecordingCriteria(kwargs["stopping_criteria"])
    # Without an EOS id the loop writes no padding after a row's end: it goes on with that row's own tokens.
    pads = any(hasattr(criterion, "eos_token_id") for criterion in decoder.criteria)
    if not pads or kwargs.get("synced_gpus") or _sees_every_row(kwargs):
        decoder.keep_finished = True
    result = function(decoder, *args, **{**kwargs, "stopping_criteria": decoder.criteria})
    return _with_cache(call, result)


def beam_search(function: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before GenerationMixin._beam_search."""
    call = _active(model)
    if call is None or call.decoder is None:
        return function(model, *args, **kwargs)
    return _with_cache(call, function(call.decoder, *args, **kwargs))


def _sees_every_row(kwargs: dict[str, Any]) -> bool:
    """A processor or criterion that transformers did not build may mix rows: it must see finished ones computed."""
    objects = [*kwargs["logits_processor"], *kwargs["stopping_criteria"]]
    return any(not type(item).__module__.startswith("transformers.") for item in objects)


def _with_cache(call: _Call, result: Any) -> Any:
    """A returned ModelOutput carries a PagedKVCache of the rows, which the caller may pass back."""
    if isinstance(result, torch.Tensor):
        return result
    assert call.decoder is not None and call.memory is not None
    cache = PagedKVCache(call.model.config, memory=call.memory)
    cache.take_rows(call.decoder.rows, call.decoder.padding)
    result.past_key_values = cache
    return result


def _observe_end(call: _Call, result: Any) -> None:
    if not call.observed or call.memory is None:
        return
    if call.decoder is None:
        call.record.observe(call.memory)
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if sequences is not None:
        # Beam search returns fewer rows than it computes.
        rows = sequences.shape[0]
        if call.decoder is not None:
            rows = max(rows, len(call.decoder.rows))
        elif call.cache is not None:
            rows = max(rows, call.cache.num_rows)
        call.record.finish(call.memory, rows, sequences.shape[1])
