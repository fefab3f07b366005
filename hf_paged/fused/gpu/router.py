"""A router whose logits become experts and weights in one launch. The product for the logits stays torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from hf_paged.fused.gpu.parts import Part
from hf_paged.fused.gpu.trace import Call, Place, at, place_of
from hf_paged.fused.router import MAX_EXPERTS, Router, RouterKind, route
from hf_paged.fused.rows import DTYPES, are_alike, are_close
from hf_paged.model.trial import random_numbers


@dataclass(frozen=True, slots=True)
class LogitsProduct:
    """Logits of rows. child: the linear layer that computes them, called as a module; else the module's parameters
    weight and bias ("" if there is none). upcasts: the rows, and the parameters, to fp32."""

    child: str = ""
    weight: str = ""
    bias: str = ""
    upcasts: bool = False

    def of(self, module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """rows [num_tokens, n] -> [num_tokens, num_experts]"""
        if self.child:
            layer: Any = module._modules[self.child]
            logits: torch.Tensor = layer(rows.float() if self.upcasts else rows)
            return logits
        weight = module._parameters[self.weight]
        bias = module._parameters[self.bias] if self.bias else None
        assert weight is not None
        if self.upcasts:
            return functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        return functional.linear(rows, weight, bias)


@dataclass(frozen=True, slots=True)
class Bias:
    """Where the bias of the choice is: an argument, or the tensor `name` of the module at `path`."""

    place: Place | None = None
    path: str = ""
    name: str = ""

    def of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.place is not None:
            return at(self.place, args, kwargs)
        return getattr(module.get_submodule(self.path), self.name)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by which logits become weights. eps, scale: the names of attributes, or numbers."""

    kind: RouterKind
    top_k: int
    has_bias: bool
    eps: str | float = 0.0
    scale: str | float = 1.0

    def router(self, module: nn.Module) -> Router:
        eps, scale = (getattr(module, x) if isinstance(x, str) else x for x in (self.eps, self.scale))
        return Router(self.kind, self.top_k, float(eps), float(scale))


class RouterPart(Part):
    """Logits, weights and experts of all tokens."""

    kind = "router"

    def __init__(self, call: Call, rows: Place, product: LogitsProduct, bias: Bias | None, rule: Rule) -> None:
        super().__init__(call.module, set(call.module._modules) - {product.child})
        self._rows, self._product, self._rule = rows, product, rule
        self._bias = bias if rule.has_bias else None
        self._dtypes = call.input.dtype, *(x.dtype for x in call.output[:2])

    def compute(self, *args: object, **kwargs: object) -> Any:
        from hf_paged.fused.gpu.kernels.router import route

        rows = at(self._rows, args, kwargs)
        dtype, logits_dtype, weights_dtype = self._dtypes
        # An adapter changes the classes of modules while it computes.
        if type(self.module) is not self.classes[0] or rows.dtype != dtype or not rows.numel():
            return self.plain(*args, **kwargs)
        logits = self._product.of(self.module, rows.reshape(-1, rows.shape[-1]))
        bias = None if self._bias is None else self._bias.of(self.module, args, kwargs).reshape(-1)
        weights, index = route(logits.contiguous(), bias, self._rule.router(self.module), weights_dtype)
        return logits.to(logits_dtype), weights, index

    @staticmethod
    def compared(output: Any) -> list[torch.Tensor]:
        """Return logits and sorted weights: neither the order of experts matters, nor the choice among equal ones."""
        logits, weights, index = output
        return [logits, weights.sort(-1)[0], logits.gather(-1, index).sort(-1)[0]]


# -- recognition -----------------------------------------------------------------------------------------------------

_OPERATIONS = {
    "mm", "addmm", "_to_copy", "_softmax", "topk", "sum", "div", "div_", "add", "add_", "sigmoid", "gather", "scatter_",
    "zeros_like", "fill_", "zero_", "masked_fill", "bitwise_not", "clone", "mul", "clamp", "clamp_min",
}  # fmt: skip
_OF_MIXERS = {"mm", "max", "abs", "clamp", "sub", "div", "gt", "masked_fill", "_softmax", "gather", "scatter", "cat"}


def router_part(call: Call) -> RouterPart | None:
    """The part for a module that made logits, weights and experts of its rows in a known way; else None."""
    rows, output = call.input, call.output
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(x, torch.Tensor) for x in output):
        return None
    logits, weights, index = output
    num_tokens = rows.numel() // rows.shape[-1]
    shapes = [logits.shape[:1], weights.shape[:1], index.shape[:1]]
    if shapes != [(num_tokens,)] * 3 or index.dim() != 2 or index.shape != weights.shape or logits.dim() != 2:
        return None
    if not (index.shape[1] <= logits.shape[1] <= min(MAX_EXPERTS, rows.shape[-1])) or index.dtype != torch.int64:
        return None
    if not all(x.dtype in DTYPES for x in (rows, logits, weights)):
        return None
    place, product = place_of(call, lambda x: x is rows), _product_of(call, logits)
    if place is None or product is None:
        return None
    called = [child.module for child in call.children if product.child and child.name == product.child]
    names = call.names_without(called)
    bias = _bias_of(call, logits.shape[1], product)
    known = not set(names) - _OPERATIONS or not set(names) - _OF_MIXERS
    # A factor or a limit may be there without effect on the probe.
    used = Used(any(name.startswith("clamp") for name in names), "mul" in names)
    rule = _rule_of(call, place, product, bias, used) if known else None
    if rule is None:
        return None
    return RouterPart(call, place, product, bias, rule)


