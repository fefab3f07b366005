"""Weights: detects whether a model's weights have changed since something was derived from them.

Cached prefixes, packed copies, CUDA graphs and the support report are all derived from a model's weights. Each stores
the value of one of the counters below and is renewed when the counter has increased. Knows modules and tensors; never
what is derived from them.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hf_paged.locks import usable_after_fork
from hf_paged.model.calls import CALLING, OF_INSTANCE, helpers, modes
from hf_paged.model.overrides import is_override
from hf_paged.model.samples import ContentSample

version_of: Callable[[dict[Any, Any]], int] | None
"""A number that is another one as soon as anything in a dictionary was set or deleted."""
try:
    from torch._C._dynamo.guards import dict_version as version_of
# torch promises nothing here: contents are compared then.
except ImportError:
    version_of = None

MAX_COMPARED_BUFFER = 65_536
"""Buffers with at most this many elements are compared by value: some models replace `inv_freq` by an equal tensor."""

_CONTENTS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_REACH = ("sliding_window", "use_sliding_window", "attention_chunk_size", "layer_types")
"""Attributes of layers and configs that say how far back a token attends, and so which K/V is kept."""
_version_of = attrgetter("_version")
_code_of = attrgetter("__code__")
_address_of = torch.Tensor.data_ptr


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
        self._picture: _Picture | None = None
        self._sample: ContentSample | None = None
        self._surroundings: Surroundings | None = None  # None: not watched, or changed since they were
        self._moved: dict[int, int] = {}  # epoch in which a tensor last changed, by its id
        self.all_moved = 0  # epoch in which all of them last changed
        self.epoch = self.layout = self.structure = self.text = 0

    @property
    def code(self) -> int:
        # Most steps are in no mode, and need not ask which.
        is_in_mode = torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()
        active = modes() if is_in_mode else ()
        return hash((self.text, *active)) if active else self.text

    def look(self, *, contents: bool = False, names: bool = False) -> int:
        """Detect changes since the last look and return the epoch.

        names: also detect an attribute that hides another one, on a module that has lost a third one since the last
        look, so that it has as many as before. contents: likewise, and compare the numbers of modules, and samples of
        all tensors, with those of the last look with `contents`. On an accelerator each look compares only some of the
        tensors in turn, so a change of few tensors is detected some looks later.
        """
        with self._lock:
            model = self._model()
            if model is None:
                return self.epoch
            if self._surroundings is not None and not self._surroundings.are_same():
                self.text += 1
                # Whoever examines the model anew watches others; until then there is nothing to compare.
                self._surroundings = None
            if self._picture is None:
                self._picture = _Picture(model)
            elif not self._picture.is_whole(model) or ((contents or names) and not self._picture.has_same_names()):
                self._replace(_Picture(model))
            elif differ(settings := self._picture.settings(), self._picture.known_settings):
                self._change_all()
                self._picture.known_settings = settings
            elif (versions := self._picture.versions()) != self._picture.known_versions:
                known = self._picture.known_versions
                written = [t for t, old, new in zip(self._picture.versioned, known, versions) if old != new]
                self._move(tensor for tensor in written if not self._picture.is_as_it_was(tensor))
                self._picture.known_versions = versions
            if contents:
                self._look_inside(self._picture)
            return self.epoch

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
        return max(self.all_moved, self._moved.get(id(tensor), 0))

    def release_views(self) -> None:
        """Release tensors that the model no longer has, until the next look with `contents`."""
        with self._lock:
            if self._sample is not None:
                self._sample.drop_views()

    # Increase the counters first: an interrupt then causes a superfluous renewal instead of a missed one.

    def _move(self, tensors: Iterable[torch.Tensor]) -> None:
        ids = [id(tensor) for tensor in tensors]
        if ids:
            self.epoch += 1
            self._moved.update(dict.fromkeys(ids, self.epoch))

    def _move_all(self) -> None:
        self.epoch += 1
        self.all_moved = self.epoch

    def _change_all(self) -> None:
        """Graphs must be captured again too: they contain numbers."""
        self._move_all()
        self.layout += 1

    def _look_inside(self, picture: _Picture) -> None:
        if differ(numbers := picture.numbers(), picture.known_numbers):
            self._change_all()
            picture.known_numbers = numbers
        if self._sample is None or self._sample.tensors is not picture.tensors:
            self._sample = ContentSample(picture.tensors)
        self._move(self._sample.look())

    def _replace(self, new: _Picture) -> None:
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
            self.epoch += 1
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
            self._move(self._sample.look_at({id(t) for t in new.tensors if known.get(id(t)) == _address(t)}))
            self._sample = None
        # Ids of tensors that are gone may be taken again.
        self._moved = {id(t): self._moved[id(t)] for t in new.tensors if id(t) in self._moved}
        self._picture = new


class ClassForwards:
    """A record of the forwards of some classes, of what calls them, of the methods that they call, and of the code in
    all these. An override of a module computes what a call of it computed at that time, and must not hide what other
    code has since set on the class."""

    __slots__ = ("_functions", "_names", "_owners", "known")

    def __init__(self, classes: Iterable[type]) -> None:
        kinds = list(dict.fromkeys(classes))
        places = [(owner, name) for owner in kinds for name in ("forward", *CALLING, *helpers(owner))]
        self._owners, self._names = [owner for owner, _ in places], [name for _, name in places]
        functions = map(getattr, self._owners, self._names, repeat(None))
        self._functions = [each for each in dict.fromkeys(map(_unwrapped, functions)) if isinstance(each, FunctionType)]
        self.known = self._current()

    def _current(self) -> list[Any]:
        return [*map(getattr, self._owners, self._names, repeat(None)), *map(_code_of, self._functions)]

    def changed(self) -> bool:
        return any(map(is_not, self._current(), self.known))


class Surroundings:
    """A record of what a forward reads beside the model: values in dictionaries, names of hooks, whole namespaces,
    and methods of classes.

    Holds the values; after `drop_values` their ids, because a value of other code could keep the model alive.
    """

    def __init__(
        self,
        fields: Sequence[tuple[dict[str, Any], str]],
        hooks: Sequence[Mapping[Any, Any]],
        namespaces: Sequence[Mapping[str, Any]],
        methods: Sequence[tuple[type, str]] = (),
    ) -> None:
        self._methods = methods
        self._fields = [owner for owner, _ in fields], [name for _, name in fields]
        self._hooks = hooks
        self._has_values = True
        self._known_names = list(map(list, hooks))
        self._known_values: list[Any] = self._values()
        self._dicts = [each for each in namespaces if type(each) is dict and version_of is not None]
        self._others = [each for each in namespaces if type(each) is not dict or version_of is None]
        self._known_versions = self._versions()
        self._known_contents = _contents(self._dicts), _contents(self._others)

    def _versions(self) -> list[tuple[int, int]]:
        # The lengths too: from Python 3.12 on, `update` of an empty dictionary is no new version.
        return [] if version_of is None else list(zip(map(version_of, self._dicts), map(len, self._dicts)))

    def _values(self) -> list[Any]:
        methods = [getattr(owner, name, None) for owner, name in self._methods]
        return [*map(dict.get, *self._fields), *methods]

    def drop_values(self) -> None:
        self._has_values = False
        self._known_values = list(map(id, self._known_values))
        self._known_contents = _ids(self._known_contents[0]), _ids(self._known_contents[1])

    def are_same(self) -> bool:
        """Called in every step, so it must be fast: torch's namespace alone has 1,500 names."""
        values = self._values()
        if not self._has_values:
            values = list(map(id, values))
        try:
            return (
                list(map(list, self._hooks)) == self._known_names
                and values == self._known_values
                and self._has_same_dicts()
                and self._are_same(self._others, self._known_contents[1])
            )
        except Exception:  # comparing what other code has put there may raise anything
            return False

    def _has_same_dicts(self) -> bool:
        """Compare the contents of those in which somebody has set or deleted anything."""
        versions = self._versions()
        if versions == self._known_versions:
            return True
        touched = [i for i, (old, new) in enumerate(zip(self._known_versions, versions)) if old != new]
        known = self._known_contents[0]
        is_same = self._are_same([self._dicts[i] for i in touched], [known[i] for i in touched])
        if is_same:
            self._known_versions = versions
        return is_same

    def _are_same(self, namespaces: Sequence[Mapping[str, Any]], known: list[list[Any]]) -> bool:
        contents = _contents(namespaces)
        return (contents if self._has_values else _ids(contents)) == known


