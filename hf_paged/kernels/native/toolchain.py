"""Finds the compiler, flags and OpenMP library for the native kernels, and compiles them.

Imports nothing else of the package: the build of a wheel (`hatch_build.py`) runs this file where no torch is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[2]
# Every *.c file in them is a translation unit, except *.inc.c, which units include.
_SOURCE_DIRECTORIES = (
    Path(__file__).parent,
    _PACKAGE / "fused" / "cpu" / "native",
    _PACKAGE / "fused" / "cpu" / "native" / "portable",
)
# A compiler that takes longer is assumed to hang: all units together take half a minute of one core.
_COMPILER_SECONDS = 900


def _read_sources() -> dict[str, bytes]:
    """The content of each source file, by its path in the package."""
    files = (path for directory in _SOURCE_DIRECTORIES for path in sorted(directory.glob("*.[ch]")))
    return {path.relative_to(_PACKAGE).as_posix(): path.read_bytes() for path in files}


# Read at import, so that they match the Python code of this process even if the package is upgraded while it runs.
SOURCES: Mapping[str, bytes] = _read_sources()

# The -fno-* flags change no result: the code reads neither errno nor floating-point exceptions. -ffast-math would break
# the propagation of NaN. Without alignment, new code in one file moves the loops of others: a step of a bf16 model with
# one row took 15.6 ms in place of 12.6 (gcc 12, Zen 4).
_FLAGS = (
    "-O2", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fvisibility=hidden",
    "-w", "-falign-functions=64", "-falign-loops=32",
)  # fmt: skip


EMULATE_AMX = "HF_PAGED_EMULATE_AMX"
"""An environment variable for tests: "1" selects the code for AMX on an emulation, which needs AVX-512 with BF16."""


ISA = "HF_PAGED_ISA"
"""The environment variable that chooses the instruction set: a key of `INSTRUCTION_SETS`, or "native"."""


class InstructionSet(NamedTuple):
    """flags: the compiler's. needed: the machine and the features that a CPU must have, as Linux names them."""

    flags: tuple[str, ...]
    needed: frozenset[str]


_AVX2 = frozenset({"x86_64", "avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
# The best ones first. All but AMX, whose use Linux must grant, follow from the flags alone.
INSTRUCTION_SETS: Mapping[str, InstructionSet] = {
    "amx": InstructionSet(
        ("-march=cooperlake", "-mamx-tile", "-mamx-bf16", "-mamx-int8"), _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
    ),
    "avx512_bf16": InstructionSet(("-march=cooperlake",), _BF16),
    "avx512": InstructionSet(("-march=skylake-avx512",), _AVX512),
    "avx2": InstructionSet(("-march=haswell",), _AVX2),
    "neon": InstructionSet(("-march=armv8-a",), frozenset({"aarch64"})),
}


class NativeBuildError(RuntimeError):
    """The native kernels cannot be compiled or loaded here."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """command: the compiler and the arguments that $CC has for it ("ccache gcc"). target: flags that select the
    instruction set."""

    command: tuple[str, ...]
    target: tuple[str, ...]

    def compile(self, source: Path, unit: Path, includes: Sequence[Path]) -> list[str]:
        flags = (*_FLAGS, *self.target, *(f"-I{path}" for path in includes))
        return [*self.command, *flags, "-c", str(source), "-o", str(unit)]

    def link(self, units: Sequence[Path], out: Path) -> list[str]:
        return [*self.command, "-shared", "-pthread", *map(str, units), "-lm", "-o", str(out)]

    def identity(self) -> str:
        """A string that identifies everything that affects the compiled code: compiler, flags, CPU."""
        compiler = os.stat(self.command[0])
        parts = (self.command, compiler.st_size, compiler.st_mtime_ns, _FLAGS, self.target, _cpu())
        return repr(parts)


def find_toolchain() -> Toolchain:
    """Find compiler and flags. Raises NativeBuildError without a compiler, ValueError for a wrong HF_PAGED_ISA."""
    isa = chosen_set() or "native"
    if isa in INSTRUCTION_SETS:
        target = INSTRUCTION_SETS[isa].flags
    else:
        target = ("-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native",)
    if emulates_amx():
        target += (f"-D{EMULATE_AMX}=1",)
    return Toolchain(_compiler(), target)


def wheel_toolchain(isa: str) -> Toolchain:
    """For the library of a wheel. isa: a key of `INSTRUCTION_SETS`. Raises NativeBuildError if there is no compiler."""
    return Toolchain(_compiler(), INSTRUCTION_SETS[isa].flags)


def chosen_set() -> str:
    """HF_PAGED_ISA; "" if it is not set. Raises ValueError if this CPU does not have that instruction set."""
    chosen = os.environ.get(ISA, "").strip().lower()
    usable = usable_sets()
    if chosen not in ("", "native", *usable):
        raise ValueError(f"{ISA}={chosen!r}: this CPU runs native{''.join(f', {name}' for name in usable)}")
    return chosen


def usable_sets() -> list[str]:
    """List the names of the `INSTRUCTION_SETS` that this CPU has, the best one first."""
    words = set(_cpu().split())
    return [name for name, each in INSTRUCTION_SETS.items() if each.needed <= words]


def emulates_amx() -> bool:
    return os.environ.get(EMULATE_AMX) == "1"


def source_digest() -> str:
    """Identifies the sources."""
    digest = hashlib.sha256()
    for name, content in SOURCES.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:24]


def wheel_library(isa: str) -> str:
    """The name of the file, beside this one, in which a wheel has the kernels for an instruction set."""
    return f"kernels-{isa}-{source_digest()}.so"


def compile_library(toolchain: Toolchain, directory: Path) -> Path:
    """Compile the sources in `directory`, all units in parallel, and return the path of the library.

    Raises NativeBuildError with the compiler's output.
    """
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
    """Run the commands in parallel. Raises NativeBuildError with the output of the first one that failed."""
    running: list[subprocess.Popen[bytes]] = []
    logs = [directory / f"{number}.log" for number in range(len(commands))]
    try:
        for command, output in zip(commands, logs, strict=True):
            # Into files, because the compilers are waited for one after the other, and a full pipe would stop one.
            with output.open("wb") as file:
                running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
        for process, command, output in zip(running, commands, logs, strict=True):
            if process.wait(_COMPILER_SECONDS):
                message = output.read_text(errors="replace").strip() or f"exit status {process.returncode}"
                raise NativeBuildError(f"the compiler failed: {message}\n{shlex.join(command)}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


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


def openmp_library() -> Path | None:
    """The OpenMP library that torch has loaded into this process; None if it cannot be determined."""
    import torch  # noqa: F401  (this loads it)

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*)", maps)))
    # torch's own copy first: another package may have loaded a second one.
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
