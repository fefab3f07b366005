"""Check that the quick tests catch small faults in the core: cache, scheduler, stepper, sampling, kernels, the door of
`generate`, and the server's recipe.

    python scripts/mutants.py list
    OMP_NUM_THREADS=1 python scripts/mutants.py run --log benchmarks/results/mutants.jsonl

A mutant of Python is one changed expression of one function; which ones, depends on nothing but this function. One of
C is a replacement of the list `NATIVE`. The quick tests of `JUDGES` judge them. They first run once without a
mutant, file by file in forks, which shows how long each takes, which functions it enters, and which fail in a fork
(these are left out). `build/mutants.json` keeps this for files of tests that do not change. Then a fork for each mutant
exchanges the function's code, or loads a library of which one unit was compiled anew, and runs the tests that enter the
function until one fails; those of the mutant's own room first. A failure counts if the same tests pass without the
mutant. Tests that start processes of their own see the original code there. A log that exists is continued; `--names`
takes the mutants that were not caught in another one.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE))

JUDGES = [f"tests/{name}" for name in ("cache", "generation", "kernels", "serving", "integration", "test_run.py")]
COUNTS = {  # how many mutants each file gives
    "cache": "allocator 10, block_manager 10, prefix_cache 8, memory 6, paged_cache 8, kv_pool 6, swap 6, layers 6",
    "features/rows": "state_memory 2",
    "generation": "paged_generate 8, prepare 6, obstacles 4, validation 5",
    "generation/engine": "scheduler 14, queues 4, tables 6, stepper 14",
    "generation/requests": "batch 6, sequence 4",
    "features/editors": "of_transformers 6",
    "generation/sampling": "warpers 6",
    "kernels": "sampling 6, reference 8, gather 8, quantised 5, metadata 6",
    "serving": "recipe 5, sampling_options 5",
}
PYTHON = {
    f"{folder}/{name}.py": int(count)
    for folder, counts in COUNTS.items()
    for name, count in map(str.split, counts.split(", "))
}
OWN_CHECKS = {"check_integrity", "__repr__"}  # functions whose faults change no output
EQUIVALENT = {
    "cache/block_manager.py BlockManager.__init__: 0 -> 1, 2": "a number of which only changes are read",
    "cache/kv_pool.py KVPool.layer_for: 0 -> 1": "the dtypes differ only where the layer tells places apart",
    "cache/swap.py CudaStreams.run: no call of work": "needs a GPU",
    "cache/swap.py _StagedStore._fetch: True -> False": "needs a GPU",
    "generation/prepare.py StopStrings.criterion: Gt -> GtE": "a cache keeps one result less",
    "features/editors/of_transformers.py _Seen.edit: max -> min, 2": "it looks at the same tokens again",
    "kernels/native/draw.c C: if (!(total < INFINITY)) return 0; -> ": "a sum of NaN ends the search: 0 too",
    "kernels/sampling.py ToHost.__init__: True -> False": "needs a GPU",
    "serving/sampling_options.py SamplingOptions._spellings: 0 -> 1": "only a vocabulary of one token shows it",
}
"""Mutants that no quick test on a CPU can notice, and why. 2: the second of equal changes of a function."""
ENTRIES = {"C": "kernels/native/ops.py", "sabotage": "generation/paged_generate.py"}  # whose tests such mutants meet
NATIVE = [
    ("partition.c", "high = (len - 1) / CHUNK;\n        extent.members", "high = len / CHUNK;\n        extent.members"),
    ("partition.c", "len - q + 1 >= (c + 1) * CHUNK", "len - q + 1 >= c * CHUNK"),
    ("partition.c", "if (c < low || c > high) continue;", "if (c < low || c >= high) continue;"),
    ("draw.c", "y ^= (y << 7) & 0x9d2c5680u;", "y ^= (y << 6) & 0x9d2c5680u;"),
    ("draw.c", "t.words[i] = (uint32_t)state->words[i];", "t.words[i] = (uint32_t)state->words[0];"),
    ("draw.c", "state->left = TWISTER_WORDS + 1 - t->next;", "state->left = TWISTER_WORDS - t->next;"),
    ("draw.c", "if (!(total < INFINITY)) return 0;", ""),
    ("finish.inc.c", "const float scale = 1.0f / total;", "const float scale = 1.0f;"),
    ("attention.inc.c", "if (!(after > before)) after = before;", ""),
]
PER_FUNCTION = 2
HANGS, AT_LEAST = 20, 20  # a test hangs after so many times the time it takes without a mutant, and so many seconds
KNOWN = HERE / "benchmarks" / "results" / "mutants.jsonl"  # the test that caught a mutant before runs first
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """line: at the commit of the log. number: of equal changes of the function. place: of a file of Python, the number
    of the function in it and of the change in the function."""

    file: str
    line: int
    function: str
    change: str
    number: int = 1
    place: tuple[int, int] = (-1, -1)
    old: str = ""
    new: str = ""

    @property
    def name(self) -> str:
        """It has no line, so that it stays the same while other functions change."""
        return f"{self.file} {self.function}: {self.change}" + (f", {self.number}" if self.number > 1 else "")

    @property
    def rank(self) -> int:
        return zlib.crc32(f"{self.file} {self.function}: {self.change} {self.number - 1}".encode())

    @property
    def entry(self) -> str:
        """The function whose tests may notice the mutant, or the file of all these functions."""
        return ENTRIES.get(self.function) or ENTRIES.get(self.file) or f"{self.file} {self.function}"


# -- Python: changed expressions --------------------------------------------------------------------------------------


def tree_of(file: str) -> ast.Module:
    return ast.parse((HERE / "hf_paged" / file).read_text())


def functions_of(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions of the module and methods of its classes, with their qualified names."""
    todo: list[tuple[str, ast.AST]] = [("", node) for node in tree.body]
    while todo:
        prefix, node = todo.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            todo += [(f"{prefix}{node.name}.", each) for each in node.body]


