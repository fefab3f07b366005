"""The cache that an encoder-decoder model gets in paged calls, and the attention over it.

The first forward of a call is the model's own, in every operation: it runs over rows of equal length, as in plain
generate, while the caches here write its K/V to blocks. In every later forward, each row has one new token: the model
gets tensors without contents, of the shapes that plain generate's cache would give it, and attends through block
tables. So whatever the model derives from shapes, lengths and masks is what it derives in plain generate.

A model whose attention is code of its own gets the contents too, gathered from the blocks (`RowStep.gather`).

Knows transformers, tensors and metadata; never sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged.annotations import Model
from hf_paged.cache.kv_pool import KVPool
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import HANDLE, MaskLayer, options_of_call, own_attention, refuse_unknown
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, NewKV
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.quantised import read_back

States = tuple[torch.Tensor, torch.Tensor]
"""K and V [rows, num_kv_heads, length, (v_)head_dim]."""


class Gather(NamedTuple):
    """Reads K/V for a model's own attention.

    own, encoder: of a layer, the states of the decoder's tokens, those of the step included, and of the encoder. (The
    first forward reads nothing.) visible: bool [rows, length], which of the encoder's states that one writes (None:
    all).
    """

    own: Callable[[int], States] | None = None
    encoder: Callable[[int], States] | None = None
    visible: torch.Tensor | None = None


@dataclass(slots=True)
class RowStep:
    """Data that the forward in progress reads and writes.

    own: metadata of the decoder's tokens (None: their K/V is not kept). encoder: of one query for each row at the last
    position of its encoder, so that causal attention shows all of them. pool: of both. length: tokens of every row
    before the step, padding included. padding: of each row. keep: bool [rows, tokens], which tokens of the first
    forward are no padding (None: this is a later one). write_encoder: makes room for the K/V of the encoder's visible
    positions, bool [rows, length], and returns their slots, int64, row by row. gather: for attention that is code of
    the model's own (None: ours reads block tables).
    """

    own: AttentionMetadata | None
    pool: KVPool
    length: int
    padding: list[int]
    encoder: AttentionMetadata | None = None
    encoder_length: int = 0
    keep: torch.Tensor | None = None
    write_encoder: Callable[[torch.Tensor], torch.Tensor] | None = None
    gather: Gather | None = None


class SelfCache(Cache):
    """K/V of the decoder's own tokens."""

    step: RowStep

    def __init__(self) -> None:
        super().__init__(layers=[MaskLayer(self.get_seq_length)])
        self.handles: list[SelfHandle | Gathered] = []
        self.length = 0  # tokens of a row with K/V in every layer, padding included

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states [rows, num_kv_heads, num_tokens, head_dim], value_states likewise, of this step's tokens."""
        step = self.step
        if step.own is None:
            return read_back(key_states, value_states, step.pool.storage)
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        # The first forward: its padding has no slots.
        if step.keep is not None:
            new = NewKV(key[step.keep], value[step.keep])
            ops.write_kv(new, step.pool.layer_for(layer_idx, *new), step.own.slot_mapping, in_bounds=True)
            return read_back(key_states, value_states, step.pool.storage)
        if key.shape[1] != 1:
            raise UnsupportedModelError("it computes several tokens of a row in one step")
        new = NewKV(key[:, 0], value[:, 0])
        if step.gather is not None:
            ops.write_kv(new, step.pool[layer_idx], step.own.slot_mapping, in_bounds=True)
            self.handles.append(Gathered(layer_idx))
            assert step.gather.own is not None
            return step.gather.own(layer_idx)
        handle = SelfHandle(layer_idx, step, new)
        self.handles.append(handle)
        # Without contents: lengths are what plain `generate`'s cache has, and attention reads the blocks.
        shown = key_states.expand(-1, -1, step.length + 1, -1)
        setattr(shown, HANDLE, handle)
        return shown, value_states.expand(-1, -1, step.length + 1, -1)


