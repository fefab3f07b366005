"""The records of a request: its token lists, how many tokens of each are computed, and its state.

Knows no blocks, no tensors and no sampling parameters. Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Protocol, TypeVar

from hf_paged.sockets import Task

_new_seq_id = itertools.count().__next__


class SeqStatus(Enum):
    """States of a group (section 4.5 of the paper), shared by all its unfinished sequences."""

    WAITING = "waiting"  # holds no block
    RUNNING = "running"  # its blocks are on the device
    SWAPPED = "swapped"  # its blocks are in host memory
    FINISHED = "finished"  # holds no block any more


class FinishReason(StrEnum):
    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"

    def __str__(self) -> str:
        return self.value


class Sequence:
    """One token list with one block table.

    Invariant: `num_computed_tokens <= num_tokens`; K/V of the first `num_computed_tokens` tokens is in the cache
    unless the sequence is finished. A sequence whose `parent` is set has no block table yet: it forks from the parent
    when the parent has computed the `branch_at` tokens that both have in common.

    `num_pending` is 1 while a sampled token is not on the host yet. The token counts as the one after `token_ids`.
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
        # The digest chain of the leading full blocks, and how many of them are registered in the prefix cache.
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
        """A sequence with a new `seq_id` and the same tokens; the scheduler forks its block table."""
        child = Sequence(self.group, self.token_ids, self.num_prompt_tokens)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_digests = self.block_digests[:]
        child.num_registered_blocks = self.num_registered_blocks
        return child

    def restart(self, parent: Sequence | None, branch_at: int) -> None:
        """Its K/V is gone: it computes its tokens again, or forks from `parent`."""
        self.num_computed_tokens = self.num_registered_blocks = 0
        self.parent, self.branch_at = parent, branch_at

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.num_computed_tokens}/{self.num_tokens} tokens, {self.status.value})"


class PromptMedia(Protocol):
    """A prompt's images, videos and audio, as a scheduler sees them.

    num_missing: tokens in the place of media that are to be encoded. encoded: None until the model's encoders have
    run, and when they must run again.
    """

    encoded: Any

    @property
    def num_missing(self) -> int: ...

    def drop_features(self) -> None:
        """The prompt is computed."""

    def keyed(self, token_ids: SequenceOf[int]) -> list[int]:
        """The tokens with other numbers in the place of placeholders, which differ for other media."""

    def undivided(self, start: int, count: int) -> int:
        """Return the largest number of tokens from `start`, at most `count`, that does not cut a run of tokens that
        attend to one another both ways."""


@dataclass(slots=True, eq=False)
class EncoderInput:
    """A request's input for the encoder of an encoder-decoder model.

    digest: equal for equal inputs that are computed with the same adapters. given: the input itself, opaque here.
    table: while the group runs, the id of the sequence that has the K/V of the states, which other groups may share.
    """

    digest: bytes
    given: object
    table: object = None


