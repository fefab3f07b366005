"""Shared by the commands: arguments, errors, progress, loading a checkpoint. Imports torch only to load one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

EXIT_REFUSED = 1

Job = Callable[[], int]
"""The work of a command, after its arguments have been parsed. Returns the exit status."""


class UsageError(Exception):
    """The user's input cannot be used. The message is one line that names the value and the remedy."""


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="folder of a checkpoint, or its name on the hub")]
DTypeOption = Annotated[DType, typer.Option(help="of the weights; auto: as they are stored")]
Device = Annotated[str | None, typer.Option(help="such as cpu or cuda:0 (default: a GPU if there is one)")]


def option(text: str, *names: str, **kwargs: Any) -> Any:
    """An option with this help. names: the flags, where they differ from the parameter's name."""
    return typer.Option(*names, help=text, **kwargs)


def show(message: str) -> None:
    """Print a line of progress that the next one overwrites. Does nothing if standard error is not a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def find_checkpoint(name: str) -> None:
    """Raise UsageError unless `name` is the folder of a checkpoint or could be a name on the hub."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(
                f"{name} is not a checkpoint: it has no config.json; give a folder made by save_pretrained"
            )
    elif folder.exists():
        raise UsageError(f"{name} is a file; give the folder of a checkpoint, made by save_pretrained")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or ("/" in name and Path(name).parent.is_dir()):
        raise UsageError(f"there is no folder {name}; give the folder of a checkpoint, or its name on the hub")


def from_pretrained(loader: Any, name: str, what: str, **kwargs: Any) -> Any:
    """`loader.from_pretrained(name)`. Raises UsageError with the first line of the error."""
    from safetensors import SafetensorError

    try:
        return loader.from_pretrained(name, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"cannot load the {what} of {name}: {reason}") from error


def load_model(
    checkpoint: str, dtype: DType, device: str | None, *, random_weights: bool = False, num_ranks: int = 1
) -> Any:
    """The model in eval mode. Raises UsageError if transformers has no language model for its configuration.

    num_ranks: of the processes that call this together, each of which gets its part of the weights.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = from_pretrained(AutoConfig, checkpoint, "configuration")
    loader: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if num_ranks > 1:
        return _load_part(loader, checkpoint, config, dtype, num_ranks)
    target = _device(device)
    if random_weights:
        chosen = config.dtype or torch.float32 if dtype is DType.auto else getattr(torch, dtype.value)
        model = loader.from_config(config, dtype=chosen)
    else:
        model = from_pretrained(loader, checkpoint, "model", config=config, dtype=dtype.value)
    return model.to(target).eval()


def check_tensor_parallel(num_ranks: int, device: str | None) -> None:
    """Raises UsageError if this machine cannot start so many ranks."""
    import torch

    if num_ranks == 1:
        return
    flag = f"--tensor-parallel-size {num_ranks}"
    if device is not None:
        raise UsageError(f"{flag} with --device {device}: each rank takes a GPU of its own, or the CPU; drop --device")
    if torch.cuda.is_available() and torch.cuda.device_count() < num_ranks:
        raise UsageError(f"{flag}: there are {torch.cuda.device_count()} GPUs; use as many ranks, or fewer")


def _load_part(loader: Any, checkpoint: str, config: Any, dtype: DType, num_ranks: int) -> Any:
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(tp_size=num_ranks)
    model = from_pretrained(loader, checkpoint, "model", config=config, dtype=dtype.value, distributed_config=spread)
    return model.eval()


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here ({reason}); 'cpu' always can") from None
    return device


def without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
