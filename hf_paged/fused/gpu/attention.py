"""An attention module in which one launch normalises, rotates and multiplies the heads and writes K and V to their
blocks."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_paged.fused.gpu.factors import Factor, factor_of
from hf_paged.fused.gpu.norms import NormOf, norm_of
from hf_paged.fused.gpu.packing import LinearGroup
from hf_paged.fused.gpu.parts import Part, passes_through
from hf_paged.fused.gpu.trace import Call, Operation, Place, at, place_of, same_memory
from hf_paged.fused.rows import ROTARY_KINDS, Angles, RotaryKind, are_alike, cos_and_sin, normalise
from hf_paged.fused.rows import rotate as rotate_by_torch
from hf_paged.integration.attention import HANDLE, LayerHandle, attention_forward
from hf_paged.model.packed_step import PackedCache


@dataclass(frozen=True, slots=True)
class Source:
    """Where the heads of the query, key or value are: in the result of linear layer `linear`, from element `start`,
    `count` heads (0: as many as there are), one every `step` elements. norm: of the layer's whole result, a module that
    is called. heads_norm: of each head, before the rotation or, if `norm_is_last`, after it."""

    linear: str
    start: int
    step: int
    count: int
    dim: int
    norm: str = ""
    heads_norm: NormOf | None = None
    norm_is_last: bool = False

    def of(self, projected: torch.Tensor) -> torch.Tensor:
        """projected [1, num_tokens, n] -> [num_tokens, heads, dim], a view."""
        rows = projected[0]
        count = self.count or rows.shape[1] // self.dim
        return rows.as_strided(
            (rows.shape[0], count, self.dim),
            (rows.stride(0), self.step, 1),
            rows.storage_offset() + self.start,
        )


@dataclass(frozen=True, slots=True)
class Places:
    """Where the module finds its arguments. angles: of the cosines and sines, if it rotates. positions: if a
    factor follows from those that it gets."""

    rows: Place
    cache: Place
    mask: Place
    angles: Place | None
    positions: Place | None


@dataclass(frozen=True, slots=True)
class Heads:
    """A way to make query, key and value. rotary: of query and key (None: there is none). factor: of the query."""

    sources: tuple[Source, Source, Source]
    rotary: RotaryKind | None
    factor: Factor | None


class AttentionPart(Part):
    """Projections, one launch for all that comes before the attention, our attention, and the last projection."""

    kind = "attention"

    def __init__(
        self,
        call: Call,
        places: Places,
        heads: Heads,
        handle: LayerHandle,
        out: str,
        skipped: set[str],
    ) -> None:
        super().__init__(call.module, skipped)
        self._places, self._sources, self._out = places, heads.sources, out
        self._rotary, self._factor = heads.rotary or RotaryKind(), heads.factor
        self.group = LinearGroup(call.module, dict.fromkeys(source.linear for source in heads.sources))
        self._layer_idx = handle.layer_idx
        # The sinks are a parameter, which may be replaced, so the module is asked for it in each call.
        self._options = {name: value for name, value in handle.options.items() if name != "s_aux"}
        self._scaling = _name_of_factor(call.module, handle.options["scaling"])
        self._sinks = _name_of_parameter(call.module, handle.options["s_aux"])
        self._rest: tuple[Any, ...] | None = call.output[1:] if isinstance(call.output, tuple) else None

    @property
    def held(self) -> Any:
        return object()  # the layer's index in the cache, and more, which two calls should not share

    def compute(self, *args: object, **kwargs: object) -> Any:
        rows, cache, mask = (at(p, args, kwargs) for p in (self._places.rows, self._places.cache, self._places.mask))
        angles = None if self._places.angles is None else at(self._places.angles, args, kwargs)
        if not isinstance(cache, PackedCache) or not isinstance(rows, torch.Tensor):
            return self.plain(*args, **kwargs)
        positions = cache.positions if self._places.positions is None else at(self._places.positions, args, kwargs)
        # Other positions than the step's would need other factors.
        if not self._fits(cache, rows, angles) or not same_memory(positions, cache.positions):
            return self.plain(*args, **kwargs)
        module = self.module
        assert self.group is not None
        projected = dict(zip(self.group.names, self.group(rows), strict=True))
        heads = [self._heads(source, projected) for source in self._sources]
        handle = cache.handle_for(self._layer_idx, rows.device)
        factor = None if self._factor is None else self._factor(module, cache, rows)
        query = self._rotate(heads, angles, factor, handle).transpose(0, 1).unsqueeze(0)
        # The attention finds the step by it, and reads K and V from the blocks alone.
        setattr(query, HANDLE, handle)
        sinks = module._parameters[self._sinks] if self._sinks else None
        options = self._options | ({"scaling": getattr(module, self._scaling)} if self._scaling else {})
        attended, _ = attention_forward(module, query, query, query, mask, s_aux=sinks, **options)
        out = module._modules[self._out](attended.flatten(2))  # type: ignore[misc]
        return out if self._rest is None else (out, *self._rest)

    def _heads(self, source: Source, projected: dict[str, torch.Tensor]) -> torch.Tensor:
        result = projected[source.linear]
        if source.norm:
            norm: Any = self.module._modules[source.norm]
            result = norm(result)
        return source.of(result)

    def _fits(self, cache: PackedCache, rows: torch.Tensor, angles: object) -> bool:
        if rows.shape[0] != 1 or self._layer_idx not in cache.memory.pool:
            return False  # its blocks are allocated when the module's own forward first writes
        if not cache.memory.pool.storage.is_exact:
            return False  # the launch that rotates writes no eight bits
        return self._places.angles is None or are_angles(angles, rows.shape[1])

    def _rotate(
        self, heads: list[torch.Tensor], angles: Angles | None, factor: torch.Tensor | None, handle: LayerHandle
    ) -> torch.Tensor:
        """The query [num_tokens, heads, dim], rotated; the key and the value are written."""
        from hf_paged.fused.gpu.kernels.rotary import rotate

        query, key, value = heads
        norms = [None if source.heads_norm is None else source.heads_norm() for source in self._sources[:2]]
        return rotate(
            query, key, angles=None if angles is None else _flat(angles), kind=self._rotary,
            norms=(norms[0], norms[1]), norm_is_last=self._sources[0].norm_is_last, factor=factor,
            value=value, into=(*handle.kv[:2], handle.metadata.slot_mapping),
        )[0]  # fmt: skip


def are_angles(angles: object, num_tokens: int) -> bool:
    """Return True for cosines and sines [..., num_tokens, n] of one row of tokens, or one complex tensor of both."""
    if isinstance(angles, torch.Tensor) and angles.is_complex():
        count = angles.shape[-1]
        return (
            angles.dim() > 1
            and angles.shape[-2:].numel() == angles.numel() == num_tokens * count
            and (angles.is_contiguous())
        )
    if not isinstance(angles, tuple | list) or len(angles) != 2:
        return False
    cos, sin = angles
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor) or cos.dim() < 2:
        return False
    return (
        cos.shape == sin.shape
        and cos.stride() == sin.stride()
        and cos.is_floating_point()
        and cos.shape[-2] == num_tokens
        and cos.numel() == num_tokens * cos.shape[-1]
        and cos.stride(-1) == 1
    )


def _flat(angles: Angles) -> Angles:
    if isinstance(angles, torch.Tensor):
        return angles.view(angles.shape[-2:])
    cos, sin = angles
    return cos.view(cos.shape[-2:]), sin.view(sin.shape[-2:])


def _name_of_parameter(module: nn.Module, tensor: object) -> str:
    """The name of the module's parameter that is `tensor`; "" for None."""
    if tensor is None:
        return ""
    return next(name for name, parameter in module._parameters.items() if parameter is tensor)


