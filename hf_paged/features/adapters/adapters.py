"""Choose the PEFT adapters of a request, and switch a model to them during a forward.

Knows only PEFT's layers. PEFT is optional and is not imported while a model has no adapters.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from hf_paged.annotations import Model
from hf_paged.integration.substitutes import Substitute
from hf_paged.model.state import state_of

BASE = "__base__"
"""PEFT's name, in its argument `adapter_names`, for the model without adapters."""

# Their PEFT models take additional arguments in every call.
_CALL_KINDS = ("POLY", "XLORA")

_Names = dict[torch.nn.Module, tuple[str, ...]]
_Result = TypeVar("_Result")


class AdapterGone(RuntimeError):
    """An adapter that a request uses has been deleted or replaced."""


class AdapterChoice:
    """The adapters that compute a request, by layer; a layer that is not in `names` computes without adapters.

    `configs` are the adapters' configs at the time of the choice: a different object means that another adapter has
    taken the name. `key` is unique among all choices of one Adapters; None is the model without adapters.
    """

    __slots__ = ("configs", "description", "key", "names", "switches")

    def __init__(self, names: _Names, configs: dict[str, Any], key: str | None) -> None:
        self.names = names
        self.configs = configs
        self.key = key
        self.description: bytes | None = None  # when `Adapters.describe` has made it
        self.switches: _Switches | None = None  # when `Adapters.run` has made them


