"""PEFT adapters of a served model: local folders with safetensors, nothing else."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from hf_paged.annotations import Model
from hf_paged.model.adapters import BASE
from hf_paged.model.state import state_of

_FILES = {
    "adapter_config.json": "give the folder of a PEFT adapter on the server",
    "adapter_model.safetensors": "save the adapter with safe_serialization=True",
}


def check_adapter(folder: str) -> None:
    """Raises ValueError unless it is a local folder with a PEFT adapter in safetensors."""
    for name, remedy in _FILES.items():
        try:
            is_there = (Path(folder) / name).is_file()
        except (OSError, ValueError) as error:  # a name that no file can have
            raise ValueError(f"{folder[:100]!r} is not a folder: {error}") from error
        if not is_there:
            raise ValueError(f"{folder} has no {name}; {remedy}")


def load_adapter(model: Model, name: str, folder: str) -> None:
    """Load a PEFT adapter under this name. Raises ValueError if that is impossible; the model then computes as before.

    PEFT changes the model before it reads the weights, and leaves weights that the folder does not have at their
    initial values, with which the adapter does nothing. Requests that are being prepared in another thread wait: they
    must not see an adapter that has a part of its layers.
    """
    if name == BASE:
        raise ValueError(f"an adapter cannot have the name {BASE!r}, which stands for the model without adapters")
    with state_of(model).lock:
        if name in (vars(model).get("peft_config") or {}):
            raise ValueError(f"an adapter {name!r} is loaded already; unload it, or choose another name")
        _load(model, name, folder)


def unload_adapter(model: Model, name: str) -> None:
    """Remove an adapter that `load_adapter` has loaded."""
    with state_of(model).lock:
        model.delete_adapter(name)


def _load(model: Model, name: str, folder: str) -> None:
    try:
        found = model.load_adapter(folder, adapter_name=name)  # a folder that exists: nothing is fetched
    except (ImportError, OSError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        _remove(model, name)
        raise ValueError(f"the adapter {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [key for key in found.missing_keys if name in key.split(".")]
    if missing or found.unexpected_keys:
        _remove(model, name)
        wrong = min(missing) if missing else min(found.unexpected_keys)
        raise ValueError(
            f"the adapter {folder} is not one of this model: it {'lacks' if missing else 'has'} {wrong}, and "
            f"{len(missing) + len(found.unexpected_keys) - 1} other weights differ too"
        )


def _remove(model: Model, name: str) -> None:
    """Remove an adapter that was loaded in part."""
    if name in (vars(model).get("peft_config") or {}):
        model._hf_peft_config_loaded = True  # set late when the first adapter is loaded
        model.delete_adapter(name)
