"""Whole copies of models whose weights a trainer has divided among processes: FSDP2 of torch, ZeRO-3 of DeepSpeed.

An engine needs a plain model: whole weights, no hooks that talk to other processes. A copy is one, on each process.
Its weights are gathered one after another, so that no process ever holds two whole models because of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_paged.fused.cpu.coded import CodedWeight
from hf_paged.fused.cpu.groups import LARGEST, rounded
from hf_paged.fused.cpu.weights import prepack
from hf_paged.model.state import release, weights_changed

_HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]
_OF_TRAINERS = ("torch.distributed.", "deepspeed.", "accelerate.", "transformers.")
"""Packages whose hooks serve training: they divide weights, and keep inputs for gradients. A copy has none of them."""
_LOSSES = "trl.trainer.utils"
"""Where TRL defines a forward that computes its losses."""
_STATES = (
    "__composable_api", "ds_", "_original_forward", "_external_params", "_original_parameters", "_device_mesh",
    "_mesh_manager", "_is_fsdp_managed", "_is_distributed_loading",
)  # fmt: skip
"""Beginnings of the attributes that FSDP2, DeepSpeed, accelerate and transformers add to what they divide."""


class WholeCopy:
    """A plain model with the weights of a sharded one, for an engine on each process.

    `refresh` is collective: all processes of the group call it, as often as one of them does. Between two calls nothing
    is exchanged, so that each process may draw as many rollouts as it likes. The copy's structure is that of the model
    when it was made; its weights are those of the last `refresh`.

    Attributes:
        model: The copy, in evaluation mode, without gradients. Before the first `refresh` it has no values.
        num_gathered_bytes: Bytes of the largest weight: what a `refresh` takes besides the copy, once or twice.

    Example:
        ```python
        copy = WholeCopy(trainer.model, torch.bfloat16)
        copy.refresh()
        engine = Engine(copy.model)
        ```
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None, *, bits: int | None = None) -> None:
        """Make the copy. Nothing is exchanged.

        Args:
            model: A model of transformers or PEFT that was given to `fully_shard`, to `deepspeed.initialize` with
                stage 3, or to `accelerator.prepare`, or that was loaded with `DistributedConfig(fsdp_size=...)`; or one
                that is not divided.
            dtype: Of the copy's floating-point parameters. None = that of the model's.
            bits: 8 or 4, to which each `refresh` rounds linear weights in groups of 32, on a CPU (`hf_paged.prepack`).
                None = they are not rounded.

        Raises:
            ValueError: For FSDP1, for a model that is spread in other ways too, for hooks or forwards of third-party
                code, which the copy would not have, and for other bits.
        """
        if bits not in (None, 8, 4):
            raise ValueError(f"bits={bits}: use 8, 4, or None for weights that are not rounded")
        self._bits = bits
        self._dtype = dtype
        self._source = _unwrapped(model)
        self._places: list[tuple[nn.Module, str, nn.Module]] = []  # a module, a parameter of it, the copy's module
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        self._made: dict[int, Any] = {}  # by the id of what it is made of
        self.model: Any = self._plain(self._source).eval()
        # Ids of modules that may go would name others later.
        self._made = {}
        self.num_gathered_bytes = max(
            _shape_of(own).numel() * own.element_size()
            for module, name, _ in self._places
            if (own := module._parameters[name]) is not None
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy's weights now; after `free`, almost none."""
        tensors = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        memory = (each.memory if isinstance(each, CodedWeight) else each for each in tensors.values())
        return sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in memory)

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather all weights of the sharded model into the copy. All processes call it, after each optimizer step.

        No engine on the copy may run a step meanwhile; with requests that are to continue, call it within
        `engine.pause(recompute=True)`. Cached prefixes of the former weights are dropped.

        Raises:
            ValueError: With `bits`, for a weight that cannot be rounded. The copy is then unusable.
        """
        _divide_again(self._source)
        filled: set[int] = set()
        for module, name, made in self._places:
            own = made._parameters[name]
            if id(own) not in filled:
                filled.add(id(own))
                with _whole(module._parameters[name]) as value:
                    _fill(own, value, name)
        for module, made in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    _fill(made._buffers[name], buffer, name)
        if self._bits is not None and not any(isinstance(each, CodedWeight) for each in self.model.parameters()):
            prepack(self.model, f"int{self._bits}", group_size=32)
        weights_changed(self.model)

    def free(self) -> None:
        """Give the memory of the copy's weights back until the next `refresh`. Put engines on it to sleep before.

        Raises:
            ValueError: With `bits`: rounded weights are small, and kept.
        """
        if self._bits is not None:
            raise ValueError(f"bits={self._bits}: rounded weights are kept; leave free() out, or make the copy anew")
        release(self.model)
        for parameter in self.model.parameters():
            parameter.data = parameter.new_zeros(1).expand(parameter.shape)

    # -- making the copy ----------------------------------------------------------------------------------------

    def _plain(self, module: nn.Module) -> nn.Module:
        """Return a module of the class that this one had before it was divided, with copies of its children."""
        if id(module) in self._made:
            known: nn.Module = self._made[id(module)]
            return known
        _check_hooks(module)
        # Without the constructor, whose arguments nobody knows.
        kind, fresh = _plain_class(type(module)), vars(nn.Module())
        made = nn.Module.__new__(kind)
        self._made[id(module)] = made
        vars(made).update(fresh | {"_non_persistent_buffers_set": {*module._non_persistent_buffers_set}})
        for name, value in vars(module).items():
            if name not in fresh and name != "forward" and not name.startswith(_STATES):
                vars(made)[name] = self._attribute(module, made, value)
        if (forward := _own_forward(module, kind)) is not None:
            vars(made)["forward"] = MethodType(forward, made)
        for name, parameter in module._parameters.items():
            made._parameters[name] = None if parameter is None else self._parameter(parameter)
            self._places += [] if parameter is None else [(module, name, made)]
        for name, buffer in module._buffers.items():
            made._buffers[name] = None if buffer is None else buffer.detach().clone()
        for name, child in module._modules.items():
            made._modules[name] = None if child is None else self._plain(child)
        self._modules.append((module, made))
        return made

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return memory for a whole parameter; one for all places of a tied one."""
        if id(parameter) not in self._made:
            dtype = self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype
            memory = torch.empty(_shape_of(parameter), dtype=dtype, device=parameter.device)
            self._made[id(parameter)] = nn.Parameter(memory, requires_grad=False)
        found: nn.Parameter = self._made[id(parameter)]
        return found

    def _attribute(self, module: nn.Module, made: nn.Module, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._plain(value)
        if isinstance(value, MethodType) and value.__self__ is module:
            return MethodType(value.__func__, made)
        # What changes in a container of the model, such as PEFT's active adapters, is not the copy's.
        if type(value) in (list, tuple, set):
            return type(value)(self._attribute(module, made, each) for each in value)
        if type(value) is dict:
            return {key: self._attribute(module, made, each) for key, each in value.items()}
        return value


def _unwrapped(model: Any) -> Any:
    """The model in what torch and DeepSpeed put around it. Raises ValueError for FSDP1, and for tensor parallelism."""
    while True:
        kind = type(model)
        if kind.__name__ == "FullyShardedDataParallel":
            raise ValueError("the model is divided by FSDP1, which flattens weights; use FSDP2 (fsdp_version: 2)")
        inner = getattr(model, "_orig_mod", None)
        if kind.__name__ in ("DeepSpeedEngine", "DistributedDataParallel"):
            inner = model.module
        if inner is None:
            break
        model = inner
    mesh = getattr(model, "_device_mesh", None)
    sizes = {} if mesh is None else dict(zip(mesh.mesh_dim_names or ("tp",), mesh.shape))
    for name, size in sizes.items():
        if size > 1 and name not in ("fsdp", "dp_replicate"):
            raise ValueError(f"the model is spread by {name}={size}, which a copy cannot undo; use fsdp_size alone")
    return model


def _plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of which `fully_shard` has made this one."""
    from torch.distributed.fsdp import FSDPModule

    found: Any = kind
    while issubclass(found, FSDPModule):
        found = found.__bases__[1]  # the first is FSDPModule
    plain: type[nn.Module] = found
    return plain


def _check_hooks(module: nn.Module) -> None:
    """Raise ValueError for a hook of third-party code."""
    for name in _HOOKS:
        for hook in vars(module)[name].values():
            if callable(hook) and not _home(hook).startswith(_OF_TRAINERS):  # others are flags
                raise ValueError(
                    f"{type(module).__name__} has a hook of {_home(hook)} in {name}, which a copy would not have; "
                    "remove it, or add it after the copy is made"
                )


def _home(function: Any) -> str:
    """The module of a function, or of an object that is called."""
    function = getattr(function, "func", function)
    return f"{getattr(function, '__module__', None) or type(function).__module__}."


def _own_forward(module: nn.Module, kind: type) -> Any:
    """The function that somebody has set as this module's `forward`; None for the class's own, also within a cast of
    accelerate or a loss of TRL. Raises ValueError for what cannot belong to another module."""
    own = vars(module)
    forward = own.get("_original_forward", own.get("forward"))
    function, held = _function_of(forward)
    if getattr(function, "__globals__", {}).get("__name__") == _LOSSES:  # all but a loss is passed on
        forward = held.get("original_forward")
        function, held = _function_of(forward)
    if forward is None or function is getattr(kind, "forward", None):
        return None
    is_bound = getattr(forward, "__self__", None) is module
    if not is_bound or any(getattr(value, "__self__", None) is module for value in held.values()):
        raise ValueError(
            f"{type(module).__name__} has a `forward` of {_home(forward)} set on itself, which a copy cannot have; set "
            "it on the class, or as a method that calls no method of this one module"
        )
    return function


def _function_of(method: Any) -> tuple[Any, dict[str, Any]]:
    """The function of a method, and what that holds of the function in which it was defined."""
    function = getattr(method, "__func__", method)
    cells = getattr(function, "__closure__", None) or ()
    return function, {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)
    } if cells else {}


# -- weights ---------------------------------------------------------------------------------------------------------


def _shape_of(parameter: torch.Tensor) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _divide_again(model: nn.Module) -> None:
    """After a forward, FSDP2 leaves some weights whole: they may be older than their parts."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def _whole(parameter: Any) -> Iterator[torch.Tensor]:
    """Yield all of a parameter, which is freed afterwards. Collective."""
    if hasattr(parameter, "ds_shape"):
        with sys.modules["deepspeed"].zero.GatheredParameters([parameter]):
            yield parameter.data
    else:
        yield parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def _fill(own: Any, value: torch.Tensor, name: str) -> None:
    if not isinstance(own, CodedWeight):
        if own.untyped_storage().nbytes() < own.nbytes:  # after `free`
            own.data = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        own.copy_(value)
        return
    low, high = (float(each) for each in value.aminmax())
    if not -LARGEST <= low <= high <= LARGEST:  # nor NaN
        raise ValueError(f"{name} has values from {low:.3g} to {high:.3g}, which codes do not have; use bits=None")
    rounded(value.to(own.dtype), own.codes.form, own.codes.memory)
