"""A decoder layer in which the residual additions are computed together with the norms beside them.

Its attention and its MLP are called as modules, whatever they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_paged.fused.gpu.norms import NormOf, norm_of
from hf_paged.fused.gpu.parts import MLPPart, Part, passes_through
from hf_paged.fused.gpu.trace import Call, Place, at, same_memory
from hf_paged.fused.rows import are_alike, normalise
from hf_paged.model.overrides import is_override


@dataclass(frozen=True, slots=True)
class Norms:
    """attention(before_attention(x)) -> after_attention, added to x; likewise the MLP. None where there is no norm."""

    before_attention: NormOf | None
    after_attention: NormOf | None
    before_mlp: NormOf | None
    after_mlp: NormOf | None
    is_parallel: bool = False

    @property
    def is_one(self) -> bool:
        """Return True if the norms before attention and MLP are one module."""
        first, second = self.before_attention, self.before_mlp
        return first is not None and second is not None and first.module is second.module

    def present(self) -> list[NormOf]:
        norms = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return [norm for norm in norms if norm is not None]


class LayerPart(Part):
    """r = x + after_attention(attention(before_attention(x))); result = r + after_mlp(mlp(before_mlp(r))).

    Both sums may have a constant factor, an attribute of the layer, before what is added to x and r. In a parallel
    layer the MLP reads x instead of r, and both norms may be one module: result = x + attention(before_attention(x)) +
    mlp(before_mlp(x)).
    """

    kind = "layer"

    def __init__(self, call: Call, found: _Found, mlp: Part | None) -> None:
        super().__init__(call.module, {child.name for child in call.children} - {found.attention.name, found.mlp.name})
        self._norms, self._rows, self._passed = found.norms, found.rows, found.passed
        self._scale, self._is_parallel = found.scale, found.norms.is_parallel
        self._attention, self._mlp = found.attention.name, found.mlp.name
        self._attention_rows = found.attention_rows
        self._rest: tuple[Any, ...] | None = call.output[1:] if isinstance(call.output, tuple) else None
        self._found_mlp = mlp
        self._tried: Part | None = None  # in a trial, where the MLP's own forward is in force

    @property
    def held(self) -> Any:
        norms = [norm.held for norm in self._norms.present()], self._is_parallel
        names = self._attention, self._mlp, self._scale
        return norms, names, self._rows, self._attention_rows, self._passed, self._rest

    def trials(self, call: Call) -> Iterator[Any]:
        """Yield the results without and with the part of the MLP."""
        yield self.compute(*call.args, **call.kwargs)
        self._tried = self._found_mlp
        try:
            yield self.compute(*call.args, **call.kwargs)
        finally:
            self._tried = self._found_mlp = None  # it would keep the weights of an MLP that is replaced

    def compute(self, *args: object, **kwargs: object) -> Any:
        from hf_paged.fused.gpu.kernels.norm import add_norm

        x = at(self._rows, args, kwargs)
        if not isinstance(x, torch.Tensor) or not all(norm.takes(x) for norm in self._norms.present()):
            return self.plain(*args, **kwargs)
        first, after, before, last = (
            None if norm is None else norm()
            for norm in (
                self._norms.before_attention, self._norms.after_attention, self._norms.before_mlp, self._norms.after_mlp
            )
        )  # fmt: skip
        shape, flat = x.shape, x.reshape(-1, x.shape[-1])
        rows = x if first is None else add_norm(flat, after=first).out.view(shape)  # type: ignore[union-attr]
        attended = self._attend(rows, args, kwargs).reshape(flat.shape)
        scale = getattr(self.module, self._scale) if self._scale else None
        mlp: Any = self.module._modules[self._mlp]
        # A norm of its result comes between the last product and the residual.
        part = None if last is not None else self._part_of(mlp)
        product = None if part is None else part.product()
        if product is not None and product.bias is not None and (before is None or scale is not None):
            # The bias would be in what the MLP reads, or be multiplied.
            product = None
        bias = None if product is None else product.bias
        if self._is_parallel:
            # The bias goes into the sum here, because the product that adds to it has none.
            both = add_norm(attended, flat, bias=bias)
            read = rows.reshape(flat.shape) if self._norms.is_one else add_norm(flat, after=before).out
        else:
            both = add_norm(attended, flat, before=after, after=before, scale=scale, bias=bias)
            read = both.total if both.out is None else both.out
        result = both.total
        assert result is not None and read is not None
        if part is not None and product is not None:
            part.add_to(result, read, product.matrix, scale)
        else:
            added = _first(mlp(read.view(shape))).reshape(flat.shape)
            if last is not None:
                result = add_norm(added, result, before=last, scale=scale).total
            else:
                result = result + (added if scale is None else added * scale)
        assert result is not None
        out = result.view(shape)
        return out if self._rest is None else (out, *self._rest)

    def _attend(self, rows: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        attention: Any = self.module._modules[self._attention]
        passed = {name: value if place is None else at(place, args, kwargs) for name, place, value in self._passed}
        positional = [passed.pop(i) for i in sorted(name for name in passed if isinstance(name, int))]
        if isinstance(self._attention_rows, int):
            positional.insert(self._attention_rows, rows)
        else:
            passed[self._attention_rows] = rows
        return _first(attention(*positional, **passed))  # type: ignore[arg-type]

    @property
    def mlp(self) -> nn.Module | None:
        return self.module._modules[self._mlp]

    def _part_of(self, mlp: nn.Module) -> MLPPart | None:
        """The part that computes the MLP in this step, if calling the MLP would run nothing else."""
        forward = vars(mlp).get("forward")
        part = self._tried or getattr(forward, "__self__", None)
        if mlp._forward_hooks or mlp._forward_pre_hooks or not is_override(forward):
            return None
        return part if isinstance(part, MLPPart) else None


def _first(out: Any) -> torch.Tensor:
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


# -- recognition -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """passed: the arguments of the attention but the rows: name or index, place among the layer's arguments, or None
    and the constant value. scale: the attribute by which what is added to the rows is multiplied; "" if by none."""

    norms: Norms
    rows: Place
    attention: Call
    attention_rows: Place
    mlp: Call
    passed: list[tuple[Place, Place | None, Any]]
    scale: str = ""


def layer_part(call: Call, parts: Mapping[nn.Module, Part]) -> LayerPart | None:
    """Make the part for a decoder layer of this kind; None if it computed anything else. parts: of modules in it."""
    found = _find(call)
    return None if found is None else LayerPart(call, found, parts.get(found.mlp.module))


def _find(call: Call) -> _Found | None:
    x, out = call.input, call.result
    tensors = isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)
    if not tensors or x.dim() != 3 or out.shape != x.shape or not call.has_one_result:
        return None
    children = [child for child in call.children if not passes_through(child.module)]
    attentions = [child for child in children if child.reads]
    others = [child for child in children if not child.reads and norm_of(child.module, x.shape[-1], x.dtype) is None]
    if len(attentions) != 1 or len(others) != 1 or not all(child.name for child in call.children):
        return None
    attention, mlp = attentions[0], others[0]
    norms = [child for child in children if child not in (attention, mlp)]
    # A module that is called twice could not be told apart by its name.
    if len({child.module for child in children}) != len(children) or not isinstance(mlp.result, torch.Tensor):
        return None
    if len(mlp.args) != 1 or mlp.kwargs or not isinstance(mlp.input, torch.Tensor):
        return None
    # Any further operation may be one that few values reach.
    if set(call.names) - {"add", "add_", "mul"} or call.names.count("mul") not in (0, 2):
        return None
    scales = _scales(call.module) if "mul" in call.names else [""]
    found = [(scale, _norms(x, attention, mlp, norms, out, scale and getattr(call.module, scale))) for scale in scales]
    found = [each for each in found if each[1] is not None]
    # Of two factors that are equal as yet, either may be changed later.
    scale, wanted = found[0] if len(found) == 1 else ("", None)
    rows = _place_of_rows(call, x)
    attention_rows = _place_of_rows(attention, attention.input)
    passed = _passed(call, attention, attention_rows)
    if wanted is None or rows is None or attention_rows is None or passed is None:
        return None
    return _Found(wanted, rows, attention, attention_rows, mlp, passed, scale)


def _scales(layer: nn.Module) -> list[str]:
    """Attributes that may be the factor. A factor of any other kind may be 1 as yet, and a trial would not show it."""
    return [name for name, value in vars(layer).items() if "multiplier" in name and isinstance(value, float)]


def _norms(
    x: torch.Tensor, attention: Call, mlp: Call, norms: list[Call], out: torch.Tensor, scale: Any
) -> Norms | None:
    """The norms by what flows through them; None if the layer's results are not those of a LayerPart."""
    attended = attention.result
    if not isinstance(attended, torch.Tensor) or attended.shape != x.shape or mlp.input.shape != x.shape:
        return None
    before = _norm_between(norms, None, attention.input)
    after = _norm_between(norms, attended, None)
    before_mlp = _norm_between(norms, None, mlp.input)
    after_mlp = _norm_between(norms, mlp.result, None)
    found = [each for each in (before, after, before_mlp, after_mlp) if each is not None]
    if not same_memory(attention.input if before is None else before.input, x):
        return None
    is_parallel = before_mlp is not None and same_memory(before_mlp.input, x)
    # Each norm must be one of these, or what it computes would be left out.
    if set(map(id, found)) != set(map(id, norms)) or len(found) != len(norms) + (is_parallel and before_mlp is before):
        return None
    if is_parallel:
        is_known = not scale and after is None and after_mlp is None and _is_sum(out, x, attended, mlp.result)
    else:
        factor = scale or 1.0
        residual = x + (attended if after is None else after.output) * factor
        added = mlp.result if after_mlp is None else after_mlp.result
        is_known = are_alike(residual, mlp.input if before_mlp is None else before_mlp.input)
        is_known = is_known and are_alike(residual + added * factor, out)
    if not is_known:
        return None
    parts = [None if each is None else norm_of(each.module, x.shape[-1], x.dtype) for each in
             (before, after, before_mlp, after_mlp)]  # fmt: skip
    for each, norm in zip((before, after, before_mlp, after_mlp), parts, strict=True):
        if each is not None and norm is not None and not are_alike(normalise(each.input, norm()), each.output):
            return None
    return Norms(*parts, is_parallel=is_parallel)  # type: ignore[misc, arg-type]