class _CrossLayer:
    """A layer of the encoder's K/V, as a decoder reads it after the first forward."""

    def __init__(self, cache: CrossCache, layer_idx: int) -> None:
        self._cache, self._layer_idx = cache, layer_idx

    @property
    def keys(self) -> torch.Tensor:
        cache = self._cache
        if cache.step.gather is not None:
            cache.handles.append(Gathered(self._layer_idx))
            return cache.gathered(self._layer_idx)[0]
        shown = cache.shown(self._layer_idx, 0)
        handle = CrossHandle(self._layer_idx, cache.step)
        cache.handles.append(handle)
        setattr(shown, HANDLE, handle)
        return shown

    @property
    def values(self) -> torch.Tensor:
        if self._cache.step.gather is not None:
            return self._cache.gathered(self._layer_idx)[1]
        return self._cache.shown(self._layer_idx, 1)

    def get_seq_length(self) -> int:
        return self._cache.step.encoder_length


class _CrossLayers:
    """Layers by index; their number is known only after the model has run. Some models ask whether there are any."""

    def __init__(self, cache: CrossCache) -> None:
        self._cache = cache

    def __getitem__(self, layer_idx: int) -> _CrossLayer:
        return _CrossLayer(self._cache, layer_idx)

    def __len__(self) -> int:
        return 1


