"""Measure the host memory that this process may still allocate: free on the system, within the limits of its cgroups.

Reads only files under `root`, so that a test can provide them. Knows nothing of K/V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes: the total that this process could have, and what it may still allocate."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of the files of a memory cgroup."""

    filesystem: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # in memory.stat: file pages that the kernel reclaims before it kills a process


_V1 = _Version("cgroup", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("cgroup2", ("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The smaller of what the system and the tightest memory cgroup of this process leave."""
    import psutil

    system = psutil.virtual_memory()
    return within_cgroups(HostMemory(int(system.total), int(system.available)), root)


def within_cgroups(memory: HostMemory, root: Path = Path("/")) -> HostMemory:
    """`memory` limited to what this process's memory cgroup and its ancestors allow (v1, v2 or both)."""
    total, available = memory.total, memory.available
    for version, directory in _directories(root):
        limits = [limit for name in version.limits if (limit := _read_int(directory / name)) is not None]
        usage = _read_int(directory / version.usage)
        if not limits or usage is None:
            continue
        # The kernel drops these pages before it kills a process, so they count as free.
        used = max(usage - _reclaimable(directory, version), 0)
        total = min(total, *limits)
        available = min(available, max(min(limits) - used, 0))
    return HostMemory(total, available)


def _directories(root: Path) -> Iterator[tuple[_Version, Path]]:
    """The directories of this process's memory cgroup and its ancestors, up to the mount point."""
    mounts = dict(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = _V2 if not controllers else _V1
        if version not in mounts or (controllers and "memory" not in controllers.split(",")):
            continue
        mounted, mount_point = mounts[version]
        yield from ((version, directory) for directory in _up_to(mount_point, _below(mounted, path)))


def _mounts(root: Path) -> Iterator[tuple[_Version, tuple[str, Path]]]:
    """Yield for each mounted memory hierarchy its version of cgroups, the part that is mounted, and the folder."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (filesystem, _, options) = before.split(), (*after.split(maxsplit=2), "", "", "")[:3]
        for version in (_V1, _V2):
            if filesystem == version.filesystem and (version is _V2 or "memory" in options.split(",")):
                yield version, (fields[3], root / fields[4].lstrip("/"))


def _below(mounted: str, path: str) -> PurePosixPath:
    """`path` relative to the mounted part of the hierarchy.

    A path outside it (".." in a container) is not visible; the mount point is then the closest cgroup to read.
    """
    if ".." in path.split("/"):
        return PurePosixPath()
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return PurePosixPath()


def _up_to(mount_point: Path, relative: PurePosixPath) -> Iterator[Path]:
    yield mount_point / relative
    if relative.parts:
        yield from _up_to(mount_point, relative.parent)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no Linux, or no cgroups
        return []


def _read_int(path: Path) -> int | None:
    """The integer in the file. None if there is no such file, or if it sets no limit ("max")."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _reclaimable(directory: Path, version: _Version) -> int:
    for line in _lines(directory / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == version.reclaimable and value.strip().isdigit():
            return int(value)
    return 0
