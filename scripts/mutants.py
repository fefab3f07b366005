"""Check that the quick tests catch small faults in the core: cache, scheduler, stepper, sampling, kernels, the door of
`generate`, and the server's recipe.

    python scripts/mutants.py list
    OMP_NUM_THREADS=1 python scripts/mutants.py run --log benchmarks/results/mutants.jsonl

A mutant of Python is one changed expression of one function, chosen by a generator with a fixed seed. One of C is a
replacement of the list `NATIVE`. The tests are collected once; a fork for each mutant exchanges the function's code, or
loads a library of which one unit was compiled anew, and runs the quick tests of the files that `PYTHON` names, in this
order, until one fails. Tests that start processes of their own see the original code there. A mutant that no test of
these files catches may still be caught by others: `--tests tests` runs all quick tests. A log that exists is continued.
`--share 1/2` takes every second mutant, `--names` those of a log that were not caught, and `--all` slow tests too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))

CACHE = [
    "test_block_manager",
    "test_allocator",
    "test_state_machine",
    "test_prefix_cache",
    "test_memory",
    "test_paged_cache",
]
ENGINE = [
    "test_scheduler",
    "test_scheduler_properties",
    "test_engine",
    "test_arrivals",
    "test_speculation",
    "test_snapshots",
]
DOOR = ["test_arguments", "test_bad_input", "test_contract_modes", "test_contract_limits", "test_contract_state"]


def files(room: str, names: list[str]) -> list[str]:
    return [f"tests/{room}/{name}.py" for name in names]


# How many mutants each file of Python gives, and the tests that run first.
PYTHON: dict[str, tuple[int, list[str]]] = {
    "cache/allocator.py": (10, files("cache", CACHE)),
    "cache/block_manager.py": (10, files("cache", CACHE)),
    "cache/prefix_cache.py": (8, files("cache", ["test_prefix_cache", *CACHE])),
    "cache/memory.py": (6, files("cache", ["test_memory", *CACHE])),
    "cache/paged_cache.py": (8, files("cache", ["test_paged_cache", *CACHE])),
    "cache/kv_pool.py": (6, files("cache", ["test_swap", *CACHE])),
    "cache/swap.py": (6, files("cache", ["test_swap", *CACHE])),
    "cache/layers.py": (6, files("cache", CACHE)),
    "generation/engine/scheduler.py": (14, files("generation", ENGINE)),
    "generation/engine/queues.py": (4, files("generation", ["test_sockets", *ENGINE])),
    "generation/engine/state_memory.py": (2, files("generation", ["test_scheduler", "test_state_moves"])),
    "generation/engine/tables.py": (6, files("generation", ENGINE)),
    "generation/engine/stepper.py": (14, files("generation", ["test_engine", "test_speculation", *ENGINE])),
    "generation/requests/batch.py": (6, files("generation", ["test_engine_processors", *ENGINE])),
    "generation/requests/sequence.py": (4, files("generation", ENGINE)),
    "generation/sampling/warpers.py": (6, files("generation", ["test_sampling", "test_editors"])),
    "generation/sampling/editors.py": (6, files("generation", ["test_editors", "test_engine_processors"])),
    "kernels/sampling.py": (6, files("generation", ["test_sampling"])),
    "kernels/reference.py": (8, files("kernels", ["test_reference", "test_gather", "test_native"])),
    "kernels/gather.py": (8, files("kernels", ["test_gather", "test_repeated_calls", "test_quantised"])),
    "kernels/quantised.py": (5, files("kernels", ["test_quantised"])),
    "kernels/metadata.py": (
        6,
        files("kernels", ["test_repeated_calls", "test_validation"]) + files("generation", ENGINE),
    ),
    "generation/paged_generate.py": (8, files("generation", DOOR)),
    "generation/prepare.py": (6, files("generation", DOOR)),
    "generation/obstacles.py": (4, files("generation", DOOR)),
    "generation/validation.py": (5, files("generation", DOOR)),
    "serving/recipe.py": (10, files("serving", ["test_matrices", "test_completions", "test_http", "test_text"])),
}
NATIVE = [
    (
        "kernels/native/partition.c",
        "high = (len - 1) / CHUNK;\n        extent.members",
        "high = len / CHUNK;\n        extent.members",
    ),
    ("kernels/native/partition.c", "len - q + 1 >= (c + 1) * CHUNK", "len - q + 1 >= c * CHUNK"),
    ("kernels/native/partition.c", "if (c < low || c > high) continue;", "if (c < low || c >= high) continue;"),
    (
        "kernels/native/partition.c",
        "if (len < q || len > table_width * step->block_size) return 2;",
        "if (len < q) return 2;",
    ),
    ("kernels/native/partition.c", "ids[b] >= num_blocks) return 3;", "ids[b] > num_blocks) return 3;"),
    ("kernels/native/draw.c", "y ^= (y << 7) & 0x9d2c5680u;", "y ^= (y << 6) & 0x9d2c5680u;"),
    ("kernels/native/draw.c", "t.words[i] = (uint32_t)state->words[i];", "t.words[i] = (uint32_t)state->words[0];"),
    ("kernels/native/draw.c", "state->left = TWISTER_WORDS + 1 - t->next;", "state->left = TWISTER_WORDS - t->next;"),
    ("kernels/native/draw.c", "if (!(total < INFINITY)) return 0;", ""),
    ("kernels/native/finish.inc.c", "const float scale = 1.0f / total;", "const float scale = 1.0f;"),
    (
        "kernels/native/attention.inc.c",
        "if (!(after > before)) after = before;\n    if (after == -INFINITY) { /* no visible key in the chunk",
        "if (after == -INFINITY) { /* no visible key in the chunk",
    ),
]
NATIVE_TESTS = files("kernels", ["test_native", "test_quantised", "test_validation", "test_repeated_calls"])
NATIVE_TESTS += files("generation", ["test_sampling"])
PER_FUNCTION = 2
SECONDS = 60  # of the tests of one mutant
HANGS = 40  # seconds of one test
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """place: of a file of Python, the number of the function in it and of the change in the function; of C, -1."""

    file: str
    line: int
    function: str
    change: str
    place: tuple[int, int] = (-1, -1)
    old: str = ""
    new: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.change}"


# -- Python: changed expressions --------------------------------------------------------------------------------------


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of the module and methods of its classes, with their qualified names."""
    todo: list[tuple[str, ast.AST]] = [("", node) for node in tree.body]
    while todo:
        prefix, node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            todo += [(f"{prefix}{node.name}.", each) for each in node.body]


