"""The ctypes structs have the memory layout of the C structs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from hf_paged.fused.cpu import structs as fused_structs
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import structs
from hf_paged.kernels.native.toolchain import find_toolchain

KERNELS = ("Bounds", "Step", "WriteStrides", "Span", "Store", "Call", "Prompts")
LAYERS = ("Linear", "Rotated", "Rotate", "Weight", "LayerIn", "LayerOut", "Experts")


@pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")
@pytest.mark.parametrize(
    ("module", "header", "names"), [(structs, "kernels.h", KERNELS), (fused_structs, "native/layers.h", LAYERS)]
)
def test_offsets(module: ModuleType, header: str, names: tuple[str, ...], tmp_path: Path) -> None:
    text = (Path(str(module.__file__)).parent / header).read_text()
    if module is fused_structs:  # the structs alone: the rest of the header is of single instruction sets
        text = "\n".join(re.findall(r"^typedef struct \{.*?^\} \w+;", text, re.DOTALL | re.MULTILINE))
    lines = ["#include <stddef.h>", "#include <stdint.h>", "#define ELEMENT uint16_t", text]
    for name in names:
        struct = getattr(module, name)
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, _ in struct._fields_:
            at = getattr(struct, field)
            lines.append(f'_Static_assert(offsetof({name}, {field}) == {at.offset}, "{name}.{field}");')
            lines.append(f'_Static_assert(sizeof((({name} *)0)->{field}) == {at.size}, "{name}.{field}");')
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(lines))
    folder = f"-I{Path(str(module.__file__)).parent}"
    command = [*find_toolchain().command, "-fsyntax-only", folder, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
