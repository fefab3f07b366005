"""Weights of a model that are kept in codes (`groups.py`) and nowhere else: parameters of a class of their own.

Whoever computes with such a parameter gets its values, so that a module's own forward computes with the same numbers as
the kernels. Knows modules and tensors, never steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from hf_paged.fused.cpu.groups import LARGEST, TOGETHER, Codes, Form, rounded
from hf_paged.fused.cpu.ops import is_available
from hf_paged.kernels import buffers
from hf_paged.kernels.buffers import HOST, give_back, has_memory, in_large_pages, mapped_files, trim
from hf_paged.model.parameters import readable_weight

_aten = torch.ops.aten
HEAD_BITS = 8
"""Embeddings and heads have so many bits: rounding them to four changes more tokens (docs/quantised.md)."""

_WRAPPED = ("base_layer", "original_module")  # as PEFT's layers name what they wrap
_saved = WeakIdKeyDictionary()  # what was last given to whoever saves them: weak references, by the memory of codes


class CodedWeight(torch.Tensor):
    """A weight [columns, depth] that is kept in codes. Functions get its values, rounded to its dtype; an embedding
    gets those of its rows only. Nobody can write to it."""

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype) -> CodedWeight:
        shape = (codes.columns, codes.depth)
        made: CodedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=HOST)
        return made

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self.codes = codes

    def __repr__(self) -> str:  # type: ignore[override]
        form = self.codes.form
        return f"CodedWeight({list(self.shape)}, {form.bits} bits in groups of {form.size}, {self.dtype})"

    @property
    def memory(self) -> torch.Tensor:
        """The memory of the codes, for whoever watches tensors that wrap others."""
        return self.codes.memory

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.codes.memory.nbytes

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        # torch would take it, and compute with the codes.
        raise _refusal(self, "an assignment to `data`")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["memory"], (self.codes[1:], self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], about: tuple[Any, ...], *_: object) -> CodedWeight:
        return CodedWeight(Codes(inner["memory"], *about[0]), about[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(first.codes, first.dtype)
        if func is _aten.clone.default:
            return cls(first.codes._replace(memory=first.memory.clone()), first.dtype)
        device = kwargs.get("device")
        if func is _aten._to_copy.default and (device is None or device.type == "cpu"):
            # Another tensor, so that whoever watches it detects the change.
            memory = first.memory.detach()
            return cls(first.codes._replace(memory=memory), kwargs.get("dtype") or first.dtype)
        if func is _aten.embedding.default and isinstance(first, cls):
            return first.codes.columns_at(args[1]).to(first.dtype)
        if func is _aten.t.default:
            return TransposedWeight(first)
        if func is _aten.slice.Tensor and not any(args[1:2]):
            # Whoever looks at some rows of a large embedding does not wait for its values.
            rows = range(len(first))[slice(*args[2:] or (None,))]
            return first.codes.columns_at(torch.tensor(rows, dtype=torch.int64, device=HOST)).to(first.dtype)
        if func._schema.is_mutable and (written := _written(func, args, kwargs)) is not None:
            raise _refusal(written, func)
        return func(*pytree.tree_map(_values, args), **pytree.tree_map(_values, kwargs))


class TransposedWeight(torch.Tensor):
    """A weight in codes as products take it, [depth, columns], or so for each batch, [batch, depth, columns]. A product
    has the values of some columns at a time, so that a large vocabulary costs no copy of its head."""

    weight: CodedWeight

    @staticmethod
    def __new__(cls, weight: CodedWeight, *batch: int) -> TransposedWeight:
        strides = (*(0 for _ in batch), 1, weight.shape[1])
        made: TransposedWeight = torch.Tensor._make_wrapper_subclass(
            cls, (*batch, *weight.shape[::-1]), dtype=weight.dtype, device=HOST, strides=strides
        )
        return made

    def __init__(self, weight: CodedWeight, *batch: int) -> None:
        self.weight = weight

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        own = next((each for each in args if isinstance(each, cls)), None)
        if own is not None and func in _AS_THEY_ARE:
            return cls(own.weight, *own.shape[:-2])
        if own is not None and func is _aten.t.default:
            return CodedWeight(own.weight.codes, own.weight.dtype)
        # As torch multiplies rows that do not lie side by side.
        if own is not None and func in (_aten.expand.default, _aten.view.default) and _is_batch_of(args[1], own):
            return cls(own.weight, args[1][0])
        if own is not None and args[-1] is own and not kwargs:
            if func is _aten.bmm.default:
                return _product(own.weight, args[0].flatten(0, 1)).unflatten(0, args[0].shape[:2])
            if func in (_aten.mm.default, _aten.addmm.default):
                return _product(own.weight, *args[-2::-1])
        return func(*pytree.tree_map(_values, args), **pytree.tree_map(_values, kwargs or {}))


_AS_THEY_ARE = (_aten.detach.default, _aten.alias.default)


def _is_batch_of(shape: Any, weight: TransposedWeight) -> bool:
    return len(shape) == 3 and tuple(shape[1:]) == tuple(weight.shape[-2:])


def _product(weight: CodedWeight, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = buffers.empty((len(rows), len(weight)), rows.dtype, rows.device)
    for first in range(0, len(weight), TOGETHER):
        some, own = slice(first, first + TOGETHER), weight.codes.values_from(first).to(weight.dtype)
        out[:, some] = torch.mm(rows, own.t()) if bias is None else torch.addmm(bias[some], rows, own.t())
    return out


def _values(each: Any) -> Any:
    if isinstance(each, TransposedWeight):
        return _values(each.weight).t().expand(each.shape)
    return each.codes.values().to(each.dtype) if isinstance(each, CodedWeight) else each


def _written(func: Any, args: Any, kwargs: Any) -> CodedWeight | None:
    """A weight in codes that the function would write to, alone or in a list."""
    arguments = func._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    outputs = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    written = pytree.tree_leaves([given.get(name) for name in outputs])
    return next((each for each in written if isinstance(each, CodedWeight)), None)


def _refusal(weight: CodedWeight, what: object) -> RuntimeError:
    return RuntimeError(
        f"{what} would write to a weight {list(weight.shape)} that is kept in {weight.codes.form.bits} bits; load the "
        "model again to change its weights"
    )


def coded_weight(layer: nn.Module) -> CodedWeight | None:
    """The layer's weight if it is kept in codes."""
    weight: torch.Tensor | None = layer._parameters.get("weight")
    return weight if isinstance(weight, CodedWeight) else None


