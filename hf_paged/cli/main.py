"""The command line `hf-paged`: its commands, exit codes and one-line errors.

Each command is a module beside this one. Its function takes the parsed arguments and returns a Job, which runs outside
of typer, because typer would handle Ctrl-C and closed pipes differently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer

import hf_paged
from hf_paged.cli import bench, build, check, generate, run, serve
from hf_paged.cli.common import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USAGE, Job, UsageError
from hf_paged.cli.ranks import end_rank, is_rank
from hf_paged.errors import UnsupportedVersionError

# Depending on its version, typer imports click or contains a copy of it. The base class of its errors works for both.
_TyperError: type[Exception] = typer.BadParameter.__base__  # type: ignore[assignment]

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("check")(check.check)
app.command("build")(build.build)
app.command("serve")(serve.serve)
# What follows the command belongs to it, options too.
app.command("run", context_settings={"allow_interspersed_args": False})(run.run)
app.add_typer(bench.bench, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-paged {hf_paged.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """PagedAttention for transformers models: the same texts from a fraction of the KV memory."""


# Once: typer would make it anew for each call of `app`.
command = typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 for success, 1 for a refused model (check), a failed build or an
    engine that died (serve), 2 for wrong usage or input, 130 if interrupted, 141 if the reader of the output has closed
    it.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        try:
            job: Job | int | None = command(arguments, prog_name="hf-paged", standalone_mode=False)
        except _TyperError as error:
            return _refused(_explained(error, arguments))
        status = job() if callable(job) else int(job or 0)
        if sys.stdout is not None:  # it is closed
            sys.stdout.flush()
        return status
    except (UsageError, ValueError, OSError, UnsupportedVersionError) as error:
        if isinstance(error, BrokenPipeError):
            # Python flushes standard output again on exit; redirect that to nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        return _refused(str(error))
    except KeyboardInterrupt:
        print("\nhf-paged: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def program() -> NoReturn:
    """Run the command of this process, and end it with the exit status."""
    status = main()
    if is_rank():
        end_rank(status)
    # If Ctrl-C ends code that Python has compiled from a string (dataclasses do that on import), CPython remembers it,
    # and a program started by `python -m` kills itself by SIGINT at its end in place of exiting with this status. The
    # next code from a string makes CPython forget it.
    exec("")
    sys.exit(status)


def _explained(error: Any, arguments: list[str]) -> str:
    """typer's message, preceded by the value that the user typed, which typer omits."""
    typed = ""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in pairwise([*arguments, ""]):
            if word == option or word.startswith(f"{option}="):
                typed = f"{option} {following}: " if word == option else f"{word}: "
    command = "hf-paged" if error.ctx is None else error.ctx.command_path
    return f"{typed}{error.format_message()} (see '{command} --help')"


def _refused(message: str) -> int:
    print("hf-paged: error:", " ".join(message.split()), file=sys.stderr)
    return EXIT_USAGE
