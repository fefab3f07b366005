"""Owns what is known of a request: its token lists, how far each is computed, and its state.

Knows no blocks, no tensors and no sampling parameters. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from enum import Enum, StrEnum

_new_seq_id = itertools.count().__next__


class SeqStatus(Enum):
    """States of a group (the paper, section 4.5); all its unfinished sequences are in it together."""

    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # its blocks are on the device
    SWAPPED = "swapped"  # its blocks are in host memory
    FINISHED = "finished"  # holds no block any more


class FinishReason(StrEnum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class Sequence:
    """One token list with one block table.

    Invariant: `num_computed_tokens <= num_tokens`; K/V of the first `num_computed_tokens` tokens is in the cache
    unless the sequence is finished. A sequence whose `parent` is set has no block table yet: it forks from the parent
    as soon as that has computed `branch_at` tokens, which both have in common.

    `num_pending` is 1 while a token that is to be computed has been chosen, but is not on the host yet: it counts, and
    comes behind `token_ids`.
    """

    __slots__ = (
        "block_digests",
        "branch_at",
        "finish_reason",
        "group",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
        "num_registered_blocks",
        "parent",
        "seq_id",
        "token_ids",
    )

    def __init__(self, group: SequenceGroup, token_ids: Iterable[int], num_prompt_tokens: int) -> None:
        self.seq_id: int = _new_seq_id()
        self.group = group
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.finish_reason: FinishReason | None = None
        self.parent: Sequence | None = None
        self.branch_at = 0
        # The digest chain of the leading full blocks, and how many of them the prefix cache was told of.
        self.block_digests: list[bytes] = []
        self.num_registered_blocks = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def status(self) -> SeqStatus:
        return SeqStatus.FINISHED if self.finish_reason is not None else self.group.status

    def copy(self) -> Sequence:
        """A sequence with a new `seq_id` that knows and has computed the same tokens (its blocks: Scheduler)."""
        child = Sequence(self.group, self.token_ids, self.num_prompt_tokens)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_digests = self.block_digests[:]
        child.num_registered_blocks = self.num_registered_blocks
        return child

    def restart(self, parent: Sequence | None, branch_at: int) -> None:
        """Nothing of it is in the cache any more. It computes its tokens itself, or forks from `parent`."""
        self.num_computed_tokens = self.num_registered_blocks = 0
        self.parent, self.branch_at = parent, branch_at

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.num_computed_tokens}/{self.num_tokens} tokens, {self.status.value})"


class SequenceGroup:
    """All samples or beams of one request. Starts with one sequence, the prompt; Scheduler.fork makes the others.

    Invariant: `live` are the unfinished ones of `sequences`, in the same order; `status` is FINISHED when none is
    left. Between its steps every live sequence of a forked group has the same number of uncomputed tokens to go
    before it may sample: it is scheduled, preempted and resumed whole.

    `width` is how many live sequences the group may have, now or once it has forked; the scheduler
    keeps that many places in the batch. `cache_root` is the prefix cache's root digest, None keeps the request out
    of the prefix cache. `priority`: lower is more urgent. `adapters` is the choice that computes it, opaque here:
    groups with different ones share no forward.
    """

    __slots__ = (
        "adapters",
        "arrival",
        "cache_root",
        "error",
        "has_branches",
        "live",
        "num_cached_tokens",
        "num_preemptions",
        "order",
        "priority",
        "request_id",
        "sequences",
        "status",
        "width",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        *,
        width: int = 1,
        priority: int = 0,
        arrival: float = 0.0,
        cache_root: bytes | None = None,
        adapters: object = None,
    ) -> None:
        if len(prompt_token_ids) == 0:
            raise ValueError(f"request {request_id!r} has an empty prompt; give at least one token")
        if width < 1:
            raise ValueError(f"width={width}: a request has at least one sequence")
        self.request_id = request_id
        self.sequences = [Sequence(self, prompt_token_ids, len(prompt_token_ids))]
        self.live = self.sequences[:]
        self.width = width
        self.priority = priority
        self.arrival = arrival
        self.cache_root = cache_root
        self.adapters = adapters
        self.status = SeqStatus.WAITING
        self.error: str | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache on arrival
        self.has_branches = False  # some live sequence waits for its parent
        self.order: tuple[int, float, int] = (priority, arrival, 0)

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SeqStatus.FINISHED

    def plan(self, budget: int) -> Plan:
        """How many tokens of each live sequence to compute next: all that are missing, or what the budget allows.

        Several sequences sample together or not at all: until everything fits, the last token of each is held back.
        A sequence that others are to fork from stops at the branch until they have.
        """
        live = self.live
        if len(live) == 1:
            num_tokens = min(live[0].num_uncomputed_tokens, budget)
            return [(live[0], num_tokens)] if num_tokens else []
        if not self.has_branches and sum([seq.num_uncomputed_tokens for seq in live]) <= budget:
            return [(seq, seq.num_uncomputed_tokens) for seq in live if seq.num_uncomputed_tokens]
        stops = {seq: seq.num_tokens - 1 for seq in live}
        for seq in live:
            if seq.parent is not None:
                stops[seq.parent] = min(stops[seq.parent], seq.branch_at)
        plan: Plan = []
        for seq in live:
            num_tokens = min(stops[seq] - seq.num_computed_tokens, budget)
            if seq.parent is None and num_tokens > 0:
                plan.append((seq, num_tokens))
                budget -= num_tokens
        return plan

    def restart(self) -> None:
        """No block is left: all tokens are computed again, a common prefix only once.

        Every sequence but the first gets a parent, the earlier one with which it has most in common. The blocks are
        then shared as far as they were before, so that the group needs no more of them than it had.
        """
        live = self.live
        for index, seq in enumerate(live):
            seq.restart(None, 0)
            for other in live[:index]:
                # Both have at least their last token left to compute: it is what they sample from.
                limit = min(seq.num_tokens, other.num_tokens) - 1
                common = _common_prefix(seq.token_ids, other.token_ids, limit)
                if seq.parent is None or common > seq.branch_at:
                    seq.restart(other, common)
        self.has_branches = len(live) > 1

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id!r}, {self.status.value}, {self.sequences!r})"


Plan = list[tuple[Sequence, int]]
"""Who computes how many of its next tokens."""


def _common_prefix(left: list[int], right: list[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`; bisection, because slices compare at the speed of C."""
    low = 0
    while low < limit:
        middle = (low + limit + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            limit = middle - 1
    return low
