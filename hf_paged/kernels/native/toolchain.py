"""Finds the compiler, flags and OpenMP library for the native kernels. Compiles nothing."""

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

# The -fno-* flags change no result: the code reads neither errno nor floating-point exceptions. -ffast-math would break
# the propagation of NaN.
_FLAGS = ("-O2", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fvisibility=hidden", "-w")


EMULATE_AMX = "HF_PAGED_EMULATE_AMX"
"""An environment variable for tests: "1" selects the code for AMX on an emulation, which needs AVX-512 with BF16."""


ISA = "HF_PAGED_ISA"
"""The environment variable that chooses the instruction set."""
# The compiler's flags, and what a CPU must have, as Linux names it.
_X86_TARGETS = {"avx2": ("-march=haswell", {"avx2", "fma", "f16c"}), "avx512": ("-march=skylake-avx512", {"avx512vl"})}


class NativeBuildError(RuntimeError):
    """The native kernels cannot be compiled or loaded here."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """command: the compiler and the arguments that $CC has for it ("ccache gcc"). target: flags that select the
    instruction set. openmp: the OpenMP library that torch has loaded into this process, if it is known."""

    command: tuple[str, ...]
    target: tuple[str, ...]
    openmp: Path | None

    def compile(self, source: Path, unit: Path, includes: Sequence[Path]) -> list[str]:
        flags = (*_FLAGS, *self.target, "-fopenmp", *(f"-I{path}" for path in includes))
        return [*self.command, *flags, "-c", str(source), "-o", str(unit)]

    def link(self, units: Sequence[Path], out: Path) -> list[str]:
        """The command that links against torch's OpenMP library, so that the kernels share its threads.

        The library is named without its directory, so that one build serves every environment that has it.
        """
        openmp = ["-fopenmp"]
        if self.openmp is not None:
            openmp = [f"-L{self.openmp.parent}", f"-l:{self.openmp.name}"]
        return [*self.command, "-shared", *map(str, units), *openmp, "-lm", "-o", str(out)]

    def identity(self) -> str:
        """A string that identifies everything that affects the compiled code: compiler, flags, CPU, OpenMP library."""
        compiler = os.stat(self.command[0])
        openmp = None if self.openmp is None else self.openmp.name
        parts = (self.command, compiler.st_size, compiler.st_mtime_ns, _FLAGS, self.target, openmp, _cpu())
        return repr(parts)

    def check(self) -> None:
        """Raise NativeBuildError if the compiler cannot use the OpenMP library. Runs the preprocessor."""
        if self.openmp is None or not self.openmp.name.startswith("libgomp"):
            return  # LLVM's and Intel's libraries work with gcc and clang
        macros = subprocess.run(
            [*self.command, "-dM", "-E", "-x", "c", os.devnull], capture_output=True, text=True, errors="replace",
            timeout=60, check=False,
        )  # fmt: skip
        if "__clang__" in macros.stdout:
            raise NativeBuildError(
                f"{shlex.join(self.command)} is clang, whose OpenMP code does not run with the library of this torch, "
                f"{self.openmp.name}; use gcc (CC=gcc)"
            )


def find_toolchain() -> Toolchain:
    """Raises NativeBuildError if there is no compiler, ValueError for an HF_PAGED_ISA that this CPU has not."""
    target: tuple[str, ...] = (_target(os.environ.get(ISA, "").strip().lower() or "native"),)
    if os.environ.get(EMULATE_AMX) == "1":
        target += (f"-D{EMULATE_AMX}=1",)
    return Toolchain(_compiler(), target, _openmp_library())


def _target(isa: str) -> str:
    """The compiler's flag for an instruction set."""
    if isa == "native":
        return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    flag, needed = _X86_TARGETS.get(isa, ("", {"none"}))
    if not needed <= set(_cpu().split()):
        raise ValueError(f"{ISA}={isa!r}: use native, or {' or '.join(_X86_TARGETS)} on a CPU that has it")
    return flag


def has_compiler() -> bool:
    try:
        _compiler()
    except NativeBuildError:
        return False
    return True


def _compiler() -> tuple[str, ...]:
    """The command of the compiler. Symbolic links are not resolved: ccache finds its compiler by the link's name."""
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
    """The OpenMP library that torch has loaded into this process; None if it cannot be determined."""
    import torch  # noqa: F401  (this loads it)

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    return min(map(Path, found), key=lambda path: "torch" not in str(path), default=None)


def _cpu() -> str:
    """Everything on which -march=native depends."""
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
