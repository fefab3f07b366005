"""Commands on several ranks: torch's elastic launcher starts the same command line once for each rank."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from hf_paged.cli.common import UsageError

TensorParallel = Annotated[
    int, typer.Option(help="ranks that share the model, one process and one GPU (or part of the CPU) each", min=1)
]

_RUN, _INPUT = "TORCHELASTIC_RUN_ID", "HF_PAGED_STANDARD_INPUT"
_EXIT_USAGE = 2


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return _RUN in os.environ


def is_first_rank() -> bool:
    """True in the one process that prints, listens and takes requests."""
    return not is_rank() or os.environ["RANK"] == "0"


def shared_seed() -> int:
    """A number that differs from run to run and is the same on all ranks of one."""
    return zlib.crc32(os.environ[_RUN].encode())


def read_input() -> str:
    """Standard input. On ranks it is that of the process that has started them."""
    path = os.environ.get(_INPUT)
    if path is None:
        return sys.stdin.read()
    with open(path, encoding="utf-8") as file:
        return file.read()


def on_ranks(size: int, work: Callable[[], int], *, last_seconds: int = 30, needs_input: bool = False) -> int:
    """Run `work` here if size is 1. Otherwise start this command line `size` times and run `work` in each process.

    Returns the exit status. last_seconds: from a signal until ranks that still run are killed. needs_input: whether
    the ranks read standard input.
    """
    if size == 1:
        return work()
    if is_rank():
        return _work_as_rank(size, work)
    with _input_for_all() if needs_input else nullcontext():
        return _launch(size, last_seconds)


def _launch(size: int, last_seconds: int) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(last_seconds))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "hf_paged.cli", *sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != _EXIT_USAGE:  # which has been explained
            print(f"hf-paged: error: rank {rank} has ended with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 0 if error.sigval is signal.SIGTERM else 128 + error.sigval
    return 0


@contextmanager
def _input_for_all() -> Iterator[None]:
    """Each rank reads standard input from a file of its own."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(sys.stdin.read())
        file.flush()
        os.environ[_INPUT] = file.name
        try:
            yield
        finally:
            del os.environ[_INPUT]


def _work_as_rank(size: int, work: Callable[[], int]) -> int:
    from torch import distributed

    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise UsageError(f"--tensor-parallel-size {size}, but {started} ranks have been started; give them the same")
    if is_first_rank():
        status = work()
    else:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # the first rank ends in its own time, and this one with it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
        try:
            status = work()
        except (UsageError, ValueError):  # the first rank explains it
            return _EXIT_USAGE
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return status
