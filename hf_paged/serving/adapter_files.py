"""Checks of a PEFT adapter by its files alone, before a model loads any of them. Knows no model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hf_paged.features.adapters.adapters import obstacle

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FILES = {
    _CONFIG: "give the folder of a PEFT adapter on the server",
    _WEIGHTS: "save the adapter with safe_serialization=True",
}
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights with which the adapter was trained beside the base's own weights."""
# For all patterns of a config, which take milliseconds unless they backtrack.
_SECONDS = 2
_PLAIN = re.compile(r"[\w.-]*")
_MATCH = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, (method, pattern) in enumerate(patterns):
    print(number, flush=True)
    try:
        for name in names:
            getattr(re, method)(pattern, name)
    except (re.error, OverflowError, RecursionError):
        pass  # PEFT will say so
"""
"""Script of a separate process, because a search for a match cannot be ended and keeps all other threads waiting."""


def check_adapter(folder: str) -> None:
    """Raise ValueError unless it is a local folder with a PEFT adapter in safetensors."""
    for name, remedy in _FILES.items():
        try:
            is_there = (Path(folder) / name).is_file()
        except (OSError, ValueError) as error:  # a name that no file can have
            raise ValueError(f"{folder[:100]!r} is not a folder: {error}") from error
        if not is_there:
            raise ValueError(f"{folder} has no {name}; {remedy}")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter's config, and the shape of each of its weights by its key in the file. No weight has been read."""

    folder: str
    config: Any
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def open(cls, folder: str) -> AdapterFile:
        """Read an adapter's config and shapes. Raises ValueError without one, or if it needs a changed base model."""
        from peft import PeftConfig

        check_adapter(folder)
        try:
            # Config and shapes come before any weight: what does not fit is refused without reading gigabytes.
            config: Any = PeftConfig.from_pretrained(folder)  # a folder that exists: nothing is fetched
            with safe_open(Path(folder) / _WEIGHTS, "pt") as file:
                keys = file.keys()
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
        except (ImportError, OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"the adapter {folder} cannot be loaded: {type(error).__name__}: {error}") from error
        if found := obstacle(config) or _edits_base(config):
            raise ValueError(f"the adapter {folder} {found}")
        config.inference_mode = True
        return cls(folder, config, shapes)

    def weights(self) -> dict[str, Any]:
        """All weights, by their key in the file, on the CPU."""
        with safe_open(Path(self.folder) / _WEIGHTS, "pt") as file:
            return {key: file.get_tensor(key) for key in self.shapes}

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raise ValueError if PEFT would take long to match the config's patterns with these names of modules."""
        # Names and plain texts cannot backtrack, so that most adapters need no process.
        patterns = [each for each in _patterns(self.config) if not _PLAIN.fullmatch(each[2])]
        if not patterns:
            return
        said = json.dumps([[(method, form.format(pattern)) for _, method, pattern, form in patterns], list(names)])
        command = [sys.executable, "-I", "-S", "-c", _MATCH]
        try:
            subprocess.run(command, input=said.encode(), capture_output=True, timeout=_SECONDS, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            # The script prints each number before it begins with that pattern; the last one has not ended.
            begun = (error.stdout or b"0").split()
            field, _, pattern, _ = patterns[int(begun[-1])]
            raise ValueError(
                f"the adapter {self.folder} has the pattern {pattern[:100]!r} in its {field}, which cannot be matched "
                f"with the names of the model's modules within {_SECONDS} seconds; give their names, or a simpler one"
            ) from None


def _patterns(config: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the regular expressions of a config: the field, PEFT's function of `re`, the expression, and the text that
    PEFT puts around it."""
    for field, value in vars(config).items():
        if field.endswith("_modules") and isinstance(value, str):
            yield field, "fullmatch", value, "{}"
        # As PEFT puts them around what the config says, because the whole expression is what takes long.
        elif field.endswith("_pattern") or field == "modules_to_save":
            form = {"layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.", "modules_to_save": r"(^|.*\.){}($|\..*)"}
            for each in [value] if isinstance(value, str) else value or ():
                yield field, "match", str(each), form.get(field, r"(.*\.)?({})$")


def _edits_base(config: Any) -> str | None:
    """Say why the adapter needs other weights or layers of the base model; None if it does not."""
    how = getattr(config, "init_lora_weights", True)
    if how not in _INITIAL:
        return (
            f"has init_lora_weights={how!r}: it was trained beside a base model whose weights PEFT had changed, and "
            "the base's own serve other requests; convert it with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
    if getattr(config, "layer_replication", None):
        return (
            f"has layer_replication={config.layer_replication}: it repeats layers of the base model, for all requests; "
            "merge it, and serve the merged model"
        )
    return None