class CrossCache(Cache):
    """K/V of the encoder's states: written by the first forward, read by every later one."""

    step: RowStep

    def __init__(self) -> None:
        self.layers = _CrossLayers(self)  # type: ignore[assignment]
        self.layer_class_to_replicate = None
        self.offloading = False
        self.handles: list[CrossHandle | CrossWrite | Gathered] = []
        self._gathered: tuple[int, States] | None = None  # of the layer in progress
        self.seen: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # of the first forward: mask, visible, slots

    def get_seq_length(self, layer_idx: int = 0) -> int:
        step = vars(self).get("step")  # None before the first forward
        return 0 if step is None or step.keep is not None else int(step.encoder_length)

    def gathered(self, layer_idx: int) -> States:
        """K and V of a layer, for attention that is code of the model's own."""
        # Keys are asked for first, then values; both are gathered together.
        if self._gathered is None or self._gathered[0] != layer_idx:
            assert self.step.gather is not None and self.step.gather.encoder is not None
            self._gathered = layer_idx, self.step.gather.encoder(layer_idx)
        return self._gathered[1]

    def forget(self) -> None:
        """Drop what belongs to the forward that has ended."""
        self.seen = self._gathered = None

    def shown(self, layer_idx: int, which: int) -> torch.Tensor:
        """[rows, num_kv_heads, length of the encoder, (v_)head_dim] without contents."""
        step, pool = self.step, self.step.pool
        like, dtype = pool[layer_idx].elements[which], pool.written_in(layer_idx)[which]
        heads, dim = like.shape[2:]
        empty = torch.empty(1, 1, 1, 1, dtype=dtype, device=like.device)
        assert step.own is not None
        return empty.expand(step.own.num_seqs, heads, step.encoder_length, dim)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states [rows of the encoder, num_kv_heads, length, head_dim], value_states likewise."""
        if self.step.keep is None:
            raise UnsupportedModelError("it computes the K/V of the encoder's states anew in every step")
        if self.step.gather is not None:
            # All layers attend to the same states, so the first one makes room for all.
            if self.seen is None:
                visible = self.step.gather.visible
                if visible is None:
                    visible = torch.ones(
                        key_states.shape[0], key_states.shape[2], dtype=torch.bool, device=key_states.device
                    )
                self.place(None, visible)
            self.handles.append(Gathered(layer_idx))
            return self.write(layer_idx, key_states, value_states)
        handle = CrossWrite(layer_idx, self)
        self.handles.append(handle)
        setattr(key_states, HANDLE, handle)
        return key_states, value_states

    def place(self, mask: object, visible: torch.Tensor) -> None:
        """Make room for K/V of visible states, bool [rows, length], in every layer. mask: from which they were read."""
        assert self.step.write_encoder is not None
        self.seen = mask, visible, self.step.write_encoder(visible)

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> States:
        """Write the K/V [rows of the encoder, num_kv_heads, length, (v_)head_dim] of the visible states to their slots.
        Returns all states as they will be read."""
        assert self.seen is not None
        _, visible, slots = self.seen
        new = NewKV(key.transpose(1, 2)[visible], value.transpose(1, 2)[visible])
        pool = self.step.pool
        kv = pool.layer_for(layer_idx, *new)
        if new.key.shape[1:] != kv.key.shape[2:] or new.value.shape[1:] != kv.value.shape[2:]:
            raise UnsupportedModelError(
                f"K/V of the encoder's states has other sizes in layer {layer_idx} than that of the tokens"
            )
        ops.write_kv(new, kv, slots, in_bounds=True)
        return read_back(key, value, pool.storage)


class PairCache(EncoderDecoderCache):
    """The cache of paged calls of an encoder-decoder model. Call `begin` before each forward."""

    is_compileable = False
    reads_encoder = True

    def __init__(self) -> None:
        super().__init__(SelfCache(), CrossCache())
        self.own = cast(SelfCache, self.self_attention_cache)
        self.cross = cast(CrossCache, self.cross_attention_cache)
        # Some models put a cache of another kind in place of the second one, unless they find it in use.
        self.is_updated = {0: True}
        self.reorder: Callable[[list[int]], None] | None = None
        """The decoder's, which moves rows in beam search."""

    @property
    def step(self) -> list[AttentionMetadata]:
        """The records of the step in progress, for `announce`."""
        step = self.own.step
        return [record for record in (step.own, step.encoder) if record is not None]

    def begin(self, step: RowStep) -> None:
        self.own.step = self.cross.step = step
        self.own.handles, self.cross.handles = [], []
        self.cross.forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        assert self.reorder is not None
        self.reorder(beam_idx.tolist())

    def check_reads(self, model: Model) -> None:
        """Raise UnsupportedModelError if a layer has not attended to what it got from here."""
        handles = [*self.own.handles, *self.cross.handles]
        unread = sorted({handle.layer_idx for handle in handles if not handle.reads})
        is_first = self.own.step.keep is not None
        # In a first forward the model attends to its own K/V by itself; only later ones have handles of it.
        if unread or not self.cross.handles or not (is_first or self.own.handles):
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention with code of its own in layer(s) {unread or 'all'}"
            )


# -- the attention of a layer --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Gathered:
    """A layer whose own attention got K/V from here."""

    layer_idx: int
    reads: int = 1


@dataclass(slots=True)
class SelfHandle:
    """Where the decoder's own K/V of a layer is; see `LayerHandle`. new: of one token of each row."""

    layer_idx: int
    step: RowStep
    new: NewKV
    reads: int = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, scaling: float | None, kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        self.reads += 1
        step = self.step
        if isinstance(mask, torch.Tensor):
            _refuse_other_mask(module, mask, step)
            mask = None
        bias = kwargs.pop("position_bias", None)
        options, _ = options_of_call(module, query, mask, scaling, kwargs)
        if bias is not None:
            options = options._replace(distance_bias=_by_distance(module, bias))
        assert step.own is not None
        out = ops.paged_attention(query[:, :, 0], step.pool[self.layer_idx], step.own, options, self.new)
        assert isinstance(out, torch.Tensor)
        return out.unsqueeze(1), None


