"""The marker `covering(n)`: cases in which every `n` values of independent parameters meet; `--every-case` runs all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

Case = tuple[Hashable, ...]
"""A value of each parameter."""


def chosen(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those that run: all but what a marker leaves out. Quick cases come before slow ones."""
    kept = set(items)
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        (strength,) = cases[0].get_closest_marker("covering").args  # type: ignore[union-attr]
        cases.sort(key=lambda item: (is_marked(item, "slow"), not is_marked(item, "smoke")))
        slow = [is_marked(item, "slow") for item in cases]
        values = [values_of(item) for item in cases]
        quick = cover(values[: slow.count(False)], strength)
        found = {*quick, *cover(values, strength, quick)}
        kept -= {case for i, case in enumerate(cases) if i not in found}
    return kept


def values_of(item: pytest.Item) -> Case:
    return tuple((name, id(value)) for name, value in item.callspec.params.items())  # type: ignore[attr-defined]


def is_marked(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def cover(cases: Sequence[Case], strength: int, first: Iterable[int] = ()) -> list[int]:
    """Indices of cases, those of `first` first, with every combination of `strength` values, used about equally."""
    own = [set(combinations(case, min(strength, len(case)))) for case in cases]
    found, used = list(first), Counter[Hashable]()
    for i in found:
        used.update(cases[i])
    having: defaultdict[Case, list[int]] = defaultdict(list)
    for i, combined in enumerate(own):
        for each in combined:
            having[each].append(i)
    gains = [len(combined) for combined in own]  # by case, what is missing of its combinations

    def take(case: int) -> None:
        for each in own[case]:
            for i in having.pop(each, ()):
                gains[i] -= 1

    for i in found:
        take(i)
    while having:
        # The first of the best ones, of whose values the others have few.
        most = max(gains)
        best = min((i for i, g in enumerate(gains) if g == most), key=lambda i: sum(used[value] for value in cases[i]))
        found.append(best)
        used.update(cases[best])
        take(best)
    return found
