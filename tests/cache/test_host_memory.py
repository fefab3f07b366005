"""host_memory on file trees like those of hosts and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged.cache.host_memory import HostMemory, host_memory, within_cgroups

HOST = HostMemory(total=1000, available=800)
V1_MOUNT = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2_MOUNT = "31 23 0:28 {mounted} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
OTHER_MOUNTS = "22 1 8:1 / / rw - ext4 /dev/root rw\n36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"


def tree(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": f"{OTHER_MOUNTS}\n{mounts}\n",
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def v2(root: Path, path: str, files: dict[str, str], mounted: str = "/", at: str = "/sys/fs/cgroup") -> HostMemory:
    return within_cgroups(HOST, tree(root, f"0::{path}", V2_MOUNT.format(mounted=mounted, at=at), files))


def v1(root: Path, path: str, files: dict[str, str], mounted: str = "/") -> HostMemory:
    cgroup = f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/elsewhere\n0::/unified"
    return within_cgroups(HOST, tree(root, cgroup, V1_MOUNT.format(mounted=mounted), files))


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert within_cgroups(HOST, tmp_path) == HOST


def test_this_host() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.total


def test_v2_in_a_container(tmp_path: Path) -> None:
    """In a cgroup namespace the container's cgroup appears as the root."""
    assert v2(tmp_path, "/", {"memory.max": "500", "memory.current": "100"}) == HostMemory(500, 400)


def test_v2_no_limit(tmp_path: Path) -> None:
    files = {"memory.max": "max", "memory.high": "max", "memory.current": "100"}
    assert v2(tmp_path, "/", files) == HOST


def test_v2_the_root_cgroup_has_no_such_files(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {"cgroup.controllers": "cpu memory"}) == HOST


@pytest.mark.parametrize(("maximum", "high", "total"), [("500", "300", 300), ("max", "300", 300), ("200", "300", 200)])
def test_v2_high_counts_like_max(tmp_path: Path, maximum: str, high: str, total: int) -> None:
    files = {"memory.max": maximum, "memory.high": high, "memory.current": "50"}
    assert v2(tmp_path, "/", files) == HostMemory(total, total - 50)


def test_v2_the_tightest_of_nested_cgroups_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "600",
        "a/memory.current": "550",
        "a/b/memory.max": "400",
        "a/b/memory.current": "100",
        "a/b/c/memory.max": "max",
        "a/b/c/memory.current": "90",
        "a/other/memory.max": "1",
        "a/other/memory.current": "1",
    }
    assert v2(tmp_path, "/a/b/c", files) == HostMemory(400, 50)


def test_v2_a_part_of_the_hierarchy_is_mounted(tmp_path: Path) -> None:
    files = {"memory.max": "500", "memory.current": "0", "inner/memory.max": "300", "inner/memory.current": "0"}
    assert v2(tmp_path, "/docker/abc/inner", files, mounted="/docker/abc") == HostMemory(300, 300)


@pytest.mark.parametrize("path", ["/../../user.slice", "/not/under/the/mount"])
def test_v2_a_path_outside_of_the_mount(tmp_path: Path, path: str) -> None:
    files = {"memory.max": "500", "memory.current": "100"}
    assert v2(tmp_path, path, files, mounted="/docker/abc") == HostMemory(500, 400)


def test_v2_beside_v1(tmp_path: Path) -> None:
    """The memory controller may belong to either version."""
    files = {"unified/memory.max": "500", "unified/memory.current": "100"}
    assert v2(tmp_path, "/", files, at="/sys/fs/cgroup/unified") == HostMemory(500, 400)


def test_v2_file_pages_that_can_be_dropped_are_free(tmp_path: Path) -> None:
    stat = "anon 100\nfile 300\ninactive_anon 7\ninactive_file 250"
    assert v2(tmp_path, "/", {"memory.max": "500", "memory.current": "400", "memory.stat": stat}) == HostMemory(
        500, 350
    )


def test_more_in_use_than_allowed(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {"memory.high": "500", "memory.current": "600"}) == HostMemory(500, 0)


def test_a_limit_above_the_host(tmp_path: Path) -> None:
    assert v2(tmp_path, "/", {"memory.max": "5000", "memory.current": "100"}) == HOST


@pytest.mark.parametrize("files", [{"memory.max": "500"}, {"memory.max": "?", "memory.current": "1"}, {}])
def test_files_that_are_missing_or_not_understood(tmp_path: Path, files: dict[str, str]) -> None:
    assert v2(tmp_path, "/", files) == HOST


def test_v1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "700",
        "memory/box/memory.limit_in_bytes": "500",
        "memory/box/memory.usage_in_bytes": "300",
        "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
    }
    assert v1(tmp_path, "/box", files) == HostMemory(500, 250)
    assert v1(tmp_path, "/", files) == HOST


def test_v1_in_a_container_that_sees_the_host_s_paths(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "100"}
    assert v1(tmp_path, "/docker/abc", files, mounted="/docker/abc") == HostMemory(500, 400)