class SequenceGroup:
    """All samples or beams of one request. Starts with one sequence, the prompt; Scheduler.fork makes the others.

    Invariant: `live` are the unfinished ones of `sequences`, in the same order; `status` is FINISHED when there are
    none. Between its steps every live sequence of a forked group has the same number of uncomputed tokens to go
    before it may sample: it is scheduled, preempted and resumed whole.

    `width` is the number of live sequences that the group may have once it has forked; the scheduler
    reserves that many places in the batch. `cache_root` is the prefix cache's root digest, None keeps the request out
    of the prefix cache. `priority`: lower is more urgent. `client`: whose request it is. `adapters` is the set of
    adapters that computes it, opaque here: groups with different sets share no forward. `task`: what is still wanted of
    the model's output at positions of the prompt; None: nothing, or no more.

    `encoder`: of an encoder-decoder model, what its encoder gets. `media`: the images, videos and audio of the prompt,
    opaque here but for `PromptMedia`.

    `stops`: numbers of tokens after which the first sequence ends a step, in ascending order. `whole`: the tokens that
    it computes in one forward, where a model does not compute a prompt in pieces, before it continues by single ones.
    """

    __slots__ = (
        "__weakref__",
        "adapters",
        "arrival",
        "cache_root",
        "client",
        "encoder",
        "error",
        "has_branches",
        "live",
        "media",
        "num_cached_tokens",
        "num_preemptions",
        "order",
        "priority",
        "request_id",
        "sequences",
        "status",
        "stops",
        "task",
        "whole",
        "width",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        *,
        width: int = 1,
        priority: float = 0,
        arrival: float = 0.0,
        client: str | None = None,
        cache_root: bytes | None = None,
        adapters: object = None,
        encoder: EncoderInput | None = None,
        media: PromptMedia | None = None,
    ) -> None:
        # The first new token is chosen from the logits of the prompt's last one.
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
        self.client = client
        self.cache_root = cache_root
        self.adapters = adapters
        self.encoder = encoder
        self.task: Task | None = None
        self.status = SeqStatus.WAITING
        self.error: str | None = None
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache on arrival
        self.has_branches = False  # some live sequence waits for its parent
        self.order: tuple[Any, int] = ((priority, arrival), 0)  # see `Queues`
        self.media = media
        self.stops: tuple[int, ...]
        self.whole: int
        self._begin()

    def _begin(self) -> None:
        """No step has both tokens of a prompt with media and later ones, which may look like placeholders."""
        self.stops, self.whole = () if self.media is None else (self.num_prompt_tokens,), self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequences[0].num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SeqStatus.FINISHED

    def wanted(self, first: int, end: int) -> range | Exception:
        """Return the positions from `first` on, below `end`, whose rows the task wants; what is wrong with the task, if
        it does not say so."""
        assert self.task is not None
        try:
            own = self.task.wanted(first, end)
            if own and (own.step != 1 or own.start < first or own.stop > end):
                raise ValueError(
                    f"wanted({first}, {end}) of {type(self.task).__name__} returned {own}, not some of these"
                )
        except Exception as error:  # of the caller's task
            return error
        return own

    def plan(self, budget: int) -> Plan:
        """Plan how many tokens of each live sequence to compute next: all missing tokens, up to the budget.

        Several sequences sample together or not at all: the last token of each is held back until all of them fit.
        A sequence that others will fork from stops at the branch until they have forked.
        """
        live = self.live
        if self.stops:
            budget = self._until_stop(budget)
        if len(live) == 1:
            num_tokens = min(live[0].num_uncomputed_tokens, budget)
            return [(live[0], num_tokens)] if num_tokens else []
        # Most steps: all that is missing fits.
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

    def _until_stop(self, budget: int) -> int:
        """The budget without what lies after the next stop. Drops the stops that have been reached."""
        done = self.live[0].num_computed_tokens
        self.stops = tuple(stop for stop in self.stops if stop > done)
        return self.undivided(done, min(budget, self.stops[0] - done) if self.stops else budget)

    @property
    def has_runs(self) -> bool:
        """Some of its tokens may have to be computed together, and so wait for a step with room for all of them."""
        return self.media is not None

    def undivided(self, start: int, count: int) -> int:
        """Return the tokens from `start` on, at most `count`, that a step may compute. See `PromptMedia`."""
        # Without media no token attends to later ones.
        return count if self.media is None else self.media.undivided(start, count)

    def restart(self) -> None:
        """The group has lost its blocks: compute all tokens again, a common prefix only once.

        Every sequence but the first gets as parent the earlier one with which it shares the longest prefix. Blocks are
        then shared as before, so the group needs no more of them than it had.
        """
        live = self.live
        self._begin()
        for index, seq in enumerate(live):
            seq.restart(None, 0)
            for other in live[:index]:
                # At least the last token of both is left to compute, because they sample from its logits.
                limit = min(seq.num_tokens, other.num_tokens) - 1
                common = _common_prefix(seq.token_ids, other.token_ids, limit)
                if seq.parent is None or common > seq.branch_at:
                    seq.restart(other, common)
        self.has_branches = len(live) > 1

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request_id!r}, {self.status.value}, {self.sequences!r})"


Plan = list[tuple[Sequence, int]]
"""Sequences, and how many of its next tokens each computes."""

_Item = TypeVar("_Item")


def by_adapters(items: Iterable[_Item], group_of: Callable[[_Item], SequenceGroup]) -> dict[Any, list[_Item]]:
    """The items of groups with the same adapters together, in the order in which these are switched on."""
    found: dict[Any, list[_Item]] = {}
    for item in items:
        found.setdefault(group_of(item).adapters, []).append(item)
    return found


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
