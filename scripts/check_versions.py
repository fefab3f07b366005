"""Run hf_paged with other versions of transformers: `python scripts/check_versions.py [VERSION ...]`.

Each version is installed into a folder of its own (`build/versions/VERSION`), which stands before the packages of this
interpreter, so that all share one torch. For each it runs `tests/versions/cases.py` and, unless `--no-smoke`, the smoke
tests of the rooms that import transformers, and prints a line. Without arguments: the oldest tested version, one in the
middle, and the newest; `--others` leaves out the one that is installed here, with which all other tests run; `latest`
is the newest release. `--write` puts the lines into the table of docs/versions.md.

Exit status: 0 if all passed, 1 if one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"
HEAD = (
    "| transformers | Python | torch | options identical | packed routes | beam sampling, seeds equal | smoke tests |"
)
MIDDLE = "5.20.2"
ROOMS = [f"tests/{room}" for room in ("cache", "fused", "generation", "integration", "model", "serving", "versions")]
"""With tests that depend on the version of transformers."""


class Line(NamedTuple):
    """What ran with one version. `problem`: what failed, or "". `row`: of the page's table."""

    version: str
    problem: str
    row: str
    seconds: float


def tested_versions() -> list[str]:
    """Return the oldest and the newest tested version, with a middle one between them."""
    sys.path.insert(0, str(ROOT))
    from hf_paged.versions import NEWEST, OLDEST

    pinned = re.search(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1].startswith(".".join(map(str, NEWEST))), "constraints.txt pins another one"
    return [".".join(map(str, OLDEST)) + ".0", MIDDLE, pinned[1]]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def folder_of(version: str) -> Path | None:
    """Return the folder with this version and with what it needs in other versions; None: it is installed here."""
    if version == metadata.version("transformers"):
        return None
    if version == "latest":
        target = FOLDER / version  # a new one each time
        subprocess.run(["rm", "-rf", str(target)], check=True)
    else:
        target = FOLDER / version
    if not (target / "complete").exists():
        name = "transformers" if version == "latest" else f"transformers=={version}"
        pip("--no-deps", "--target", str(target), name)
        (found,) = metadata.distributions(name="transformers", path=[str(target)])
        others = [str(each) for each in map(Requirement, found.requires or ()) if not _is_met(each)]
        if others:
            pip("--no-deps", "--target", str(target), *others)
        (target / "complete").touch()
    return target


def _is_met(requirement: Requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return True
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def run(folder: Path | None, *command: str) -> subprocess.CompletedProcess[str]:
    path = [str(ROOT)] if folder is None else [str(ROOT), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )


def check(version: str, folder: Path | None, seeds: int, smoke: bool) -> Line:
    start = time.monotonic()
    cases = run(folder, "-m", "tests.versions.cases", "--seeds", str(seeds))
    problems = []
    try:
        record = json.loads(cases.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Line(version, f"the cases ended with {cases.returncode}: {cases.stderr.strip()[-500:]}", "", 0.0)
    if cases.returncode:
        problems.append(f"wrong: {record['wrong']}, routes: {record['routes']}, seeds: {record['beam sampling']}")
    tests = "not run"
    if smoke:
        done = run(folder, "-m", "pytest", "-q", "-m", "smoke and not gpu", "-p", "no:cacheprovider", *ROOMS)
        tests = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-200:]
        tests = re.sub(r", \d+ (deselected|warnings?)|( in .*)|, \d+ skipped", "", tests)
        if done.returncode:
            problems.append(
                "smoke tests: " + " | ".join(re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE))
            )
    packed = sum(route == "packed" for route in record["routes"].values())
    equal = min(record["beam sampling"].values())
    cells = [
        record["transformers"], ".".join(record["python"].split(".")[:2]), record["torch"].split("+")[0],
        f"{record['identical']} of {record['cases']}", f"{packed} of {len(record['routes'])}",
        f"{equal} of {record['seeds']}", tests,
    ]  # fmt: skip
    return Line(record["transformers"], "; ".join(problems), f"| {' | '.join(cells)} |", time.monotonic() - start)


def write(lines: Sequence[Line]) -> None:
    """Replace the rows of the same transformers, Python and torch in the page's table, and keep the others."""
    before, table, after = re.split(rf"({re.escape(HEAD)}\n(?:\|.*\n)+)", PAGE.read_text(), maxsplit=1)
    rows = {tuple(row.split("|")[1:4]): row for row in table.splitlines()[2:]}
    rows |= {tuple(line.row.split("|")[1:4]): line.row for line in lines if line.row}
    head = "\n".join(table.splitlines()[:2])
    numbered = sorted(rows.values(), key=lambda row: [int(number) for number in re.findall(r"\d+", row)[:8]])
    PAGE.write_text(before + "\n".join([head, *numbered]) + "\n" + after)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--seeds", type=int, default=200, help="of beam sampling")
    parser.add_argument("--jobs", type=int, default=2, help="versions at once")
    parser.add_argument("--no-smoke", action="store_true", help="leave out the smoke tests")
    parser.add_argument("--others", action="store_true", help="leave out the version that is installed")
    parser.add_argument("--write", action="store_true", help="write the table of docs/versions.md")
    arguments = parser.parse_args(argv)
    versions = arguments.versions or tested_versions()
    if arguments.others:
        versions = [version for version in versions if version != metadata.version("transformers")]
    folders = [folder_of(version) for version in versions]  # one after the other: pip shares a cache
    lines = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for line in pool.map(
            lambda each: check(*each, arguments.seeds, not arguments.no_smoke), zip(versions, folders)
        ):
            print(f"{'FAILED ' if line.problem else 'passed '} {line.version:8} {line.seconds:4.0f} s  {line.row}")
            if line.problem:
                print(f"        {line.problem}")
            lines.append(line)
    if arguments.write:
        write(lines)
    return int(any(line.problem for line in lines))


if __name__ == "__main__":
    sys.exit(main())
