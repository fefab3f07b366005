"""Compiles the C kernels once a machine, in the background, and loads them. Knows compilers and files, no tensors.

A process uses the kernels that are in the cache when it first asks, or never: it does not change over later. So results
cannot change in the middle of a run, and no call of a user waits for a compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from hf_paged.kernels.native.structs import declare

SWITCH = "HF_PAGED_NATIVE"
EMULATE_AMX = "HF_PAGED_EMULATE_AMX"
"""For tests: "1" builds and uses the code for AMX on an emulation of it, which needs AVX-512 with BF16."""
# Every *.c in these is a translation unit of its own; *.inc.c and *.h are included by those.
_SOURCE_DIRECTORIES = (Path(__file__).parent, Path(__file__).parents[2] / "fused" / "cpu" / "native")
# Neither flag changes a result: no code here reads errno or floating-point exceptions. No -ffast-math: NaN must travel.
_FLAGS = ("-O2", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fvisibility=hidden", "-w")
_STALE_SECONDS = 600


class NativeBuildError(RuntimeError):
    """The native kernels cannot be compiled here."""


@dataclass(frozen=True, slots=True)
class _Toolchain:
    compiler: str
    target: tuple[str, ...]
    openmp: str | None  # the library this process already runs its threads with

    def commands(self, directory: Path, stem: str) -> list[list[str]]:
        """Compile and link `stem`.tmp.so. Linking the very OpenMP library that torch uses shares its threads."""
        link = [self.openmp] if self.openmp else ["-fopenmp"]
        compiled = {str(directory / f"{stem}.{number}.o"): source for number, source in enumerate(_units())}
        includes = [f"-I{directory}" for directory in _SOURCE_DIRECTORIES]
        flags = (*_FLAGS, *self.target, "-fopenmp", *includes)
        return [
            *([self.compiler, *flags, "-c", str(source), "-o", unit] for unit, source in compiled.items()),
            [self.compiler, "-shared", *compiled, *link, "-lm", "-o", str(directory / f"{stem}.tmp.so")],
        ]


def _sources() -> list[Path]:
    return [path for directory in _SOURCE_DIRECTORIES for path in sorted(directory.glob("*.[ch]"))]


def _units() -> list[Path]:
    return [path for path in _sources() if path.suffix == ".c" and not path.name.endswith(".inc.c")]


def _openmp_library() -> str | None:
    """Path of the OpenMP runtime loaded into this process (torch's own copy first), if it can be told."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    return min(found, key=lambda path: "torch" not in path, default=None)


def _cpu() -> str:
    """What -march=native depends on."""
    lines: list[str] = [platform.machine()]
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if re.match(r"(model name|flags|Features|CPU part)\b", line):
                lines.append(line)
            elif not line:
                break
    except OSError:
        lines.append(platform.processor())
    return "\n".join(lines)


def _toolchain() -> _Toolchain | None:
    names = [os.environ["CC"]] if os.environ.get("CC") else []
    for name in [*names, "cc", "gcc", "clang"]:
        path = shutil.which(name)
        if path:
            machine = platform.machine()
            target = ("-mcpu=native",) if machine in ("aarch64", "arm64") else ("-march=native",)
            if os.environ.get(EMULATE_AMX) == "1":
                target += (f"-D{EMULATE_AMX}=1",)
            return _Toolchain(os.path.realpath(path), target, _openmp_library())
    return None


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "hf_paged"


def _stem(toolchain: _Toolchain) -> str:
    """Names a build: changes with the sources, the flags, the compiler, the CPU and the OpenMP library."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
    compiler = os.stat(toolchain.compiler)
    parts = (*_FLAGS, *toolchain.target, toolchain.compiler, compiler.st_size, compiler.st_mtime_ns)
    digest.update(repr((parts, toolchain.openmp, _cpu())).encode())
    return f"kernels-{digest.hexdigest()[:24]}"


def _private_directory() -> Path:
    """The cache directory, which nobody else may write: code is loaded from it."""
    directory = cache_directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeBuildError(f"{directory} can be written by others; make it yours alone, or set XDG_CACHE_HOME")
    return directory


def _start_in_background(toolchain: _Toolchain, directory: Path, stem: str) -> None:
    """Start a build that outlives this process; a build of the same kernels that already runs is left alone."""
    lock = directory / f"{stem}.lock"
    try:
        lock.mkdir()
    except FileExistsError:
        if time.time() - lock.stat().st_mtime < _STALE_SECONDS:
            return
        os.utime(lock)
    own = f"{stem}.{os.getpid()}"
    quoted = {name: shlex.quote(str(directory / name)) for name in (f"{own}.log", f"{own}.tmp.so")}
    log, library = quoted.values()
    units = f"{shlex.quote(str(directory / own))}.*.o"
    steps = " && ".join(shlex.join(command) for command in toolchain.commands(directory, own))
    script = (
        f"( if {steps} && mv -f {library} {shlex.quote(str(directory / stem))}.so; then rm -f {log}; "
        f"else mv -f {log} {shlex.quote(str(directory / stem))}.failed; fi; "
        f"rm -f {units}; rmdir {shlex.quote(str(lock))} ) >{log} 2>&1 </dev/null &"
    )
    subprocess.run(["nice", "sh", "-c", script] if shutil.which("nice") else ["sh", "-c", script], check=True)


def _load(path: Path) -> ctypes.CDLL:
    return declare(ctypes.CDLL(str(path)))


@functools.cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    """The kernels, if they can be used, and a line about it. Asked once a process; may start a background build."""
    if os.environ.get(SWITCH) == "0":
        return None, f"native kernels are off ({SWITCH}=0)"
    if os.name != "posix":
        return None, "native kernels are built on POSIX systems only"
    toolchain = _toolchain()
    if toolchain is None:
        return None, "no native kernels: no C compiler found (cc, gcc, clang or $CC)"
    try:
        directory = _private_directory()
        stem = _stem(toolchain)
        path = directory / f"{stem}.so"
        if path.exists():
            library = _load(path)
            threads = "OpenMP" if library.hfp_openmp() else "one thread"
            return library, f"native kernels: {library.hfp_target().decode()}, {threads}"
        failed = directory / f"{stem}.failed"
        if failed.exists():
            lines = failed.read_text(errors="replace").strip().splitlines() or ["no message"]
            return None, f"no native kernels: the compiler failed ({lines[0][:150]}; all of it in {failed})"
        _start_in_background(toolchain, directory, stem)
    except (OSError, NativeBuildError, subprocess.CalledProcessError) as error:
        return None, f"no native kernels: {error}"
    return None, f"native kernels are being compiled in the background ({path}); the next process will use them"


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None: then `status` says why."""
    return _find()[0]


def status() -> str:
    """One line for people: which CPU kernels this process has, or why it has none."""
    return _find()[1]


def build() -> Path:
    """Compile now and wait (seconds), then load: for setup scripts, tests and benchmarks.

    Returns the library's path. Raises NativeBuildError with the compiler's words if it cannot be had.
    """
    toolchain = _toolchain()
    if toolchain is None:
        raise NativeBuildError("no C compiler found (cc, gcc, clang or $CC)")
    directory = _private_directory()
    stem = _stem(toolchain)
    path = directory / f"{stem}.so"
    if not path.exists():
        own = f"{stem}.{os.getpid()}"
        try:
            for command in toolchain.commands(directory, own):
                done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
                if done.returncode:
                    raise NativeBuildError(f"{shlex.join(command)}\n{done.stderr}")
            os.replace(directory / f"{own}.tmp.so", path)
        finally:
            for unit in directory.glob(f"{own}.*.o"):
                unit.unlink(missing_ok=True)
        (directory / f"{stem}.failed").unlink(missing_ok=True)
    _find.cache_clear()
    return path