def keep_in_codes(model: nn.Module, form: Form, *, is_new: bool = False) -> None:
    """Replace the weights of linear layers and of the embedding by codes, one by one, so that each gives its memory
    back before the next one is read. is_new: whether nobody has written to the weights since they were loaded, so that
    what has been read of mapped files is given back too.

    Raises ValueError if there is nothing to replace, or for a weight that codes or kernels do not support. No weight
    has been replaced then.
    """
    apart = {id(part) for part in (_embedding(model), _head(model)) if part is not None}
    adapters = _adapters(model)
    named = {
        name: layer
        for name, layer in model.named_modules()
        if (type(layer) is nn.Linear or id(layer) in apart) and coded_weight(layer) is None and layer not in adapters
    }
    if not named:
        raise ValueError("the model has no linear layers whose weights are not in codes; to change them, load it again")
    files = mapped_files() if is_new else []
    for name, layer in named.items():
        if (reason := _obstacle(layer)) is not None:
            raise ValueError(f"{name}: {reason}")
        _forget(layer._parameters["weight"], files)
    layers = list(named.values())
    forms = {id(weight): form for weight in _weights(layers)}
    finer = form._replace(bits=HEAD_BITS)
    forms |= {id(weight): finer for weight in _weights([each for each in layers if id(each) in apart])}
    sizes = {id(each): forms[id(each)].num_bytes(each.shape[0], each.shape[1]) for each in _weights(layers)}
    parts = dict(zip(sizes, in_large_pages(sum(sizes.values())).split(list(sizes.values())), strict=True))
    holders = modules_by_weight(model)
    for layer in layers:
        # Tied weights have become codes with the first of their layers.
        if coded_weight(layer) is None:
            (weight,) = _weights([layer])
            codes = rounded(weight, forms[id(weight)], parts[id(weight)])
            put_codes(holders[id(weight)], codes, weight.dtype)
            _forget(weight, files)
            del weight
    _leave_files(model, sum(sizes.values()))
    trim()


