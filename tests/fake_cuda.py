"""A CUDA device that does not exist: tensors on `cuda:0` whose data is in host memory, on which torch computes.

Code takes its branches for CUDA. While `no_waits` holds, whatever would make the host wait for the device raises an
error: reading a value, operations whose result has a shape that depends on values, copies that are not asynchronous.
Attention, which a kernel would compute, and the read of an event that has been awaited are excepted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.kernels import gather, ops
from tests import logical_devices
from tests.fused import fewer
from tests.logical_devices import OnDevice

DEVICE = torch.device("cuda", 0)


class _Event:
    def synchronize(self) -> None: ...


class _Stream:
    def record_event(self) -> _Event:
        return _Event()

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None: ...


class Waits(RuntimeError):
    """The host would wait for the device."""


_pinned: set[int] = set()  # addresses of pinned memory
_forbidden = False
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_aten = torch.ops.aten


class _Watch(TorchDispatchMode):
    """Pinned memory, and what must not be done while `no_waits` holds."""

    __module__ = "hf_paged.tests"  # a device is no code of others, who would have each row computed alone

    launches = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        pins = kwargs.pop("pin_memory", None)
        if name in (_aten._pin_memory, _aten.pin_memory):
            result, pins = args[0].clone(), True
        else:
            if any(isinstance(x, OnDevice) for x in args) and not func.is_view:
                self.launches += 1
            if _forbidden:
                _check(func, name, args, kwargs)
            result = func(*args, **kwargs)
        if pins:
            _pinned.add(result.untyped_storage().data_ptr())
        return result


def _tolist(tensor: OnDevice) -> Any:
    if _forbidden:
        raise Waits("tolist() needs values on the host")
    return tensor._held.tolist()


def _check(func: Any, name: Any, args: Any, kwargs: Any) -> None:
    if name is _aten._to_copy:
        target = torch.device(kwargs.get("device") or args[0].device)
        source, host, is_async = args[0].device, args[0], kwargs.get("non_blocking")
        if target.type == "cpu":
            host = None  # new memory, which is not pinned
    elif name is _aten.copy_:
        target, source, is_async = args[0].device, args[1].device, len(args) > 2 and args[2]
        host = args[0] if target.type == "cpu" else args[1]
    else:
        if name in (_aten.index, _aten.index_put, _aten.index_put_):  # a mask is counted on the host first
            reads = any(x is not None and x.dtype == torch.bool for x in args[1])
        else:
            reads = not _TAGS.isdisjoint(func.tags)
        if reads and any(isinstance(x, OnDevice) for x in args):
            raise Waits(f"{func} needs a value on the host")
        return
    if target.type == source.type:
        return
    if host is None or host.untyped_storage().data_ptr() not in _pinned or not is_async:
        raise Waits(f"a copy from {source} to {target} that is not asynchronous")


def _add_guard() -> None:
    """Torch's own table of what switches to a device: CUDA gets what the type "meta" has, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # of the enumeration DeviceType
    table[cuda] = table[cuda] or table[meta]


@contextmanager
def no_waits() -> Iterator[None]:
    global _forbidden
    before, _forbidden = _forbidden, True
    try:
        yield
    finally:
        _forbidden = before


def _allowed(compute: Callable[..., Any]) -> Callable[..., Any]:
    def operation(*args: Any, **kwargs: Any) -> Any:
        global _forbidden
        before, _forbidden = _forbidden, False
        try:
            return compute(*args, **kwargs)
        finally:
            _forbidden = before

    return operation


@contextmanager
def fake_cuda() -> Iterator[_Watch]:
    """Without gradients and inference mode, see `logical_devices`."""
    stream, watch = _Stream(), _Watch()
    patches: list[Any] = [
        mock.patch.object(torch.cuda, name, value)
        for name, value in {
            "_lazy_init": lambda: None,
            "current_stream": lambda device=None: stream,
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: False,
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
        }.items()
    ]
    patches += [mock.patch.object(OnDevice, "tolist", _tolist)]
    patches += [mock.patch.object(torch, "inference_mode", lambda mode=True: torch.no_grad())]
    patches += [mock.patch.dict(ops._default_impl, {"cuda": "torch"})]
    patches += [
        mock.patch.object(gather, name, _allowed(getattr(gather, name)))
        for name in ("paged_attention", "write_kv", "copy_blocks")
    ]
    patches += [mock.patch.object(module, name, _allowed(getattr(fewer, name))) for module, name in fewer.OPERATIONS]
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    _add_guard()
    with ExitStack() as stack:
        # `module.to` makes new parameters: those of a CPU cannot become wrapped ones.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(torch.no_grad())
        stack.enter_context(logical_devices._Functions())
        stack.enter_context(logical_devices._Dispatch())
        stack.enter_context(watch)
        yield watch