@dataclass(slots=True)
class CrossHandle:
    """Where the K/V of the encoder's states of a layer is."""

    layer_idx: int
    step: RowStep
    reads: int = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, scaling: float | None, kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        self.reads += 1
        step = self.step
        softcap, bias = kwargs.pop("softcap", None), kwargs.pop("position_bias", None)
        # T5's is zero here: only its attention to its own tokens has positions.
        if bias is not None and bool(bias.any()):
            raise UnsupportedModelError(f"{type(module).__name__} adds a bias to its attention over the encoder")
        refuse_unknown(module, kwargs)
        assert step.encoder is not None
        options = Attention(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap=softcap)
        out = ops.paged_attention(query[:, :, 0], step.pool[self.layer_idx], step.encoder, options)
        assert isinstance(out, torch.Tensor)
        return out.unsqueeze(1), None


@dataclass(slots=True)
class CrossWrite:
    """The first forward's attention over the encoder's states: the model's own. Its mask says which of them any token
    attends to; their K/V is written to blocks."""

    layer_idx: int
    cache: CrossCache
    reads: int = 0

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: Any,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        self.reads += 1
        cache = self.cache
        # Layers usually get the same mask object, which then needs no comparison.
        if cache.seen is None or cache.seen[0] is not mask:
            visible = _visible(module, mask, key)
            if cache.seen is None:
                cache.place(mask, visible)
            elif not torch.equal(visible, cache.seen[1]):
                raise UnsupportedModelError(f"the layers of {type(module).__name__} attend to different encoder states")
        # What is attended to is what later steps will read, rounded to how it is stored.
        key, value = cache.write(self.layer_idx, key, value)
        return own_attention(module, query, key, value, mask, scaling=scaling, **kwargs)


def _visible(module: Any, mask: object, key: torch.Tensor) -> torch.Tensor:
    """bool [rows, length]: which of the encoder's states the tokens attend to, by the mask of the attention call."""
    rows, length = key.shape[0], key.shape[2]
    if mask is None:
        return torch.ones(rows, length, dtype=torch.bool, device=key.device)
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4):
        raise UnsupportedModelError(f"{type(module).__name__} masks the encoder's states in a way of its own")
    seen = _unmasked(mask) if mask.ndim == 4 else mask != 0
    if seen.ndim == 4:
        last = seen[:, :1, -1:]
        if not bool((seen == last).all()):
            raise UnsupportedModelError(f"tokens of {type(module).__name__} attend to different encoder states")
        seen = last[:, 0, 0]
    seen = seen[..., :length].expand(rows, length)
    # Attention over no state at all has no value.
    empty = ~seen.any(dim=1)
    if bool(empty.any()):
        raise ValueError(f"row {int(empty.nonzero()[0])} of the encoder's input is masked entirely; leave it out")
    return seen


def _unmasked(mask: torch.Tensor) -> torch.Tensor:
    """Return True where the mask hides nothing. Floats are added to scores; in other masks, True or 1 means visible."""
    # Half of the least number, because a hidden place may have it plus a bias.
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0


def _refuse_other_mask(module: Any, mask: torch.Tensor, step: RowStep) -> None:
    """Raise UnsupportedModelError unless the mask [rows, 1, 1, length] hides the left padding and nothing else."""
    seen = _unmasked(mask)
    padding = torch.tensor(step.padding, dtype=torch.int64, device=mask.device)
    columns = torch.arange(mask.shape[-1], dtype=torch.int64, device=mask.device)
    if mask.shape[-1] != step.length + 1 or not bool((seen == (columns >= padding[:, None])[:, None, None]).all()):
        raise UnsupportedModelError(f"{type(module).__name__} hides earlier tokens with a mask of its own")


def _by_distance(module: Any, bias: torch.Tensor) -> torch.Tensor:
    """bias [1, num_heads, 1, length] of one token to all tokens up to itself -> [num_heads, length] by distance."""
    if bias.ndim != 4 or bias.shape[0] != 1 or bias.shape[2] != 1:
        raise UnsupportedModelError(f"the bias of {type(module).__name__} does not depend on the distance alone")
    # Columns run from the first token to the token itself, distances the other way.
    return bias[0, :, 0].flip(-1)
