"""Builds the wheel: where gcc is found on Linux, with the native kernels, compiled for every instruction set.

Such a wheel is for one platform. An installation from it needs no compiler, and its first process waits for nothing.
Without gcc, or with HF_PAGED_WHEEL=pure, the wheel is for any platform, and the kernels are compiled at first use.
HF_PAGED_WHEEL=platform makes a missing compiler an error. An editable installation compiles nothing.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH = "HF_PAGED_WHEEL"
NATIVE = Path("hf_paged/kernels/native")


class KernelsHook(BuildHookInterface):  # type: ignore[misc, type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get(SWITCH, "").strip().lower()
        if wanted not in ("", "pure", "platform"):
            raise ValueError(f"{SWITCH}={wanted!r}: use pure or platform, or do not set it")
        if version == "editable" or wanted == "pure" or (sys.platform != "linux" and not wanted):
            return
        toolchain = _toolchain(Path(self.root))
        self._work = tempfile.TemporaryDirectory(prefix="hf_paged-")
        try:
            built = self._compile(toolchain)
        except toolchain.NativeBuildError as error:
            if wanted == "platform":
                raise
            self.app.display_warning(f"a wheel without kernels, which are compiled at first use: {error}")
            return
        build_data["force_include"].update(built)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"

    def _compile(self, toolchain: ModuleType) -> dict[str, str]:
        """The path in the wheel of each library, by its path here."""
        built: dict[str, str] = {}
        for isa, each in toolchain.INSTRUCTION_SETS.items():
            if platform.machine() in each.needed:
                directory = Path(self._work.name) / isa
                directory.mkdir()
                library = toolchain.compile_library(toolchain.wheel_toolchain(isa), directory)
                built[str(library)] = str(NATIVE / toolchain.wheel_library(isa))
        return built

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_work"):
            self._work.cleanup()


def _toolchain(root: Path) -> ModuleType:
    """The module, loaded by its path: the package itself needs torch, which is not installed here."""
    spec = importlib.util.spec_from_file_location("toolchain", root / NATIVE / "toolchain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def _platform_tag() -> str:
    """Of this Linux. `auditwheel repair` turns it into a tag that package indexes accept."""
    return f"linux_{platform.machine()}"
