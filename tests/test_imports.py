"""The import rule: one direction between packages, pure modules without torch, an import that costs milliseconds."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

import hf_paged
from hf_paged import registry
from hf_paged.policies import EVICTIONS, POLICIES
from hf_paged.serving.checkpoints import CODED_FORMATS
from hf_paged.tasks import TASKS
from scripts import core_lines
from tests.sources import FILES, PACKAGE, statements, text_of, tree_of

pytestmark = pytest.mark.smoke

LAYERS = {
    "executor": -4, "side_memory": -3, "policies": -3, "tasks": -3, "sockets": -2, "registry": -1, "config": 0,
    "errors": 0, "versions": 1, "locks": 0, "threads": 0, "annotations": 0,
    "kernels": 1, "cache": 2, "integration": 3, "model": 4, "fused": 5, "generation": 6, "features": 7, "serving": 8,
    "bridges": 9, "load": 9, "rollouts": 10, "plugin": 10, "cli": 11, "__main__": 12,
}  # fmt: skip
OF_OTHERS = {
    "encoder_decoder": {"fused", "rows"}, "fused": {"rows", "watch"}, "graphs": {"watch"}, "ranks": {"graphs"},
    "rows": {"media", "watch"}, "speculation": {"adapters", "fused", "ranks", "watch"},
}  # fmt: skip
"""The features that a feature imports."""
PURE = [
    "hf_paged.sockets", "hf_paged.registry", "hf_paged.config", "hf_paged.errors",
    "hf_paged.versions", "hf_paged.locks", "hf_paged.threads",
    "hf_paged.cache.allocator", "hf_paged.cache.block_manager", "hf_paged.features.rows.checkpoints",
    "hf_paged.cache.prefix_cache", "hf_paged.generation.requests.sequence", "hf_paged.generation.engine.tables",
    "hf_paged.generation.engine.prefixes", "hf_paged.generation.engine.queues", "hf_paged.generation.engine.scheduler",
    "hf_paged.features.encoder_decoder.encoders", "hf_paged.features.media.media_memory",
    "hf_paged.features.rows.state_memory", "hf_paged.features.beams.beams", "hf_paged.serving.routing",
]  # fmt: skip
CORE_IMPORTS = {
    "executors": {"binding", "sizing"},
    "parts": {"binding", "engine"},
    "watching": {"conditions", "obstacles", "prepare", "processors", "support"},
    "ways": {"paged_generate"},
}
"""The wiring, files beside the features, and the modules of the core that import it. They may become fewer."""


@cache
def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, also inside functions; `from a import b` gives a and a.b."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    names: set[str] = set()
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: -node.level], *([node.module] if node.module else [])] if node.level else [node.module]
            names.add(".".join(base))
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def room(module: str) -> str | None:
    """`hf_paged.cache.kv_pool` -> `cache`; None for what is not a room of this package."""
    head, *rest = module.split(".")
    return rest[0] if head == "hf_paged" and rest and rest[0] in LAYERS else None


def test_imports_go_one_way() -> None:
    for path in FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own != "__init__":  # the package's names everything
            check_imports(path, own)


def check_imports(path: Path, own: str) -> None:
    assert own in LAYERS, f"{own} has no place in the import order; add it to LAYERS and to docs/architecture.md"
    for name in imported_modules(path):
        assert name != "hf_paged" or LAYERS[own] >= LAYERS["serving"], f"{path.name} ({own}) imports __init__"
        other = room(name)
        if other in (None, own, "features"):  # what imports features is below
            continue
        assert LAYERS[other] < LAYERS[own], f"{path.name} ({own}) imports {name} ({other}), which stands above it"


@cache
def own_imports() -> dict[str, set[str]]:
    """Module -> the modules of this package that it imports, also inside functions and for type checking only."""
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in FILES}
    modules = set(names.values())
    return {
        name: (imported_modules(path) & modules) - {name}
        for path, name in names.items()
        if path.name != "__init__.py"  # it names everything
    }


def test_no_module_imports_itself_through_others() -> None:
    tuple(TopologicalSorter(own_imports()).static_order())  # raises CycleError, which has the cycle


def test_the_parts_of_a_folder_import_one_way() -> None:
    """A part is a file or a folder within it: two of them must not need each other, not through others either."""
    for folder in sorted({".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in FILES}):
        parts: dict[str, set[str]] = {}
        for module, others in own_imports().items():
            own = part_of(folder, module)
            if own is not None:
                needed = {part for other in others if (part := part_of(folder, other))}
                parts.setdefault(own, set()).update(needed - {own, "features"})
        tuple(TopologicalSorter(parts).static_order())  # raises CycleError, which has the cycle


def part_of(folder: str, module: str) -> str | None:
    """`hf_paged.cache`, `hf_paged.cache.swap` -> `swap`; None for a module that is elsewhere."""
    return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else None


def test_generation_knows_no_triton() -> None:
    for path in FILES:
        heads = {name.split(".")[0] for name in imported_modules(path)}
        assert "generation" not in path.parts or "triton" not in heads, path


def test_layers_for_gpus_can_go() -> None:
    """Only what selects the overrides knows them, so that what a measurement does not justify can be deleted."""
    knows = {name for name, others in own_imports().items() if any(".fused.gpu." in each for each in others)}
    assert {name for name in knows if ".fused.gpu." not in name} == {
        "hf_paged.fused.overrides",
        "hf_paged.fused.report",
    }


@pytest.mark.parametrize(("name", "most"), [("scheduler", 480), ("runner", 430), ("sizing", 300)])
def test_the_core_of_an_engine_names_no_feature(name: str, most: int) -> None:
    """Needs besides block tables are behind `SideMemory`, how a model computes behind `Executor`, tasks: `Task`."""
    text = (PACKAGE / f"generation/engine/{name}.py").read_text()
    words = r"(?i)encoder\w*|\bmedia\w*|\bimages?\b|(?<!gradient )checkpoint\w*|recurrent|(?<!model\.)\bstates?\b"
    words += r"|\bscor\w*|logprob\w*"
    assert re.findall(words, text) == [] and len(text.splitlines()) <= most
    if name != "scheduler":
        assert not re.search(r"isinstance\(.*(Model|Rows|Executor)\b", text)


NOT_OF_THE_CORE = r"(?i)encoder|media|image|video|audio|checkpoint|recurrent|specul|adapter"
"""What features are about. (A draft is a part of any step, which the core verifies, whoever makes it.)"""
NAMED = {
    "is_encoder_decoder": "of transformers' configs", "EncoderDecoderCache": "of transformers",
    "PREPARE_ENCODER": "the name of a method of transformers, which its versions call otherwise",
    "ENCODES_MEDIA": "what transformers has since a version", "has_encoder": "a field of `check`, which users read",
    "encoder_inputs": "a figure of `Engine.stats`, which users read", "encoder_hits": "the same",
    "adapter": "an argument of `Engine.add_request`",
    "adapters": "a field of `Parts`, which executors read; of PEFT, in refusals",
    "_adapters": "layers of PEFT, in `model/picture.py`",
}  # fmt: skip
"""The names in the core that are about a feature all the same, and why."""


def test_the_core_names_no_feature() -> None:
    found: set[str] = set()
    for path in FILES:
        if core_lines.part_of(path.relative_to(PACKAGE).as_posix()) == "core" and path.name != "__init__.py":
            names = (
                getattr(node, field, None)
                for node in ast.walk(tree_of(path))
                for field in ("id", "attr", "arg", "name")
            )
            found |= {name for name in names if isinstance(name, str) and re.search(NOT_OF_THE_CORE, name)}
    assert {name for name in found if "." not in name} == set(NAMED)


@cache
def imports_of_features() -> dict[str, set[tuple[str, str]]]:
    """Part (a feature, "core", "programs") -> its imports of features other than itself, as (module, module)."""
    part = {n: core_lines.part_of(n.removeprefix("hf_paged.").replace(".", "/") + ".py") for n in own_imports()}
    found: dict[str, set[tuple[str, str]]] = {}
    for name, others in own_imports().items():
        to_features = {other for other in others if part.get(other, "core") not in ("core", "programs", part[name])}
        found.setdefault(part[name], set()).update((name, other) for other in to_features)
    return found


def test_the_core_imports_no_feature() -> None:
    """It asks the wiring for what features give, and the tables of `registry.py` name what is imported when needed."""
    found: dict[str, set[str]] = {}
    for name, other in imports_of_features()["core"]:
        found.setdefault(other.removeprefix("hf_paged.features."), set()).add(name.rpartition(".")[2])
    assert found == CORE_IMPORTS


def test_the_tables_name_what_exists() -> None:
    tables = [each.values() for each in (POLICIES, EVICTIONS, TASKS, registry.REPORTS, CODED_FORMATS)]
    assert all(callable(pkgutil.resolve_name(p)) for p in chain(*tables, registry.WITHOUT_VARIANTS, [registry.BEAMS]))


def test_features_import_few_others() -> None:
    found = {
        name: {other.removeprefix("hf_paged.features.").removeprefix("hf_paged.").split(".")[0] for _, other in pairs}
        for name, pairs in imports_of_features().items()
        if name not in ("core", "programs", "wiring")
    }
    assert {name: others for name, others in found.items() if others} == OF_OTHERS


def test_inner_package_files_are_empty() -> None:
    inner = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert inner and not [path for path in inner if path.read_text().strip()]


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_pure_modules_leave_torch_alone() -> None:
    found = [name for name in PURE if (PACKAGE.parent / (name.replace(".", "/") + ".py")).exists()]
    assert len(found) >= 7
    code = f"import sys\nimport {', '.join(found)}\n"
    assert run(code + "print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])") == "[]"


def test_import_is_light() -> None:
    code = (
        "import sys\nbefore = set(sys.modules)\nimport hf_paged\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names), sum(name.startswith('hf_paged') for name in sys.modules))"
    )
    packages, count = run(code).rsplit(" ", 1)
    assert packages == "['hf_paged']" and int(count) <= 9


PRIVATE_OF_THE_ENGINE = re.compile(r"\b_*(?:engine|loop|core|stepper)_*\._(?!_)\w+")


def test_clients_of_the_engine_leave_its_private_members_alone() -> None:
    """Such as `engine._lock` or `self._core._step()`."""
    found = {path.name: hit[0] for path in FILES for hit in PRIVATE_OF_THE_ENGINE.finditer(text_of(path))}
    assert found.keys() <= {"loop.py"}, found


def test_public_names() -> None:
    here = {
        name
        for name, value in vars(hf_paged).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("hf_paged.")
    }
    lazy = set(hf_paged._LAZY)
    assert set(hf_paged.__all__) == here | lazy
    assert sorted(hf_paged.__all__) == list(hf_paged.__all__)
    assert set(hf_paged.__all__) <= set(dir(hf_paged))
    for name in hf_paged.__all__:
        assert getattr(hf_paged, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hf_paged.no_such_name