class Adapters:
    """The adapters of one model. Equal choices are one object.

    Adapters may be loaded or deleted between steps, not while a step runs in another thread, and activated at any time.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        # Do not return a call's result while holding it: Ctrl-C between the call and the release would leave it held.
        self._lock = state_of(model).lock
        self._base = AdapterChoice({}, {}, None)
        self._keys = itertools.count()
        self._configs: dict[str, Any] = {}
        self._layers: dict[Any, frozenset[str]] = {}  # PEFT's layers in the model, with the adapters each has
        self._choices: dict[frozenset[tuple[torch.nn.Module, tuple[str, ...]]], AdapterChoice] = {}
        self._described: dict[bytes, AdapterChoice] = {}
        self._seen = False

    @property
    def seen(self) -> bool:
        """False if the model has never had adapters, so that there is nothing to choose or switch."""
        self._seen = self._seen or bool(vars(self._model).get("peft_config"))
        return self._seen

    def choose(self, adapter: str | None) -> AdapterChoice:
        """The adapters for a request: the one of that name alone, BASE (none), or None for all that are active now.

        Raises ValueError if the adapter is not loaded or cannot be chosen.
        """
        if adapter in (None, BASE) and not self.seen:
            # Without waiting for a forward, which holds the lock.
            return self._base
        with self._lock:
            self._look()
            choice = self._choice(self._active() if adapter is None else self._named(adapter))
        return choice

    def alone(self) -> list[AdapterChoice]:
        """List the active adapters, the bare model, then each adapter alone; skip choices that no request can make."""
        found: list[AdapterChoice] = []
        for name in (None, BASE, *(vars(self._model).get("peft_config") or {})):
            # Some adapters no request can choose, and no others can be while some are merged.
            with suppress(ValueError):
                if (choice := self.choose(name)) not in found:
                    found.append(choice)
        return found

    def is_active(self, choice: AdapterChoice) -> bool:
        """Return True if the model's owner has activated the same adapters."""
        return choice is self.choose(None)

    def run(self, choice: AdapterChoice, compute: Callable[[], _Result]) -> _Result:
        """Return the result of `compute` with the choice activated; the model is restored even after an error.

        Raises AdapterGone if one of the choice has been deleted, RuntimeError if merged ones cannot be switched off.
        """
        with self._lock:
            self._look()
            result = self._switches_to(choice).run(compute)
        return result

    def describe(self, choice: AdapterChoice) -> bytes:
        """The choice as data, for the same model with the same adapters in another process."""
        if choice.description is None:
            numbers = {layer: number for number, layer in enumerate(self._layers)}
            names = [(numbers[layer], own) for layer, own in choice.names.items()]
            choice.description = json.dumps((choice.key, len(numbers), names)).encode()
        return choice.description

    def described(self, description: bytes) -> AdapterChoice:
        """The choice that another process has described.

        Raises RuntimeError if the adapters of this process are others.
        """
        with self._lock:
            self._look()
            choice = self._described.get(description)
            if choice is None:
                key, count, numbered = json.loads(description)
                layers = list(self._layers)
                names = {layers[number]: tuple(own) for number, own in numbered} if count == len(layers) else {}
                lost = [name for own in names.values() for name in own if name not in self._configs]
                if count != len(layers) or lost:
                    raise RuntimeError(
                        f"the driver has adapters in {count} layers, this rank in {len(layers)}"
                        + (f", without {_list(lost[:1])}" if lost else "")
                        + "; load the same adapters, in the same order, on every rank"
                    )
                configs = {name: self._configs[name] for own in names.values() for name in own}
                choice = self._described[description] = AdapterChoice(names, configs, key)
        return choice

    def _named(self, adapter: str) -> _Names:
        if adapter != BASE:
            if not isinstance(adapter, str) or adapter not in self._configs:
                raise ValueError(f"adapter={adapter!r} is not loaded: {self._remedy()}")
            _refuse(adapter, self._configs[adapter])
        if merged := self._merged():
            raise ValueError(
                f"adapter={adapter!r}: {_list(merged)} is merged into the weights and cannot be switched off; call "
                "unmerge_adapter() on the PEFT model first"
            )
        names: _Names = {layer: (adapter,) for layer, available in self._layers.items() if adapter in available}
        if not names and adapter != BASE:
            raise ValueError(f"adapter {adapter!r} has no weights in layers that can be switched; use model.generate")
        return names

    def _switches_to(self, choice: AdapterChoice) -> _Switches:
        lost = [name for name, config in choice.configs.items() if self._configs.get(name) is not config]
        if lost:
            raise AdapterGone(f"{_list(lost)} was deleted or replaced after this request had been added")
        merged = [layer for layer in self._layers if layer.merged_adapters]
        # Merged adapters are in the weights, so only the choice that has them can be computed.
        if merged and choice.names != self._active():
            raise RuntimeError(f"{_list(self._merged())} was merged into the weights after this request had been added")
        switches = choice.switches
        # Kept, because every step needs them, until layers or merges are others.
        if switches is None or switches.layers is not self._layers or switches.merged != merged:
            switches = choice.switches = _Switches(self._layers, choice.names, merged)
        return switches

    def _look(self) -> None:
        """Find the adapters' layers again if adapters have come or gone."""
        configs = vars(self._model).get("peft_config") or {}
        # By identity: another adapter may have taken the name.
        if configs.keys() == self._configs.keys() and all(self._configs[name] is configs[name] for name in configs):
            return
        layers = layers_of(self._model) if configs else {}
        self._layers, self._configs, self._described = layers, dict(configs), {}
        # A name may come back with other weights.
        self._choices = {
            key: choice
            for key, choice in self._choices.items()
            if all(configs.get(name) is config for name, config in choice.configs.items())
        }

    def _active(self) -> _Names:
        """The adapters that are active in the model now."""
        names: _Names = {}
        for layer, available in self._layers.items():
            if not _disabled.own(layer):
                active = _active.own(layer)
                active = (active,) if isinstance(active, str) else active
                if own := tuple([name for name in active if name in available]):
                    names[layer] = own
        return names

    def _merged(self) -> list[str]:
        return sorted({name for layer in self._layers for name in layer.merged_adapters})

    def _choice(self, names: _Names) -> AdapterChoice:
        if not names:
            return self._base
        # By layers and names, so that a name and what is active now are one choice if they mean the same.
        key = frozenset(names.items())
        known = self._choices.get(key)
        if known is None:
            configs = {name: self._configs.get(name) for own in names.values() for name in own}
            for name, config in configs.items():
                _refuse(name, config)
            known = self._choices[key] = AdapterChoice(names, configs, str(next(self._keys)))
        return known

    def _remedy(self) -> str:
        if not self._configs:
            return "the model has no adapters; load it with load_adapter, or leave adapter out"
        loaded = ", ".join(map(repr, self._configs))
        return f"choose one of {loaded} or {BASE!r}, or load it with load_adapter"


