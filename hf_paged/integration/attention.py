"""The attention and mask functions that transformers calls under the name "hf_paged", and how calls reach them.

If the key carries a LayerHandle, they run the paged kernels; otherwise they call the model's own implementation. Knows
transformers and the kernels; never sequences.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_paged.cache.kv_pool import KVPool
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.latents import Absorbed
from hf_paged.integration.names import CACHE_NAMES
from hf_paged.integration.substitutes import Substitute
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.bounds import UNBOUNDED, Bounds
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.locks import usable_after_fork

NAME = "hf_paged"

# Keyword arguments of attention functions that do not affect the result here: positions are in the metadata, and a
# packed step never trains. Any other argument that is neither None nor False is refused (see `refuse_unknown`).
_INERT_KWARGS = frozenset({
    "position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "cache_position",
    "position_embeddings", *CACHE_NAMES, "layer_idx", "is_causal", "num_items_in_batch", "return_dict",
    "logits_to_keep", "token_type_ids", "attention_mask", "per_layer_inputs", "max_length_q", "max_length_k",
    "cu_seq_lens_q", "cu_seq_lens_k", "q_heads_per_kv_head", "deterministic", "target_dtype", "implementation",
    "output_gate", "input_ids", "inputs_embeds", "head_mask", "shared_kv_states", "is_first_iteration",
})  # fmt: skip

_collected: ContextVar[list[Callable[..., Any]] | None] = ContextVar("hf_paged_mask_functions", default=None)
packed_cache: ContextVar[Any] = ContextVar("hf_paged_packed_cache", default=None)
"""The `PackedCache` of the packed forward that runs in this thread; None outside one."""

HANDLE = "_hf_paged_handle"
"""The attribute of a key tensor that says where the layer's K/V is."""


@dataclass(slots=True)
class LayerHandle:
    """Where a layer's K/V is; an attribute of the key tensor that `PackedCache.update` returns to the layer.

    The first attention call of a step writes `new`, the K and V of its tokens.
    `reads` counts the attention calls: 0 means that the layer bypassed the paged attention function. places: see
    `token_rows`.
    """

    layer_idx: int
    pool: KVPool  # not the tensors: a handle outlives its step, and must not keep them when the pool is released
    metadata: AttentionMetadata
    new: NewKV | None
    reads: int = 0
    bounds: Bounds = UNBOUNDED  # of the layer's last attention call
    options: dict[str, Any] = field(default_factory=dict)  # arguments of that call other than tensors
    places: torch.Tensor | None = None
    is_latent: bool = False  # the layer attends to what it caches, see `latents`

    @property
    def kv(self) -> LayerKV:
        return self.pool.layers[self.layer_idx]


# -- which implementation a config names while a packed forward runs -------------------------------------------------

IMPLEMENTATION = "_attn_implementation_internal"
"""The field of a config that names its attention implementation: NAME for a thread within a packed forward of it."""

names = Substitute(IMPLEMENTATION)
names.put_on(PreTrainedConfig)

_lock = usable_after_fork(threading.RLock())
_forwards: set[int] = set()  # ids of the packed forwards in progress, which need the names even after uninstall()
_wanted = False  # whether `register` is in effect


def configs_of(model: torch.nn.Module) -> list[Any]:
    """Every config object that the model's modules consult for their attention implementation."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def own_implementation(config: Any) -> str:
    """The implementation that a config names for plain calls, also in a packed forward."""
    name = vars(config).get(IMPLEMENTATION)
    return _own_implementation(config) if name == NAME else name or "eager"


def in_packed_step() -> bool:
    """True inside a packed forward of this thread."""
    return packed_cache.get() is not None


def _own_implementation(config: Any) -> str:
    name: str | None = None if config is None else vars(config).get(IMPLEMENTATION)
    # A model loaded with attn_implementation="hf_paged" has no other implementation: use transformers' default.
    return name if name not in (None, NAME) else "sdpa"


# -- the two functions -----------------------------------------------------------------------------------------------


OWN_MASK = "makes its attention mask without transformers' functions"
"""Reason why such a model is not native: nobody else knows how its mask treats padding."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A packed step's mask in place of a tensor: which earlier tokens of its own sequence a token attends to.

    A model receives it from mask creation and passes it to its attention unchanged. A model that computes with its mask
    needs a real tensor and cannot run packed steps. obstacle: why the kernels cannot attend with this mask; a model may
    make one that it does not use.

    In a step in which tokens attend to later ones: reaches: whether this mask lets them. windows: the windows that the
    mask may have (None: no window): a long one hides nothing in short sequences. The call of attention names its own.
    """

    bounds: Bounds = UNBOUNDED
    obstacle: str | None = None
    windows: tuple[int | None, ...] = ()
    reaches: bool = True


_patterns: dict[tuple[Any, ...], MaskPattern] = {}


def attention_mask(*args: Any, **kwargs: Any) -> Any:
    """AttentionMaskInterface: a MaskPattern (None: causal) in a packed step, else the own implementation's mask."""
    # Whoever collects functions needs no mask.
    if (functions := _collected.get()) is not None:
        functions.append(kwargs["mask_function"])
        return None
    if packed_cache.get() is not None:
        return _pattern(**kwargs)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    config = kwargs.get("config")
    return ALL_MASK_ATTENTION_FUNCTIONS[_own_implementation(config)](*args, **kwargs)


