"""Streams without a device: work waits in its stream's queue until a test runs it, and only events constrain the order.
A missing wait therefore gives wrong data under some schedule.

This does not cover pinned memory, torch's allocators and the copies themselves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
import torch

from hf_paged.cache import swap


class Event:
    """A point in a stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_reached = False

    def reach(self) -> None:
        self.is_reached = True


class Stream:
    """Replaces `torch.cuda.Stream`. work: pending work, each piece after an event or at any time (None)."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.work: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def add(self, work: Callable[[], object], after: Event | None = None) -> None:
        self.work.append((after, work))
        self._device.catch_up()

    def record_event(self) -> Event:
        event = Event(self)
        self.add(event.reach)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not self and not self._device.leaves_out_wait():
            self.add(lambda: None, after=event)

    @property
    def is_ready(self) -> bool:
        return bool(self.work) and (self.work[0][0] is None or self.work[0][0].is_reached)

    def step(self) -> None:
        self.work.popleft()[1]()

    def finish(self) -> None:
        """Run all work of this stream, and of other streams only what it waits for."""
        while self.work:
            self._finish_one()

    def _finish_one(self) -> None:
        after = self.work[0][0]
        while after is not None and not after.is_reached:
            after.stream._finish_one()
        self.step()


class Device:
    """The streams of a test.

    is_eager: the current stream runs its work at once; each piece of work of the others runs with probability `chance`
    whenever work is added. left_out: the index of a wait of one stream for another that is skipped. waits: the number
    of such waits so far.
    """

    def __init__(self, *, is_eager: bool = False, chance: float = 0.0, left_out: int | None = None) -> None:
        self.current = Stream(self)
        self.sides: list[Stream] = []
        self.waits = 0
        self._is_eager = is_eager
        self._chance = chance
        self._left_out = left_out
        self._random = random.Random(0)

    def leaves_out_wait(self) -> bool:
        self.waits += 1
        return self.waits - 1 == self._left_out

    def catch_up(self) -> None:
        if self._is_eager:
            for side in self.sides:
                while side.is_ready and self._random.random() < self._chance:
                    side.step()
            self.current.finish()

    def synchronize(self, schedule: str) -> None:
        """Run all work. `schedule`: the stream that runs ahead as far as events allow, else a seed."""
        rng = random.Random(schedule)
        while ready := [stream for stream in (self.current, *self.sides) if stream.is_ready]:
            {"current": ready[0], "side": ready[-1]}.get(schedule, rng.choice(ready)).step()
        assert not any(stream.work for stream in (self.current, *self.sides)), "they wait for one another"


class FakeStreams:
    """In the place of `swap.CudaStreams`, for K/V on a CPU. Memory holds noise at first."""

    device_type = "cpu"
    device: Device

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.side = Stream(self.device)
        self.device.sides.append(self.side)

    @property
    def current(self) -> Stream:
        return self.device.current

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        stream.add(work)

    def staging(self, *shape: int) -> torch.Tensor:
        memory = torch.empty(shape, dtype=torch.uint8)
        # What the current stream has still to do to it from before it was freed.
        self.current.add(lambda: memory.random_())
        return memory

    def host(self, *shape: int) -> torch.Tensor:
        return torch.randint(256, shape, dtype=torch.uint8)


def install(patch: pytest.MonkeyPatch, device: Device) -> None:
    """Make host pools swap blocks in the CPU's memory as if the blocks were on this device."""
    patch.setattr(swap, "CudaStreams", FakeStreams)
    patch.setattr(FakeStreams, "device", device, raising=False)
