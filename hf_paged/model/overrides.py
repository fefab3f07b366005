"""One reversible list of patches, each of which replaces a value in a namespace.

All temporary changes that hf_paged makes to a model during a forward are made here: forwards of modules and functions
of modeling modules. (What configs and PEFT's layers say changes for one thread only: `integration/substitutes.py`.)
Knows nothing of models, but that copies and pickles of their modules do without the patches.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from itertools import repeat
from operator import is_
from typing import Any, Final, NamedTuple, Protocol

from torch import nn

from hf_paged.locks import usable_after_fork
from hf_paged.model.calls import OF_INSTANCE, helpers

ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""The value of a name that the namespace does not have."""

_lock = usable_after_fork(threading.RLock())
_functions: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # override -> what it replaces
_in_place: dict[int, Overrides] = {}  # those with users, by id


class Override(Protocol):
    """Replaced parts of a model during a packed forward, the `user`. Any number of forwards may overlap."""

    def apply(self, user: object) -> object: ...

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""


class Patch(NamedTuple):
    """Set `namespace[name]` to `value` in place of `replaces`. Values are compared by identity."""

    namespace: dict[str, Any]
    name: str
    value: Any
    replaces: Any = ABSENT


class Overrides:
    """Patches that are applied and undone together.

    A patch is applied only if the namespace holds the value that it replaces, and undone only if the namespace holds
    the value that it set. A value that other code has set, before or meanwhile, stays in effect.

    The patches are in place from the first user's `apply` to the last user's `undo`. Ctrl-C may interrupt both methods
    between any two instructions: `undo` removes all patches that are in place, and may be called again.
    """

    __slots__ = ("_added", "_replaced", "_users")

    def __init__(self, patches: Iterable[Patch] = ()) -> None:
        # Patches that only add a name are the many (one for each linear layer and norm): they are kept in columns,
        # which the interpreter walks in C.
        every = list(patches)
        added = [patch for patch in every if patch.replaces is ABSENT and patch.value is not ABSENT]
        self._added = [p.namespace for p in added], [p.name for p in added], [p.value for p in added]
        self._replaced = [p for p in every if p.replaces is not ABSENT or p.value is ABSENT]
        self._users: dict[int, int] = {}  # their ids -> their threads
        for patch in every:
            if callable(patch.value) and not is_override(patch.value):
                mark(getattr(patch.value, "__func__", patch.value))

    def apply(self, user: object) -> list[Any]:
        """Apply the patches; returns the current value of each added name, which other code may have set."""
        with _lock:
            self._users[id(user)] = threading.get_ident()
            _in_place[id(self)] = self
            for namespace, name, value, replaces in self._replaced:
                _swap(namespace, name, replaces, value)
            # No `return` of a call's result under the lock: Ctrl-C after the call could leave the lock held.
            held = list(map(dict.setdefault, *self._added))
        return held

    def undo(self, user: object) -> None:
        with _lock:
            self._users.pop(id(user), None)
            if not self._users:
                self._take_out()

    def withdraw(self) -> None:
        """Undo the patches for all users."""
        with _lock:
            self._users.clear()
            self._take_out()

    def keep_thread(self, thread: int) -> None:
        """Undo the patches for users in other threads."""
        for user in [user for user, own in self._users.items() if own != thread]:
            del self._users[user]
        if not self._users:
            self._take_out()

    def _take_out(self) -> None:
        namespaces, names, values = self._added
        # The usual case, in C.
        if all(map(is_, map(dict.get, namespaces, names), values)):
            list(map(dict.pop, namespaces, names, repeat(None)))
        else:
            for namespace, name, value in zip(namespaces, names, values, strict=True):
                _swap(namespace, name, value, ABSENT)
        for namespace, name, value, replaces in self._replaced:
            _swap(namespace, name, value, replaces)
        _in_place.pop(id(self), None)


def _after_fork() -> None:
    """Undo the patches of steps in threads that this child does not have."""
    for overrides in list(_in_place.values()):
        overrides.keep_thread(threading.get_ident())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _swap(namespace: dict[str, Any], name: str, old: object, new: object) -> None:
    if namespace.get(name, ABSENT) is not old:
        return
    if new is ABSENT:
        namespace.pop(name, None)
    else:
        namespace[name] = new


# -- functions as values ---------------------------------------------------------------------------------------------


def mark(function: object, replaced: object = None) -> Any:
    """Register a function as an override, with the function that it replaces, if any.

    An attribute of the function would not do: `functools.wraps` would copy it to a wrapper of other code.
    """
    _functions[function] = replaced
    return function


def is_override(value: object) -> bool:
    """Return True if a function, or the function of a bound method, is registered as an override."""
    function = getattr(value, "__func__", value)
    try:
        return function in _functions
    except TypeError:  # a value that other code has set need not be hashable
        return False


def without_override(value: object) -> Any:
    """The value that an override replaces; any other value unchanged."""
    return _functions[value] if is_override(value) else value


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Reduce a module for `copy` and `pickle` without the overrides of steps in progress."""
    made = super(nn.Module, module).__reduce_ex__(protocol)
    if isinstance(made, str) or len(made) < 3 or not isinstance(made[2], dict):
        return made
    return (*made[:2], _without_overrides(made[2]), *made[3:])


def _without_overrides(state: dict[str, Any]) -> dict[str, Any]:
    """A copy, because a copy or pickle walks through it for long, while steps begin and end."""
    return {name: value for name, value in dict(state).items() if not (callable(value) and is_override(value))}


def _replicate(module: Any) -> Any:
    """Make nn.DataParallel's replica of a module without the overrides of steps in progress."""
    replica = _own_replicate(module)
    replica.__dict__ = _without_overrides(vars(replica))
    return replica


nn.Module.__reduce_ex__ = _reduce  # type: ignore[method-assign,assignment]
_own_replicate: Any = nn.Module._replicate_for_data_parallel
nn.Module._replicate_for_data_parallel = _replicate  # type: ignore[method-assign]


def uncompiled_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model without those that are compiled within it, and their parts: these are traced as a whole,
    in which an override would be a break."""
    compiled = [each for each in model.modules() if each is not model and _is_compiled(each)]
    inside = {part for each in compiled for part in each.modules()}
    return [module for module in model.modules() if module not in inside]


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def foreign_forward(module: Any) -> bool:
    """Return True if other code has replaced `forward`, its caller or a helper on this module."""
    own = vars(module)
    values = (own.get(name) for name in (*OF_INSTANCE, *helpers(type(module))))
    return any(value is not None and not is_override(value) for value in values)


def is_unhooked(module: Any) -> bool:
    """Return True if a call of the module runs only its class's forward or an override of ours."""
    return not (module._forward_hooks or module._forward_pre_hooks or foreign_forward(module))