class Changes(ast.NodeVisitor):
    """Counts the possible changes of a function, and makes the one with the number `wanted`.

    Annotations, defaults, assertions and the texts of errors stay as they are."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found = wanted, list[tuple[int, str]]()

    def _at(self, node: ast.AST, text: str) -> bool:
        self.found.append((node.lineno, text))  # type: ignore[attr-defined]
        return len(self.found) - 1 == self.wanted

    def of_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[int, str]]:
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        for statement in body:
            self.visit(statement)
        return self.found

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_arguments(self, node: ast.arguments) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        other = _COMPARISONS[type(node.ops[0])]
        if self._at(node, f"{type(node.ops[0]).__name__} -> {other.__name__}"):
            node.ops[0] = other()
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._at(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = _OPERATIONS.get(type(node.op))  # type: ignore[arg-type]
        if other is not None and self._at(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        other = _OPERATIONS.get(type(node.op))  # type: ignore[arg-type]
        if other is not None and self._at(node, f"{type(node.op).__name__}= -> {other.__name__}="):
            node.op = other()
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if self._at(node, "the condition is negated"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            other = "max" if node.func.id == "min" else "min"
            if self._at(node, f"{node.func.id} -> {other}"):
                node.func.id = other
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and self._at(node, f"no call of {ast.unparse(node.value.func)}"):
            node.value = ast.copy_location(ast.Constant(None), node.value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            if self._at(node, f"{node.value} -> {not node.value}"):
                node.value = not node.value
        elif isinstance(node.value, int) and self._at(node, f"{node.value} -> {node.value + 1}"):
            node.value += 1


def python_mutants() -> list[Mutant]:
    chosen = []
    for file, (count, _) in PYTHON.items():
        tree = ast.parse((HERE / "hf_paged" / file).read_text())
        every = []
        for number, (name, function) in enumerate(functions_of(tree)):
            for place, (line, change) in enumerate(Changes().of_function(function)):
                every.append(Mutant(file, line, name, change, (number, place)))
        random.Random(0).shuffle(every)
        of_function: dict[str, int] = {}
        for mutant in every:
            of_function[mutant.function] = of_function.get(mutant.function, 0) + 1
            if of_function[mutant.function] <= PER_FUNCTION:
                chosen.append(mutant)
                count -= 1
            if not count:
                break
    return chosen


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


_FUNCTIONS: list[FunctionType] = []
"""Those of the package, found before the forks: a search in a fork would copy all memory."""


def living_functions() -> list[FunctionType]:
    own = str(HERE / "hf_paged")
    every = [each for each in gc.get_objects() if isinstance(each, FunctionType)]
    return [each for each in every if each.__code__.co_filename.startswith(own)]


def exchange(file: str, tree: ast.Module, names: set[str]) -> int:
    """Give the living functions of these names the code of a changed tree. Returns how many there are."""
    path = str(HERE / "hf_paged" / file)
    importlib.import_module("hf_paged." + file.removesuffix(".py").replace("/", "."))
    made = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    codes = {(c.co_qualname, c.co_firstlineno): c for c in codes_in(made) if c.co_qualname in names}
    count = 0
    for function in _FUNCTIONS or living_functions():
        code = function.__code__
        new = codes.get((code.co_qualname, code.co_firstlineno)) if code.co_filename == path else None
        if new is not None and new.co_freevars == code.co_freevars:
            function.__code__ = new
            count += 1
    return count


def apply_python(mutant: Mutant) -> None:
    tree = ast.parse((HERE / "hf_paged" / mutant.file).read_text())
    name, function = list(functions_of(tree))[mutant.place[0]]
    Changes(mutant.place[1]).of_function(function)
    if not exchange(mutant.file, tree, {name}):
        raise RuntimeError(f"no function {name} of {mutant.file} is in use")


# -- C: replaced text -------------------------------------------------------------------------------------------------


def native_mutants() -> list[Mutant]:
    from tests import sabotage

    mutants = [Mutant("sabotage", 0, name, "of several lines") for name in sabotage.FAULTS]
    for file, old, new in NATIVE:
        text = (HERE / "hf_paged" / file).read_text()
        if text.count(old) != 1:
            raise RuntimeError(f"{file} has {old!r} {text.count(old)} times")
        line = text[: text.index(old)].count("\n") + 1
        mutants.append(Mutant(file, line, "C", f"{old} -> {new}", old=old, new=new))
    return mutants


class NativeLibraries:
    """Compiles the library with one changed file. Objects of units that do not see the change are kept."""

    def __init__(self, directory: Path) -> None:
        from hf_paged.kernels.native import toolchain

        self.toolchain, self.directory = toolchain, directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.sources = dict(toolchain.SOURCES)
        toolchain.compile_library(toolchain.find_toolchain(), directory)

    def library(self, mutant: Mutant) -> Path:
        file = self.directory / mutant.file
        before, out = file.read_text(), self.directory / f"mutant-{abs(hash(mutant))}.so"
        units = [n for n in self.sources if n.endswith(".c") and not n.endswith(".inc.c")]
        if mutant.file in units:
            changed = [mutant.file]
        else:  # the units that include it
            changed = [n for n in units if f'"{file.name}"'.encode() in self.sources[n]]
        own = self.toolchain.find_toolchain()
        includes = [self.directory / p.relative_to(HERE / "hf_paged") for p in self.toolchain._SOURCE_DIRECTORIES]
        objects = {n: (self.directory / n).with_suffix(".o") for n in units}
        file.write_text(before.replace(mutant.old, mutant.new))
        try:
            for name in changed:
                objects[name] = objects[name].with_suffix(".mutant.o")
            commands = [own.compile(self.directory / n, objects[n], includes) for n in changed]
            self.toolchain._run(commands, self.directory)
        finally:
            file.write_text(before)
        self.toolchain._run([own.link(list(objects.values()), out)], self.directory)
        out.chmod(0o600)
        return out


# -- tests in forks ---------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    by: str | None
    """The test that failed, or None."""
    tests: int
    whole: bool
    """Whether all tests ran, unless one failed."""
    seconds: float


class Runner:
    """A plugin of pytest: collects once, then runs chosen tests in forks."""

    def __init__(self, task: Callable[[Runner], None]) -> None:
        self.task, self.failed, self.items = task, list[str](), dict[str, Any]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.task(self)
        return True

    def first_failure(self, ids: list[str], change: Callable[[], None]) -> Result:
        """Run tests in a fork after `change()`, until one fails."""
        start, (out, into) = time.time(), os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            try:
                change()
                items = [self.items[name] for name in ids]
                for item, following in zip(items, [*items[1:], None]):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    os.write(into, f"{self.failed[0] if self.failed else ''}\n".encode())
                    if self.failed:
                        break
            except BaseException as error:
                os.write(into, f"{type(error).__name__}: {error}"[:2000].encode())
            os._exit(0)
        os.close(into)
        text, last, whole = "", start, False
        while not whole and time.time() < start + SECONDS:
            if select.select([out], [], [], 1)[0]:
                read = os.read(out, 4096).decode()
                text, last, whole = text + read, time.time(), not read
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(out)
        lines = text.splitlines()
        by = lines[-1] if lines and lines[-1] else None
        if by is None and not whole and time.time() - last > HANGS:
            by = f"{ids[len(lines)]} hangs"
        return Result(by, len(lines), whole, round(time.time() - start, 1))


def run(arguments: argparse.Namespace) -> None:
    import pytest

    number, of = map(int, arguments.share.split("/"))
    mutants = [*python_mutants(), *native_mutants()][number - 1 :: of]
    if arguments.names:
        records = [json.loads(line) for line in arguments.names.read_text().splitlines()]
        wanted = {record["mutant"] for record in records if record["by"] is None}
        mutants = [mutant for mutant in mutants if mutant.name in wanted]

    if arguments.log.exists():
        done = {json.loads(line)["mutant"] for line in arguments.log.read_text().splitlines()}
        mutants = [mutant for mutant in mutants if mutant.name not in done]

    def task(runner: Runner) -> None:
        from hf_paged.kernels.native import build
        from tests import sabotage

        build.library()
        for file in PYTHON:
            importlib.import_module("hf_paged." + file.removesuffix(".py").replace("/", "."))
        _FUNCTIONS.extend(living_functions())
        gc.collect()
        gc.freeze()
        libraries: NativeLibraries | None = None
        with arguments.log.open("a") as log:
            for mutant in mutants:
                if mutant.file == "sabotage":
                    change, first = (
                        partial(sabotage.FAULTS[mutant.function], pytest.MonkeyPatch()),
                        files("generation", DOOR),
                    )
                elif mutant.place[0] < 0:
                    libraries = libraries or NativeLibraries(HERE / "build" / f"mutants-{number}")
                    change = partial(load_native, libraries.library(mutant))
                    first = NATIVE_TESTS
                else:
                    change, first = partial(apply_python, mutant), PYTHON[mutant.file][1]
                ids = [
                    name
                    for each in dict.fromkeys(arguments.tests or first)
                    for name in runner.items
                    if name.startswith(each)
                ]
                log.write(
                    json.dumps({"mutant": mutant.name, **runner.first_failure(ids, change)._asdict(), "of": len(ids)})
                    + "\n"
                )
                log.flush()

    every = [*(each for _, tests in PYTHON.values() for each in tests), *NATIVE_TESTS]
    os.chdir(HERE)
    marks = "not gpu" if arguments.all else "not gpu and not slow"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    pytest.main([*options, *dict.fromkeys(arguments.tests or every)], plugins=[Runner(task)])


def load_native(path: Path) -> None:
    from hf_paged.kernels.native import build

    build._decision = build._loaded(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run"])
    parser.add_argument("--tests", nargs="+", help="files or folders; default: those named for each file")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--names", type=Path)
    parser.add_argument("--share", default="1/1")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "list":
        for mutant in [*python_mutants(), *native_mutants()]:
            print(mutant.name)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
