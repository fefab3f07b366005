"""The user's cache directory of builds. Code is loaded from it, so only its owner may be able to write there."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_paged.kernels.native.toolchain import NativeBuildError

# Several environments, or machines that share a home directory, have builds of their own.
_KEPT = 8
_open_libraries: list[int] = []


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/hf_paged or ~/.cache/hf_paged; one in /tmp if the home directory is missing or read-only."""
    chosen, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(chosen):  # the XDG specification says to ignore relative paths
        return Path(chosen) / "hf_paged"
    if os.path.isabs(home):
        directory = Path(home) / ".cache" / "hf_paged"
        if directory.is_dir() or os.access(home, os.W_OK):
            return directory
    return Path(tempfile.gettempdir()) / f"hf_paged-{os.getuid()}"


def open_directory() -> Path:
    """The cache directory, which is created if it is missing. Raises NativeBuildError if other users may write there,
    or OSError."""
    directory = cache_directory()
    # `mkdir(parents=True)` would give the parents the default mode, which lets others read.
    for missing in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    # Not `stat`: a link could lead into a directory of somebody else.
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode) or _is_open_to_others(info):
        raise NativeBuildError(
            f"{directory} belongs to another user or can be written by others; correct that (chown, chmod 700), or set "
            "XDG_CACHE_HOME to another directory"
        )
    if info.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def _is_open_to_others(info: os.stat_result) -> bool:
    return info.st_uid != os.getuid() or bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of builds: one process builds at a time. The lock is freed if the process dies."""
    import fcntl  # exists on POSIX only, but the package can be imported elsewhere

    with (directory / "lock").open("a") as file:
        with suppress(OSError):  # a file system without locks: two processes may build, and the later library is kept
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child forked meanwhile has the file open too


def is_locked(directory: Path) -> bool:
    """Return True if another process is building."""
    import fcntl

    with (directory / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False


def publish(built: Path, path: Path) -> None:
    """Move a library to its final path, and remove builds that have not been used for long."""
    built.chmod(0o600)  # for any umask
    # Renamed when it is complete, so that another process finds the whole library or none.
    os.replace(built, path)
    libraries = sorted(path.parent.glob("kernels-*.so"), key=lambda p: p.stat().st_mtime, reverse=True)
    kept = {path, *libraries[:_KEPT]}
    for entry in path.parent.glob("kernels-*"):
        if entry not in kept:
            remove(entry)


def remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


def load(path: Path) -> ctypes.CDLL:
    """Load the library. Raises NativeBuildError if another user owns it or may write it, or OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or _is_open_to_others(info):
        os.close(descriptor)
        raise NativeBuildError(f"{path} belongs to another user or can be written by others; remove it")
    # Load by descriptor, so that it is the file that was checked, even if its path has been replaced. The descriptor
    # stays open: the loader identifies libraries by name, and another file must never get the same number.
    _open_libraries.append(descriptor)
    opened = f"/proc/self/fd/{descriptor}"
    return ctypes.CDLL(opened if os.path.exists(opened) else str(path))
