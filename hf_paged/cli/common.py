"""Shared by the commands: arguments, errors, progress."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_paged.serving.checkpoints import DEQUANTISED, check_ranks, is_gguf, pretrained

# 1 and 2 as most programs have them, for a result and for usage; 130 and 141 as shells have them, for Ctrl-C and a
# closed pipe.
EXIT_REFUSED = 1
EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141

Job = Callable[[], int]
"""The work of a command, after its arguments have been parsed. Returns the exit status."""


class UsageError(Exception):
    """The user's input cannot be used. The message is one line that names the value and the remedy."""


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(StrEnum):
    int8 = "int8"
    int4 = "int4"
    w8a16 = "w8a16"
    w4a16 = "w4a16"
    w8a8 = "w8a8"
    w4a8 = "w4a8"
    a16 = "a16"
    a8 = "a8"
    dequantised = DEQUANTISED


Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="folder of a checkpoint, a .gguf file, or its name on the hub")
]
DTypeOption = Annotated[DType, typer.Option(help="of the weights; auto: as they are stored")]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="on a CPU, round the weights to this, in groups of 32, when loaded; w8a16, w4a16: fp32 activations, too, "
        "to 16 bits; w8a8, w4a8: activations to 8 bits; a16, a8: those alone, beside weights in a file's codes; "
        "dequantised: plain ones of a .gguf file",
    ),
]
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
        if not is_gguf(name):
            remedy = "give the folder of a checkpoint, made by save_pretrained, or a .gguf file"
            raise UsageError(f"{name} is a file; {remedy}")
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or ("/" in name and Path(name).parent.is_dir()):
        raise UsageError(f"there is no folder {name}; give the folder of a checkpoint, or its name on the hub")


Revision = Annotated[str | None, typer.Option(help="branch, tag or commit of a checkpoint on the hub")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run the Python code that the checkpoint brings")
]


def source_of(revision: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments of from_pretrained, without those that have their defaults."""
    return without_none(revision=revision, trust_remote_code=trust_remote_code or None)


def check_tensor_parallel(num_ranks: int, device: str | None, checkpoint: str, source: dict[str, Any]) -> None:
    """Raise UsageError or ValueError if this machine, or this model, cannot have so many ranks."""
    if num_ranks == 1:
        return
    import torch

    flag = f"--tensor-parallel-size {num_ranks}"
    if device is not None:
        raise UsageError(f"{flag} with --device {device}: each rank takes a GPU of its own, or the CPU; drop --device")
    # Counted before processes are started, which would all fail.
    if torch.cuda.is_available() and torch.cuda.device_count() < num_ranks:
        raise UsageError(f"{flag}: there are {torch.cuda.device_count()} GPUs; use as many ranks, or fewer")
    from transformers import AutoConfig

    # By the config alone, because weights take minutes to load.
    check_ranks(pretrained(AutoConfig, checkpoint, "configuration", **source), num_ranks)


def without_none(**options: object) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
