"""What the marker `covering` leaves: each combination of values, in few cases."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import covering

CASES = [tuple(zip("abcd", values)) for values in product(range(4), range(3), range(3), range(2))]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 42), (4, 72), (9, 72)])
def test_every_combination_is_covered(strength: int, most: int) -> None:
    found = covering.cover(CASES, strength)
    wanted = {each for case in CASES for each in combinations(case, min(strength, 4))}
    assert {each for i in found for each in combinations(CASES[i], min(strength, 4))} == wanted
    assert len(found) == len(set(found)) <= most


class Item:
    """As much of a `pytest.Item` as is looked at."""

    def __init__(self, test: str, *marks: Any, **params: object) -> None:
        self.nodeid = f"{test}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)
        self._marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)


def test_quick_cases_cover_alone() -> None:
    slow, covering_one = pytest.mark.slow.mark, pytest.mark.covering(1).mark
    items = [
        Item("test_marked", covering_one, *([slow] if family == "c" else []), family=family, mode=mode)
        for mode in ("x", "y")
        for family in ("c", "a", "b")
    ]
    items += [Item("test_other", family=family) for family in "ab"]
    found = [item.nodeid for item in items if item in covering.chosen(items)]  # type: ignore[arg-type,comparison-overlap]
    assert found == ["test_marked[c-x]", "test_marked[a-x]", "test_marked[b-y]", "test_other[a]", "test_other[b]"]
