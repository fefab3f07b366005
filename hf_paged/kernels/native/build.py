"""The native kernels of a process: found in the user's cache, or compiled there, and loaded. Knows files, no tensors.

A process decides once, for all native parts together (attention, sampling, decoder layers), when it first asks whether
it has the kernels: then it waits until they are compiled, seconds, once a machine. So its results do not depend on when
a compiler ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_paged.kernels.native import store
from hf_paged.kernels.native.structs import declare
from hf_paged.kernels.native.toolchain import NativeBuildError, Toolchain, find_toolchain, has_compiler
from hf_paged.locks import usable_after_fork

__all__ = ["NativeBuildError", "build", "compile_library", "has_compiler", "library", "load", "status"]

log = logging.getLogger("hf_paged")

SWITCH = "HF_PAGED_NATIVE"
_PACKAGE = Path(__file__).parents[2]
# Every *.c in these is a translation unit of its own; *.inc.c and *.h are included by those.
_SOURCE_DIRECTORIES = (Path(__file__).parent, _PACKAGE / "fused" / "cpu" / "native")
_RETRY_SECONDS = 3600  # after a failed build
_COMPILER_SECONDS = 900  # then it hangs


def _read_sources() -> dict[str, bytes]:
    """Path in the package -> content."""
    files = (path for directory in _SOURCE_DIRECTORIES for path in sorted(directory.glob("*.[ch]")))
    return {str(path.relative_to(_PACKAGE)): path.read_bytes() for path in files}


# Read with the Python code that calls the kernels: an upgrade of the package while this process runs changes both.
SOURCES: Mapping[str, bytes] = _read_sources()


@dataclass(frozen=True, slots=True)
class _Decision:
    library: ctypes.CDLL | None
    status: str


_decision: _Decision | None = None
_lock = usable_after_fork(threading.Lock())


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None: then `status` says why. The first question of a machine compiles them and waits.

    Raises ValueError if HF_PAGED_NATIVE has a value that means neither on nor off.
    """
    return (_decision or _decided()).library


def status() -> str:
    """One line for people: which CPU kernels this process has, or why it has none."""
    return _decided().status


def build() -> Path:
    """Compile the kernels if they are not in the cache, whatever failed before, and load them.

    Returns the library's path. A process that had decided to do without them uses them from now on: not while a
    generate call or an engine runs. Raises NativeBuildError with the reason, the compiler's words for one, if there is
    nothing to load.
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
        f"no native CPU kernels, so slower code of torch takes their place: {reason}. `hf-paged build` tries again and "
        f"tells all of it; {SWITCH}=0 does without them and without this warning",
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
    raise ValueError(f"{SWITCH}={os.environ[SWITCH]!r}: use 1 (compile and use the native CPU kernels) or 0 (do not)")


def _loaded(path: Path) -> _Decision:
    loaded = load(path)
    threads = "OpenMP" if loaded.hfp_openmp() else "one thread"
    return _Decision(loaded, f"native kernels: {loaded.hfp_target().decode()}, {threads}")


def _built(*, retry: bool) -> Path:
    """Path of the library, compiled now if need be. retry: even if that has failed within the last hour."""
    toolchain = find_toolchain()
    directory = store.open_directory()
    path = directory / _file_name(toolchain)
    if not path.exists():
        if store.is_locked(directory):
            log.warning("hf_paged: waiting for another process that compiles the CPU kernels")
        with store.locked(directory):
            if not path.exists():
                _build(toolchain, path, retry=retry)
    with suppress(OSError):  # a cache that is read-only
        os.utime(path)  # the builds last used are kept
    return path


def _file_name(toolchain: Toolchain) -> str:
    """Names a build: changes with the sources and with whatever they are compiled with."""
    digest = hashlib.sha256(toolchain.identity().encode())
    for name, content in SOURCES.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return f"kernels-{digest.hexdigest()[:24]}.so"


def _build(toolchain: Toolchain, path: Path, *, retry: bool) -> None:
    failed = path.with_suffix(".failed")
    if not retry and failed.exists() and abs(time.time() - failed.stat().st_mtime) < _RETRY_SECONDS:
        raise NativeBuildError(failed.read_text(errors="replace"))
    log.warning("hf_paged: compiling the CPU kernels, once for this machine; this takes 5 to 30 seconds")
    for leftover in path.parent.glob("build-*"):  # of a process that was killed
        store.remove(leftover)
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as work:
        try:
            built = compile_library(toolchain, Path(work))
        except NativeBuildError as error:
            failed.write_text(str(error), errors="replace")
            raise
        store.publish(built, path)


def compile_library(toolchain: Toolchain, directory: Path) -> Path:
    """Compile the sources in `directory`, all units side by side; returns the library.

    Raises NativeBuildError with the compiler's words.
    """
    toolchain.check()
    includes = [directory / path.relative_to(_PACKAGE) for path in _SOURCE_DIRECTORIES]
    units: list[Path] = []
    for name, content in SOURCES.items():
        source = directory / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_bytes(content)
        if name.endswith(".c") and not name.endswith(".inc.c"):
            units.append(source)
    out = directory / "kernels.so"
    _run([toolchain.compile(unit, unit.with_suffix(".o"), includes) for unit in units], directory)
    _run([toolchain.link([unit.with_suffix(".o") for unit in units], out)], directory)
    return out


def _run(commands: list[list[str]], directory: Path) -> None:
    """All at once. Raises NativeBuildError with the words of the first that fails."""
    running: list[subprocess.Popen[bytes]] = []
    logs = [directory / f"{number}.log" for number in range(len(commands))]
    try:
        for command, output in zip(commands, logs, strict=True):
            with output.open("wb") as file:
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
        for process, command, output in zip(running, commands, logs, strict=True):
            if process.wait(_COMPILER_SECONDS):
                words = output.read_text(errors="replace").strip() or f"exit status {process.returncode}"
                raise NativeBuildError(f"the compiler failed: {words}\n{shlex.join(command)}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def load(path: Path) -> ctypes.CDLL:
    """A library that `compile_library` has made, with the types of its functions."""
    return declare(store.load(path))
