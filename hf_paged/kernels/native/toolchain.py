"""Which compiler makes the native kernels, with which flags, for which CPU and OpenMP library. Compiles nothing."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Neither flag changes a result: no code here reads errno or floating-point exceptions. No -ffast-math: NaN must travel.
_FLAGS = ("-O2", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fvisibility=hidden", "-w")


EMULATE_AMX = "HF_PAGED_EMULATE_AMX"
"""For tests: "1" builds and uses the code for AMX on an emulation of it, which needs AVX-512 with BF16."""


class NativeBuildError(RuntimeError):
    """The native kernels cannot be compiled or loaded here."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """command: the compiler, with leading arguments where $CC has some ("ccache gcc"). target: flags that select
    instructions. openmp: the library that this process already runs its threads with."""

    command: tuple[str, ...]
    target: tuple[str, ...]
    openmp: Path | None

    def compile(self, source: Path, unit: Path, includes: Sequence[Path]) -> list[str]:
        flags = (*_FLAGS, *self.target, "-fopenmp", *(f"-I{path}" for path in includes))
        return [*self.command, *flags, "-c", str(source), "-o", str(unit)]

    def link(self, units: Sequence[Path], out: Path) -> list[str]:
        """Linking the OpenMP library that torch uses shares its threads. It is named by file, not by path, so that one
        build serves every environment that has this library."""
        openmp = ["-fopenmp"]
        if self.openmp is not None:
            openmp = [f"-L{self.openmp.parent}", f"-l:{self.openmp.name}"]
        return [*self.command, "-shared", *map(str, units), *openmp, "-lm", "-o", str(out)]

    def identity(self) -> str:
        """Changes with whatever may change the code: compiler, flags, CPU and the name of the OpenMP library."""
        compiler = os.stat(self.command[0])
        openmp = None if self.openmp is None else self.openmp.name
        parts = (self.command, compiler.st_size, compiler.st_mtime_ns, _FLAGS, self.target, openmp, _cpu())
        return repr(parts)

    def check(self) -> None:
        """Raises NativeBuildError if the compiler cannot use the OpenMP library. Runs the preprocessor."""
        if self.openmp is None or not self.openmp.name.startswith("libgomp"):
            return  # LLVM's and Intel's libraries serve code of both compilers
        macros = subprocess.run(
            [*self.command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True, errors="replace",
            timeout=60, check=False,
        )  # fmt: skip
        if "__clang__" in macros.stdout:
            raise NativeBuildError(
                f"{shlex.join(self.command)} is clang, whose OpenMP code cannot run on the library of this torch, "
                f"{self.openmp.name}; use gcc (CC=gcc)"
            )


def find_toolchain() -> Toolchain:
    """Raises NativeBuildError where there is no compiler."""
    target = ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)
    if os.environ.get(EMULATE_AMX) == "1":
        target += (f"-D{EMULATE_AMX}=1",)
    return Toolchain(_compiler(), target, _openmp_library())


def has_compiler() -> bool:
    try:
        _compiler()
    except NativeBuildError:
        return False
    return True


def _compiler() -> tuple[str, ...]:
    """Links are kept: ccache is told by the name it is called by which compiler is meant."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        path = shutil.which(chosen[0])
        if path is None:
            raise NativeBuildError(f"the C compiler CC={os.environ['CC']} was not found")
        return os.path.abspath(path), *chosen[1:]
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            return (os.path.abspath(path),)
    raise NativeBuildError("no C compiler found (cc, gcc, clang or $CC)")


def _openmp_library() -> Path | None:
    """The OpenMP runtime that torch has loaded into this process, if it can be told."""
    import torch  # noqa: F401  loads it, in a process that has not needed torch so far

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    return min(map(Path, found), key=lambda path: "torch" not in str(path), default=None)


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
