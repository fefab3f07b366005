"""Tests that run with both ways to schedule: steps that wait for the last tokens, and asynchronous ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hf_paged import SchedulerConfig

WAYS = ("waiting steps", "async steps")


def in_both_schedulings(test: Callable[..., Any]) -> Any:
    """The test runs once with each way as the default of engines. The steps' number may differ."""
    return pytest.mark.usefixtures("scheduling")(pytest.mark.parametrize("scheduling", WAYS, indirect=True)(test))


def schedule_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines schedule asynchronously by default, as on a CUDA device."""
    chosen = SchedulerConfig.for_device

    def for_device(self: SchedulerConfig, kind: str) -> SchedulerConfig:
        return replace(chosen(self, kind), async_scheduling=self.async_scheduling is not False)

    monkeypatch.setattr(SchedulerConfig, "for_device", for_device)
