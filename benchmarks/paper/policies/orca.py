"""Orca (Max), (Pow2) and (Oracle): one contiguous reservation for each sequence, batches per iteration (section 6.1).

The three differ only in how many slots they reserve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.paper.policies.buddy import BuddyAllocator, power_of_two
from benchmarks.paper.policies.interface import Load, Memory, decode_load_of, load_of
from benchmarks.paper.policies.queue import Queue
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup

MAX_MODEL_LENGTH = 2048

Reserve = Callable[[int, int, int], int]
"""(prompt tokens, output tokens, the model's maximum) -> slots to reserve for one sequence."""


def reserve_max(prompt: int, output: int, longest: int = MAX_MODEL_LENGTH) -> int:
    """Orca (Max): the output length is unknown, so every sequence may reach the model's maximum."""
    return max(longest, prompt + output)


def reserve_pow2(prompt: int, output: int, longest: int = MAX_MODEL_LENGTH) -> int:
    """Orca (Pow2): over-reserves the output by at most a factor of two, and never beyond the model's maximum."""
    return min(prompt + power_of_two(output), reserve_max(prompt, output, longest))


def reserve_oracle(prompt: int, output: int, longest: int = MAX_MODEL_LENGTH) -> int:
    """Orca (Oracle): knows the output length, which no real system does."""
    return prompt + output


RESERVATIONS: dict[str, Reserve] = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}


class Orca(Queue):
    """Iteration-level batches over contiguous reservations.

    Every sequence of a group reserves memory when the group starts and keeps it until the group ends. output_lengths:
    request_id -> tokens that each of its sequences will generate; "max" does not look at them. longest: tokens of a
    sequence, at most, of the model.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: int,
        output_lengths: Mapping[str, int],
        *,
        reserve: str,
        longest: int = MAX_MODEL_LENGTH,
    ) -> None:
        super().__init__(config)
        self.name = f"orca-{reserve}"
        self.buddy = BuddyAllocator(capacity)
        self._reserve = RESERVATIONS[reserve]
        self._longest = longest
        self._output_lengths = output_lengths
        self._chunks: dict[SequenceGroup, list[int]] = {}
        self._reserved: dict[SequenceGroup, int] = {}  # slots asked for, by each sequence

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        self._reserved[group] = self._reserve(
            group.num_prompt_tokens, self._output_lengths[group.request_id], self._longest
        )
        size = power_of_two(self._reserved[group])
        if sum(root // size for root in self.buddy._roots.values()) < group.width:
            raise ValueError(
                f"request {group.request_id!r} reserves {group.width} x {size} slots of {self.buddy.capacity}: more "
                "than an empty pool has; give the pool more memory"
            )

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput()
        budget = self.config.token_budget
        for group in self.running:
            budget = self._plan(group, budget, output)
        if not self._waiting:
            return output
        places = self.config.max_num_seqs - sum(group.width for group in self.running)
        while self._waiting and budget > 0 and self._waiting[0].width <= places:
            group = self._waiting[0]
            if not self._allocate(group):
                break
            self._start(self._waiting.popleft())
            places -= group.width
            budget = self._plan(group, budget, output)
        return output

    def _plan(self, group: SequenceGroup, budget: int, output: SchedulerOutput) -> int:
        live = group.live
        if len(live) == 1:  # most groups: `group.plan` without the call
            count = min(len(live[0].token_ids) - live[0].num_computed_tokens, budget)
            if count:
                output.scheduled.append((live[0], count))
            return budget - count
        plan = group.plan(budget)
        output.scheduled.extend(plan)
        return budget - sum(count for _, count in plan)

    def _allocate(self, group: SequenceGroup) -> bool:
        chunks: list[int] = []
        for _ in range(group.width):
            chunk = self.buddy.allocate(self._reserved[group])
            if chunk is None:
                for taken in chunks:
                    self.buddy.free(taken)
                return False
            chunks.append(chunk)
        self._chunks[group] = chunks
        return True

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        super().finish_group(group, reason)
        del self._reserved[group]
        for chunk in self._chunks.pop(group):
            self.buddy.free(chunk)

    def decode_steps(self, limit: int) -> int:
        rows = sum(len(group.live) for group in self.running)
        return min(limit, self.config.token_budget // max(rows, 1))

    def decode_load(self) -> Load:
        return decode_load_of(self.running)

    def load(self, output: SchedulerOutput) -> Load:
        return load_of(output, copied_tokens=self._take_copied())

    def memory(self, ahead: float = 0.0) -> Memory:
        """Rounding to a power of two counts as external: it is the allocator's, not the request's (Figure 2)."""
        tokens, asked, final = 0.0, 0, 0
        for group in self.running:
            tokens += sum(seq.num_tokens for seq in group.live)
            asked += self._reserved[group] * group.width
            final += (group.num_prompt_tokens + self._output_lengths[group.request_id]) * group.width
        tokens -= ahead
        return Memory(tokens, final - tokens, asked - final, self.buddy.capacity - asked, 0)
