"""Records of a model's parts, and of what its forwards read beside it. Each says whether all is as it was.

Some are compared in every step, so that comparing is fast. Knows modules and tensors; never who asks, nor why.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_paged.model.calls import CALLING, OF_INSTANCE, helpers
from hf_paged.model.overrides import is_override

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


class ClassForwards:
    """A record of the forwards of some classes, of what calls them, of the methods that they call, and of the code in
    all these. An override of a module computes what a call of it computed at that time, and must not hide what other
    code has since set on the class."""

    __slots__ = ("_changed_at", "_functions", "_names", "_owners", "known")

    def __init__(self, classes: Iterable[type]) -> None:
        kinds = list(dict.fromkeys(classes))
        places = [(owner, name) for owner in kinds for name in ("forward", *CALLING, *helpers(owner))]
        self._owners, self._names = [owner for owner, _ in places], [name for _, name in places]
        functions = map(getattr, self._owners, self._names, repeat(None))
        self._functions = [each for each in dict.fromkeys(map(_unwrapped, functions)) if isinstance(each, FunctionType)]
        self.known = self._current()
        self._changed_at = False, -1

    def _current(self) -> list[Any]:
        return [*map(getattr, self._owners, self._names, repeat(None)), *map(_code_of, self._functions)]

    def changed(self) -> bool:
        return differ(self._current(), self.known)

    def changed_at(self, layout: int) -> bool:
        """The same, as of the look that found this `Weights.layout`, which is another one after such a change."""
        if layout != self._changed_at[1]:
            self._changed_at = self.changed(), layout
        return self._changed_at[0]


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
        self._methods = [owner for owner, _ in methods], [name for _, name in methods]
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
        return [*map(dict.get, *self._fields), *map(getattr, *self._methods, repeat(None))]

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


class Picture:
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
        self.addresses = [address_or_none(tensor) for tensor in self.tensors]
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

    def has_structure_of(self, other: Picture) -> bool:
        """Return True if both pictures have the same modules, names in them, `forward`s and reach of attention."""
        ours, theirs = self._skeleton(), other._skeleton()
        return (
            list(map(list, self._contents)) == list(map(list, other._contents))
            and len(ours) == len(theirs)
            and all(map(is_, ours, theirs))
            and self._root_forwards == other._root_forwards
            and self._reach == other._reach
        )

    def has_hooks_of(self, other: Picture) -> bool:
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

    def equal_buffers(self, other: Picture) -> set[int]:
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


def address_or_none(tensor: torch.Tensor) -> int | None:
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
