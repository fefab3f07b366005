"""The ctypes structs have the memory layout of the C structs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hf_paged.fused.cpu import structs
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.toolchain import find_toolchain

HEADER = Path(structs.__file__).parent / "native" / "layers.h"
NAMES = ("Linear", "Rotated", "Rotate", "Weight", "LayerIn", "LayerOut", "Experts")


@pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")
def test_sizes_and_offsets_are_those_of_the_header(tmp_path: Path) -> None:
    # The structs alone: the rest of the header is of single instruction sets.
    declarations = re.findall(r"^typedef struct \{.*?^\} \w+;", HEADER.read_text(), re.DOTALL | re.MULTILINE)
    prints = [f'printf("{name} %zu\\n", sizeof({name}));' for name in NAMES]
    for name in NAMES:
        fields = [field for field, _ in getattr(structs, name)._fields_]
        prints += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field in fields]
    source = tmp_path / "offsets.c"
    includes = "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n#define ELEMENT uint16_t\n"
    source.write_text(includes + "\n".join(declarations) + "\nint main(void) {\n" + "\n".join(prints) + "\n}\n")
    toolchain = find_toolchain()
    assert toolchain is not None
    program = tmp_path / "offsets"
    subprocess.run([*toolchain.command, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in map(str.split, printed.splitlines())}

    assert len(declarations) >= len(NAMES)
    for name in NAMES:
        struct = getattr(structs, name)
        record = np.dtype(struct)
        assert found[name] == ctypes.sizeof(struct) == record.itemsize
        assert record.fields is not None
        for field, _ in struct._fields_:
            assert found[f"{name}.{field}"] == getattr(struct, field).offset == record.fields[field][1]
