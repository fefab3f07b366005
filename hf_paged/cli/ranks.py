"""Commands on several ranks: the same command line runs once more for each rank, in a process of its own.

The ranks find each other through a file without a name, which no one else can open, and talk over the loopback. They
end with the process that has started them, however that ends.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Annotated, NoReturn

import typer

from hf_paged.cli.common import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, EXIT_USAGE, UsageError
from hf_paged.errors import RankError

TensorParallel = Annotated[
    int, typer.Option(help="ranks that share the model, one process and one GPU (or part of the CPU) each", min=1)
]

_RUN, _STORE, _INPUT = "HF_PAGED_RANKS", "HF_PAGED_STORE", "HF_PAGED_STANDARD_INPUT"
_RUN_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_JOIN_LIMIT = timedelta(hours=2)  # between ranks that load a checkpoint; afterwards the engine notices sooner
# Seconds from the end of one rank until others that still run are killed, or the command might never end.
_END_SECONDS = 30.0
# The same if it has failed: the first rank tells its clients.
_FAILURE_SECONDS = 5.0
# Linux's number, which no module of Python has.
_PR_SET_PDEATHSIG = 1


def is_rank() -> bool:
    """Return True if a launcher has started this process as one of several ranks."""
    return _run_id() is not None


def _run_id() -> str | None:
    return os.environ.get(_RUN, os.environ.get(_RUN_OF_TORCHRUN))


def is_first_rank() -> bool:
    """True in the one process that prints, listens and takes requests."""
    return not is_rank() or os.environ["RANK"] == "0"


def shared_seed() -> int:
    """A number that differs from run to run and is the same on all ranks of one."""
    return zlib.crc32((_run_id() or "").encode())


def read_input() -> str:
    """Standard input. On ranks it is that of the process that has started them."""
    path = os.environ.get(_INPUT)
    if path is None:
        return sys.stdin.read()
    with open(_path(path), encoding="utf-8") as file:
        return file.read()


def on_ranks(size: int, work: Callable[[], int], *, last_seconds: int = 30, needs_input: bool = False) -> int:
    """Run `work` here if size is 1. Otherwise start this command line `size` times and run `work` in each process.

    Returns the exit status, which is that of the first rank that fails. last_seconds: from a signal until ranks that
    still run are killed. needs_input: whether the ranks read standard input.
    """
    if size == 1:
        return work()
    if is_rank():
        return _work_as_rank(size, work)
    # Ranks have no standard input of their own: they read it from this file.
    text = sys.stdin.read().encode() if needs_input else b""
    with _file("input", text) as given, _file("store") as store, _watched_signals() as watch:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            shared = _environment(size, store, given)
            for rank in range(size):
                ranks.append(_start(rank, shared, (store, given)))
            return _supervise(ranks, watch, last_seconds)
        finally:
            for each in ranks:
                each.kill()  # nothing, if it has ended
                each.wait()


# -- the process that starts the ranks ---------------------------------------------------------------------------------


@contextmanager
def _file(name: str, content: bytes = b"") -> Iterator[int]:
    """Make a file in memory without a path: only processes with its descriptor can open it, and none is left."""
    descriptor = os.memfd_create(f"hf-paged-{name}")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield descriptor
    finally:
        os.close(descriptor)


def _path(descriptor: int | str) -> str:
    return f"/proc/self/fd/{descriptor}"


@contextmanager
def _watched_signals() -> Iterator[int]:
    """Return a descriptor from which arriving signals can be read, one byte (the number) each."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    kinds = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before = [signal.signal(each, lambda *_: None) for each in kinds]
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in zip(kinds, before):
            signal.signal(each, handler)
        os.close(reader)
        os.close(writer)


def _environment(size: int, store: int, given: int) -> dict[str, str]:
    """Return the environment of all ranks. They run on this machine; nothing has to reach them from elsewhere."""
    # Ranks on one machine share its cores.
    asked: dict[str, object] = {"OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // size)}
    asked |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    own: dict[str, object] = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, _STORE: store, _INPUT: given}
    # The process's number first, which ranks compare with their parent's.
    own[_RUN] = f"{os.getpid()}-{uuid.uuid4().hex}"
    return {name: str(value) for name, value in {**asked, **os.environ, **own}.items()}


def _start(rank: int, environment: dict[str, str], files: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hf_paged.cli", *sys.argv[1:]],
        stdin=subprocess.DEVNULL,
        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        pass_fds=files,
        start_new_session=True,  # Ctrl-C reaches this process, which tells the first rank, once
    )


