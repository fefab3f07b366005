"""Our kernels with one barrier, wait or fence less: which of these the machine sees.

    TRITON_INTERPRET=0 python scripts/ptx_mutants.py CHIP GROUP CASE KERNEL

runs the case as often as the machine code of the kernel has such instructions, each time without another one, and
prints a line of JSON: of each, what was seen: a fault, a wrong result, or nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ptx import launches, room

GUARDS = r"bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|wgmma\.wait_group"


def without(number: int) -> tuple[Callable[[str], str], list[str]]:
    """A change of PTX that leaves out its guard of this number; and a list that receives all guards, in order."""
    found: list[str] = []

    def change(ptx: str) -> str:
        places = list(re.finditer(rf"^\s*({GUARDS})[^;]*;", ptx, re.MULTILINE))
        found[:] = [place[1] for place in places]
        if number >= len(places):
            return ptx
        return ptx[: places[number].start()] + "\n" + ptx[places[number].end() :]

    return change, found


def outcomes(chip: str, group: str, case: str, kernel: str) -> list[dict[str, Any]]:
    run, found = launches.run, []
    number, total = 0, 1
    while number < total:  # the first run says how many there are
        change, guards = without(number)

        def changed(launch: Any, chip: str, **options: Any) -> Any:
            wanted = launch.kernel.fn.__name__ == kernel
            return run(launch, chip, **options, change=change if wanted else None)  # noqa: B023 (called in this turn)

        room.run = changed
        (ran,) = room.ran(chip, [group], [case])
        room.run = run
        if not (total := len(guards)):
            break
        seen = ran.fault or "".join(ran.notes) or ("a wrong result" if ran.apart > 1 else "")
        found.append({"guard": guards[number], "number": number, "seen": seen.partition(":")[0]})
        number += 1
    return found


if __name__ == "__main__":
    print(json.dumps(outcomes(*sys.argv[1:])))