def _pattern(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: Any = None,
    config: Any = None,
    **_: object,
) -> MaskPattern | None:
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    cache = packed_cache.get()
    if (mask := getattr(cache, "mask", None)) is not None:  # of whole prompts: see `both_ways.py`
        own: MaskPattern | None = mask(mask_function)
        return own
    step = () if cache is None else cache.step
    # Such a mask depends on the step's tokens, so it is not kept.
    if step and step[0].reach is not None:
        return _with_reach(mask_function, local_size or getattr(config, "sliding_window", None), step[0])
    if mask_function is causal_mask_function:
        return None
    if mask_function is bidirectional_mask_function and cache.reads_encoder:
        return None  # which of the encoder's states are visible is in their block tables
    key = (local_size, _shape_of(mask_function))
    if key not in _patterns:
        _patterns[key] = _recognise(mask_function, local_size, device)
    return _patterns[key]


# Rows of a mask that are compared at a time: a long prompt's whole mask would be a square of its length.
_TILE = 512


def _with_reach(mask_function: Callable[..., Any], window: int | None, metadata: AttentionMetadata) -> MaskPattern:
    """Return the pattern of a mask in a step whose tokens attend to later tokens. The mask has to agree with
    `metadata.reach`, or to be causal: layers may differ (Gemma 4)."""
    assert metadata.reach is not None
    device, starts = metadata.reach.device, metadata.query_start_loc.tolist()
    sizes = [None] if window is None else [None, int(window)]
    # All that the mask may be; each tile of each sequence leaves those that fit.
    patterns = [(reaches, size) for reaches in (True, False) for size in sizes]
    for start, stop, length in zip(starts, starts[1:], metadata.seq_lens.tolist()):
        key = torch.arange(start, stop, dtype=torch.int64, device=device)[None]
        ahead = length - stop  # from a row to the position of its token
        for low in range(start, stop, _TILE):
            query = torch.arange(low, min(low + _TILE, stop), dtype=torch.int64, device=device)[:, None]
            actual = mask_function(0, 0, query, key)
            ends = {True: key + ahead <= metadata.reach[query], False: key <= query}
            patterns = [
                (reaches, size)
                for reaches, size in patterns
                if torch.equal(actual, ends[reaches] if size is None else ends[reaches] & (key > query - size))
            ]
    if patterns:
        reaches = patterns[0][0]
        return MaskPattern(windows=tuple(size for each, size in patterns if each == reaches), reaches=reaches)
    return MaskPattern(
        obstacle="its attention mask is neither causal nor a sliding window with runs of tokens that attend to one "
        "another both ways; this model needs the dense view"
    )


def mask_functions(make_masks: Callable[[], object]) -> list[Callable[..., Any]]:
    """The functions of the masks that `make_masks` makes for configs that name this implementation: (batch, head,
    query, key) -> whether the query sees the key."""
    functions: list[Callable[..., Any]] = []
    token = _collected.set(functions)
    try:
        make_masks()
    finally:
        _collected.reset(token)
    return functions


