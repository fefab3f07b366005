"""Weights: detects whether a model's weights have changed since something was derived from them.

Cached prefixes, packed copies, CUDA graphs and the support report are all derived from a model's weights. Each stores
the value of one of the counters below and is renewed when the counter has increased. Knows modules and tensors; never
what is derived from them.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Container, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hf_paged.locks import usable_after_fork
from hf_paged.model.calls import modes
from hf_paged.model.picture import Picture, Surroundings, address_or_none, differ


class Weights:
    """The weights of one model. `look` detects changes and increases these counters:

    - `structure`: a module or a `forward` was added, replaced or removed, or a module's class or
      the `forward` of a class replaced, or what calls a `forward` or is called by it (`_call_impl`, a method), or a
      sliding window is another;
    - `text`: as for `structure`, or a forward hook was added or removed, or the `Surroundings` have changed;
    - `layout`: as for `structure`, or a tensor has another address;
    - `epoch`: as for `layout`, or a tensor was replaced or changed, so that the model may compute other values.

    `code` is a number of `text` and of the modes of torch in the calling thread: another one for others.

    These changes are detected: replaced parameters, buffers and submodules; addresses and versions of tensors, and of
    the inner tensors of a tensor that wraps others; `forward` attributes and forward hooks; merged PEFT adapters and
    their scalings; steps of torch's optimizers. With `contents`, some elements of each tensor are compared as well,
    which detects most writes through `.data`, and the public attributes of modules that are numbers (`eps`, `scaling`).
    All other changes must be reported by calling `changed`.

    Holds the model weakly; any method may be called from any thread.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._lock = usable_after_fork(threading.RLock())
        self._picture: Picture | None = None
        self._sample: ContentSample | None = None
        self._surroundings: Surroundings | None = None  # None: not watched, or changed since they were
        self._moved: dict[int, int] = {}  # epoch in which a tensor last changed, by its id
        self.all_moved = 0  # epoch in which all of them last changed
        self._is_due = False  # versions are to be compared
        self._epoch = self.layout = self.structure = self.text = 0

    @property
    def code(self) -> int:
        # Most steps are in no mode, and need not ask which.
        is_in_mode = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        active = modes() if is_in_mode else ()
        return hash((self.text, *active)) if active else self.text

    @property
    def epoch(self) -> int:
        self._compare_versions()
        return self._epoch

    def look(self, *, contents: bool = False, names: bool = False) -> None:
        """Detect changes since the last look; those of tensors' versions when somebody asks for them.

        names: also detect an attribute that hides another one, on a module that has lost a third one since the last
        look, so that it has as many as before. contents: likewise, and compare the numbers of modules, and samples of
        all tensors, with those of the last look with `contents`. On an accelerator each look compares only some of the
        tensors in turn, so a change of few tensors is detected some looks later.
        """
        with self._lock:
            model = self._model()
            if model is None:
                return
            if self._surroundings is not None and not self._surroundings.are_same():
                self.text += 1
                # Whoever examines the model anew watches others; until then there is nothing to compare.
                self._surroundings = None
            if self._picture is None:
                self._picture = Picture(model)
            elif not self._picture.is_whole(model) or ((contents or names) and not self._picture.has_same_names()):
                self._replace(Picture(model))
            elif differ(settings := self._picture.settings(), self._picture.known_settings):
                self._change_all()
                self._picture.known_settings = settings
            self._is_due = True
            if contents:
                self._compare_versions()
                self._look_inside(self._picture)

    def watch(self, surroundings: Surroundings) -> None:
        """Compare these in each look from now on, until one has changed."""
        with self._lock:
            self._surroundings = surroundings

    def changed(self) -> None:
        """Report that the weights have changed."""
        with self._lock:
            self._move_all()

    def changed_by(self, parameters: Iterable[torch.Tensor]) -> None:
        """Report that an optimizer has changed these tensors; tensors of other models are ignored."""
        with self._lock:
            if self._picture is not None:
                ids = self._picture.ids
                self._move(parameter for parameter in parameters if id(parameter) in ids)

    @property
    def are_plain(self) -> bool:
        """Return True if the last look found only tensors of torch's own classes."""
        return self._picture is None or self._picture.is_plain

    def moved_at(self, tensor: torch.Tensor) -> int:
        """The epoch in which this tensor of the model last changed, as of the last look."""
        self._compare_versions()
        return max(self.all_moved, self._moved.get(id(tensor), 0))

    def release_views(self) -> None:
        """Release tensors that the model no longer has, until the next look with `contents`."""
        with self._lock:
            if self._sample is not None:
                self._sample.drop_views()

    def _compare_versions(self) -> None:
        """Once after each look, and only if asked: it takes a third of a look, and replayed graphs need no epoch."""
        with self._lock:
            picture = self._picture
            if not self._is_due or picture is None:
                return
            if (versions := picture.versions()) != picture.known_versions:
                written = [t for t, old, new in zip(picture.versioned, picture.known_versions, versions) if old != new]
                self._move(tensor for tensor in written if not picture.is_as_it_was(tensor))
                picture.known_versions = versions
            self._is_due = False

    # Increase the counters first: an interrupt then causes a superfluous renewal instead of a missed one.

    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        ids = [id(tensor) for tensor in tensors]
        if ids:
            self._epoch += 1
            self._moved.update(dict.fromkeys(ids, self._epoch))

    def _move_all(self) -> None:
        self._epoch += 1
        self.all_moved = self._epoch

    def _change_all(self) -> None:
        """Graphs must be captured again too: they contain numbers."""
        self._move_all()
        self.layout += 1

    def _look_inside(self, picture: Picture) -> None:
        if differ(numbers := picture.numbers(), picture.known_numbers):
            self._change_all()
            picture.known_numbers = numbers
        if self._sample is None or self._sample.tensors is not picture.tensors:
            self._sample = ContentSample(picture.tensors)
        self._move(self._sample.look())

    def _replace(self, new: Picture) -> None:
        """Tensors, or the memory of some, were replaced: find out which, and whether that can change results."""
        old = self._picture
        assert old is not None
        # By identity and address, because the same tensor may have got other memory.
        known = {id(tensor): address for tensor, address in zip(old.tensors, old.addresses)}
        others = [t for t, address in zip(new.tensors, new.addresses) if known.get(id(t)) != address]
        versions = {id(tensor): version for tensor, version in zip(old.versioned, old.known_versions)}
        others += [t for t, v in zip(new.versioned, new.known_versions) if versions.get(id(t), v) != v]
        same_structure = new.has_structure_of(old)
        same_code = same_structure and new.has_hooks_of(old)
        if not same_code:
            self._epoch += 1
            self.text += 1
        if not same_structure:
            self.structure += 1
        if not same_code or others or len(known) != len(new.tensors):
            self.layout += 1
        # Only within the same modules: places of buffers are counted by module.
        equal = new.equal_buffers(old) if same_structure else set()
        self._move(tensor for tensor in others if id(tensor) not in equal)
        if differ(new.known_settings, old.known_settings) or (
            same_structure and differ(new.known_numbers, old.known_numbers)
        ):
            self._change_all()
        if self._sample is not None and self._sample.tensors is old.tensors:
            # Tensors that are where they were may have been written to meanwhile.
            self._move(self._sample.look_at({id(t) for t in new.tensors if known.get(id(t)) == address_or_none(t)}))
            self._sample = None
        # Ids of tensors that are gone may be taken again.
        self._moved = {id(t): self._moved[id(t)] for t in new.tensors if id(t) in self._moved}
        self._picture = new


# -- contents --------------------------------------------------------------------------------------------------------

# Writes through `.data` increase no version of a tensor.
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


# -- optimizers ------------------------------------------------------------------------------------------------------

_watched: weakref.WeakSet[Weights] = weakref.WeakSet()
_watched_lock = usable_after_fork(threading.Lock())
_hook: Any = None


def watch_optimizers(weights: Weights) -> None:
    """Report the steps of all torch optimizers to `weights`, because fused ones do not increase tensors' versions."""
    global _hook
    with _watched_lock:
        _watched.add(weights)
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with _watched_lock:
        watched = list(_watched)
    for weights in watched:
        weights.changed_by(parameter for group in optimizer.param_groups for parameter in group["params"])