def round_activations(model: nn.Module, bits: int) -> None:
    """Let kernels round the rows, too, that they multiply with the model's weights in codes (`Form.activations`).

    Raises ValueError for codes of a table, which are multiplied in fp32, and if no weights are in codes.
    """
    coded = [each for each in model.parameters() if isinstance(each, CodedWeight)]
    if not coded:
        raise ValueError("none of its weights can be kept in codes, with which rows would be rounded")
    if any(each.codes.form.table for each in coded):
        raise ValueError("its codes are numbers of values in a table, with which rows are multiplied in fp32")
    for each in coded:
        each.codes = each.codes._replace(form=each.codes.form._replace(activations=bits))


def _forget(weight: torch.Tensor | None, files: list[range]) -> None:
    """Give the pages of a weight in these mapped files back to the system, which reads them again if they are used."""
    if weight is not None and weight.is_contiguous() and any(weight.data_ptr() in file for file in files):
        give_back(weight.detach()[None], [0])


def _leave_files(model: nn.Module, most: int) -> None:
    """Copy what is left of a checkpoint whose file is mapped, unless that takes more than so many bytes: a norm keeps
    all pages of the file in this process's memory."""
    files = mapped_files()
    parts = [each for each in (*model.parameters(), *model.buffers()) if has_memory(each) and each.is_cpu]
    left = [each for each in parts if any(each.data_ptr() in file for file in files)]
    if sum(each.nbytes for each in left) <= most:
        for each in left:
            each.data = each.data.clone()


def modules_by_weight(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules that share each weight, by its id."""
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        holders.setdefault(id(module._parameters.get("weight")), []).append(module)
    return holders


def put_codes(modules: list[nn.Module], codes: Codes, dtype: torch.dtype) -> None:
    """Replace the weight that these modules share by codes; whoever saves the model gets their values."""
    own = nn.Parameter(CodedWeight(codes, dtype), requires_grad=False)
    for module in modules:
        module._parameters["weight"] = own
        module.register_state_dict_post_hook(_save_values)


def _weights(layers: list[nn.Module]) -> Iterator[nn.Parameter]:
    # One by one, because a list would keep them all.
    return (weight for layer in layers if (weight := layer._parameters["weight"]) is not None)


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The modules that PEFT's layers have beside the one that they wrap: they are trained, and small."""
    wrappers = [module for module in model.modules() if not module._modules.keys().isdisjoint(_WRAPPED)]
    added = (child for each in wrappers for name, child in each.named_children() if name not in _WRAPPED)
    return {part for child in added for part in child.modules()}


def _inside(layer: Any) -> nn.Module | None:
    """The layer itself, or the one that it wraps."""
    found: nn.Module | None = next((getattr(layer, name) for name in _WRAPPED if hasattr(layer, name)), layer)
    return found


def _embedding(model: Any) -> nn.Module | None:
    try:
        found = _inside(model.get_input_embeddings())
    # Models of audio have none.
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


def _head(model: Any) -> nn.Module | None:
    found = _inside(model.get_output_embeddings())
    return found if type(found) is nn.Linear else None


def _obstacle(layer: nn.Module) -> str | None:
    weight = readable_weight(layer)
    if weight is None:
        return f"the weight of a {type(layer).__name__} is computed, or of a class of its own"
    if not weight.is_cpu or not is_available(weight.dtype):
        kind = f"{weight.dtype} on {weight.device}"
        return f"there are no native kernels for weights of {kind}; load the model in fp32 or bf16 on a CPU"
    low, high = (float(each) for each in weight.detach().aminmax())
    # No comparison with NaN is true.
    if not -LARGEST <= low <= high <= LARGEST:
        return (
            f"codes have no values outside of {LARGEST:,.0f} on each side of zero, and its weight has values from "
            f"{low:.3g} to {high:.3g}; load a checkpoint without such weights, or keep the model's own weights"
        )
    return None


def _save_values(module: nn.Module, found: dict[str, Any], prefix: str, *_: object) -> None:
    """Give whoever saves the model plain values: other programs can load them."""
    if (weight := found.get(key := f"{prefix}weight")) is not None and isinstance(weight, CodedWeight):
        known = _saved.get(weight.memory)
        values = None if known is None else known()
        # Somebody may have written to what was saved before. Tied weights are one tensor in what is saved now.
        if values is None or not any(each is values for each in found.values()):
            values = _values(weight)
            _saved[weight.memory] = weakref.ref(values)
        found[key] = values
