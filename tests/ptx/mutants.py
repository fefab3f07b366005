"""Our kernels with one barrier, wait or fence less: which of these the machine sees.

    TRITON_INTERPRET=0 python tests/ptx/mutants.py CHIP GROUP CASE KERNEL

runs the case as often as the machine code of the kernel has such instructions, each time without another one, and
prints a line of JSON: of each, whether a fault or a wrong result was seen, and whether it is a barrier beside another
one or an end of the program, with no access of memory between them.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ptx import launches, room

GUARDS = r"bar\.sync|cp\.async\.wait_group|fence\.proxy\.async|wgmma\.wait_group"
ACCESSES = r"\b(ld|st)\.(shared|global)|\b(ldmatrix|stmatrix|atom|red|wgmma\.mma|cp\.async)"


def without(number: int) -> tuple[Callable[[str], str], list[tuple[str, bool]]]:
    """A change of PTX that leaves out its guard of this number; and a list that receives all guards, in order, with
    whether they are barriers beside another one."""
    found: list[tuple[str, bool]] = []

    def change(ptx: str) -> str:
        places = list(re.finditer(rf"^\s*({GUARDS})[^;]*;", ptx, re.MULTILINE))
        barriers = [0, *(place.start() for place in places if place[1] == "bar.sync"), len(ptx)]
        gaps = {(a, b): re.search(ACCESSES, ptx[a:b]) is None for a, b in itertools.pairwise(barriers)}
        idle = {end for gap, is_idle in gaps.items() for end in gap if is_idle}
        found[:] = [(place[1], place[1] == "bar.sync" and place.start() in idle) for place in places]
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
        name, is_beside = guards[number]
        found.append({"guard": name, "number": number, "seen": seen.partition(":")[0], "beside another": is_beside})
        number += 1
    return found


if __name__ == "__main__":
    print(json.dumps(outcomes(*sys.argv[1:])))
