"""The ctypes structs have the memory layout of the C structs."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import structs
from hf_paged.kernels.native.toolchain import find_toolchain

KERNELS = Path(structs.__file__).parent


@pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")
@pytest.mark.parametrize(
    "struct",
    [structs.Bounds, structs.Step, structs.WriteStrides, structs.Span, structs.Store, structs.Call, structs.Prompts],
    ids=lambda struct: struct.__name__,
)
def test_offsets(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    name, fields = struct.__name__, [field[0] for field in struct._fields_]
    checks = [f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size");']
    for field in fields:
        at = getattr(struct, field)
        checks.append(f'_Static_assert(offsetof({name}, {field}) == {at.offset}, "{field}");')
        checks.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {at.size}, "{field}");')
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(["#include <stddef.h>", '#include "kernels.h"', *checks]))
    command = [*find_toolchain().command, "-fsyntax-only", f"-I{KERNELS}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
