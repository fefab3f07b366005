"""Runners for a tensor-parallel model: the driver's sends each step as a message, the others carry it out.

All ranks move blocks and compute forwards. Block tables, requests and sampling exist on the driver alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from hf_paged.annotations import Model
from hf_paged.config import SchedulerConfig, Switches
from hf_paged.errors import RankError, UnsupportedModelError
from hf_paged.features.graphs.graphs import graphed_steps
from hf_paged.features.ranks.message import StepMessage
from hf_paged.features.ranks.ranks import Ranks, check_heads, num_ranks
from hf_paged.generation.engine.runner import Runner, StepResult, Work
from hf_paged.generation.engine.sizing import OpenedMemory
from hf_paged.generation.engine.tables import Drafts, SchedulerOutput
from hf_paged.generation.requests.batch import SampledTokens
from hf_paged.generation.requests.sequence import Plan, by_adapters
from hf_paged.model.state import unwrapped
from hf_paged.registry import Choice, Variants
from hf_paged.sockets import Executor, SideMemory

_Result = TypeVar("_Result")


class _Event(Enum):
    """Messages of one byte, besides steps, from the driver to the other ranks."""

    PAUSE = b"p"
    COMPARE = b"="  # what each rank has got
    CLOSE = b"c"


def check_parallel(model: Model, asked: SchedulerConfig, switches: Switches) -> None:
    """Raises ValueError for an option that several ranks do not have, UnsupportedModelError for too many ranks."""
    size = num_ranks(model)
    if size > 1:
        check_heads(unwrapped(model), size)
    refused = {
        "async_scheduling": asked.async_scheduling,
        "cuda_graphs": switches.cuda_graphs,
        "warmup": switches.warmup,
    }
    for name, value in refused.items():
        if value and size > 1:
            raise ValueError(f"{name}=True: the model is on {size} ranks, where this is not implemented; leave it out")


def make_runner(
    opened: OpenedMemory,
    adapters: Variants,
    max_num_seqs: int,
    switches: Switches,
    sides: Iterable[SideMemory] = (),
) -> Runner:
    """The runner of this process."""
    executor, ranks = opened.executor, opened.ranks
    if ranks is None:
        executor.graphs = graphed_steps(executor, max_num_seqs, switches.cuda_graphs)
        return Runner(executor, opened.host_pool, adapters, sides)
    return (DrivingRunner if ranks.is_driver else FollowingRunner)(opened, adapters, ranks)


class _RankRunner(Runner):
    is_alone = False

    def __init__(self, opened: OpenedMemory, adapters: Variants, ranks: Ranks) -> None:
        super().__init__(opened.executor, opened.host_pool, adapters)
        self._ranks = ranks
        opened.executor.stand_in = _refuse

    def when_ranks_fail(self, call: Callable[[str], Any]) -> None:
        self._ranks.when_failed(call)


def _refuse(_: Executor, reason: str) -> Executor:
    raise UnsupportedModelError(
        f"{reason}; one sequence at a time is not computed on several ranks: take it out, or use "
        "model.generate(..., cache_implementation='paged') on every rank"
    )


class DrivingRunner(_RankRunner):
    """The runner of rank 0. If a step fails on any rank, no rank runs another one."""

    def __init__(self, opened: OpenedMemory, adapters: Variants, ranks: Ranks) -> None:
        super().__init__(opened, adapters, ranks)
        self._prepared: deque[Work] = deque()  # of the next step

    def check_model(self) -> None:
        self._ranks.check()
        super().check_model()

    @property
    def can_repeat(self) -> bool:
        return False  # the other ranks have computed it

    def prepare(self, output: SchedulerOutput) -> None:
        # Packed here, before `run` needs it, because the other ranks wait for the step.
        grouped = by_adapters(output.scheduled, lambda entry: entry[0].group)
        plans = [*grouped.values()] if self._adapters.seen else [output.scheduled]
        work = super()._work
        self._prepared = deque(work(output, None, plan, output.drafts) for plan in plans if plan)
        forwards = [self._executor.pack(each.parts) for each in self._prepared if each.plan]
        if forwards or output.moves_blocks:
            step = StepMessage(
                output.swap_out, output.swap_in, output.block_copies, forwards, self._bound.weights.epoch
            )
            self._ranks.send(step.to_bytes())
        # After the message, so that all ranks move their blocks at the same time.
        with self._ranks.guard():
            super().prepare(output)

    def _work(self, output: SchedulerOutput, sampled: SampledTokens | None, plan: Plan, drafts: Drafts) -> Work:
        return self._prepared.popleft()

    def run(self, output: SchedulerOutput, sampled: SampledTokens | None = None) -> StepResult:
        with self._ranks.guard():
            return super().run(output, sampled)

    def _run_with(self, choice: Choice, compute: Callable[[], _Result]) -> _Result:
        with self._ranks.guard():  # of its own: an error must not be confined to the requests with these adapters
            return super()._run_with(choice, compute)

    def pause(self) -> None:
        self._ranks.send(_Event.PAUSE.value)

    def check_integrity(self) -> None:
        self._ranks.send(_Event.COMPARE.value)
        self._ranks.check_same_messages()

    def close(self) -> None:
        # A rank that has failed hears of no end, and needs none.
        with suppress(RankError):
            self._ranks.send(_Event.CLOSE.value)
        self._ranks.close(is_done=True)
        super().close()


class FollowingRunner(_RankRunner):
    """The runner of a rank that does what the driver tells it."""

    takes_requests = False

    def __init__(self, opened: OpenedMemory, adapters: Variants, ranks: Ranks) -> None:
        super().__init__(opened, adapters, ranks)
        self._epoch: int | None = None
        self._is_done = False

    def check_model(self) -> None:
        raise RuntimeError(f"rank {self._ranks.rank} follows rank 0, which takes the requests; call run_worker()")

    def follow(self, on_pause: Callable[[], Any] | None) -> None:
        """Carry out the steps of the driver until it closes its engine. Raises RankError if a rank fails."""
        while not self._is_done:
            message = self._ranks.receive()
            with self._ranks.guard():
                self._obey(message, on_pause)

    def _carry_out(self, step: StepMessage) -> None:
        """Move blocks and write K/V. The driver alone needs the logits."""
        executor: Any = self._executor
        self._follow_last_step()
        with self._conditions.modes(executor):
            self._move_blocks(step.swap_out, step.swap_in, step.block_copies)
            for forward in step.forwards:
                compute = partial(executor.compute, forward)
                if forward.adapters is None:
                    compute()
                else:
                    self._adapters.run(self._adapters.described(forward.adapters), compute)

    def _obey(self, message: bytearray, on_pause: Callable[[], Any] | None) -> None:
        event = _Event(bytes(message)) if len(message) == 1 else None
        if event is None:
            step = StepMessage.from_bytes(message)
            # Only the driver looks for changes of the weights, or ranks could differ in when they notice one.
            if step.weights_epoch != self._epoch:
                self._epoch = step.weights_epoch
                self._bound.weights.changed()
            # Checked and followed as the driver does it before a step.
            super().check_model()
            self.look()
            self.follow_model()
            self._carry_out(step)
        elif event is _Event.PAUSE:
            if on_pause is not None:
                on_pause()
        elif event is _Event.COMPARE:
            self._ranks.check_same_messages()
        else:
            self._is_done = True
            self._ranks.close(is_done=True)

    def close(self) -> None:
        self._ranks.close(is_done=self._is_done)
        super().close()