def _product_of(call: Call, logits: torch.Tensor) -> LogitsProduct | None:
    rows = call.input.reshape(-1, call.input.shape[-1])
    for child in call.children:
        tensors = isinstance(child.input, torch.Tensor) and isinstance(child.output, torch.Tensor)
        if child.name and tensors and torch.equal(child.output.to(logits.dtype), logits):
            return LogitsProduct(child=child.name, upcasts=child.input.dtype != rows.dtype)
    parameters = {name: p for name, p in call.module._parameters.items() if type(p) is nn.Parameter}
    weights = [name for name, p in parameters.items() if p.shape == (logits.shape[1], rows.shape[1])]
    biases = ["", *(name for name, p in parameters.items() if p.shape == logits.shape[1:])]
    for weight, bias, upcasts in itertools.product(weights, biases, (False, True)):
        read = [parameters[weight], *([parameters[bias]] if bias else [])]
        if not upcasts and any(tensor.dtype != rows.dtype for tensor in read):
            continue
        product = LogitsProduct("", weight, bias, upcasts)
        result = product.of(call.module, rows)
        expected = logits.to(result.dtype)
        # Logits that the product's dtype cannot hold are another's.
        if torch.equal(expected.to(logits.dtype), logits) and are_alike(result, expected):
            return product
    return None


