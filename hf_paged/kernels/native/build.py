"""Loads the library of native kernels: from the installed wheel if it has a build for this CPU, else from the user's
cache, compiled first if necessary. Knows files, not tensors.

A process decides once whether it uses native kernels, for all of them together (attention, sampling, decoder layers).
The first call on a machine waits until they are compiled, which takes seconds, so results never depend on whether a
compilation has finished.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_paged.kernels.native import store
from hf_paged.kernels.native.structs import declare
from hf_paged.kernels.native.toolchain import (
    SOURCES,
    NativeBuildError,
    Toolchain,
    chosen_set,
    compile_library,
    emulates_amx,
    find_toolchain,
    has_compiler,
    openmp_library,
    source_digest,
    usable_sets,
    wheel_library,
)
from hf_paged.locks import usable_after_fork

__all__ = ["SOURCES", "NativeBuildError", "build", "compile_library", "has_compiler", "library", "load", "status"]

log = logging.getLogger("hf_paged")

SWITCH = "HF_PAGED_NATIVE"
"""The environment variable that turns native kernels on or off."""
_WHEEL_LIBRARIES = Path(__file__).parent
# What made a build fail may be gone in an hour. Until then, each process would wait for the same failure.
_RETRY_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class _Decision:
    library: ctypes.CDLL | None
    status: str


_decision: _Decision | None = None
_lock = usable_after_fork(threading.Lock())


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None if there are none; `status` gives the reason. The first call on a machine compiles
    them and waits.

    Raises ValueError if HF_PAGED_NATIVE is neither on nor off, or if HF_PAGED_ISA is no instruction set of this CPU.
    """
    return (_decision or _decided()).library


def status() -> str:
    """One readable line: which native CPU kernels this process has, or why it has none."""
    return _decided().status


def build() -> Path:
    """Load the kernels. If neither the wheel nor the cache has them, compile them, even after a recent failed build.

    Returns the library's path. If the process had no native kernels, it uses them from now on, so do not call it while
    a generate call or an engine is running. Raises NativeBuildError with the reason, such as the compiler's output, if
    there is no library to load.
    """
    global _decision
    if _is_off():
        raise NativeBuildError(f"native kernels are off ({SWITCH}={os.environ[SWITCH]})")
    with _lock:
        try:
            path = _built(retry=True)
            if _decision is None or _decision.library is None:
                _decision = _loaded(path)
        except (OSError, subprocess.SubprocessError) as error:
            raise NativeBuildError(str(error)) from error
    return path


def _decided() -> _Decision:
    global _decision
    if _decision is None:
        # Two threads that decide at once must not get different kernels.
        with _lock:
            if _decision is None:
                _decision = _decide()
    return _decision


def _decide() -> _Decision:
    if _is_off():
        return _Decision(None, f"native kernels are off ({SWITCH}={os.environ[SWITCH]})")
    if os.name != "posix":
        return _Decision(None, "no native kernels: they are built on POSIX systems only")
    try:
        return _loaded(_built(retry=False))
    except (OSError, NativeBuildError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())[:300]
    warnings.warn(
        f"no native CPU kernels, so the slower torch implementation is used: {reason}. `hf-paged build` retries and "
        f"prints the whole error; {SWITCH}=0 turns native kernels and this warning off",
        RuntimeWarning,
        stacklevel=2,
    )
    return _Decision(None, f"no native kernels: {reason}")


def _is_off() -> bool:
    value = os.environ.get(SWITCH, "1").strip().lower()
    if value in ("0", "false", "off", "no"):
        return True
    if value in ("", "1", "true", "on", "yes"):
        return False
    raise ValueError(f"{SWITCH}={os.environ[SWITCH]!r}: use 1 (compile and use native CPU kernels) or 0 (do not)")


def _loaded(path: Path) -> _Decision:
    is_from_wheel = path.parent == _WHEEL_LIBRARIES
    loaded = declare(ctypes.CDLL(str(path))) if is_from_wheel else load(path)
    threads = "OpenMP" if _share_threads(loaded) else "one thread"
    origin = "of the wheel" if is_from_wheel else "compiled here"
    return _Decision(loaded, f"native kernels: {loaded.hfp_target().decode()}, {threads}, {origin}")


def _share_threads(library: ctypes.CDLL) -> bool:
    """Let the library use the threads of torch's OpenMP library. Returns whether it can."""
    path = openmp_library()
    if path is None:
        return False
    openmp = ctypes.CDLL(str(path))  # which is loaded already
    try:
        functions = openmp.GOMP_parallel, openmp.omp_get_thread_num
    except AttributeError:
        return False
    library.hfp_use_openmp(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
    return True


def _built(*, retry: bool) -> Path:
    """The path of the library, which is compiled if necessary. retry: even if a build failed within the last hour."""
    if (path := _in_wheel()) is not None:
        return path
    toolchain = find_toolchain()
    directory = store.open_directory()
    path = directory / _file_name(toolchain)
    if not path.exists():
        if store.is_locked(directory):
            log.warning("hf_paged: waiting for another process that is compiling the CPU kernels")
        with store.locked(directory):
            # Whoever held the lock may have built it meanwhile.
            if not path.exists():
                _build(toolchain, path, retry=retry)
    with suppress(OSError):  # the cache may be read-only
        os.utime(path)  # only the most recently used builds are kept
    return path


def _in_wheel() -> Path | None:
    """The library of the installed wheel for this CPU and HF_PAGED_ISA. None if there is no wheel with libraries, or if
    it has none for these sources and this instruction set."""
    isa = chosen_set()
    if isa == "native" or emulates_amx():
        return None
    paths = [_WHEEL_LIBRARIES / wheel_library(name) for name in ([isa] if isa else usable_sets())]
    return next((path for path in paths if path.exists()), None)


def _file_name(toolchain: Toolchain) -> str:
    """A name that identifies the sources and everything that they are compiled with."""
    digest = hashlib.sha256(f"{source_digest()} {toolchain.identity()}".encode())
    return f"kernels-{digest.hexdigest()[:24]}.so"


def _build(toolchain: Toolchain, path: Path, *, retry: bool) -> None:
    failed = path.with_suffix(".failed")
    # `abs`: a failure that a wrong clock has put into the future must not forbid builds for long.
    if not retry and failed.exists() and abs(time.time() - failed.stat().st_mtime) < _RETRY_SECONDS:
        raise NativeBuildError(failed.read_text(errors="replace"))
    log.warning("hf_paged: compiling the CPU kernels, once for this machine; this takes 20 to 30 seconds of one core")
    # They are of processes that were killed: whoever builds holds the lock.
    for leftover in path.parent.glob("build-*"):
        store.remove(leftover)
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as work:
        try:
            built = compile_library(toolchain, Path(work))
        except NativeBuildError as error:
            failed.write_text(str(error), errors="replace")
            raise
        store.publish(built, path)


def load(path: Path) -> ctypes.CDLL:
    """Load a library that `compile_library` has made, and declare the types of its functions."""
    return declare(store.load(path))
