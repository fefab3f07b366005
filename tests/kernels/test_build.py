"""How the native kernels are compiled, cached, found and loaded, and that a process decides once."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels import ops
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import store, toolchain
from hf_paged.kernels.native.toolchain import NativeBuildError, find_toolchain

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine"),
]

_AS_ALWAYS = 'case "$*" in *-dM*) exit 0;; esac'
_BROKEN = "echo 'no such instruction' >&2; exit 1"


@pytest.fixture(scope="module", autouse=True)
def built() -> Path:
    return native_build.build()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state of a new process with an empty cache; returns the directory of the future library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native_build.SWITCH, raising=False)
    monkeypatch.setattr(native_build, "_decision", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the tests that ask for no warning
        yield tmp_path / "cache" / "hf_paged"


@pytest.fixture
def compiler(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$CC: a program that "compiles" by copying the existing library. It appends a line to `calls` for each call."""
    path = tmp_path / "compiler"
    copy = f'while [ "$1" != -o ]; do shift; done; cp {built} "$2"'
    write_script(path, f'echo "$*" >> {tmp_path / "calls"}; {_AS_ALWAYS}; {copy}')
    monkeypatch.setenv("CC", str(path))
    return path


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def libraries(directory: Path) -> list[Path]:
    return list(directory.glob("kernels-*.so"))