def _supervise(ranks: Sequence[subprocess.Popen[bytes]], watch: int, last_seconds: float) -> int:
    """Pass signals on to the first rank, until all have ended. Returns the exit status."""
    failure: tuple[int, int] | None = None  # a rank and its status
    limits: list[float] = []  # when those that still run are killed: at the first of them
    while True:
        signals = [number for number in _read(watch) if number != signal.SIGCHLD]  # before looking who has ended
        running = [rank for rank, each in enumerate(ranks) if each.poll() is None]
        ended = {rank: each.returncode for rank, each in enumerate(ranks) if rank not in running}
        failure = failure or _worst(ended)
        if not running:
            break
        # Only to the first rank: it tells the others by the engine's messages.
        for number in signals:
            ranks[0].send_signal(number)
            limits.append(time.monotonic() + last_seconds)
        if ended:
            # The first rank tells its clients; without it nobody does, so that the others end at once.
            seconds = _END_SECONDS if failure is None else _FAILURE_SECONDS if 0 in running else 0.0
            limits.append(time.monotonic() + seconds)
        left = min(limits) - time.monotonic() if limits else None
        if left is not None and left <= 0:
            failure = failure or (running[0], -signal.SIGKILL)
            for rank in running:
                ranks[rank].kill()
        select.select([watch], [], [], None if left is None else max(0.1, left))
    if failure is None:
        return 0
    rank, status = failure
    if status not in (EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE):  # which need no further explanation
        print(f"hf-paged: error: rank {rank} has ended with status {status}", file=sys.stderr)
    return status if status > 0 else 128 - status


def _worst(ended: dict[int, int]) -> tuple[int, int] | None:
    """Return a failed rank and its status; if several failed, one that a signal ended. None if none failed."""
    return min(((rank, status) for rank, status in ended.items() if status), key=lambda each: each[1] > 0, default=None)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 512)
    except BlockingIOError:
        return b""


# -- a rank ------------------------------------------------------------------------------------------------------------


def _work_as_rank(size: int, work: Callable[[], int]) -> int:
    from torch import distributed

    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise UsageError(f"--tensor-parallel-size {size}, but {started} ranks have been started; give them the same")
    if _STORE in os.environ:
        # First: a parent that ends while ranks join would leave them waiting for each other.
        _end_with_parent(int(os.environ[_RUN].partition("-")[0]))
        _join(int(os.environ["RANK"]), size)
    if is_first_rank():
        status = work()
    else:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)  # the first rank ends in its own time, and this one with it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
        try:
            status = work()
        except (UsageError, ValueError):  # the first rank explains it
            status = EXIT_USAGE
        except RankError:  # which has been logged
            status = 1
    if distributed.is_initialized() and not status:  # if another rank may have failed, nothing is to wait for it
        distributed.destroy_process_group()
    return status


def end_rank(status: int) -> NoReturn:
    """End this process, which is a rank, with this exit status, and without the end of the interpreter.

    A thread of gloo may still have to free a tensor, for which it needs Python's lock. Up to version 3.13, Python ends
    any thread that asks for the lock once the interpreter ends; in the middle of torch's code, this aborts the process
    ("terminate called without an active exception", rarely).

    With status 0, threads that are no daemons are awaited, and exit functions run. With any other, nothing is awaited,
    because another rank may have failed. Open files are not flushed, other than the standard ones.
    """
    if not status:
        threading._shutdown()  # type: ignore[attr-defined]  # both as at the end of the interpreter
        atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # its reader has gone; it is closed; there is none
            output.flush()
    os._exit(status)


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the call; then no signal would come.
    if os.getppid() != parent:
        sys.exit(1)


def _join(rank: int, size: int) -> None:
    """Make the process group that transformers would make, with the file in place of a server that listens."""
    import torch
    from torch import distributed

    device = torch.accelerator.current_accelerator(check_available=True)
    backend, own = "gloo", None
    if device is not None:
        torch.accelerator.set_device_index(rank)
        backend = distributed.get_default_backend_for_device(device.type)
        own = torch.device(device.type, rank) if backend == "nccl" else None
    # Before the first group is made.
    use_gloo_of_one_thread()
    distributed.init_process_group(
        backend,
        store=distributed.FileStore(_path(os.environ[_STORE]), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=_JOIN_LIMIT,
        device_id=own,
    )


def use_gloo_of_one_thread() -> None:
    """From now on, groups of gloo that this process makes carry out their operations in one thread each.

    As torch makes them they have two, which write the name of their last operation into one string without a lock
    (`ProcessGroupGloo::runLoop`, torch 2.13). A name of up to 15 characters lies in the string itself. A longer one,
    ALLGATHER_COALESCED of a layer with a gathered output, lies in memory that one thread frees while the other one
    writes to it. On a loaded machine, one of a hundred short runs of two ranks crashed or hung.
    """
    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import distributed_c10d

    class OneThread(ProcessGroupGloo):
        def __init__(self, store: object, rank: int, size: int, timeout: timedelta) -> None:
            options = self._Options()  # type: ignore[attr-defined]
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            devices = [self.create_device(interface=name) for name in interfaces]
            options._devices = devices or [self.create_default_device()]
            options._threads, options._timeout = 1, timeout
            super().__init__(store, rank, size, options)  # type: ignore[arg-type]

    distributed_c10d.ProcessGroupGloo = OneThread  # type: ignore[misc]
