"""FasterTransformer: static batches as large as memory allows, padded, run until the longest output ends."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.paper.policies.interface import Load, Memory
from benchmarks.paper.policies.orca import MAX_MODEL_LENGTH
from benchmarks.paper.policies.queue import Queue
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, SequenceGroup


class Static(Queue):
    """Takes the requests that have waited longest, up to as many as fit at the model's maximum length.

    Rows of finished sequences are computed on, as padding, and all requests of a batch end with it.
    """

    def __init__(self, config: SchedulerConfig, capacity: int, output_lengths: Mapping[str, int]) -> None:
        super().__init__(config)
        self.name = "faster-transformer"
        self.capacity = capacity
        self.batch_size = min(capacity // MAX_MODEL_LENGTH, config.max_num_seqs)
        if self.batch_size < 1:
            raise ValueError(f"capacity={capacity}: less than one sequence of {MAX_MODEL_LENGTH} tokens")
        self._output_lengths = output_lengths
        self._rows = 0  # of the batch, finished ones included
        self._longest_prompt = 0
        self._num_steps = 0
        self._ended: list[SequenceGroup] = []

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput()
        if not self.running:
            self._next_batch()
        for group in self.running:
            output.scheduled.extend((seq, seq.num_uncomputed_tokens) for seq in group.live)
        return output

    def _next_batch(self) -> None:
        self._rows = self._longest_prompt = self._num_steps = 0
        while self._waiting and self._rows + self._waiting[0].width <= self.batch_size:
            group = self._waiting.popleft()
            self._start(group)
            self._rows += group.width
            self._longest_prompt = max(self._longest_prompt, group.num_prompt_tokens)
        if self._waiting and not self.running:
            width = self._waiting[0].width
            raise ValueError(f"a request of {width} sequences exceeds the batch of {self.batch_size}")

    def update(self, output: SchedulerOutput) -> None:
        self._num_steps += max((count for _, count in output.scheduled), default=0) if self._num_steps else 1
        super().update(output)

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """Ended rows continue as padding until the batch has ended; only then is the group finished."""
        for seq in group.live:
            seq.finish_reason = reason
        group.live = []
        self._ended.append(group)
        if len(self._ended) == len(self.running):
            for ended in self._ended:
                ended.status = SeqStatus.FINISHED
            self._ended, self.running = [], []

    def decode_steps(self, limit: int) -> int:
        return limit

    def decode_load(self) -> Load:
        return Load(self._rows, self._rows, self._rows * (self._longest_prompt + self._num_steps))

    def load(self, output: SchedulerOutput) -> Load:
        copied, rows, prompt = self._take_copied(), self._rows, self._longest_prompt
        if self._num_steps:
            return Load(rows, rows, rows * (prompt + self._num_steps), 0, copied)
        return Load(rows, rows * prompt, rows * prompt, rows * prompt * (prompt + 1) // 2, copied)

    def memory(self, ahead: float = 0.0) -> Memory:
        tokens, final = 0.0, 0
        for group in self.running:
            output = self._output_lengths[group.request_id]
            final += (group.num_prompt_tokens + output) * group.width
            done = [seq.num_tokens for seq in group.live] or [group.num_prompt_tokens + output] * group.width
            tokens += sum(done)
        reserved = self.batch_size * MAX_MODEL_LENGTH
        tokens -= ahead
        return Memory(tokens, final - tokens, reserved - final, self.capacity - reserved, 0)
