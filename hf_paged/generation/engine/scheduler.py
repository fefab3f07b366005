"""Decides which requests run in the next step: admission, preemption and order.

It sees counts and block ids, never a tensor, a model or a sampling parameter. The device's work is returned as data
(SchedulerOutput). Standard library only.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.checkpoints import CheckpointRules, Checkpoints
from hf_paged.cache.prefix_cache import PrefixCache
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.encoders import EncoderTables, EncoderWrite
from hf_paged.generation.engine.prefixes import Prefixes
from hf_paged.generation.engine.tables import Drafts, Preemption, SchedulerOutput, Tables
from hf_paged.generation.requests.sequence import FinishReason, Plan, SeqStatus, Sequence, SequenceGroup

_by_order = attrgetter("order")


class Scheduler:
    """Queues of sequence groups over a block manager.

    Invariants: every unfinished group is in exactly one of *waiting* (holds no block), *running* (on the device) and
    *swapped* (in host memory), each ordered by (priority, arrival): lower numbers first. Victims are taken from the
    end of *running*, so a group never loses its blocks to a later one, and the first one always makes progress: no
    livelock. Between two steps the table of a running sequence covers exactly its computed tokens.

    A step: `output = schedule()`, the forward, `update(output)`, then the next tokens: `fork` / `reorder` / `finish` or
    an append to `token_ids`, as the caller decides. Before `update`, no scheduled token is pending any more. `enqueue`
    belongs between steps.

    `host_manager`, if given, is the swap space. `states`: of a model that keeps states besides K/V, or instead of it.
    `state_blocks`: the memory of the state of one sequence, in blocks, if it is in the same memory as the blocks. It is
    then withheld from the allocator for each sequence that a running group may have, and for each checkpoint.
    `chunk`: tokens of a prompt in a step, at most, so that several prompts share a step (None: what the budget allows).
    `has_encoder`: groups may have an encoder, whose states have tables too (`encoders`). Such a group starts when
    `unencoded` has named it, its encoder has run, and `encoded` has been told how many states there are.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        host_manager: BlockManager | None = None,
        states: CheckpointRules | None = None,
        chunk: int | None = None,
        *,
        state_blocks: float = 0.0,
        has_encoder: bool = False,
    ) -> None:
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting: list[SequenceGroup] = []
        self._running: list[SequenceGroup] = []
        self._swapped: list[SequenceGroup] = []
        self._queues = {
            SeqStatus.WAITING: self._waiting,
            SeqStatus.RUNNING: self._running,
            SeqStatus.SWAPPED: self._swapped,
        }
        self._arrivals = itertools.count()
        self.num_preemptions_recompute = 0
        self.num_preemptions_swap = 0
        self.manager = manager
        self.prefix_cache: PrefixCache | None = None
        self._has_encoder = has_encoder
        self.encoders: EncoderTables | None = None
        self._grown_to = 0
        self.may_grow = False  # steps may have more tokens, where some of a prompt must be computed together
        self.has_states = False  # sequences have recurrent states, which forget nothing: see `drop_drafts`
        self._num_held = 0  # states that the last step has held beside those of its sequences
        self._has_media = False  # there has been a group with media
        self._waits_for_room = False  # a running group, for a step with as many tokens as it must compute together
        self.use_tables(config, manager, host_manager, states, chunk, state_blocks=state_blocks)

    def use_tables(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        host_manager: BlockManager | None,
        states: CheckpointRules | None,
        chunk: int | None,
        *,
        state_blocks: float = 0.0,
    ) -> None:
        """Go on over other managers. No group holds blocks: see `recompute_all`."""
        if manager is not self.manager:
            manager.num_copies += self.manager.num_copies
        former, self.prefix_cache = self.prefix_cache, None
        if config.prefix_caching is not False:
            self.prefix_cache = PrefixCache(manager, None if states is None else Checkpoints(states))
            if former is not None:
                self.prefix_cache.count_on(former)
        self.config = config
        self.manager = manager
        self.host_manager = host_manager
        self._prefixes = Prefixes(self.prefix_cache, manager)
        self._checkpoints = None if self.prefix_cache is None else self.prefix_cache.checkpoints
        self._state_blocks = state_blocks
        self._tables = Tables(manager, host_manager, state_blocks)
        if self._has_encoder:
            self.encoders = EncoderTables(manager, 0 if self.encoders is None else self.encoders.num_hits)
        self._token_budget = max(config.token_budget, self._grown_to)
        self._chunk = chunk or self._token_budget
        self._output = SchedulerOutput()  # of the next step, as far as it is known
        self._taken = self._output  # of the last step

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def groups(self) -> list[SequenceGroup]:
        """All unfinished groups in the order in which they were added."""
        return list(self._groups.values())

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def may_admit(self) -> bool:
        """Whether the next step might start a group and look for its prefix: places may become free during the step,
        and a swapped group may be started over."""
        return bool(self._waiting or self._swapped)

    @property
    def num_state_blocks(self) -> tuple[int, int]:
        """The blocks whose memory is kept for the states of running groups, and for checkpoints."""
        if not (size := self._state_blocks):
            return 0, 0
        running = math.ceil(size * (sum([group.width for group in self._running]) + self._num_held))
        return running, 0 if self._checkpoints is None else math.ceil(size * len(self._checkpoints))

    @property
    def running(self) -> list[SequenceGroup]:
        """The running groups, in order."""
        return list(self._running)

    @property
    def is_idle(self) -> bool:
        """No group has computed anything yet."""
        return not self._running and not self._swapped

    # -- requests come and go -----------------------------------------------------------------------------------

    def check(self, group: SequenceGroup) -> None:
        """Raises ValueError if the group can never run. Reads no state that changes, so any thread may call it."""
        config = self.config
        for name, limit in (("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", self._token_budget)):
            if group.width > limit:
                raise ValueError(f"{group.width} sequences in one request, but {name}={limit}; raise it")
        self._tables.check_fits_alone(group)

    def enqueue(self, group: SequenceGroup) -> None:
        """Queue a group that has passed `check`. Its id is not in use."""
        group.order = (group.priority, group.arrival, next(self._arrivals))
        self._has_media |= group.media is not None
        self._groups[group.request_id] = group
        insort(self._waiting, group, key=_by_order)

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        """Finish all live sequences of the group."""
        if group.status is not SeqStatus.FINISHED:
            self._release(group, group.live, reason)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Finish one sequence; with its last one the group is finished."""
        group = seq.group
        if seq.finish_reason is not None:
            return
        self._release(group, [seq], reason)
        if any(other.parent is seq for other in group.live):
            # Sequences that were to fork from this one need another parent.
            self._start_over(group)

    def _release(self, group: SequenceGroup, seqs: list[Sequence], reason: FinishReason) -> None:
        self._free(group, seqs)
        for seq in seqs:
            if self._checkpoints is not None:
                self._checkpoints.end(seq.seq_id)
            seq.finish_reason = reason
            seq.parent = None
        group.live = [seq for seq in group.live if seq.finish_reason is None]
        # The remaining sequences may still fork into as many as the request asks for.
        group.width = max(len(group.live), group.width - len(seqs))
        self._output.finished_seq_ids.extend(seq.seq_id for seq in seqs)
        if not group.live:
            self._set_status(group, SeqStatus.FINISHED)
            group.has_branches = False
            del self._groups[group.request_id]

    def _free(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        if group.status is SeqStatus.RUNNING:
            self._tables.free(seqs)
        elif group.status is SeqStatus.SWAPPED:
            self._tables.free_swapped(seqs, self._output.swap_out)

    def _start_over(self, group: SequenceGroup) -> None:
        """Free the group's blocks and put it back into the waiting queue."""
        self._free(group, group.live)
        group.restart()
        if group.media is not None:
            group.media.encoded = None  # the weights may have changed since; features of the same ones are kept
        self._set_status(group, SeqStatus.WAITING)

    def _set_status(self, group: SequenceGroup, status: SeqStatus) -> None:
        """Move the group from one queue to another."""
        if self.encoders is not None:
            if status is SeqStatus.RUNNING:
                self.encoders.take(group)
            else:
                self.encoders.give_up(group)
        old = self._queues[group.status]
        index = bisect_left(old, group.order, key=_by_order)
        if index < len(old) and old[index] is group:  # not, if an interrupt struck the last change
            del old[index]
        group.status = status
        if status is not SeqStatus.FINISHED:
            insort(self._queues[status], group, key=_by_order)
        self._withhold()

    def _fail(self, group: SequenceGroup) -> None:
        num_tokens, count = max(seq.num_tokens for seq in group.live), len(group.live)
        group.error = (
            f"the cache is too small for request {group.request_id!r} alone, with {count} sequence(s) of up to "
            f"{num_tokens} tokens ({self._tables.usage()}); give it more memory"
        )
        self.finish_group(group, FinishReason.ERROR)
        self._output.failed.append(group)

    # -- a step -------------------------------------------------------------------------------------------------

    def schedule(self, drafts: Drafts | None = None) -> SchedulerOutput:
        """Choose what the next step computes and make room for it.

        Running groups come first, in order, then groups that were swapped out, then new ones, unless a group was
        preempted. At most `max_num_batched_tokens` tokens and `max_num_seqs` sequences. drafts: of running sequences
        with one token to compute; they are taken as far as the budget goes, if no block is missing.
        """
        return self.schedule_without_preempting(drafts) or self._schedule_one_by_one()

    def schedule_without_preempting(self, drafts: Drafts | None = None) -> SchedulerOutput | None:
        """`schedule`, if there are blocks for all running groups; otherwise change nothing and return None, because a
        group might have to be preempted."""
        self._num_held = 0
        self._withhold()
        plan, budget = self._plan_running(self._token_budget)
        if drafts and (num_drafted := self._append_with_drafts(plan, budget - self._num_next_tokens(), drafts)):
            self._output.scheduled.extend(plan)
            return self._schedule_others(0 if self._waits_for_room else budget - num_drafted)
        appends = [(seq.seq_id, count) for seq, count in plan]
        copies = self.manager.append_if_room(appends)
        while copies is None and self._make_room():
            copies = self.manager.append_if_room(appends)
        if copies is None:
            return None
        self._output.block_copies.extend(copies)
        self._output.scheduled.extend(plan)
        return self._schedule_others(0 if self._waits_for_room else budget)

    def _num_next_tokens(self) -> int:
        """Tokens of the waiting prompts that may start in this step; 0 if there is no room for the first one. Drafts
        leave them what they would have without drafts."""
        groups = [] if self._swapped or self._waits_for_room else self._next_in_line()
        if not groups or not self._is_ready(groups[0]):
            return 0
        besides = self._blocks_for_encoder(groups[0])
        if self._tables.num_missing(groups[0], self._prefixes.match(groups[0]), self._watermark, besides) > 0:
            return 0
        return sum(min(self._chunk, group.live[0].num_uncomputed_tokens) for group in groups)

    def _append_with_drafts(self, plan: Plan, budget: int, drafts: Drafts) -> int:
        """Append slots for the plan, and for drafts as far as the budget goes. Returns the number of drafted tokens; 0
        if blocks are missing, and nothing has changed."""
        chosen: Drafts = {}
        left = budget
        for seq, _ in plan:
            if left > 0 and seq in drafts:
                chosen[seq] = drafts[seq][:left]
                left -= len(chosen[seq])
        appends = [(seq.seq_id, count + len(chosen.get(seq, ()))) for seq, count in plan]
        copies = self.manager.append_if_room(appends) if chosen and self._hold(len(chosen)) else None
        if copies is None:
            self._hold(0)
            return 0
        self._output.block_copies.extend(copies)
        self._output.drafts.update(chosen)
        return budget - left

    def _hold(self, num_states: int) -> bool:
        """Take memory for as many states more, which a step holds for sequences with drafts. False: there is not so
        much."""
        if not self._state_blocks:
            return True
        former, self._num_held = self._num_held, num_states
        allocator = self.manager.allocator
        if sum(self.num_state_blocks) > allocator.num_free + allocator.num_cached:
            self._num_held = former
            return False
        self._withhold()
        return True

    def _schedule_one_by_one(self) -> SchedulerOutput:
        """Schedule running groups in order; when blocks run out, preempt the last one to arrive."""
        output, running = self._output, self._running
        num_preempted, budget, index = len(output.preempted), self._token_budget, 0
        while index < len(running) and budget > 0:
            used = self._schedule_group(running[index], budget)
            if used is not None:
                budget -= used
                index += 1
            elif self._make_room():
                continue  # there may be room now
            elif len(running) > 1:
                self._preempt(running[-1], self._cheaper_way(running[-1]))
            else:
                self._fail(running[0])
        return self._schedule_others(budget if len(output.preempted) == num_preempted else 0)

    def _schedule_others(self, budget: int) -> SchedulerOutput:
        """Resume swapped groups and admit new ones within what is left of the budget."""
        if budget > 0:
            budget = self._resume_swapped(budget)
            if not self._swapped:
                self._admit(budget)
        output = self._taken = self._output
        self._output = SchedulerOutput()
        if self.encoders is not None:
            output.encoders.extend(self.encoders.writes())
        if self._checkpoints is not None:
            num_seqs = sum(group.width for group in self._running)
            self._checkpoints.fit(num_seqs, self.manager.allocator.num_available)
            output = replace(output, states=self._checkpoints.take_moves())
        if self._state_blocks:
            self._withhold()
            output.untouched.extend(self.manager.allocator.untouch())
            if self.host_manager is not None:
                output.untouched_on_host.extend(self.host_manager.allocator.untouch())
        return output

    def _plan_running(self, budget: int) -> tuple[Plan, int]:
        """What all running groups compute next if there are enough blocks, and the remaining budget."""
        plan: Plan = []
        chunk = self._chunk
        self._waits_for_room = False
        for group in self._running:
            if budget <= 0:
                break
            # Most groups: `group.plan` without the call.
            if len(group.live) == 1 and not group.has_branches and not group.stops:
                seq = group.live[0]
                missing = len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens  # `seq.num_uncomputed_tokens`
                if missing:
                    missing = missing if missing < chunk else chunk
                    plan.append((seq, missing if missing < budget else budget))
                    budget -= missing
                continue
            if group.has_branches:
                self._tables.fork_branches(group, self._output.forks)
            own = group.plan(min(budget, max(chunk, group.width)))
            self._waits_for_room |= not own and group.media is not None
            budget -= sum([num_tokens for _, num_tokens in own])
            plan += own
        return plan, budget

    def _resume_swapped(self, budget: int) -> int:
        while self._swapped and budget > 0:
            group = self._swapped[0]
            if not self._is_ready(group):
                break
            missing = self._tables.num_missing_swapped(group, self._watermark, self._blocks_for_encoder(group))
            if missing <= 0:
                self._tables.swap_in(group, self._output.swap_in)
                self._output.resumed.append(group)
                budget -= self._start(group, budget)
            elif self._make_room(group, missing):
                continue  # there may be room now
            elif self._running:
                break
            else:
                # Recomputed, it needs fewer blocks: swapped in, it cannot share the blocks of pinned prefixes.
                self._start_over(group)
        return budget

    def _admit(self, budget: int) -> None:
        waiting = self._waiting
        if not waiting:
            return
        places = self.config.max_num_seqs - sum(group.width for group in self._running)
        # Prompts that stop for a checkpoint have no blocks for their ends yet.
        owed = sum(self._tables.owed(group) for group in self._running) if self._checkpoints is not None else 0
        while waiting and budget > 0 and waiting[0].width <= places and self._is_ready(waiting[0]):
            group = waiting[0]
            prefix = self._prefixes.match(group)
            besides = self._blocks_for_encoder(group) + owed
            missing = self._tables.num_missing(group, prefix, self._watermark, besides)
            if missing <= 0:
                places -= group.width
                self._tables.start(group.live[0], prefix)
                self._prefixes.adopt(group, prefix)
                if group.media is not None and group.live[0].num_computed_tokens >= group.num_prompt_tokens:
                    group.media.drop_features()
                self._output.admitted.append(group)
                budget -= self._start(group, budget)
                owed += self._tables.owed(group) if self._checkpoints is not None else 0
            elif self._make_room(group, missing):
                continue  # there may be room now
            elif self._running:
                break
            else:
                self._fail(group)

    # -- encoders -----------------------------------------------------------------------------------------------

    @property
    def token_budget(self) -> int:
        """Tokens that a step computes at most, and placeholders for which features are computed before it."""
        return self._token_budget

    def unencoded_media(self) -> list[SequenceGroup]:
        """The groups that may start in the next step if the encoders of their images, videos and sound run before it:
        the first one, and others as far as the tokens of a step go."""
        found: list[SequenceGroup] = []
        if not self._waiting or not self._has_media:
            return found
        budget = self._token_budget
        for group in self._next_in_line():
            if group.media is not None and group.media.encoded is None:
                budget -= group.media.num_missing
                if found and budget < 0:
                    break
                found.append(group)
        return found

    def make_room_for(self, num_tokens: int) -> int:
        """Let a step compute so many tokens of a prompt, if it may. Returns how many it computes, at most."""
        if self.may_grow and num_tokens > min(self._chunk, self._token_budget):
            self._grown_to = max(self._grown_to, num_tokens)
            self._token_budget = max(self._token_budget, num_tokens)
            self._chunk = max(self._chunk, num_tokens)
        return min(self._chunk, self._token_budget)

    def _next_in_line(self) -> list[SequenceGroup]:
        """Groups for which there are places."""
        places = self.config.max_num_seqs - sum(group.width for group in self._running)
        next_in_line = []
        for group in (*self._swapped, *self._waiting):
            places -= group.width
            if places < 0:
                break
            next_in_line.append(group)
        return next_in_line

    def unencoded(self) -> list[SequenceGroup]:
        """The groups that may start in the next step if their encoders run before it."""
        encoders = self.encoders
        if encoders is None or not self.may_admit:
            return []
        encoders.keep_encoded((*self._swapped, *self._waiting))
        return encoders.unencoded(self._next_in_line())

    def encoded(self, group: SequenceGroup, num_states: int) -> None:
        """The encoder has computed the input of this group, and of all with the same one."""
        assert self.encoders is not None and group.encoder is not None
        self.encoders.encoded[group.encoder.digest] = num_states

    def wrote(self, writes: Iterable[EncoderWrite]) -> set[bytes]:
        """These tables have their contents. Returns the digests of the inputs whose states are still to be written."""
        assert self.encoders is not None
        self.encoders.written(writes)
        return set(self.encoders.encoded)

    def _is_ready(self, group: SequenceGroup) -> bool:
        if group.media is not None and group.media.encoded is None:
            return False
        return self.encoders is None or self.encoders.is_ready(group)

    def _blocks_for_encoder(self, group: SequenceGroup) -> int:
        return 0 if self.encoders is None else self.encoders.blocks_needed(group)

    # -- memory that may be given up ----------------------------------------------------------------------------

    def _make_room(self, but: SequenceGroup | None = None, missing: int = 0) -> bool:
        """Give up the states of an encoder that no running group reads, other than this one's, or a checkpoint in the
        same memory as the blocks. False: there are none, or all of them are less than is missing, and running groups
        may still end."""
        if self._running and missing > self._num_spare_blocks(but):
            return False
        if self.encoders is not None:
            return self.encoders.evict(but)
        if not self._state_blocks or self._checkpoints is None or not self._checkpoints.give_up():
            return False
        self._withhold()
        return True

    def _num_spare_blocks(self, but: SequenceGroup | None) -> int:
        """Blocks that `_make_room` can give up."""
        if self.encoders is not None:
            return self.encoders.num_idle_blocks(but)
        return 0 if self._checkpoints is None else math.ceil(self._state_blocks * self._checkpoints.num_spare)

    def _withhold(self) -> None:
        """Keep the memory of states from being used for blocks."""
        if not self._state_blocks:
            return
        allocator = self.manager.allocator
        if self.host_manager is not None:
            swapped = sum(len(group.live) for group in self._swapped)
            self.host_manager.allocator.withhold(math.ceil(self._state_blocks * swapped))
        room = allocator.num_free + allocator.num_cached
        checkpoints = self._checkpoints
        while sum(self.num_state_blocks) > room and checkpoints is not None and checkpoints.give_up():
            pass  # blocks were pinned since there was room
        allocator.withhold(sum(self.num_state_blocks))

    @property
    def _watermark(self) -> float:
        return self.config.watermark if self._running else 0.0

    def _start(self, group: SequenceGroup, budget: int) -> int:
        self._set_status(group, SeqStatus.RUNNING)
        return self._schedule_group(group, budget) or 0

    def _schedule_group(self, group: SequenceGroup, budget: int) -> int | None:
        """Schedule what the budget and the blocks allow; returns the number of tokens, None if blocks are missing."""
        if group.has_branches:
            self._tables.fork_branches(group, self._output.forks)
        plan = group.plan(min(budget, max(self._chunk, group.width)))
        if not plan:
            return 0
        plan = self._tables.append_part(plan, self._output.block_copies)
        if not plan:
            return None
        self._output.scheduled.extend(plan)
        return sum([num_tokens for _, num_tokens in plan])

    # -- preemption ---------------------------------------------------------------------------------------------

    def _cheaper_way(self, group: SequenceGroup) -> Preemption:
        """In mode "auto": recompute what one step can recompute, swap what takes several.

        A prefill that fits in one step rides along with the others at about the price of its arithmetic, while a
        swap moves every block twice. Several steps are lost for a context longer than `max_num_batched_tokens`,
        and for every branch of a group of several sequences (the paper too recomputes single sequences and swaps
        groups).
        """
        if self.config.preemption != "auto":
            return self.config.preemption
        one_step = len(group.live) == 1 and group.live[0].num_computed_tokens <= self._token_budget
        return "recompute" if one_step else "swap"

    def _preempt(self, group: SequenceGroup, mode: Preemption) -> None:
        """Take all blocks of a running group that is not in this step. Recompute if the swap space is full."""
        if mode == "swap" and self._tables.swap_out(group, self._output.swap_out):
            group.num_preemptions += 1
            self.num_preemptions_swap += 1
            self._output.preempted.append((group, "swap"))
            self._set_status(group, SeqStatus.SWAPPED)
        else:
            self._recompute(group)

    def _recompute(self, group: SequenceGroup) -> None:
        group.num_preemptions += 1
        self.num_preemptions_recompute += 1
        self._output.preempted.append((group, "recompute"))
        self._start_over(group)

    # -- other weights ------------------------------------------------------------------------------------------

    def forget_prefixes(self) -> None:
        """The weights have changed: drop all cached prefixes; groups with K/V of the old weights cache no further
        blocks, and those without have their media encoded again."""
        self._prefixes.forget((*self._running, *self._swapped))
        for group in self._waiting:
            if group.media is not None:
                group.media.encoded = None
        if self.encoders is not None:
            self.encoders.forget()

    def begin_anew(self, *, shares_prefixes: bool) -> None:
        """The model is computed in another way: begin prompts again that are computed in part, and drop all cached
        prefixes. shares_prefixes: whether prefixes are cached from now on. Between two steps."""
        for group in (*self._running, *self._swapped):
            if any(seq.num_computed_tokens < seq.num_prompt_tokens for seq in group.live):
                self._start_over(group)
        self.forget_prefixes()
        self._prefixes.is_on = shares_prefixes

    def recompute_all(self) -> None:
        """Free the K/V of all running and swapped groups, which then wait as after a preemption. Between two steps."""
        self.recompute((*self._running, *self._swapped))

    def recompute(self, groups: Iterable[SequenceGroup]) -> None:
        """The same for these groups."""
        for group in groups:
            self._recompute(group)

    # -- after the forward --------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput) -> None:
        """Record that the step is computed. Sequences that have ended meanwhile are skipped."""
        if self._checkpoints is not None and output.states.lost:
            self._checkpoints.lose_copies(output.states.lost)
        manager = self.manager
        block_size, shares, drops = manager.block_size, self.prefix_cache is not None, manager.drops_blocks
        drafts, running, has_media = output.drafts, SeqStatus.RUNNING, self._has_media
        for seq, num_tokens in output.scheduled:
            if seq.finish_reason is not None or seq.group.status is not running:
                continue
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + num_tokens
            if has_media and num_computed == seq.num_prompt_tokens and seq.group.media is not None:
                seq.group.media.drop_features()
            has_draft = drafts and seq in drafts
            if has_draft and self.has_states:
                continue  # it may go back to before this step
            if shares and num_computed // block_size > seq.num_registered_blocks:
                self._prefixes.register(seq)
            if drops and not has_draft:  # whose tables are too long yet
                manager.drop_unseen(seq.seq_id)
        self._withhold()  # for new checkpoints

    def accept_draft(self, seq: Sequence) -> None:
        """After `update`: the next drafted token of `seq` has become a token of it, and its K/V is computed."""
        seq.num_computed_tokens += 1
        shares = self.prefix_cache is not None and not self.has_states
        if shares and seq.num_computed_tokens % self.manager.block_size == 0:
            self._prefixes.register(seq)

    def drop_drafts(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the slots of drafted tokens that have not been accepted. num_tokens: those that the sequence has
        K/V and states of. A state has all tokens of a step, or none: a sequence with states, whose draft was wrong,
        computes its part of the step again, without the wrong tokens."""
        self._num_held = max(self._num_held - 1, 0)
        if seq.finish_reason is None and seq.group.status is SeqStatus.RUNNING:
            seq.num_computed_tokens = num_tokens
            self._tables.take_back(seq)
            shares = self.prefix_cache is not None and self.has_states
            if shares and num_tokens // self.manager.block_size > seq.num_registered_blocks:
                self._prefixes.register(seq)
            if self.manager.drops_blocks:
                self.manager.drop_unseen(seq.seq_id)

    def discard_plan(self) -> None:
        """After an interrupted `schedule`: forget what it has planned, and put the queues in order. The groups that
        hold blocks have been finished; a waiting one may have been about to start."""
        for status, queue in self._queues.items():
            queue[:] = sorted((group for group in self._groups.values() if group.status is status), key=_by_order)
        finished = (*self._taken.finished_seq_ids, *self._output.finished_seq_ids)
        self._output = SchedulerOutput()
        self._output.finished_seq_ids.extend(finished)
        for group in self._waiting:
            group.restart()
        kept: set[object] = set() if self.prefix_cache is None else set(self.prefix_cache.pins)
        if self.encoders is not None:
            self.encoders.recover()
            kept |= self.encoders.seq_ids
        for seq_id in set(self.manager.seq_ids) - kept:
            self.manager.free(seq_id)
        if self._checkpoints is not None:
            self._checkpoints.recover()

    def rollback(self, output: SchedulerOutput) -> None:
        """Undo the appends of a step whose forward failed after its copies were done, or that did nothing else. The
        next step frees the states of ended sequences, if this one has not."""
        self._output.finished_seq_ids.extend(output.finished_seq_ids)
        for seq, _ in output.scheduled:
            if seq.finish_reason is None and seq.group.status is SeqStatus.RUNNING:
                self._tables.take_back(seq)

    def fork(self, parent: Sequence, tokens: list[int]) -> list[Sequence]:
        """Continue the computed `parent` with each of `tokens`: itself with the first, copies with the others.

        Returns all of them in the order of `tokens`. The copies share the parent's blocks; no memory is taken.
        """
        group = parent.group
        if len(group.live) + len(tokens) - 1 > group.width or not tokens:
            raise ValueError(f"{len(group.live)} + {len(tokens)} - 1 sequences in a group of width {group.width}")
        assert parent.num_uncomputed_tokens == 0, f"{parent!r} is not computed"
        family = [parent, *(self._tables.copy(parent, self._output.forks) for _ in tokens[1:])]
        for seq, token in zip(family, tokens):
            seq.token_ids.append(token)
        group.sequences.extend(family[1:])
        group.live = [seq for seq in group.sequences if seq.finish_reason is None]
        return family

    def reorder(self, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]:
        """Beam search: live sequence i becomes a continuation of live sequence `parents[i]` with `tokens[i]`.

        Survivors are forked, losers are freed; K/V never moves. There may be fewer or more beams than before, up to
        the width of the group. Returns the new `group.live`.
        """
        old = group.live
        if len(parents) != len(tokens) or not 0 < len(parents) <= max(group.width, len(old)):
            raise ValueError(f"{len(parents)} parents and {len(tokens)} tokens for a group of width {group.width}")
        assert group.status is SeqStatus.RUNNING and all(seq.num_uncomputed_tokens == 0 for seq in old)
        beams: list[Sequence] = []
        seen: set[int] = set()
        for index in parents:
            beams.append(self._tables.copy(old[index], self._output.forks) if index in seen else old[index])
            seen.add(index)
        losers = [seq for index, seq in enumerate(old) if index not in seen]
        self._tables.free(losers)
        self._output.finished_seq_ids.extend(seq.seq_id for seq in losers)
        for seq, token in zip(beams, tokens):
            seq.token_ids.append(token)
        group.sequences = [seq for seq in group.sequences if seq.finish_reason is not None] + beams
        group.live = beams[:]
        for seq in losers:
            if self._checkpoints is not None:
                self._checkpoints.lose(seq.seq_id)
            seq.finish_reason = FinishReason.STOP
        return group.live

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the class does not hold (between two steps)."""
        queued = [group for queue in self._queues.values() for group in queue]
        assert len(queued) == len(self._groups) and set(queued) == set(self._groups.values()), "a group is lost"
        for status, queue in self._queues.items():
            assert queue == sorted(queue, key=_by_order), f"{status} is out of order"
            for group in queue:
                assert group.status is status and group.live, f"{group!r} is in the queue {status}"
        assert sum(group.width for group in self._running) <= self.config.max_num_seqs
        pins: set[object] = set() if self.prefix_cache is None else set(self.prefix_cache.pins)
        if self.encoders is not None:
            self.encoders.check_integrity(self._running)
            pins |= self.encoders.seq_ids
        self._tables.check_integrity(self._running, self._swapped, pins)
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
