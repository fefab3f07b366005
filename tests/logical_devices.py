"""Tensors on `logical:0`, `logical:1`, ..., with data in host memory: only copies go from one device to another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

KIND = "logical"
_KINDS = (KIND, "cuda")  # see `tests.fake_cuda`


class OnDevice(torch.Tensor):
    """A tensor that is on a logical device; `data_of` has its values."""

    _held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes a parameter like another one, which was of this class
            return held if isinstance(held, OnDevice) else torch.nn.Parameter(held, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device
        )
        made._held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self._held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"a tensor on {self.device} has no numpy array")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self._held} on {self.device}"


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors' data. Raises RuntimeError if they are on several devices."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    operation = func.overloadpacket
    # As for real devices, numbers and indices may be on the CPU.
    may_be_on_cpu = len(tensors) > 1 and operation in _INDEXING
    devices = {x.device for x in tensors if x.device.type in _KINDS or (x.ndim and not may_be_on_cpu)}
    if operation in _COPIES:
        device = tensors[0].device
    elif len(devices) > 1:
        raise RuntimeError(f"{func}: tensors on {' and '.join(sorted(map(str, devices)))}")
    else:
        device = next(iter(devices), torch.device("cpu"))
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        kwargs = kwargs | {"device": torch.device("cpu") if device.type in _KINDS else device}
    wrappers = {id(x._held): x for x in tensors if isinstance(x, OnDevice)}

    def bare(x: Any) -> Any:
        return x._held if isinstance(x, OnDevice) else x

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or device.type not in _KINDS:
            return x
        return wrappers[id(x)] if id(x) in wrappers else OnDevice(x, device)

    bare_args, bare_kwargs = tree_map(bare, (args, kwargs))
    return tree_map(wrapped, func(*bare_args, **bare_kwargs))


class _Dispatch(TorchDispatchMode):
    __module__ = "hf_paged.tests"  # a device is no code of others, who would have each row computed alone

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode a composite operation arrives whole
            result = func.decompose(*args, **(kwargs or {}))
        return run(func, args, kwargs or {}) if result is NotImplemented else result


class _Functions(TorchFunctionMode):
    """`torch.tensor`, and indexing with a list, make a tensor below all dispatch modes: it is made here and copied."""

    __module__ = "hf_paged.tests"  # a device is no code of others, who would have each row computed alone

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type in _KINDS:
            return func(*args, **kwargs | {"device": "cpu"}).to(device)
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            tensor, index = args
            args = tensor, tuple(torch.tensor(x).to(tensor.device) if isinstance(x, list) else x for x in index)
        return func(*args, **kwargs)


class _Module:
    """What torch asks of the module of a type of device."""

    def __init__(self, count: int) -> None:
        self._count = count

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


@contextmanager
def logical_devices(count: int = 2) -> Iterator[None]:
    """Tensors on logical devices, without gradients or inference mode. For a process of its own, which it changes."""
    backend_registration._setup_privateuseone_for_python_backend(KIND, _Module(count))
    with (
        mock.patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad()),
        torch.no_grad(),
        _Functions(),
        _Dispatch(),
    ):
        yield


def in_child(check: Callable[[], None]) -> None:
    """Call `check` in a fork of this process. Raises AssertionError if it does not return."""
    import torch._dynamo  # noqa: F401  # torch's modes need it: imported here, once for all children

    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0, "see the output of the child process"
