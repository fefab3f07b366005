"""The pool holds what arithmetic says, for layers with and without windows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.paper import kinds


@pytest.mark.covering(1)
@pytest.mark.parametrize("load", ["mixed", "changing"])
@pytest.mark.parametrize("shape", kinds.SHAPES[1:3], ids=lambda shape: shape.name)
def test_blocks_in_use_hold_what_later_tokens_see(shape: kinds.Shape, load: str) -> None:
    demand = replace(kinds.DEMANDS[load], requests=100, pool=kinds.DEMANDS[load].pool // 6)
    assert 0.95 < kinds.held(shape.kinds(), demand).visible <= 1


def test_windows_make_room_for_more_requests() -> None:
    shape, demand = kinds.SHAPES[2], replace(kinds.DEMANDS["long"], requests=24, pool=kinds.DEMANDS["long"].pool // 3)
    ours, whole = (kinds.held(each, demand) for each in (shape.kinds(), kinds.everything(shape.kinds())))
    assert ours.requests > 3 * whole.requests
