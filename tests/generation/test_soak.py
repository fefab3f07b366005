"""Random load with every kind of event on an engine. `scripts/soak.py` runs a million requests of it."""

from __future__ import annotations

import pytest

from tests.soaking.rounds import Report, Round
from tests.soaking.world import KINDS, World

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # what PEFT asks
]


@pytest.fixture(scope="module")
def world() -> World:
    pytest.importorskip("peft")
    return World()


def check(report: Report) -> None:
    assert not report.wrong
    assert report.leaked == 0


@pytest.mark.quick_cases("[gemma3")
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_soak(world: World, kind: str) -> None:
    report = Round(world, 1000 * list(KINDS).index(kind), 25, kind, "steps").run()
    check(report)
    assert report.counts["checked"] > 15


@pytest.mark.parametrize("mode", ["threads", "stream"])
def test_a_short_soak_of_the_other_ways_in(world: World, mode: str) -> None:
    check(Round(world, 0, 25, "llama", mode).run())