def _shape_of(value: Any) -> Any:
    """A key that identifies a mask function: its code and the constants in its closure, recursively."""
    # Models make these functions anew in each forward, so that identity says nothing.
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__, tuple(_shape_of(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, tuple | list):
        return tuple(map(_shape_of, value))
    return value if isinstance(value, int | str | None) else type(value)


def _looks_ahead(mask_function: Callable[..., Any], device: Any) -> bool:
    """Return True if the mask lets one of the first four tokens attend to a later one."""
    points = torch.arange(4, dtype=torch.int64, device=device)
    try:
        seen = mask_function(0, 0, points[:, None], points[None, :])
    except IndexError:  # it looks positions up in a tensor as long as the batch's rows
        return False
    return isinstance(seen, torch.Tensor) and bool((seen & (points[None, :] > points[:, None])).any())


def _recognise(mask_function: Callable[..., Any], local_size: int | None, device: Any) -> MaskPattern:
    """Compare the function with the patterns that the kernels implement, at the edges of windows and chunks."""
    if local_size is not None:
        size = int(local_size)
        # Windows and chunks differ from one another, and from causal masks, only beside multiples of their size.
        edges = sorted({max(k * size + d, 0) for k in range(4) for d in (-1, 0, 1)})
        points = torch.tensor(edges, dtype=torch.int64, device=device)
        query, key = points[:, None], points[None, :]
        try:
            actual = mask_function(0, 0, query, key)
        except IndexError:  # it looks positions up in a tensor as long as the batch's rows
            actual = None
        causal = key <= query
        for bounds in (Bounds(sliding_window=size), Bounds(chunk_size=size)):
            if actual is not None and torch.equal(actual, causal & ~bounds.hidden(query, key)):
                return MaskPattern(bounds)
    if _looks_ahead(mask_function, device):
        return MaskPattern(
            obstacle="its attention mask lets tokens attend to later ones, as within an image or over an encoder's "
            "states, which a packed row does not support; this model needs the dense view"
        )
    return MaskPattern(
        obstacle="its attention mask is neither causal nor a sliding window nor chunks; this model needs the dense view"
    )


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """AttentionInterface: query [batch, num_heads, q_len, head_dim] -> [batch, q_len, num_heads, v_head_dim], None.

    In a packed step key carries a LayerHandle. Batch is 1 and q_len is num_tokens of the ragged batch, or each row of
    the batch is a sequence.
    Raises UnsupportedModelError for anything in the call that the kernels do not implement.
    """
    handle: Any = getattr(key, HANDLE, None)
    if handle is None:
        if (attend := getattr(packed_cache.get(), "attend", None)) is not None:  # whole prompts: see `both_ways.py`
            whole: tuple[torch.Tensor, None] = attend(
                module, (query, key, value), attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return whole
        # Within a step only a call that interrupts it, or a model that goes around the cache, has such keys.
        if packed_cache.get() is not None:
            if (name := _interrupting()) is not None:
                raise RuntimeError(
                    f"{name}, the handler of a signal, has interrupted a step and calls a part of the model that has a "
                    f"{type(module).__name__}; call the model itself there, or call the part later"
                )
            raise UnsupportedModelError(
                f"{type(module).__name__} attends to keys that did not come from the cache as it returned them; "
                "this model needs the dense view"
            )
        return own_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if not isinstance(handle, LayerHandle):  # of an encoder-decoder model: see `encoder_decoder/caches.py`
        attended: tuple[torch.Tensor, torch.Tensor | None]
        attended = handle.attend(module, query, key, value, attention_mask, scaling, kwargs)
        return attended
    handle.reads += 1
    softcap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
    handle.options = {"scaling": scaling, "softcap": softcap, "s_aux": kwargs.get("s_aux"), "sliding_window": window}
    options, pattern = options_of_call(module, query, attention_mask, scaling, kwargs)
    if attention_mask is None:
        _refuse_both_ways(module, kwargs.get("is_causal"))
    handle.bounds = pattern.bounds
    rows = token_rows(query, handle.places)
    # Under autocast the query may have another dtype than the K and V that are kept.
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(handle.pool.written_in(handle.layer_idx)[0])
    # Only the first call of a layer writes; a second one reads what is there.
    kv, new, handle.new = handle.kv, handle.new, None
    absorbed = None
    if handle.is_latent:
        absorbed = Absorbed(module, kv)
        rows, kv = absorbed.queries(rows), absorbed.kv
        # In the pool a latent and its rotary part lie side by side: both are the key, the latent alone the value.
        new = new and NewKV(torch.cat(new, dim=-1), new.key)
    # A causal layer in a step with runs of tokens that attend both ways.
    metadata = handle.metadata if pattern.reaches else handle.metadata.causal
    out = ops.paged_attention(rows, kv, metadata, options, new)
    assert isinstance(out, torch.Tensor)
    if absorbed is not None:
        out = absorbed.outputs(out)
    if len(query) == 1:
        return out.unsqueeze(0), None
    if handle.places is not None:
        padded = out.new_zeros(len(query) * query.shape[2], *out.shape[1:])
        out = padded.index_copy_(0, handle.places, out)
    return out.view(len(query), query.shape[2], *out.shape[1:]), None


def _interrupting() -> str | None:
    """The name of the handler of a signal in which this thread is."""
    # By their code, because a frame has no reference to its function.
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {getattr(getattr(each, "__func__", each), "__code__", None) for each in handlers} - {None}
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_qualname


def options_of_call(
    module: torch.nn.Module, query: torch.Tensor, mask: object, scaling: float | None, kwargs: dict[str, Any]
) -> tuple[Attention, MaskPattern]:
    """Return the options of a module's call of attention, and the pattern of its mask. kwargs: further arguments; known
    ones are taken out. Raises UnsupportedModelError for others."""
    softcap, sinks = kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    pattern = pattern_of_call(module, mask, kwargs.pop("sliding_window", None))
    refuse_unknown(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Attention(scale, pattern.bounds, softcap, sinks), pattern


def token_rows(states: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
    """[batch, num_heads, length, size] -> [num_tokens, num_heads, size], without what is padding.

    places int64 [num_tokens]: the tokens among all batch * length positions; None: all of them.
    """
    if len(states) == 1:
        return states[0].transpose(0, 1)
    rows = states.transpose(1, 2).flatten(0, 1)
    return rows if places is None else rows.index_select(0, places)


def pattern_of_call(module: torch.nn.Module, mask: object, window: int | None) -> MaskPattern:
    """The pattern of `mask`, which decides, as in eager and SDPA attention. A contradicting `window` is refused."""
    if mask is not None and not isinstance(mask, MaskPattern):
        raise UnsupportedModelError(f"{type(module).__name__} {OWN_MASK}")
    pattern = mask or MaskPattern(reaches=False)
    if pattern.obstacle is not None:
        raise UnsupportedModelError(pattern.obstacle)
    if window in pattern.windows:
        return MaskPattern(Bounds(window), reaches=pattern.reaches)
    if pattern.windows:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes sliding_window={window}, but in its mask tokens that attend to one "
            "another both ways see more, or less; this model needs the dense view"
        )
    own = pattern.bounds
    if window is not None and own.chunk_size is None and window != own.sliding_window:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes sliding_window={window}, but its mask is "
            f"{'causal' if mask is None else f'a window of {own.sliding_window}'}; this model needs the dense view"
        )
    return pattern


def _refuse_both_ways(module: torch.nn.Module, is_causal: bool | None) -> None:
    """Refuse a call without a mask by a module that is not causal (eager attention ignores `is_causal`)."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal and _own_implementation(getattr(module, "config", None)) != "eager":
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens if it gets no mask (is_causal=False), which a packed row "
            "does not support; this model needs the dense view"
        )


def refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in _INERT_KWARGS:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name}={type(value).__name__} to its attention, which the paged "
                "kernels do not implement; this model needs the dense view"
            )


def own_attention(module: torch.nn.Module, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    name = _own_implementation(getattr(module, "config", None))
    function = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if function is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no attention implementation named {name!r}")
    result: tuple[torch.Tensor, torch.Tensor | None] = function(module, *args, **kwargs)
    return result


def register() -> None:
    """Make "hf_paged" a valid `attn_implementation`. Idempotent; inert until a paged call runs."""
    global _wanted
    with _lock:
        _wanted = True
        _add_names()


def unregister() -> None:
    """Undo `register`. If a packed forward is running, the name is removed when it ends."""
    global _wanted
    with _lock:
        _wanted = False
        _remove_unneeded_names()


def name_ours(forward: object, configs: Iterable[Any]) -> None:
    """For this thread, the configs name the functions of this module, until the caller puts `names.here.values` back.
    Then it calls `name_own` for the packed forward `forward`."""
    # After `uninstall` a call that is still running needs the names until it ends.
    if not _wanted:
        with _lock:
            _forwards.add(id(forward))
            _add_names()
    # One assignment, which Ctrl-C cannot interrupt.
    names.here.values = {**names.here.values, **dict.fromkeys(map(id, configs), NAME)}


def name_own(forward: object) -> None:
    """Idempotent."""
    if _forwards:
        with _lock:
            _forwards.discard(id(forward))
            _remove_unneeded_names()


def _names() -> tuple[tuple[dict[str, Any], Callable[..., Any]], ...]:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return (
        (AttentionInterface._global_mapping, attention_forward),
        (AttentionMaskInterface._global_mapping, attention_mask),
    )


def _add_names() -> None:
    for mapping, function in _names():
        mapping.setdefault(NAME, function)


def _remove_unneeded_names() -> None:
    if _wanted or _forwards:
        return
    for mapping, function in _names():
        # Whoever has put another function there keeps it.
        if mapping.get(NAME) is function:
            del mapping[NAME]


class MaskLayer(CacheLayerMixin):
    """Provides what mask creation reads of a layer; holds no K/V. length: the tokens before the step in progress."""

    is_sliding = False
    is_compileable = False

    def __init__(self, length: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError("a step writes through the cache that has this layer")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._length()

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
