"""Thread-local values of attributes of other packages' objects, while a thread computes.

The objects themselves stay as they are: other threads, copies, pickles and forked children see what their owner has
set. Knows neither configs nor adapters. Standard library only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

_NONE: Final[Any] = object()


class _Here(threading.local):
    """The values that the present thread sees, by the id of the object. Whoever sets them puts back what was there: an
    assignment, which Ctrl-C cannot interrupt."""

    # Not a context variable: torch.compile reads a thread's own value, and compiles anew for another one.
    values: Mapping[int, Any] = {}


_every: list[_Here] = []


def substituted() -> list[Mapping[int, Any]]:
    """All that this thread substitutes now."""
    return [here.values for here in _every]


def substitute(values: Sequence[Mapping[int, Any]]) -> None:
    """Substitute these values, as `substituted` had them; nothing where there are too few."""
    for index, here in enumerate(_every):
        here.values = values[index] if index < len(values) else {}


class Substitute:
    """An attribute of some classes, as a descriptor in its place: what a thread does not substitute is read from the
    object's own namespace, where every thread writes.

    It stays on the classes once it is there: what torch.compile has compiled reads no descriptor that is put on later.
    """

    def __init__(self, name: str, default: Any = _NONE, here: _Here | None = None) -> None:
        """default: of objects without the attribute, where the classes have one."""
        self.name = name
        self._default = default
        self.here = here or _Here()
        if here is None:
            _every.append(self.here)

    def put_on(self, owner: type) -> None:
        """Idempotent."""
        if not isinstance(vars(owner).get(self.name), Substitute):
            setattr(owner, self.name, Substitute(self.name, getattr(owner, self.name, _NONE), self.here))

    def own(self, owner: Any) -> Any:
        """Return the value for threads that substitute nothing. Raises AttributeError if there is none."""
        own = owner.__dict__
        return own[self.name] if self.name in own else getattr(type(owner), self.name)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            if self._default is _NONE:
                raise AttributeError(f"{kind!r} has no attribute {self.name!r}")
            return self._default
        values, own, key = self.here.values, owner.__dict__, id(owner)
        if key in values:
            return values[key]
        return own[self.name] if self.name in own else getattr(type(owner), self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self.name] = value

    def __delete__(self, owner: Any) -> None:
        if self.name not in owner.__dict__:
            raise AttributeError(self.name)
        del owner.__dict__[self.name]
