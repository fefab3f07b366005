"""Loads checkpoints in safetensors whose layers have tensors of codes in place of a weight.

Knows the files, not what the codes mean."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_paged.kernels import buffers
from hf_paged.serving.stored_codes import Stored, load, summary

# Lengths of the kernels' groups.
_SIZES = (128, 64, 32, 16)
# Dtypes by their names in the format.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


class Sorted(NamedTuple):
    """The plain weights of a checkpoint and those in codes, by their names. others: what users are told of weights
    whose codes have become plain ones."""

    state: dict[str, torch.Tensor]
    stored: dict[str, Stored]
    others: str = ""


class Tensors:
    """The tensors of a checkpoint. Each is read when it is asked for, into memory of its own: a file that is mapped
    stays in the process's memory as long as one of its tensors does.

    metadata: what the files say of the tensors. There are none if the checkpoint is in another format.
    """

    def __init__(self, checkpoint: str, source: Mapping[str, Any]) -> None:
        from transformers.utils.hub import cached_file, get_checkpoint_shard_files

        source = {name: value for name, value in source.items() if name == "revision"}
        names = "model.safetensors", "model.safetensors.index.json"
        one, index = (
            cached_file(checkpoint, name, _raise_exceptions_for_missing_entries=False, **source) for name in names
        )
        files: list[Any] = [] if one is None else [one]
        if one is None and index is not None:
            files, _ = get_checkpoint_shard_files(checkpoint, index, **source)
        self.metadata: dict[str, str] = {}
        self._where: dict[str, tuple[Path, int, Any]] = {}
        for file in map(Path, files):
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                found = json.loads(opened.read(size))
            self.metadata |= found.pop("__metadata__", {})
            self._where |= {name: (file, 8 + size, about) for name, about in found.items()}

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of this name. Raises KeyError if there is none, ValueError for an unknown dtype, or if the
        file has another number of bytes for it."""
        file, start, about = self._where[name]
        if (dtype := _DTYPES.get(about["dtype"])) is None:
            raise ValueError(f"{name} is of {about['dtype']}, which is not read here; known are {', '.join(_DTYPES)}")
        begin, end = about["data_offsets"]
        needed = math.prod(about["shape"]) * dtype.itemsize
        if begin < 0 or end - begin != needed:
            raise ValueError(f"{name} has bytes {begin} to {end} of {file} and needs {needed}; fetch the file again")
        made = buffers.empty(about["shape"], dtype)
        if made.numel():
            with file.open("rb", buffering=0) as opened:
                opened.seek(start + begin)
                memory: Any = made.flatten().view(torch.uint8).numpy()
                left = memoryview(memory)
                # A call may read less than it is asked for.
                while left and (count := opened.readinto(left)):
                    left = left[count:]
            if left:
                raise ValueError(f"{file} ends within {name}")
        return made

    def parts(self, owner: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        """Return the tensors `owner` + name, and those of the optional ones that exist, by their names. Raises
        ValueError if there is none of a name."""
        if missing := [owner + name for name in names if owner + name not in self._where]:
            raise ValueError(f"{missing[0]} is missing, without which codes have no values; fetch the checkpoint again")
        return {name: self.read(owner + name) for name in (*names, *optional) if owner + name in self._where}


def load_layers(
    checkpoint: str,
    config: Any,
    loader: Any,
    dtype: torch.dtype,
    source: Mapping[str, Any],
    sort: Callable[[Any, Tensors], Sorted | str],
) -> tuple[Any, str] | str:
    """Load the model of a checkpoint, and say what is in codes; or why transformers must load it, as `sort` says.

    sort: is given the model without memory, and the tensors.
    """
    from transformers import GenerationConfig

    tensors = Tensors(checkpoint, source)
    if not tensors.names:
        return "its weights are not in safetensors"
    # Else transformers would ask for the package that has written the codes.
    config = copy.deepcopy(config)
    del config.quantization_config
    with torch.device("meta"):
        model = loader.from_config(config, dtype=dtype, **{k: v for k, v in source.items() if k != "revision"})
    found = sort(model, tensors)
    if isinstance(found, str):
        return found
    loaded = load(type(model), config, dtype, found.state, found.stored)
    with contextlib.suppress(OSError):
        loaded.generation_config = GenerationConfig.from_pretrained(checkpoint, **source)
    return loaded, summary(found.stored) + found.others


def check_length(name: str, found: int, least: int) -> None:
    """Raise ValueError if a tensor has fewer elements than the file says of its weight."""
    if found < least:
        raise ValueError(f"{name} has {found} elements, and its weight needs {least}; fetch the checkpoint again")


def common_size(*lengths: int) -> int:
    """Return the longest group of the kernels that divides these lengths, 0 if none does."""
    return next((size for size in _SIZES if math.gcd(*lengths) % size == 0), 0)


def plain_ones(count: int, reason: str) -> str:
    """Return what users are told of so many weights whose codes have become plain ones."""
    return f", {count} are plain, because {reason}" if count else ""
