"""`hf-paged run`: another program with hf_paged in it, in its child processes too.

The program takes the place of this process (exec), so that its exit status, signals, arguments and standard input are
its own. Python's start-up imports `sitecustomize` from the folder `boot`, which does the rest.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from hf_paged.cli.common import Job, UsageError
from hf_paged.cli.serve import batch_job

_BOOT = Path(__file__).parent / "boot"
_PYTHONS = ("python", "python3", f"python3.{sys.version_info.minor}")
# Options of Python that end the options, and those that have their value in the next word.
_ENDS, _WITH_VALUE = ("-c", "-m"), ("-W", "-X", "--check-hash-based-pycs")


def run(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="a console script, a .py file, python and its arguments; with --input: a checkpoint, flags of serve",
        ),
    ],
    default: Annotated[
        bool, typer.Option("--default", help="page calls of `generate` that name no cache, where they can be paged")
    ] = False,
    serving: Annotated[
        bool,
        typer.Option("--serving", help="run transformers' continuous batching on our engine, `transformers serve` too"),
    ] = False,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="answer the requests of this JSONL file, in OpenAI's batch format")
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", help="append the answers to this file; those that it has stay as they are"),
    ] = None,
) -> Job:
    """Run a Python program with hf_paged installed in it and in the Python processes that it starts.

    Examples: hf-paged run lm_eval --model hf-paged ..., hf-paged run --serving transformers serve --continuous-batching
    MODEL, hf-paged run --default python script.py. Options of hf-paged stand before COMMAND.

    hf-paged run --input requests.jsonl --output answers.jsonl CHECKPOINT answers a file of requests as a server would,
    with its flags after CHECKPOINT. Run again after an interruption, it answers what is left.
    """
    if input_file is None and output_file is None:
        return lambda: _run(command, default=default, serving=serving)
    # A run without an output could not be continued.
    if input_file is None or output_file is None:
        raise UsageError("--input and --output belong together; give a file of requests, and one for their answers")
    if default or serving:
        raise UsageError("--default and --serving are for programs; with --input leave them out")
    return batch_job(command, input_file, output_file)


def _run(command: list[str], *, default: bool, serving: bool) -> int:
    words = resolved(command)
    path = os.environ.get("PYTHONPATH")
    # First on the path, so that this sitecustomize is the one that Python imports.
    os.environ["PYTHONPATH"] = str(_BOOT) if not path else f"{_BOOT}{os.pathsep}{path}"
    parts = [name for name, is_wanted in (("default", default), ("serving", serving)) if is_wanted]
    os.environ["HF_PAGED_RUN"] = ",".join(["install", *parts])
    os.environ["HF_PAGED_RUN_PID"] = str(os.getpid())  # exec keeps it
    # What is buffered would be lost by exec.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(words[0], words)


def resolved(command: list[str]) -> list[str]:
    """The path of the program to execute, and its arguments. Raises UsageError for a program that cannot be run so."""
    name, *arguments = command
    if name in _PYTHONS:
        _check_python_options(arguments)
        return [sys.executable, *arguments]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UsageError(f"there is no file {name}")
        return [sys.executable, name, *arguments]
    # Of this environment first, because the PATH may lead to another one.
    beside = Path(sys.executable).parent / name
    if os.sep not in name and beside.is_file():
        return [str(beside), *arguments]
    found = shutil.which(name)
    if found is not None:
        return [found, *arguments]
    if any(script.name == name for script in entry_points(group="console_scripts")):
        return [sys.executable, "-c", _START, name, *arguments]
    raise UsageError(
        f"there is no command {name} beside {sys.executable} or on the PATH; install the package that has it into the "
        "environment of hf-paged"
    )


# A console script that was installed without its file.
_START = (
    "import sys; from importlib.metadata import entry_points; del sys.argv[0]; "
    "sys.exit(next(iter(entry_points(group='console_scripts', name=sys.argv[0]))).load()())"
)


def _check_python_options(arguments: list[str]) -> None:
    """Raise UsageError for options of Python with which `sitecustomize` is not imported, or from elsewhere."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "-" or word.startswith(_ENDS):
            return
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith(("--", "-W", "-X")) and set("EIS") & set(word):
            raise UsageError(
                f"python {word} ignores the environment, which brings hf_paged into the program; leave it out, or "
                "call hf_paged.install() in the program"
            )