def edits_of(node: ast.AST) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The changes of one node: their names, and what makes them."""
    match node:
        case ast.Compare(ops=[op, *_]):
            other: Any = _COMPARISONS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", partial(node.ops.__setitem__, 0, other())
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            yield f"{type(op).__name__} -> {other.__name__}", partial(setattr, node, "op", other())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATIONS:
            other, sign = _OPERATIONS[type(op)], "=" if isinstance(node, ast.AugAssign) else ""
            yield f"{type(op).__name__}{sign} -> {other.__name__}{sign}", partial(setattr, node, "op", other())
        case ast.If(test=test):
            yield "the condition is negated", partial(setattr, node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
            opposite = "max" if name == "min" else "min"
            yield f"{name} -> {opposite}", partial(setattr, function, "id", opposite)
        case ast.Expr(value=ast.Call(func=called) as call):
            # Code has to keep its free variables, so that a function takes it.
            never = ast.Lambda(ast.arguments([], [], None, [], [], None, []), call)
            yield f"no call of {ast.unparse(called)}", partial(setattr, node, "value", never)
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", partial(setattr, node, "value", not value)
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", partial(setattr, node, "value", value + 1)


def changes_of(function: ast.AST) -> Iterator[tuple[int, str, Callable[[], Any]]]:
    """The possible changes of a function. Annotations, defaults, assertions and texts of errors stay as they are."""
    left = [getattr(function, "annotation", None), *getattr(function, "decorator_list", [])]
    for child in ast.iter_child_nodes(function):
        if child not in left and not isinstance(child, ast.Assert | ast.Raise | ast.JoinedStr | ast.arguments):
            yield from ((child.lineno, *edit) for edit in edits_of(child))  # type: ignore[attr-defined]
            yield from changes_of(child)


def possible_mutants(file: str) -> Iterator[Mutant]:
    alike = Counter[tuple[str, str]]()
    for at, (name, function) in enumerate(functions_of(tree_of(file))):
        if function.name not in OWN_CHECKS:
            for place, (line, change, _) in enumerate(changes_of(function)):
                alike[name, change] += 1
                yield Mutant(file, line, name, change, alike[name, change], (at, place))


def python_mutants() -> list[Mutant]:
    """Those with the smallest checksums, so that a change of one function does not choose others elsewhere."""
    chosen = []
    for file, count in PYTHON.items():
        of_function = Counter[str]()
        observable = [mutant for mutant in possible_mutants(file) if mutant.name not in EQUIVALENT]
        for mutant in sorted(observable, key=lambda each: each.rank):
            if of_function[mutant.function] < PER_FUNCTION and count:
                of_function[mutant.function] += 1
                count -= 1
                chosen.append(mutant)
    return chosen


def codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_in(each)


_FUNCTIONS: dict[str, list[FunctionType]] = {}
"""Those of each file, found before the forks: a search in a fork would copy all memory."""


def find_functions(files: Iterable[str]) -> None:
    for file in files:
        importlib.import_module("hf_paged." + file.removesuffix(".py").replace("/", "."))
        _FUNCTIONS[str(HERE / "hf_paged" / file)] = []
    gc.unfreeze()  # tests/conftest.py freezes what it has imported, which get_objects leaves out then
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in _FUNCTIONS:
            _FUNCTIONS[each.__code__.co_filename].append(each)
    if without := [path for path, found in _FUNCTIONS.items() if not found]:
        raise RuntimeError(f"no function in use was found of {without}: no test could be seen to enter them")


def exchange(file: str, tree: ast.Module, names: set[str]) -> int:
    """Give the living functions of these names the code of a changed tree. Returns how many there are."""
    path = str(HERE / "hf_paged" / file)
    made = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
    codes = {(c.co_qualname, c.co_firstlineno): c for c in codes_in(made) if c.co_qualname in names}
    count = 0
    for function in _FUNCTIONS[path]:
        new = codes.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
        if new is not None and new.co_freevars == function.__code__.co_freevars:
            function.__code__ = new
            count += 1
    return count


def apply_python(mutant: Mutant) -> None:
    tree = tree_of(mutant.file)
    name, function = list(functions_of(tree))[mutant.place[0]]
    list(changes_of(function))[mutant.place[1]][2]()
    if not exchange(mutant.file, tree, {name}):
        raise RuntimeError(f"no function {name} of {mutant.file} is in use")


ENTERED: set[str] = set()


def note_entries(files: Iterable[str]) -> None:
    """Functions of these files add their names to `ENTERED` when they are called."""
    builtins._entered = ENTERED.add  # type: ignore[attr-defined]
    for file in files:
        tree, names = tree_of(file), set[str]()
        for name, function in functions_of(tree):
            note = ast.parse(f"_entered({f'{file} {name}'!r})").body[0]
            function.body.insert(int(ast.get_docstring(function) is not None), note)
            names.add(name)
        exchange(file, tree, names)


# -- C: replaced text -------------------------------------------------------------------------------------------------


def other_mutants() -> list[Mutant]:
    from tests import sabotage  # imports hf_paged, which tests/conftest.py must do first

    mutants = [Mutant("sabotage", 0, name, "of several lines") for name in sabotage.FAULTS]
    for name, old, new in NATIVE:
        file = f"kernels/native/{name}"
        text = (HERE / "hf_paged" / file).read_text()
        if text.count(old) != 1:
            raise RuntimeError(f"{file} has {old!r} {text.count(old)} times")
        line = text[: text.index(old)].count("\n") + 1
        mutants.append(Mutant(file, line, "C", f"{old} -> {new}", old=old, new=new))
    return [mutant for mutant in mutants if mutant.name not in EQUIVALENT]


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


def load_native(path: Path) -> None:
    from hf_paged.kernels.native import build

    build._decision = build._loaded(path)


# -- tests in forks ---------------------------------------------------------------------------------------------------


class Runner:
    """A plugin of pytest: collects once, then runs chosen tests in forks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.failed, self.shared = arguments, False, set[str]()
        self.items, self.seconds, self.entered = dict[str, Any](), dict[str, float](), dict[str, list[str]]()
        self.left_out: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        """What a fixture of several tests enters, all tests of the file depend on."""
        before = set(ENTERED)
        ENTERED.clear()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                self.shared |= ENTERED
            ENTERED.update(before)

    def pytest_runtestloop(self, session: Any) -> bool:
        from hf_paged.kernels.native import build

        self.items = {item.nodeid: item for item in session.items}
        build.library()
        find_functions([*PYTHON, *ENTRIES.values()])
        gc.collect()
        gc.freeze()
        self.run_unmutated()
        self.run_mutants()
        return True

    def run(self, ids: list[str], change: Callable[[], Any], *, to_end: bool = False) -> Iterator[dict[str, Any]]:
        """Run tests in a fork after `change()`, until one fails, hangs or ends the process: a record for each."""
        out, into = os.pipe()
        child = os.fork()
        if not child:
            self._run_here(ids, change, into, to_end)
        os.close(into)
        text, number, wrong = b"", 0, ""
        try:
            while number < len(ids) and not wrong:
                left = AT_LEAST + HANGS * self.seconds.get(ids[number], 20)  # counted here, so that a pause takes none
                while b"\n" not in text and not wrong:
                    if not select.select([out], [], [], 1)[0]:
                        left -= 1
                        wrong = "" if left > 0 else "hangs"
                    elif read := os.read(out, 1 << 16):
                        text += read
                    else:
                        wrong = "ends the process"
                line, _, text = text.partition(b"\n")
                record = {"wrong": wrong} if wrong else json.loads(line)
                if "error" in record:
                    raise RuntimeError(record["error"])
                wrong = record["wrong"] if not to_end or wrong else ""
                yield {"test": ids[number], **record}
                number += 1
        finally:  # after Ctrl-C too: a mutant may run for ever
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(out)

    def _run_here(self, ids: list[str], change: Callable[[], Any], into: int, to_end: bool) -> None:
        def tell(**record: Any) -> None:
            os.write(into, json.dumps(record).encode() + b"\n")

        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        try:
            change()
            items = [self.items[name] for name in ids]
            for item, following in zip(items, [*items[1:], None]):
                start, self.failed = time.time(), False
                ENTERED.clear()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                wrong = "fails" if self.failed else ""
                tell(wrong=wrong, seconds=time.time() - start, entered=[*ENTERED], shared=[*self.shared])
                if wrong and not to_end:
                    break
        except BaseException as error:
            with suppress(OSError):  # nobody may be left to hear it
                tell(error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def run_unmutated(self) -> None:
        """Find how long each test takes, what it enters, and which tests fail in a fork."""
        store = HERE / "build" / "mutants.json"
        store.parent.mkdir(exist_ok=True)
        known = json.loads(store.read_text()) if store.exists() else {}
        for file in dict.fromkeys(name.partition("::")[0] for name in self.items):
            ids = [name for name in self.items if name.startswith(f"{file}::")]
            state = zlib.crc32("".join([(HERE / file).read_text(), *ids]).encode())
            if known.get(file, {}).get("state") != state:
                records: list[dict[str, Any]] = []
                while len(records) < len(ids):  # again for those after one that has ended the process
                    note = partial(note_entries, [*PYTHON, *ENTRIES.values()])
                    records += self.run(ids[len(records) :], note, to_end=True)
                shared = set().union(*(record.get("shared", []) for record in records))
                entered: dict[str, list[str]] = {}
                for record in records:
                    for name in shared.union(record.get("entered", [])):
                        entered.setdefault(name, []).append(record["test"])
                seconds = {record["test"]: round(record.get("seconds", 0), 3) for record in records}
                wrong = {record["test"]: record["wrong"] for record in records if record["wrong"]}
                known[file] = {"state": state, "seconds": seconds, "entered": entered, "wrong": wrong}
                store.write_text(json.dumps(known))
            self.seconds |= known[file]["seconds"]
            self.left_out |= known[file]["wrong"]
            for name, tests in known[file]["entered"].items():
                for key in (name, name.partition(" ")[0]):
                    self.entered.setdefault(key, []).extend(tests)

    def judges(self, mutant: Mutant, first: str | None) -> list[str]:
        """The tests that may notice a mutant: the likeliest first, and those of a file together."""
        entering = self.entered.get(mutant.entry) or self.entered.get(mutant.file, [])  # a function may be new
        ids = [name for name in dict.fromkeys(entering) if name not in self.left_out]
        if not ids:
            raise RuntimeError(f"no test enters {mutant.file}, says build/mutants.json: remove it if the file is new")
        files: dict[str, list[float]] = {}
        for name in ids:
            files.setdefault(name.partition("::")[0], []).append(self.seconds[name])
        room = "tests/" + ("generation" if mutant.file == "sabotage" else mutant.file.partition("/")[0])

        def rank(name: str) -> tuple[Any, ...]:
            file = name.partition("::")[0]
            mean = sum(files[file]) / len(files[file])
            return name != first, not name.startswith(room), mean, file, self.seconds[name]

        return sorted(ids, key=rank)

    def judge(self, mutant: Mutant, change: Callable[[], Any], first: str | None) -> dict[str, Any]:
        """Which test catches the mutant. A test that fails likewise without it is no judge."""
        start, ids = time.time(), self.judges(mutant, first)
        while True:
            records = list(self.run(ids, change))
            wrong = records[-1]["wrong"] if records else ""
            again = list(self.run(ids[: len(records)], int)) if wrong else []
            if not again or not again[-1]["wrong"]:
                break
            ids.remove(again[-1]["test"])
        by = records[-1]["test"] if wrong else None
        how = {"mutant": mutant.name, "line": mutant.line, "by": by} | ({"how": wrong} if wrong else {})
        return how | {"tests": len(records), "of": len(ids), "seconds": round(time.time() - start, 1)}

    def run_mutants(self) -> None:
        log, before = self.arguments.log, records_of(KNOWN)
        mutants = [*python_mutants(), *other_mutants()]
        if self.arguments.names:
            wanted = {name for name, each in records_of(self.arguments.names).items() if not each["by"]}
            every = [each for file in PYTHON for each in possible_mutants(file)]
            mutants = [mutant for mutant in [*every, *other_mutants()] if mutant.name in wanted]
        done = records_of(log)
        write(log, self.circumstances())
        libraries: NativeLibraries | None = None
        for mutant in mutants:
            if mutant.name in done:
                continue
            if mutant.file == "sabotage":
                from tests import sabotage

                change: Callable[[], Any] = partial(sabotage.FAULTS[mutant.function], pytest.MonkeyPatch())
            elif mutant.function == "C":
                libraries = libraries or NativeLibraries(HERE / "build" / "mutants")
                change = partial(load_native, libraries.library(mutant))
            else:
                change = partial(apply_python, mutant)
            write(log, self.judge(mutant, change, before.get(mutant.name, {}).get("by")))

    def circumstances(self) -> dict[str, Any]:
        import torch
        import transformers

        git = partial(subprocess.check_output, cwd=HERE, text=True)
        state = git(["git", "describe", "--always", "--dirty", "--exclude", "*"]).strip()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        of = {"tests": len(self.items), "seconds": round(sum(self.seconds.values())), "left_out": self.left_out}
        return {"commit": state, "date": str(date.today()), **versions, **of}


def write(log: Path, record: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(record) + "\n")


def records_of(log: Path) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {record["mutant"]: record for record in records if "mutant" in record}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run"])
    parser.add_argument("--log", type=Path, help="where the results go: one line of JSON for each mutant")
    parser.add_argument("--names", type=Path, help="another log: take the mutants that no test caught there")
    arguments = parser.parse_args()
    if arguments.command == "list":
        for mutant in [*python_mutants(), *other_mutants()]:
            print(mutant.name)
        return
    os.chdir(HERE)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not slow"]
    raise SystemExit(pytest.main([*options, *JUDGES], plugins=[Runner(arguments)]))


if __name__ == "__main__":
    main()
