"""PEFT adapters of a served model: local folders with safetensors, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def check_adapter(folder: str) -> None:
    """Raises ValueError unless it is a local folder with a PEFT adapter in safetensors."""
    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds no adapter_config.json; give the folder of a PEFT adapter on the server")
    if not (path / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder} holds no adapter_model.safetensors; save the adapter with safe_serialization=True")


def load_adapter(model: Any, name: str, folder: str) -> None:
    """Load a PEFT adapter under this name. Raises ValueError if that is impossible."""
    try:
        model.load_adapter(folder, adapter_name=name)  # a folder that exists: nothing is fetched
    except (ImportError, OSError, LookupError, RuntimeError, TypeError, SafetensorError) as error:
        raise ValueError(f"the adapter {folder} cannot be loaded: {type(error).__name__}: {error}") from error
