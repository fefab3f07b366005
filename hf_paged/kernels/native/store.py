"""The directory of the user where builds are kept. Code is loaded from it, so only its owner may write there."""

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

_KEPT = 8  # builds, the last used: environments with other versions of torch, machines that share a home
_open_libraries: list[int] = []


def cache_directory() -> Path:
    """$XDG_CACHE_HOME/hf_paged; ~/.cache/hf_paged; for a user whose home is missing or read-only, one in /tmp."""
    chosen, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(chosen):  # the XDG specification: others are ignored
        return Path(chosen) / "hf_paged"
    if os.path.isabs(home):
        directory = Path(home) / ".cache" / "hf_paged"
        if directory.is_dir() or os.access(home, os.W_OK):
            return directory
    return Path(tempfile.gettempdir()) / f"hf_paged-{os.getuid()}"


def open_directory() -> Path:
    """The cache directory, made if it is missing. Raises NativeBuildError if others may write there, or OSError."""
    directory = cache_directory()
    for missing in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode) or _is_open_to_others(info):
        raise NativeBuildError(f"{directory} can be written by others; make it yours alone, or set XDG_CACHE_HOME")
    if info.st_mode & 0o077:
        directory.chmod(0o700)
    return directory


def _is_open_to_others(info: os.stat_result) -> bool:
    return info.st_uid != os.getuid() or bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One process at a time builds; the lock of a process that dies is free again."""
    import fcntl  # POSIX only; the package can be imported elsewhere

    with (directory / "lock").open("a") as file:
        with suppress(OSError):  # a file system without locks: two processes may build the same; the later one's stays
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has the same open file


def is_locked(directory: Path) -> bool:
    """Whether another process is building."""
    import fcntl

    with (directory / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
        return False


def publish(built: Path, path: Path) -> None:
    """Move a library to where it is looked for, whatever the umask, and remove what is no longer used."""
    built.chmod(0o600)
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
    """The library, if it belongs to this user and nobody else may write it. Raises NativeBuildError or OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or _is_open_to_others(info):
        os.close(descriptor)
        raise NativeBuildError(f"{path} can be written by others; remove it")
    # The file that was looked at, whatever has the name by now. It stays open: the loader takes a library whose name it
    # knows for loaded, so no other may ever have this number.
    _open_libraries.append(descriptor)
    opened = f"/proc/self/fd/{descriptor}"
    return ctypes.CDLL(opened if os.path.exists(opened) else str(path))