def _is_sum(out: torch.Tensor, *addends: torch.Tensor) -> bool:
    """Return True if `out` is the sum of three addends, in whatever order, each sum of two rounded."""
    # Models add the three terms in any order, and round each sum.
    return any(
        are_alike(a + b + c, out) for a, b, c in (addends, addends[1:] + addends[:1], addends[::2] + addends[1:2])
    )


def _norm_between(norms: list[Call], source: object, target: object) -> Call | None:
    """The norm with this input, or with this output."""
    for each in norms:
        if same_memory(each.input, source) if target is None else same_memory(each.output, target):
            return each
    return None


def _place_of_rows(call: Call, rows: object) -> Place | None:
    if call.args:
        return 0 if call.args[0] is rows else None
    return next((name for name, value in call.kwargs.items() if value is rows), None)


def _passed(layer: Call, attention: Call, rows: Place | None) -> list[tuple[Place, Place | None, Any]] | None:
    """Find the sources of the attention's other arguments: the layer's own, or constants. None if there are others."""
    given: list[tuple[Place, Any]] = [*enumerate(attention.args), *attention.kwargs.items()]
    own: list[tuple[Place, Any]] = [*enumerate(layer.args), *layer.kwargs.items()]
    passed: list[tuple[Place, Place | None, Any]] = []
    for name, value in given:
        if name == rows:
            continue
        if name in layer.kwargs and layer.kwargs[str(name)] is value:
            passed.append((name, name, None))
        elif value is None or isinstance(value, bool | int | float | str):
            passed.append((name, None, value))
        else:
            place = next((place for place, each in own if each is value), None)
            if place is None:
                return None
            passed.append((name, place, None))
    return passed
