"""New values for a model's weights, from tensors or from files of safetensors: all are checked before one is written.

Knows modules, tensors and files; never what is derived from weights, which `weights.py` notices.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hf_paged.model.state import state_of

_HEADER = 2**27
"""Bytes that a file may have besides its weights: the format allows a header of 100 MB."""
# A trainer's fp64 is taken for any dtype.
_WIDEST = 8  # bytes of a number


class NewWeights:
    """Values that fit the weights of a model, by name. None of them has been written."""

    def __init__(self, model: nn.Module, values: Mapping[str, torch.Tensor], *, partial: bool = False) -> None:
        """Check the values. They are kept in the weights' own dtypes: without a copy where they have these already.

        partial: some weights may be left out, which keep their values. Raises ValueError for names, shapes, dtypes or
        numbers that do not fit, for weights that are kept in another form, and for a model with adapters.
        """
        self._model = model
        own = _weights_of(model)
        _check_names(own, values, partial=partial)
        self._new = {name: _fitting(name, own[name], value) for name, value in values.items()}
        self._own = own
        self._check_tied()

    @classmethod
    def read(cls, model: nn.Module, files: Iterable[IO[bytes]], *, partial: bool = False) -> NewWeights:
        """Read open files of safetensors into memory of our own, and close them. Raises ValueError as for tensors, for
        what is no such file, and for files that are larger than the model's weights can be."""
        left = _WIDEST * sum(weight.numel() for weight in _weights_of(model).values()) + _HEADER
        values: dict[str, torch.Tensor] = {}
        for file in files:
            found = _read(file, left)
            left -= sum(value.nbytes for value in found.values())  # of all files together
            if twice := values.keys() & found.keys():
                raise ValueError(f"{min(twice)} is in {file.name} and in another file; keep one of them")
            values |= found
        return cls(model, values, partial=partial)

    def _check_tied(self) -> None:
        first: dict[int, str] = {}
        for name, value in self._new.items():
            other = first.setdefault(id(self._own[name]), name)
            if other != name and not torch.equal(value, self._new[other]):
                raise ValueError(f"{name} and {other} are one weight of the model, and have different values; give one")

    @torch.inference_mode()  # which may write to all tensors, those of an inference mode too
    def write(self) -> None:
        """Write all values in place. Raises ValueError if the model has other weights than it had, and writes none."""
        now = _weights_of(self._model)
        if any(now.get(name) is not self._own[name] for name in self._new):
            raise ValueError("the model has other modules than when the new weights were checked; update it again")
        try:
            self._copy()
        except BaseException:
            # Ctrl-C, most likely. The values are at hand: with all of them the model is whole, with a part it is not.
            self._copy()
            raise

    def _copy(self) -> None:
        for name, value in self._new.items():
            self._own[name].copy_(value)


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by their names in `state_dict`. Raises ValueError if a file cannot name them."""
    with state_of(model).lock:
        if adapters := getattr(model, "peft_config", None):
            raise ValueError(
                f"the model has the adapters {', '.join(map(repr, adapters))}, which were trained on the weights that "
                "it has; unload them first, or load a new adapter instead of new weights"
            )
        # Not `state_dict` itself: quantised weights give it values that are made for it.
        return {
            f"{place}.{name}".lstrip("."): weight
            for place, module in model.named_modules(remove_duplicate=False)
            for name, weight in (*module._parameters.items(), *module._buffers.items())
            if weight is not None and name not in module._non_persistent_buffers_set
        }


def _check_names(own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], *, partial: bool) -> None:
    if unknown := sorted(values.keys() - own.keys()):
        raise ValueError(
            f"{unknown[0]!r} is no weight of the model{_and_others(unknown)}; names are those of model.state_dict(), "
            f"such as {next(iter(own), '')!r}"
        )
    # By identity: of tied weights one name suffices.
    given = {id(own[name]) for name in values}
    lacking = [name for name, weight in own.items() if id(weight) not in given]
    if lacking and not partial:
        raise ValueError(f"{lacking[0]!r} is missing{_and_others(lacking)}; give all weights, or say partial=True")
    if not values:
        raise ValueError("there are no weights; give at least one")


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""


def _fitting(name: str, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the value in the weight's dtype. Raises ValueError if it does not fit."""
    if type(own) not in (torch.Tensor, nn.Parameter) or own.device.type == "meta":
        kind = "offloaded" if own.device.type == "meta" else f"kept as {type(own).__name__}"
        raise ValueError(f"{name} is {kind}, and cannot be written; load the new checkpoint instead")
    if value.shape != own.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, and the model's has {tuple(own.shape)}")
    if value.dtype != own.dtype and not (value.is_floating_point() and own.is_floating_point()):
        raise ValueError(f"{name} has dtype {value.dtype}, which is not rounded to the model's {own.dtype}")
    fitting = value.detach().to(own.dtype)
    # After it is rounded, because fp16 has no room for what fp32 has.
    if fitting.is_floating_point() and not fitting.isfinite().all():
        raise ValueError(f"{name} has values that are not finite in {own.dtype}; the former weights stay in use")
    return fitting


# -- files -----------------------------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    """Return the path of a file, or those of a folder's files of safetensors. Raises ValueError if it has none."""
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    except (OSError, ValueError) as error:  # a name that no file can have
        raise ValueError(f"{str(path)[:100]!r} cannot be read: {error}") from error
    if not files:
        raise ValueError(f"{path} has no *.safetensors; save the weights there first")
    return files


def open_files(paths: Iterable[Path], opener: Callable[[str, int], int] = os.open) -> Iterator[IO[bytes]]:
    """Open files one after another, by a function like `os.open`. Raises ValueError for what cannot be opened."""
    for path in paths:
        try:
            # Without waiting for the other end of what may be a pipe.
            file = open(path, "rb", opener=lambda name, flags: opener(name, flags | os.O_NONBLOCK))  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"{path} cannot be opened: {error}; give a file that can be read") from error
        yield file  # the reader closes it


def _read(source: IO[bytes], most: int) -> dict[str, torch.Tensor]:
    try:
        with source, _own_copy(source, most) as copy, safe_open(copy, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{source.name} cannot be read as safetensors: {error}; give what safetensors.torch.save_file has written "
            "whole"
        ) from error


@contextmanager
def _own_copy(source: IO[bytes], most: int) -> Iterator[str]:
    """Yield the name of a copy that nobody else can write to: reading a mapped file that another process shortens ends
    this one. Tensors may map it after that."""
    with _memory() as (copy, name):
        info = os.fstat(source.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError("it is no file")
        if info.st_size > most:
            raise OSError(f"it has {info.st_size} bytes, and the model's weights have at most {most} more")
        shutil.copyfileobj(source, copy, 2**20)
        copy.flush()
        yield name


@contextmanager
def _memory() -> Iterator[tuple[IO[Any], str]]:
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("hf-paged-weights"), "wb") as file:
            yield file, f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as named:
            yield named, named.name
