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


def v1(root: Path, path: str, files: dict[str, str], mounted: str = "/") -> HostMemory:
    cgroup = f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/elsewhere\n0::/unified"
    return within_cgroups(HOST, tree(root, cgroup, V1_MOUNT.format(mounted=mounted), files))


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert within_cgroups(HOST, tmp_path) == HOST
    memory = host_memory()
    assert 0 < memory.available <= memory.total


MAX_500 = {"memory.max": "500", "memory.current": "100"}
NESTED = {
    "a/memory.max": "600", "a/memory.current": "550", "a/b/memory.max": "400", "a/b/memory.current": "100",
    "a/b/c/memory.max": "max", "a/b/c/memory.current": "90", "a/other/memory.max": "1", "a/other/memory.current": "1",
}  # fmt: skip
INNER = {"memory.max": "500", "memory.current": "0", "inner/memory.max": "300", "inner/memory.current": "0"}
STAT = "anon 100\nfile 300\ninactive_anon 7\ninactive_file 250"
IN_V2: dict[str, tuple[str, dict[str, str], dict[str, str], HostMemory]] = {  # path, files, mount, what is found
    "in a container": ("/", MAX_500, {}, HostMemory(500, 400)),  # in a namespace its cgroup appears as the root
    "no limit": ("/", {"memory.max": "max", "memory.high": "max", "memory.current": "100"}, {}, HOST),
    "the root cgroup has no such files": ("/", {"cgroup.controllers": "cpu memory"}, {}, HOST),
    "high below max": ("/", {**MAX_500, "memory.high": "300"}, {}, HostMemory(300, 200)),
    "high alone": ("/", {**MAX_500, "memory.max": "max", "memory.high": "300"}, {}, HostMemory(300, 200)),
    "high above max": ("/", {**MAX_500, "memory.high": "700"}, {}, HostMemory(500, 400)),
    "the tightest of nested ones": ("/a/b/c", NESTED, {}, HostMemory(400, 50)),
    "a part is mounted": ("/docker/abc/inner", INNER, {"mounted": "/docker/abc"}, HostMemory(300, 300)),
    "a path above the mount": ("/../../user.slice", MAX_500, {"mounted": "/docker/abc"}, HostMemory(500, 400)),
    "a path beside the mount": ("/not/under/it", MAX_500, {"mounted": "/docker/abc"}, HostMemory(500, 400)),
    "beside v1": (  # the memory controller may belong to either version
        "/", {f"unified/{name}": text for name, text in MAX_500.items()}, {"at": "/sys/fs/cgroup/unified"},
        HostMemory(500, 400),
    ),
    "file pages": ("/", {**MAX_500, "memory.current": "400", "memory.stat": STAT}, {}, HostMemory(500, 350)),
    "more in use than allowed": ("/", {"memory.high": "500", "memory.current": "600"}, {}, HostMemory(500, 0)),
    "a limit above the host": ("/", {**MAX_500, "memory.max": "5000"}, {}, HOST),
    "no usage": ("/", {"memory.max": "500"}, {}, HOST),
    "not understood": ("/", {"memory.max": "?", "memory.current": "1"}, {}, HOST),
    "no files": ("/", {}, {}, HOST),
}  # fmt: skip


@pytest.mark.parametrize("case", IN_V2)
def test_v2(case: str, tmp_path: Path) -> None:
    path, files, mount, expected = IN_V2[case]
    mounts = V2_MOUNT.format(**{"mounted": "/", "at": "/sys/fs/cgroup", **mount})
    assert within_cgroups(HOST, tree(tmp_path, f"0::{path}", mounts, files)) == expected


def test_v1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "700",
        "memory/box/memory.limit_in_bytes": "500", "memory/box/memory.usage_in_bytes": "300",
        "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
    }  # fmt: skip
    assert v1(tmp_path, "/box", files) == HostMemory(500, 250)
    assert v1(tmp_path, "/", files) == HOST


def test_v1_in_a_container_that_sees_the_host_s_paths(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "100"}
    assert v1(tmp_path, "/docker/abc", files, mounted="/docker/abc") == HostMemory(500, 400)
