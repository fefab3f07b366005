"""ContentSample: detects changes of tensors by comparing a few elements of each.

Writes through `.data` do not increase a tensor's version. Most of them change the whole tensor, so a few elements show
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import torch

# Most writes change whole tensors, so a few elements show them; more would make each look longer.
POINTS = 3
"""Elements of each tensor, evenly spaced."""

PART = 32
"""Tensors on an accelerator that one look compares; each costs as much as twenty on a CPU."""

# As bits, so that a NaN equals itself.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ContentSample:
    """Some elements of `tensors`, as of the last look. Keeps the tensors' memory alive until `drop_views`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._parts: list[_HostPart | _DevicePart] | None = None
        self._known: list[Any] | None = None  # what the parts held
        self._turn = 0

    def look(self) -> list[torch.Tensor]:
        """The tensors whose elements have changed since the last look; none at the first one."""
        parts = self._open()
        if self._known is None:
            self._known = [part.read() for part in parts]
            return []
        hosts = [index for index, part in enumerate(parts) if isinstance(part, _HostPart)]
        devices = [index for index, part in enumerate(parts) if isinstance(part, _DevicePart)]
        if devices:
            # One part in each look, because each costs a wait for the device.
            self._turn = (self._turn + 1) % len(devices)
            hosts.append(devices[self._turn])
        changed: list[torch.Tensor] = []
        for index in hosts:
            part, now = parts[index], parts[index].read()
            if not part.are_equal(now, self._known[index]):
                changed += part.differing(now, self._known[index])
                self._known[index] = now
        return changed

    def look_at(self, ids: Container[int]) -> list[torch.Tensor]:
        """The tensors with these ids that have, or may have, changed since the last look. Reads no others."""
        if self._known is None:
            return []
        if self._parts is None:
            return [tensor for tensor in self.tensors if id(tensor) in ids]
        changed: list[torch.Tensor] = []
        for part, known in zip(self._parts, self._known):
            changed += part.differing(part.read(ids, known), known)
        return changed

    def drop_views(self) -> None:
        self._parts = None

    def _open(self) -> list[_HostPart | _DevicePart]:
        if self._parts is None:
            self._parts = list(_parts(self.tensors))
        return self._parts


def _parts(tensors: list[torch.Tensor]) -> Iterator[_HostPart | _DevicePart]:
    """The tensors by device and size of an element."""
    groups: dict[tuple[torch.device, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for tensor in tensors:
        view = _view(tensor)
        if view is not None:
            groups.setdefault((tensor.device, tensor.element_size()), []).append((tensor, view))
    for (device, _), pairs in groups.items():
        if device.type == "cpu":
            yield _HostPart(pairs)
        else:
            for start in range(0, len(pairs), PART):
                yield _DevicePart(pairs[start : start + PART])


@torch.no_grad()
def _view(tensor: torch.Tensor) -> torch.Tensor | None:
    """int [1 to POINTS], a view of some elements. None for an empty tensor or one that cannot be viewed."""
    bits = _BITS.get(tensor.element_size())
    if bits is None or tensor.numel() == 0 or tensor.device.type == "meta" or not tensor.data_ptr():
        return None
    try:
        plain = tensor.detach().view(bits)
        # A tensor with gaps has no view of evenly spaced elements, but one in its middle.
        if not plain.is_contiguous():
            return plain[tuple(size // 2 for size in plain.shape)].reshape(1)
        flat = plain.view(-1)
        step = max(flat.numel() // POINTS, 1)
        return flat[step // 2 :: step][:POINTS]
    except (RuntimeError, TypeError):  # a layout or type without views of its bits
        return None


class _HostPart:
    """Tensors on the CPU, all of one element size. All elements are read in one gather: an array over the addresses of
    all of them, indexed by address, costs a quarter of a concatenation of the views."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._tensors = [tensor for tensor, _ in pairs]
        views = [view.numpy() for _, view in pairs]
        self._owners = np.repeat(np.arange(len(pairs)), [len(view) for view in views])
        # They keep the memory that is read by address.
        self._views = views
        size = views[0].itemsize
        addresses = np.concatenate(
            [view.ctypes.data + np.arange(len(view), dtype=np.int64) * view.strides[0] for view in views]
        )
        base = int(addresses.min())
        self._is_aligned = not ((addresses - base) % size).any()
        self._places = (addresses - base) // size
        span = int(self._places.max()) + 1
        memory = (ctypes.c_char * (span * size)).from_address(base)
        self._memory = np.ndarray(span, views[0].dtype, memory)  # type: ignore[arg-type]  # only the elements at `_places` are known to be ours

    def read(self, ids: Container[int] | None = None, default: Any = None) -> Any:
        """The elements. With `ids`, those of other tensors are taken from `default`."""
        if ids is None:
            return self._memory.take(self._places) if self._is_aligned else np.concatenate(self._views)
        result = default.copy()
        for index, (tensor, view) in enumerate(zip(self._tensors, self._views)):
            if id(tensor) in ids:
                result[self._owners == index] = view
        return result

    def are_equal(self, a: Any, b: Any) -> bool:
        return bool((a == b).all())

    def differing(self, a: object, b: object) -> list[torch.Tensor]:
        return [self._tensors[index] for index in np.unique(self._owners[a != b])]


class _DevicePart:
    """Some tensors on an accelerator."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._tensors = [tensor for tensor, _ in pairs]
        self._views = [view for _, view in pairs]
        self._owners = np.repeat(np.arange(len(pairs)), [len(view) for view in self._views])

    @torch.no_grad()
    def read(self, ids: Container[int] | None = None, default: Any = None) -> Any:
        if ids is None:
            return torch.cat(self._views)
        pieces = default.split([len(view) for view in self._views])
        pairs = zip(self._tensors, self._views, pieces)
        return torch.cat([view if id(tensor) in ids else piece for tensor, view, piece in pairs])

    def are_equal(self, a: Any, b: Any) -> bool:
        return torch.equal(a, b)

    def differing(self, a: Any, b: Any) -> list[torch.Tensor]:
        return [self._tensors[index] for index in np.unique(self._owners[(a != b).cpu().numpy()])]