def _contents(namespaces: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(each.values()) for each in namespaces]


def _ids(contents: list[list[Any]]) -> list[list[Any]]:
    return [list(map(id, each)) for each in contents]


class _Picture:
    """A record of a model's parts. Holds the parts, but not the model itself.

    tensors: all parameters and buffers; a tensor that wraps others is replaced by its inner tensors. addresses: their
    addresses. versioned: those tensors that count in-place changes.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        contents = [vars(m)[name] for m in modules for name in _CONTENTS]
        # Most are empty, and to look at these costs less than to compare them.
        self._dicts, self._empty = [d for d in contents if d], [d for d in contents if not d]
        self._contents = [dict(d) for d in self._dicts]
        self._objects = [value for contents in self._contents for value in contents.values()]
        # Tensors of one element, unlike others, would be compared by value.
        single = [
            (d, key) for d in self._dicts for key, x in d.items() if isinstance(x, torch.Tensor) and x.numel() < 2
        ]
        self._single_dicts, self._single_keys = [d for d, _ in single], [key for _, key in single]
        self._singles = [d[key] for d, key in single]
        self._modules, self._classes = modules[1:], list(map(type, modules[1:]))
        self._root_class = type(model)
        self._class_forwards = ClassForwards([*self._classes, self._root_class])
        # The root's attributes are looked up each time: they often refer to the model itself.
        self._attributes = [vars(module) for module in modules[1:]]
        called = [
            (own, name) for own, kind in zip(self._attributes, self._classes) for name in (*OF_INSTANCE, *helpers(kind))
        ]
        called += [(own, name) for own in self._attributes for kind in _CONTENTS for name in own[kind]]
        self._first_owners, self._first_names = [own for own, _ in called], [name for _, name in called]
        self._first = self._looked_at_first()
        own = [(*place, value) for place, value in zip(called, self._first) if value is not None]
        self._own_owners, self._own_names = [owner for owner, _, _ in own], [name for _, name, _ in own]
        self._own_values = [value for _, _, value in own]
        self._num_attributes: list[int] = []
        self.has_same_names()
        contents_of_root = [key for name in _CONTENTS for key in vars(model)[name]]
        self._root_names = [*OF_INSTANCE, *helpers(self._root_class), *contents_of_root]
        self._root_forwards = self._root_tokens(model)
        hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]
        self._unhooked, self._hooked = [h for h in hooks if not h], [h for h in hooks if h]
        self._known_hooks = [list(h) for h in self._hooked]
        self._all_hooks = [list(h) for h in hooks]
        self._root_hooks = [list(vars(model)[name]) for name in _HOOKS]
        self._find_tensors()
        # A module's `config` may be anything: a dictionary, or an object without a namespace.
        named = [owner.get("config") for owner in [vars(model), *self._attributes]]
        configs = [vars(each) for each in named if hasattr(each, "__dict__")]
        owners = [*self._attributes, *{id(own): own for own in configs}.values()]
        reaches = [(owner, name) for owner in owners for name in _REACH if name in owner]
        self._reach_owners, self._reach_names = [owner for owner, _ in reaches], [name for _, name in reaches]
        self._reach = self._reaches()
        # Layers of PEFT, which all have this list.
        self._adapters = [attributes for attributes in self._attributes if "merged_adapters" in attributes]
        self.known_settings = self.settings()
        numbered = [
            (attributes, name)
            for attributes in self._attributes
            for name, value in list(attributes.items())  # another thread may set a forward meanwhile
            if type(value) in (float, int, bool) and not name.startswith("_") and name != "training"
        ]
        self._numbered, self._names_of_numbers = [owner for owner, _ in numbered], [name for _, name in numbered]
        self.known_numbers = self.numbers()
        self._buffers = {
            (index, key): (buffer, buffer.detach().clone())
            for index, module in enumerate(modules)
            for key, buffer in module._buffers.items()
            if buffer is not None and not _inner_names(buffer) and buffer.numel() <= MAX_COMPARED_BUFFER
        }

    def _find_tensors(self) -> None:
        found: dict[int, torch.Tensor] = {}
        wrapped: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        for value in self._objects:
            if isinstance(value, torch.Tensor):
                found[id(value)] = value
        queue = list(found.values())
        for tensor in queue:
            for name in _inner_names(tensor):
                inner = getattr(tensor, name)
                wrapped.append((tensor, name, inner))
                if id(inner) not in found:
                    found[id(inner)] = inner
                    queue.append(inner)
        self.ids = frozenset(found)
        self.is_plain = all(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in found.values())
        self._wrappers, self._names = [outer for outer, _, _ in wrapped], [name for _, name, _ in wrapped]
        self._inner = [inner for _, _, inner in wrapped]
        self.tensors = [tensor for tensor in queue if not _inner_names(tensor)]
        self.addresses = [_address(tensor) for tensor in self.tensors]
        self._addressed = [t for t, address in zip(self.tensors, self.addresses) if address is not None]
        self._addresses = [address for address in self.addresses if address is not None]
        self.versioned = [tensor for tensor in queue if not tensor.is_inference()]
        self.known_versions = self.versions()

    def is_whole(self, model: nn.Module) -> bool:
        """Return True if every part is the same object at the same address.

        Called in every step, so it must be fast: some tens of microseconds for 272 weights in 30 layers.
        """
        return (
            (list(map(len, self._attributes)) == self._num_attributes or self.has_same_names())
            and all(map(is_, map(dict.get, self._own_owners, self._own_names), self._own_values))
            and self._has_contents()
            and self._reaches() == self._reach
            and list(map(type, self._modules)) == self._classes
            and type(model) is self._root_class
            and not self._class_forwards.changed()
            and list(map(_address_of, self._addressed)) == self._addresses
            and not any(self._unhooked)
            and not any(self._empty)
            and (not self._hooked or list(map(list, self._hooked)) == self._known_hooks)
            and (not self._inner or all(map(is_, map(getattr, self._wrappers, self._names), self._inner)))
            and self._root_tokens(model) == self._root_forwards
            and [list(vars(model)[name]) for name in _HOOKS] == self._root_hooks
        )

    def _looked_at_first(self) -> list[Any]:
        """Return the attributes on modules that a call or access finds before the class's; None where there is none.

        An access finds them before parameters, buffers and submodules too. Overrides of ours do not count.
        """
        values = list(map(dict.get, self._first_owners, self._first_names))
        if all(map(is_, values, repeat(None))):
            return values
        return [value if value is None else _not_ours(value) for value in values]

    def has_same_names(self) -> bool:
        """Return True if no module has got or lost an attribute that hides another.

        A new attribute changes the number of attributes, unless another was deleted since: so looks with contents ask
        this too.
        """
        # Before the names: what is set meanwhile, the next look counts.
        numbers = list(map(len, self._attributes))
        if all(map(is_, map(dict.get, self._first_owners, self._first_names), self._first)):
            self._num_attributes = numbers
            return True
        # Overrides of other threads are not counted: a forward that is set when they are gone makes up for one.
        return all(map(is_, self._looked_at_first(), self._first))

    def _root_tokens(self, model: nn.Module) -> list[tuple[int, Any] | None]:
        own = vars(model)
        return [_token(_not_ours(own.get(name))) if name in own else None for name in self._root_names]

    def _reaches(self) -> list[Any]:
        return list(map(dict.get, self._reach_owners, self._reach_names))

    def _has_contents(self) -> bool:
        """Compare the dictionaries with `==`, in a third of the time of comparing item by item. Identical objects are
        equal, modules are equal to no other module, and comparing two different tensors raises."""
        try:
            return self._dicts == self._contents and all(
                map(is_, map(dict.get, self._single_dicts, self._single_keys), self._singles)
            )
        except Exception:  # the truth value of a comparison of tensors, of any class, may raise anything
            return False

    def versions(self) -> list[int]:
        return list(map(_version_of, self.versioned))

    def settings(self) -> list[tuple[list[str], Any]]:
        """For each layer with adapters: the merged adapters, and the scaling of each adapter."""
        return [([*a["merged_adapters"]], copy.copy(a.get("scaling"))) for a in self._adapters]

    def numbers(self) -> list[Any]:
        """The public attributes of the modules that are numbers; but for the root, whose dictionary is not kept."""
        return list(map(dict.get, self._numbered, self._names_of_numbers))

    def has_structure_of(self, other: _Picture) -> bool:
        """Return True if both pictures have the same modules, names in them, `forward`s and reach of attention."""
        ours, theirs = self._skeleton(), other._skeleton()
        return (
            list(map(list, self._contents)) == list(map(list, other._contents))
            and len(ours) == len(theirs)
            and all(map(is_, ours, theirs))
            and self._root_forwards == other._root_forwards
            and self._reach == other._reach
        )

    def has_hooks_of(self, other: _Picture) -> bool:
        return self._root_hooks == other._root_hooks and self._all_hooks == other._all_hooks

    def _skeleton(self) -> list[Any]:
        modules = [None if isinstance(x, torch.Tensor) else x for x in self._objects]
        return [*modules, *self._first, *self._classes, self._root_class, *self._class_forwards.known]

    def is_as_it_was(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor is a small CPU buffer that was rewritten with equal values.

        Some rotary embeddings do so in each forward. If the values differ, they are noted for the next comparison.
        """
        for place, (buffer, content) in self._buffers.items():
            if buffer is tensor and buffer.device.type == "cpu":
                if _are_equal(buffer, content):
                    return True
                self._buffers[place] = buffer, buffer.detach().clone()
        return False

    def equal_buffers(self, other: _Picture) -> set[int]:
        """Ids of buffers with the same values as the corresponding buffers in `other`."""
        equal = set()
        for place, (buffer, content) in self._buffers.items():
            old = other._buffers.get(place)
            if old is not None and _are_equal(content, old[1]):
                equal.add(id(buffer))
        return equal


def differ(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return True unless these numbers, or the objects in their places, are known to be equal."""
    try:
        return bool(one != other)
    except Exception:  # a tensor has taken the place of a number: its truth value may raise anything
        return True


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.device == b.device and a.device.type != "meta"
    return same_kind and torch.equal(a, b)


def _inner_names(tensor: torch.Tensor) -> Sequence[str]:
    """Attributes that hold the inner tensors of a wrapper (torchao, DTensor); none for an ordinary tensor."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return ()
    names: Sequence[str] = tensor.__tensor_flatten__()[0]
    return [name for name in names if isinstance(getattr(tensor, name), torch.Tensor)]  # DTensor lists its mesh too


def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(function) if callable(function) else None


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # it has no memory of its own: use its identity
        return None


def _not_ours(forward: object) -> Any:
    """`forward`, or None if it is an override that hf_paged has applied in a step of another thread."""
    return None if is_override(forward) else forward


def _token(forward: object) -> tuple[int, Any] | None:
    """A value that identifies a `forward` without keeping it alive."""
    if forward is None:
        return None
    try:
        return id(forward), weakref.ref(forward)
    except TypeError:  # an object without weak references
        return id(forward), None


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