def _name_of_factor(module: nn.Module, factor: object) -> str:
    """The name of the module's attribute that is the number `factor`; "" if none is, as when it is computed."""
    return next((name for name, value in vars(module).items() if isinstance(value, float) and value is factor), "")


# -- recognition -----------------------------------------------------------------------------------------------------


def attention_part(call: Call, cache: PackedCache) -> AttentionPart | None:
    """The part for a module that attended through us, if all it computed before and after is known; else None."""
    # What happens between two attentions of one module is not known.
    if call.reads != 1 or call.key is None or call.value is None or not cache.handles:
        return None
    handle, rows = cache.handles[-1], call.input
    places = _places_of(call, cache, rows)
    sinks = handle.options.get("s_aux")
    if places is None or (sinks is not None and id(sinks) not in map(id, call.module._parameters.values())):
        return None
    last = _last(call)
    if last is None or not last.name or not same_memory(last.output, call.result) or not call.has_one_result:
        return None
    factor, before = factor_of(call)
    if factor is None or not factor.is_given:
        places = replace(places, positions=None)
    elif places.positions is None:
        return None
    numbers = None if factor is None else factor(call.module, cache, rows)
    # At positions where the factor is 1, nobody sees whether it is applied.
    if numbers is not None and bool((numbers == 1).all()):
        return None  # a trial shows nothing
    found = _heads_of(call, rows, places, factor, numbers) if _only_rotates(before) else None
    if found is None:
        return None
    if found.rotary is None:
        places = replace(places, angles=None)
    skipped = _skipped_by(call, found.sources)
    return None if skipped is None else AttentionPart(call, places, found, handle, last.name, skipped)


