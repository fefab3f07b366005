"""Counts the lines of the core, which everyone who changes hf_paged reads, and of each feature beside it.

    python scripts/core_lines.py

A feature is a folder of `features/`, or `fused/`. The files beside these folders are the wiring: the core asks them for
features, and they know all. So does `plugin.py`. `PROGRAMS` are clients of the engine. All other files are the core.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hf_paged"
PROGRAMS = ("serving", "bridges", "load", "cli", "rollouts.py")


def part_of(file: str) -> str:
    """Return the feature of a file, given as its path within the package, or "wiring", "programs", or "core"."""
    first, *rest = file.split("/")
    if first == "features" and len(rest) > 1:
        return rest[0]
    kinds = {"fused": "fused", "features": "wiring", "plugin.py": "wiring", **dict.fromkeys(PROGRAMS, "programs")}
    return kinds.get(first, "core")


def lines() -> Counter[str]:
    """Return the number of lines of each part: of Python, docstrings and comments included."""
    counts: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        counts[part_of(path.relative_to(PACKAGE).as_posix())] += path.read_text().count("\n")
    return counts


def main() -> None:
    counts = lines()
    for name, count in counts.most_common():
        print(f"{name:26}{count:>8,}")
    print(f"{'all':26}{counts.total():>8,}")


if __name__ == "__main__":
    main()