def _bias_of(call: Call, num_experts: int, product: LogitsProduct) -> Bias | None:
    """The only tensor that may be the bias of the choice; None if there is none or several."""

    def fits(x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.numel() == num_experts and x.is_floating_point()

    found = [Bias(place) for place in [place_of(call, fits)] if place is not None]
    for path, module in call.module.named_modules():
        if product.child and path.split(".")[0] == product.child:
            continue
        tensors = {**module._parameters, **module._buffers}
        found += [
            Bias(None, path, name)
            for name, tensor in tensors.items()
            if fits(tensor) and not (path == "" and name in (product.weight, product.bias))
        ]
    return found[0] if len(found) == 1 else None


class Used(NamedTuple):
    """Operations of the module: a limit, a product of elements."""

    clamps: bool
    multiplies: bool


_known: dict[tuple[Any, ...], Rule | None] = {}  # by class, sizes, dtypes and all attributes that are numbers


def _rule_of(call: Call, place: Place, product: LogitsProduct, bias: Bias | None, used: Used) -> Rule | None:
    module = call.module
    scalars = [(name, x) for name, x in vars(module).items() if isinstance(x, bool | int | float | str)]
    tensors = [call.input, *call.output]
    key = (
        type(module), type(module).forward, place, product, bias, used, tuple(scalars),
        tuple((x.shape[-1], x.dtype, x.device, x.dim()) for x in tensors),
    )  # fmt: skip
    if key not in _known:
        _known[key] = _probed(call, place, product, bias, used)
    return _known[key]


@torch.no_grad()
def _probed(call: Call, place: Place, product: LogitsProduct, bias: Bias | None, used: Used) -> Rule | None:
    """The rule by which a copy of the module turns chosen logits into weights, with a bias and factors that show."""
    rows, (logits, weights, index) = call.input, call.output
    probe, args, kwargs = _copy(call, product)
    # Chosen logits, because those of the trial may not show a limit, a group or a factor.
    chosen = _logits(logits.shape[1], index.shape[1]).to(rows)
    padded = functional.pad(chosen, (0, rows.shape[-1] - chosen.shape[1]))
    given = padded if rows.dim() == 2 else padded[None]
    if isinstance(place, int):
        args[place] = given
    else:
        kwargs[place] = given
    tensor = random_numbers()(logits.shape[1])
    if bias is not None:
        old = bias.of(probe, tuple(args), kwargs)
        tensor = tensor.to(old)
        if isinstance(bias.place, int):
            args[bias.place] = tensor.view(old.shape)
        elif bias.place is not None:
            kwargs[bias.place] = tensor.view(old.shape)
        else:
            old.data.copy_(tensor.view(old.shape))
    expected = type(probe).forward(probe, *args, **kwargs)
    # The copy must pass the chosen logits on, or its weights say nothing about them.
    if not torch.equal(expected[0].float(), chosen.float()):
        return None
    # The logits before they are returned have the dtype of the product.
    before = chosen.to(torch.float32 if product.upcasts else rows.dtype)
    fitting = []
    for rule in _rules(probe, index.shape[1], bias is not None, used):
        result = _ordered(*route(before, tensor if rule.has_bias else None, rule.router(probe), weights.dtype))
        wanted = _ordered(*expected[1:])
        # Equal bits at once; of rules that only agree, the first.
        if all(map(torch.equal, result, wanted)):
            return rule
        if _agree(result, wanted):
            fitting.append(rule)
    return fitting[0] if fitting else None


def _copy(call: Call, product: LogitsProduct) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """A copy of the module that returns the first elements of a row as its logits, and the call's arguments."""
    num_experts, size = call.output[0].shape[1], call.input.shape[-1]
    probe: Any = copy.deepcopy(call.module)
    for module in probe.modules():
        # The forwards there record the trial, of which the copy is no part.
        vars(module).pop("forward", None)
    weight = torch.eye(num_experts, size, dtype=torch.float32, device=call.input.device)
    if product.child:
        dtype = next((p.dtype for p in probe._modules[product.child].parameters()), call.input.dtype)
        layer = nn.Linear(size, num_experts, bias=False, device=call.input.device, dtype=dtype)
        probe._modules[product.child] = layer
        layer.weight.copy_(weight)
    else:
        probe._parameters[product.weight].copy_(weight)
        if product.bias:
            probe._parameters[product.bias].zero_()
    for i, name in enumerate(_numbers(vars(probe))):
        # A factor of 1 would not show.
        if vars(probe)[name] == 1:
            vars(probe)[name] = 1.25 + i / 64
    return probe, list(call.args), dict(call.kwargs)


def _numbers(attributes: dict[str, Any]) -> list[str]:
    """Return the names of attributes that may be factors."""
    return [name for name, x in attributes.items() if isinstance(x, float) or ("scal" in name and type(x) is int)]


def _logits(num_experts: int, top_k: int) -> torch.Tensor:
    """Make rows of distinct logits within +-4, exact in bf16 for up to 512 experts. Two more rows have close and very
    low logits, of which top_k + 1 differ."""
    generator = torch.Generator().manual_seed(0)
    ids: Any = {"dtype": torch.int64, "device": "cpu"}
    places = torch.stack([torch.randperm(num_experts, generator=generator, **ids) for _ in range(16)])
    unit = max(1, 1 << (num_experts - 1).bit_length()) / 8
    last = torch.tensor([[90.0], [-120.0]], dtype=torch.float32, device="cpu").repeat(1, num_experts)
    different = torch.arange(min(top_k + 1, num_experts), dtype=torch.float32, device="cpu")
    last[0, : top_k + 1], last[1, : top_k + 1] = 128 - different, -64 - different / 2
    return torch.cat([(places - num_experts // 2).float() / unit, last])


def _rules(probe: nn.Module, top_k: int, may_have_bias: bool, used: Used) -> Iterator[Rule]:
    attributes = vars(probe)
    numbers = _numbers(attributes)
    groups = [(1, 1)]
    if isinstance(attributes.get("num_group"), int) and attributes["num_group"] > 1:
        groups.insert(0, (attributes["num_group"], attributes["topk_group"]))
    weights = ("clamp",) if used.clamps else ("none", "sum", "softmax", "sigmoid", "sigmoid_sum")
    choices = itertools.product(
        groups, (True, False) if may_have_bias else (False,), ("softmax", "none", "sigmoid"), weights, (False, True),
        numbers if used.multiplies else [1.0],
    )  # fmt: skip
    for (num, chosen), has_bias, scores, weight, is_low, scale in choices:
        # The kernel rounds no sum of a score and its bias.
        if has_bias and is_low:
            continue
        eps: list[str | float] = [*numbers] if weight == "clamp" else [0.0, 1e-20] if "sum" in weight else [0.0]
        for each in eps:
            yield Rule(RouterKind(scores, weight, is_low, num, chosen), top_k, has_bias, each, scale)  # type: ignore[arg-type]
    if used.clamps and top_k == 2:
        yield from (Rule(RouterKind("mixer", is_low=True), top_k, False, name) for name in numbers)


def _ordered(weights: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index, places = index.sort(-1)
    return weights.gather(-1, places), index


def _agree(result: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Return True if weights and experts of the probe's rows are alike. Of the last two rows, where scores may be
    equal, only the weights count, by themselves, as they may be tiny."""
    if not torch.equal(result[1][:-2], expected[1][:-2]):
        return False
    one, other = result[0].float(), expected[0].float()
    tolerance = 1e-5 if expected[0].dtype == torch.float32 else 0.01
    last = torch.allclose(one[-2:].sort()[0], other[-2:].sort()[0], tolerance, 0, equal_nan=True)
    return last and are_close(one[:-2], other[:-2], tolerance)