def _last(call: Call) -> Call | None:
    """The last child that computed anything."""
    return next((child for child in reversed(call.children) if not passes_through(child.module)), None)


def _skipped_by(call: Call, sources: tuple[Source, Source, Source]) -> set[str] | None:
    """Name the children that the part does not call; None if a child computed more than the norm of heads. A trial
    may not show this: a factor of the query may be 1 as yet."""
    last = _last(call)
    assert last is not None
    called = {last.name, *(source.linear for source in sources), *(source.norm for source in sources)}
    norms = [source.heads_norm.module for source in sources if source.heads_norm is not None]
    others = [child for child in call.children if not child.name or child.name not in called]
    known = all(child.name and (child.module in norms or passes_through(child.module)) for child in others)
    return {child.name for child in others} if known else None


def written(cache: PackedCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the K and V that the last layer of the step has written."""
    handle = cache.handles[-1]
    key, value = (kv.flatten(0, 1)[handle.metadata.slot_mapping] for kv in handle.kv[:2])
    return key, value


_OPERATIONS = {"mul", "neg", "cat", "add", "sub", "stack", "clone", "copy_", "index", "index_select", "arange"}


def _only_rotates(operations: list[Operation]) -> bool:
    """Return True if a trial on few tokens shows all effects of the operations: no limit that few values reach."""
    names = [name for name, _ in operations]
    # The query and the key are rotated alike: a further factor, which may be 1 as yet, makes an odd number.
    by_numbers = any(numbers for name, numbers in operations if name in ("mul", "add", "sub"))
    return set(names) <= _OPERATIONS and names.count("mul") % 2 == 0 and not by_numbers


def _places_of(call: Call, cache: PackedCache, rows: object) -> Places | None:
    if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
        return None
    num_tokens = rows.shape[1]
    found = place_of(call, lambda x: x is rows), place_of(call, lambda x: isinstance(x, PackedCache))
    mask = _place_of_mask(call)
    if found[0] is None or found[1] is None or mask is None:
        return None
    angles = place_of(call, lambda x: are_angles(x, num_tokens))
    return Places(found[0], found[1], mask, angles, place_of(call, lambda x: same_memory(x, cache.positions)))


def _place_of_mask(call: Call) -> Place | None:
    """Where the module gets its mask, which is None in a causal layer."""
    if "attention_mask" in call.kwargs:
        return "attention_mask"
    names = list(inspect.signature(type(call.module).forward).parameters)[1:]
    index = names.index("attention_mask") if "attention_mask" in names else len(call.args)
    return index if index < len(call.args) else None


def _heads_of(
    call: Call, rows: torch.Tensor, places: Places, factor: Factor | None, numbers: torch.Tensor | None
) -> Heads | None:
    """Find the heads by comparing the recorded query, key and value with the results of the children. numbers
    [num_tokens]: those of the factor."""
    assert call.key is not None and call.value is not None and call.query is not None
    key, value = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)  # [num_tokens, heads, dim]
    kv_heads, dim, v_dim = key.shape[1], key.shape[2], value.shape[2]
    last = _last(call)
    assert last is not None
    # The first products read the module's own rows; what reads anything else is not a projection.
    linears = [
        c for c in call.children if c is not last and c.input is rows and isinstance(c.output, torch.Tensor) and c.name
    ]
    attended = last.input
    if not isinstance(attended, torch.Tensor) or attended.shape[-1] % v_dim:
        return None
    heads = attended.shape[-1] // v_dim
    angles = None if places.angles is None else at(places.angles, call.args, call.kwargs)
    # A layer may rotate nothing, whatever it gets.
    kinds = [None, *(kind for kind in ROTARY_KINDS if angles is not None and _may_turn(kind, dim, angles))]
    for layout in _layouts(linears, heads, kv_heads, dim, v_dim):
        results = call.query, call.key, None
        q, k, v = (_with_norms(*both, call, key.dtype) for both in zip(layout, results, strict=True))
        # Nothing is computed with the value, so it must be equal, not alike.
        if not torch.equal(v.of(_projected(call, v)), value) or q.norm_is_last != k.norm_is_last:
            continue
        for kind in kinds:
            if not are_alike(_turned(call, k, kind, angles), key):
                continue
            query = _turned(call, q, kind, angles)
            if numbers is not None:
                query = (query * numbers[:, None, None]).to(query.dtype)
            return Heads((q, k, v), kind, factor) if are_alike(query, call.query) else None
    return None


def _may_turn(kind: RotaryKind, dim: int, angles: Angles) -> bool:
    cos, _ = cos_and_sin(_flat(angles))
    turned = cos.shape[1] * (2 if kind.doubles else 1)
    return turned <= dim and turned % 2 == 0 and (kind.has_angle_of_pair or not kind.doubles)


def _turned(call: Call, source: Source, kind: RotaryKind | None, angles: Any) -> torch.Tensor:
    """The heads of a source, normalised and rotated (by no angles without a kind)."""
    heads, norm = source.of(_projected(call, source)), source.heads_norm
    if norm is not None and not source.norm_is_last:
        heads = normalise(heads, norm())
    if kind is not None:
        heads = rotate_by_torch(heads, *cos_and_sin(_flat(angles)), kind)
    return normalise(heads, norm()) if norm is not None and source.norm_is_last else heads


def _layouts(
    linears: list[Call], heads: int, kv_heads: int, dim: int, v_dim: int
) -> list[tuple[Source, Source, Source]]:
    """The ways in which linear layers may give the heads: three layers, or one whose result has three parts, or one
    with query, key and value of a head side by side."""
    found = []
    sizes = heads * dim, kv_heads * dim, kv_heads * v_dim
    widths = {c.name: c.output.shape[-1] for c in linears}
    if len(linears) == 3:
        # Modules may call them in either order.
        for names in (list(widths), [*list(widths)[::-1]]):
            if tuple(widths[name] for name in names) == sizes:
                dims = dim, dim, v_dim
                found.append(tuple(Source(name, 0, d, 0, d) for name, d in zip(names, dims, strict=True)))
    elif len(linears) == 1 and widths[linears[0].name] == sum(sizes):
        name = linears[0].name
        starts, counts = (0, sizes[0], sizes[0] + sizes[1]), (heads, kv_heads, kv_heads)
        found.append(tuple(Source(name, s, d, n, d) for s, d, n in zip(starts, (dim, dim, v_dim), counts, strict=True)))
        if heads == kv_heads:
            step = 2 * dim + v_dim
            found.append(tuple(Source(name, s, step, heads, d) for s, d in ((0, dim), (dim, dim), (2 * dim, v_dim))))
    return found  # type: ignore[return-value]


def _with_norms(source: Source, result: torch.Tensor | None, call: Call, dtype: torch.dtype) -> Source:
    """The source with the norms that were applied to its layer's result, or whose result is `result`."""
    projected = next(c for c in call.children if c.name == source.linear).output
    start = projected.data_ptr() + source.start * projected.element_size()
    for child in call.children:
        rows = child.input
        if not isinstance(rows, torch.Tensor) or not child.name:
            continue
        is_first, is_last = rows.data_ptr() == start, same_memory(child.output, result)
        if (is_first or is_last) and rows.shape[-1] == source.dim:
            norm = norm_of(child.module, source.dim, dtype) if len(child.args) + len(child.kwargs) == 1 else None
            if norm is not None:
                return replace(source, heads_norm=norm, norm_is_last=not is_first)
        if is_first and rows.shape == projected.shape and isinstance(child.output, torch.Tensor):
            return Source(source.linear, 0, source.step, source.count, source.dim, child.name)
    return source


def _projected(call: Call, source: Source) -> torch.Tensor:
    result: torch.Tensor = next(c for c in call.children if c.name == (source.norm or source.linear)).output
    return result