def test_the_first_question_waits_and_says_so(fresh: Path, compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert native_build.library() is not None
    assert native_build.status().startswith("native kernels: ")
    assert ["compiling the CPU kernels" in record.message for record in caplog.records] == [True]
    calls = (fresh.parents[1] / "calls").read_text().splitlines()
    units = [name for name in native_build.SOURCES if name.endswith(".c") and not name.endswith(".inc.c")]
    assert sum(" -c " in call for call in calls) == len(units)
    assert sorted(p.name for p in fresh.iterdir()) == sorted(["lock", *(p.name for p in libraries(fresh))])


def test_the_next_process_compiles_nothing(fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_build.library()
    calls = (fresh.parents[1] / "calls").read_text()
    monkeypatch.setattr(native_build, "_decision", None)
    assert native_build.library() is not None
    assert (fresh.parents[1] / "calls").read_text() == calls


def test_a_build_in_progress_is_waited_for(fresh: Path, built: Path, compiler: Path, monkeypatch: Any) -> None:
    """This thread plays the other process: it holds the lock and installs the kernels before it releases the lock."""
    directory, waits = store.open_directory(), threading.Event()
    path = directory / native_build._file_name(find_toolchain())
    monkeypatch.setattr(logging.getLogger("hf_paged"), "warning", lambda *_: waits.set())
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(native_build.library()))
    with store.locked(directory):
        thread.start()
        assert waits.wait(120)
        store.publish(Path(shutil.copy(built, directory / "ready")), path)
    thread.join()
    assert results and results[0] is not None
    assert not (fresh.parents[1] / "calls").exists()


def test_attention_and_layers_are_native_together(fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that found no kernels uses torch for all, one that builds them native code, whatever comes later."""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert ops.default_impl("cpu") == "torch" and not fused_ops.is_available(torch.float32)
    monkeypatch.setenv("CC", str(compiler))
    assert ops.default_impl("cpu") == "torch" and native_build.library() is None
    assert not fused_ops.is_available(torch.float32)
    native_build.build()
    assert ops.default_impl("cpu") == "native" and native_build.library() is not None
    loaded = native_build.library()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native_build.library() is loaded and ops.default_impl("cpu") == "native"


@pytest.mark.parametrize("value", ["0", "OFF"])
def test_switched_off(value: str, fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native_build.SWITCH, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_build.library() is None
    assert f"HF_PAGED_NATIVE={value}" in native_build.status()
    assert not fresh.exists()
    with pytest.raises(NativeBuildError, match="off"):
        native_build.build()


def test_the_instruction_set_is_chosen(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_PAGED_ISA", raising=False)
    own = find_toolchain()
    monkeypatch.setattr(toolchain, "_cpu", lambda: "x86_64 avx2 fma f16c bmi2")
    monkeypatch.setenv("HF_PAGED_ISA", "AVX2")
    assert find_toolchain().target[0] == "-march=haswell" and find_toolchain().identity() != own.identity()
    monkeypatch.setenv("HF_PAGED_ISA", "native")
    assert find_toolchain().target == own.target
    for value in ("avx512", "sse9"):
        monkeypatch.setenv("HF_PAGED_ISA", value)
        with pytest.raises(ValueError, match=f"HF_PAGED_ISA='{value}': this CPU runs native, avx2$"):
            find_toolchain()
    monkeypatch.setenv(native_build.SWITCH, "maybe")
    with pytest.raises(ValueError, match="HF_PAGED_NATIVE='maybe': use 1"):
        native_build.library()


def test_missing_kernels_are_told_once_with_the_remedy(fresh: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="no C compiler.*hf-paged build.*HF_PAGED_NATIVE=0") as told:
        assert native_build.library() is None
        assert native_build.library() is None
    assert len(told) == 1
    assert "no C compiler" in native_build.status()
    with pytest.raises(NativeBuildError, match="no C compiler"):
        native_build.build()


def test_a_failure_is_kept_for_an_hour(fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fresh.parents[1] / "calls"
    write_script(compiler, f"echo x >> {calls}; {_AS_ALWAYS}; {_BROKEN}")

    def ask() -> int:
        """Number of compiler runs in a new process."""
        calls.write_text("")
        monkeypatch.setattr(native_build, "_decision", None)
        assert native_build.library() is None
        assert "no such instruction" in native_build.status()
        return len(calls.read_text())

    assert ask() > 0
    assert ask() == 0
    calls.write_text("")
    with pytest.raises(NativeBuildError, match="no such instruction"):
        native_build.build()  # always tries
    assert calls.read_text()
    (failed,) = fresh.glob("*.failed")
    os.utime(failed, (0, 0))
    assert ask() > 0
    assert ask() == 0
    write_script(compiler, f"# another one\necho x >> {calls}; {_AS_ALWAYS}; {_BROKEN}")
    assert ask() > 0


def test_a_full_disk_is_forgotten_at_once(fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(store, "publish", mock.Mock(side_effect=OSError(28, "No space left on device")))
        assert native_build.library() is None
        assert "No space left" in native_build.status()
        with pytest.raises(NativeBuildError, match="No space left"):
            native_build.build()
    monkeypatch.setattr(native_build, "_decision", None)
    assert native_build.library() is not None


def test_a_killed_build_leaves_nothing_in_the_way(fresh: Path, compiler: Path) -> None:
    leftover = store.open_directory() / "build-killed"
    leftover.mkdir()
    (leftover / "paged.o").write_text("half")
    assert native_build.library() is not None
    assert not leftover.exists()


def test_what_was_hashed_is_compiled(fresh: Path, compiler: Path) -> None:
    """Later changes of the installed files, for example by an upgrade, have no effect."""
    native_build.build()
    commands = (fresh.parents[1] / "calls").read_text()
    assert "attention" in commands and str(Path(native_build.__file__).parents[2]) not in commands


def test_links_keep_their_names(fresh: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ccache recognises the compiler by the name of the link."""
    links = tmp_path / "links"
    links.mkdir()
    write_script(tmp_path / "ccache", f'[ "$(basename "$0")" = gcc ] && exec {compiler} "$@"; exit 1')
    (links / "gcc").symlink_to(tmp_path / "ccache")
    monkeypatch.setenv("CC", str(links / "gcc"))
    native_build.build()


def test_a_chosen_compiler(fresh: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have arguments, and is not replaced if it is missing."""
    monkeypatch.setenv("CC", f"{compiler} -m64")
    native_build.build()
    assert all(call.startswith("-m64 ") for call in (fresh.parents[1] / "calls").read_text().splitlines())
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NativeBuildError, match="CC=no-such-compiler was not found"):
        native_build.build()


def test_a_process_that_has_not_imported_torch_makes_the_same_build() -> None:
    code = "from hf_paged.kernels.native.toolchain import find_toolchain; print(find_toolchain().identity())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == find_toolchain().identity()


def test_nobody_else_may_write(fresh: Path, compiler: Path) -> None:
    before = os.umask(0)
    try:
        path = native_build.build()
    finally:
        os.umask(before)
    assert (mode(fresh.parent), mode(fresh), mode(path)) == (0o700, 0o700, 0o600)


@pytest.mark.parametrize("fault", ["folder", "writable", "link"])
def test_what_others_can_write_is_not_trusted(fault: str, fresh: Path, compiler: Path, monkeypatch: Any) -> None:
    path = native_build.build()
    if fault == "folder":
        fresh.chmod(0o777)
    elif fault == "writable":
        path.chmod(0o666)
    else:
        path.rename(fresh / "elsewhere")
        path.symlink_to(fresh / "elsewhere")
    monkeypatch.setattr(native_build, "_decision", None)
    assert native_build.library() is None
    assert ("symbolic link" if fault == "link" else "written by others") in native_build.status()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(tempfile.gettempdir()) / f"hf_paged-{os.getuid()}"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert store.cache_directory() == tmp_path / ".cache" / "hf_paged"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no $HOME, and none in the list of users
    assert store.cache_directory() == own
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path / "missing"))
    assert store.cache_directory() == own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.cache_directory() == tmp_path / "hf_paged"


def test_old_builds_are_removed(fresh: Path, compiler: Path) -> None:
    directory = store.open_directory()
    for age in range(10):
        old = directory / f"kernels-{age}.so"
        old.write_text("")
        os.utime(old, (1000 - age, 1000 - age))
    for name in ("kernels-x.failed", "kernels-x.1.o"):
        (directory / name).write_text("")
    (directory / "kernels-x.lock").mkdir()
    path = native_build.build()
    left = {p.name for p in directory.iterdir()}
    assert left == {"lock", path.name, *(f"kernels-{age}.so" for age in range(7))}