def obstacle(config: Any) -> str | None:
    """Why requests cannot choose such an adapter, whose effect depends on more than a layer's input; None: they can."""
    kind = getattr(getattr(config, "peft_type", None), "value", None)
    if getattr(config, "is_prompt_learning", False):
        found = f"is of the kind {kind}, which changes the inputs of generate"
    elif getattr(config, "alora_invocation_tokens", None):
        found = "is switched on by tokens of the prompt (alora_invocation_tokens)"
    elif kind in _CALL_KINDS:
        found = f"is of the kind {kind}, which takes arguments of its own in every call"
    else:
        return None
    return f"{found}, which the engine does not do; use model.generate"


def _refuse(name: str, config: Any) -> None:
    """Raises ValueError for an adapter that no request can choose."""
    if found := obstacle(config):
        raise ValueError(f"adapter {name!r} {found}")


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Compute as the base does, in trials of the model: what an adapter does wrong is its own. Merged ones stay."""
    layers = layers_of(model) if vars(model).get("peft_config") else {}
    outer = _disabled.here.values
    with state_of(model).lock:
        try:
            # PEFT would unmerge a layer that is disabled, in the user's weights.
            own = [id(layer) for layer in layers if not layer.merged_adapters]
            _disabled.here.values = {**outer, **dict.fromkeys(own, True)}
            yield
        finally:
            _disabled.here.values = outer


def switch_off(model: torch.nn.Module) -> None:
    """Leave the model as its base, until a request or `Adapters.run` switches adapters on."""
    for layer in layers_of(model):
        layer._disable_adapters = True


def kinds() -> tuple[type, ...]:
    """The classes of PEFT's layers. From now on each thread may switch them for itself."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = BaseTunerLayer, AuxiliaryTrainingWrapper
    for owner in found:
        _active.put_on(owner)
        _disabled.put_on(owner)
    return found


def layers_of(model: torch.nn.Module) -> dict[Any, frozenset[str]]:
    """PEFT's layers in the model, with the adapters each has."""
    known = kinds()
    found: Iterator[Any] = (module for module in model.modules() if isinstance(module, known))
    return {module: frozenset(module._get_available_adapters()) for module in found}


def _list(names: list[str]) -> str:
    return "adapter " + ", ".join(map(repr, names))


_active, _disabled = Substitute("_active_adapter"), Substitute("_disable_adapters")


class _Switches:
    """PEFT's layers as a choice has them, within `run` and for its thread. The layers stay as they are: PEFT's own
    set_adapter would switch them for all threads, and set which weights require gradients. So do merged ones, which
    PEFT would unmerge, in the user's weights."""

    def __init__(self, layers: dict[Any, frozenset[str]], names: _Names, merged: list[Any]) -> None:
        self.layers, self.merged = layers, merged
        switched = [layer for layer in layers if layer not in merged]
        self._disabled = {id(layer): layer not in names for layer in switched}
        self._active = {id(layer): list(names[layer]) for layer in switched if layer in names}

    def run(self, compute: Callable[[], _Result]) -> _Result:
        outer = _active.here.values, _disabled.here.values
        try:
            _active.here.values = {**outer[0], **self._active}
            _disabled.here.values = {**outer[1], **self._disabled}
            return compute()
        finally:
            _active.here.values, _disabled.here.values = outer
