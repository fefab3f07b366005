"""One reversible list of patches: values put in place of others in some namespaces, and taken out again.

Everything hf_paged changes in a model for the time of a forward is changed here: forwards of modules, functions of
modeling modules, fields of configs, PEFT's switches. Standard library only; knows nothing of models.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from itertools import repeat
from operator import is_, is_not
from typing import Any, Final, NamedTuple, Protocol

ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""As a value: the namespace does not have the name."""

_lock = threading.RLock()
_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # overrides -> what each replaces


class Override(Protocol):
    """Parts of a model replaced for the time of one packed forward, the `user`. Any number of them may overlap."""

    def apply(self, user: object) -> None: ...

    def undo(self, user: object) -> None:
        """Undo `apply`, or the part of it that was done; may be called again."""


class Patch(NamedTuple):
    """`namespace[name]` is to be `value` instead of `replaces`. Values are compared by identity."""

    namespace: dict[str, Any]
    name: str
    value: Any
    replaces: Any = ABSENT


class Overrides:
    """Patches that are applied and undone together.

    A patch is put in place only where the namespace holds what it replaces, and undone only where the namespace holds
    what the patch put there. A value that other code has set, before or meanwhile, stays in force and in place.

    The patches are in place from the first user's `apply` to the last user's `undo`. Ctrl-C may interrupt both methods
    between any two instructions: `undo` takes out whatever part of the list is in place, and may be called again.
    """

    __slots__ = ("_added", "_replaced", "_users")

    def __init__(self, patches: Iterable[Patch] = ()) -> None:
        # Patches that only add a name are the many (one for each linear layer and norm): they are kept in columns,
        # which the interpreter walks in C.
        every = list(patches)
        added = [patch for patch in every if patch.replaces is ABSENT and patch.value is not ABSENT]
        self._added = [p.namespace for p in added], [p.name for p in added], [p.value for p in added]
        self._replaced = [p for p in every if p.replaces is not ABSENT or p.value is ABSENT]
        self._users: set[int] = set()

    @property
    def in_use(self) -> bool:
        return bool(self._users)

    def apply(self, user: object) -> list[Any]:
        """Returns what the names that are to be added hold now: the patch's value, or what other code has set."""
        with _lock:
            self._users.add(id(user))
            for namespace, name, value, replaces in self._replaced:
                _swap(namespace, name, replaces, value)
            return list(map(dict.setdefault, *self._added))

    def undo(self, user: object) -> None:
        with _lock:
            self._users.discard(id(user))
            if not self._users:
                self._take_out()

    def withdraw(self) -> None:
        """Undo for all users."""
        with _lock:
            self._users.clear()
            self._take_out()

    def _take_out(self) -> None:
        namespaces, names, values = self._added
        if all(map(is_, map(dict.get, namespaces, names), values)):  # as always
            list(map(dict.pop, namespaces, names, repeat(None)))
        else:
            for namespace, name, value in zip(namespaces, names, values, strict=True):
                _swap(namespace, name, value, ABSENT)
        for namespace, name, value, replaces in self._replaced:
            _swap(namespace, name, value, replaces)


def _swap(namespace: dict[str, Any], name: str, old: Any, new: Any) -> None:
    if namespace.get(name, ABSENT) is not old:
        return
    if new is ABSENT:
        namespace.pop(name, None)
    else:
        namespace[name] = new


# -- functions as values ---------------------------------------------------------------------------------------------


def mark(function: Any, replaced: Any = None) -> Any:
    """Remember that a function is an override, and which function it replaces, if that is one. A mark on the function
    itself would be copied by `functools.wraps`: a wrapper that other code has made of an override is not ours."""
    _functions[function] = replaced
    return function


def is_override(value: Any) -> bool:
    """Whether a function, or the function of a bound method, is marked."""
    function = getattr(value, "__func__", value)
    try:
        return function in _functions
    except TypeError:  # what other code has set need not be hashable
        return False


def without_override(value: Any) -> Any:
    """What an override replaces; any other value as it is."""
    return _functions[value] if is_override(value) else value


def foreign_forward(module: Any) -> bool:
    """Whether other code has set a `forward` on this module, in place of its class's."""
    own = vars(module).get("forward")
    return own is not None and not is_override(own)


class ClassForwards:
    """The forwards of some classes, as they were. An override of a module computes what the class's forward did then,
    and must not hide one that other code has put into the class since."""

    __slots__ = ("_classes", "_forwards")

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = list(dict.fromkeys(classes))
        self._forwards = self._current()

    def _current(self) -> list[Any]:
        return [getattr(owner, "forward", None) for owner in self._classes]

    def changed(self) -> bool:
        return any(map(is_not, self._current(), self._forwards))
