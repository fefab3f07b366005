"""Decides which requests run in the next step: admission, preemption and order.

It sees counts and block ids, never a tensor, a model or a sampling parameter. The device's work is returned as data
(SchedulerOutput). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.prefix_cache import CachedPrefix, PrefixCache
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.prefixes import Prefixes
from hf_paged.generation.engine.queues import Queues
from hf_paged.generation.engine.tables import Drafts, Preemption, SchedulerOutput, Tables
from hf_paged.generation.requests.sequence import FinishReason, Plan, SeqStatus, Sequence, SequenceGroup
from hf_paged.sockets import SideMemory


class Scheduler(Queues):
    """Moves sequence groups between the queues, over a block manager.

    Invariants: a *waiting* group holds no block, a *running* one is on the device, a *swapped* one in host memory. With
    any policy, running groups keep their order, and no group is preempted for one behind it. So the first one always
    makes progress (no livelock). Between two steps, a running sequence's table covers exactly its computed tokens.

    A caller repeats: call `schedule`, run the forward, call `update` with the output of `schedule`. Then it enters the
    next tokens: by `fork`, `reorder`, `finish` or an append to `token_ids`. All scheduled tokens must be on the host
    before `update`. New groups are queued (`enqueue`) between steps.

    `host_manager`, if given, is the swap space. `chunk`: most tokens of a prompt in one step, so that several prompts
    share a step (None: what the budget allows). `side_memories`: what groups need besides block tables.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        host_manager: BlockManager | None = None,
        chunk: int | None = None,
        *,
        side_memories: Iterable[SideMemory] = (),
    ) -> None:
        super().__init__(config)
        self.num_preemptions_recompute = 0
        self.num_preemptions_swap = 0
        self.manager = manager
        self.prefix_cache: PrefixCache | None = None
        self._grown_to = 0
        self.may_grow = False  # the token budget may grow for a prompt that needs more tokens in one step
        self._waits_for_room = False  # a running group needs more tokens in one step than the budget has left
        self.use_tables(config, manager, host_manager, chunk, side_memories=side_memories)

    def use_tables(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        host_manager: BlockManager | None,
        chunk: int | None,
        *,
        side_memories: Iterable[SideMemory],
    ) -> None:
        """Continue with other managers. No group may hold blocks, so call `recompute_all` before."""
        if manager is not self.manager:
            manager.num_copies += self.manager.num_copies
        # Counters continue; the blocks of the former cache belong to the former manager.
        former, self.prefix_cache = self.prefix_cache, None
        if config.prefix_caching is not False:
            self.prefix_cache = PrefixCache(manager, evict_by=config.prefix_eviction)
            if former is not None:
                self.prefix_cache.count_on(former)
        self.config = config
        self.manager = manager
        self.host_manager = host_manager
        self.side_memories = tuple(side_memories)
        for side in self.side_memories:
            side.bind(self)
        self._stops_prompts = any(side.stops_prompts for side in self.side_memories)
        self._prefixes = Prefixes(self.prefix_cache, manager, self.side_memories)
        self._tables = Tables(manager, host_manager, self._blocks_beside)
        self._token_budget = max(config.token_budget, self._grown_to)
        self._chunk = chunk or self._token_budget
        self._output = SchedulerOutput()  # of the next step, so far
        self._taken = self._output  # of the last step

    @property
    def token_budget(self) -> int:
        """The most tokens of a step, including those whose inputs a side memory computes before the step."""
        return self._token_budget

    def make_room_for(self, num_tokens: int) -> int:
        """Raise the budget to `num_tokens`, if `may_grow`. Returns the most tokens of a prompt in a step now."""
        if self.may_grow and num_tokens > min(self._chunk, self._token_budget):
            self._grown_to = max(self._grown_to, num_tokens)
            self._token_budget = max(self._token_budget, num_tokens)
            self._chunk = max(self._chunk, num_tokens)
        return min(self._chunk, self._token_budget)

    # -- requests come and go -----------------------------------------------------------------------------------

    def check(self, group: SequenceGroup) -> None:
        """Raises ValueError if the group can never run. Any thread may call it, as it reads nothing that changes."""
        config = self.config
        for name, limit in (("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", self._token_budget)):
            if group.width > limit:
                raise ValueError(f"{group.width} sequences in one request, but {name}={limit}; raise it")
        self._tables.check_fits_alone(group)

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
        self._tables.free(group, seqs, self._output.swap_out)
        for seq in seqs:
            for side in self.side_memories:
                side.ended(seq, is_lost=False)
            seq.finish_reason = reason
            seq.parent = None
        group.live = [seq for seq in group.live if seq.finish_reason is None]
        # The remaining sequences may still fork into as many as the request asks for.
        group.width = max(len(group.live), group.width - len(seqs))
        self._output.finished_seq_ids.extend(seq.seq_id for seq in seqs)
        if not group.live:
            self._set_status(group, SeqStatus.FINISHED)

    def _start_over(self, group: SequenceGroup) -> None:
        """Free the group's blocks and put it back into the waiting queue."""
        self._tables.free(group, group.live, self._output.swap_out)
        group.restart()
        self._set_status(group, SeqStatus.WAITING)

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

        Running groups come first, in order, then swapped ones, then new ones. If a group was preempted, no other
        starts. A step has at most `max_num_batched_tokens` tokens and `max_num_seqs` sequences. drafts: for running
        sequences with one token to compute. They are taken if no block is missing, until the budget is spent.
        """
        return self.schedule_without_preempting(drafts) or self._schedule_one_by_one()

    def schedule_without_preempting(self, drafts: Drafts | None = None) -> SchedulerOutput | None:
        """Schedule if there are blocks for all running groups. Else change nothing and return None, because a group may
        have to be preempted."""
        self._hold(0)
        plan, budget = self._plan_running(self._token_budget)
        if drafts:
            # Waiting prompts that may start have their part of the budget first.
            owed = sum(min(self._chunk, group.live[0].num_uncomputed_tokens) for group in self._starting())
            if num_drafted := self._append_with_drafts(plan, budget - owed, drafts):
                self._output.scheduled.extend(plan)
                return self._schedule_others(0 if self._waits_for_room else budget - num_drafted)
        appends = [(seq.seq_id, count) for seq, count in plan]
        while (copies := self.manager.append_if_room(appends)) is None:
            if not self._make_room():
                return None
        self._output.block_copies.extend(copies)
        self._output.scheduled.extend(plan)
        return self._schedule_others(0 if self._waits_for_room else budget)

    def _starting(self) -> list[SequenceGroup]:
        """Return the waiting groups that may start in this step. The list is empty if the first one has no room."""
        groups = [] if self.swapped or self._waits_for_room else self.next_in_line()
        if not groups or not self._is_ready(groups[0]):
            return []
        return groups if self._num_missing(groups[0], self._prefixes.match(groups[0])) <= 0 else []

    def _num_missing(self, group: SequenceGroup, prefix: CachedPrefix | None) -> int:
        """Return how many blocks are missing for a waiting group to start."""
        # Running prompts that a side memory stops early have no blocks yet for their remaining tokens.
        owed = sum(self._tables.owed(group) for group in self.running) if self._stops_prompts else 0
        return self._tables.num_missing(group, prefix, self._watermark, self._blocks_needed(group) + owed)

    def _append_with_drafts(self, plan: Plan, budget: int, drafts: Drafts) -> int:
        """Append slots for the plan, and for drafts until the budget is spent. Returns the number of drafted tokens. If
        blocks are missing, changes nothing and returns 0."""
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

    def _schedule_one_by_one(self) -> SchedulerOutput:
        """Schedule running groups in order; when blocks run out, preempt one that has not been scheduled."""
        output, running, self._shares = self._output, self.running, {}
        num_preempted, budget, index = len(output.preempted), self._token_budget, 0
        while index < len(running) and budget > 0:
            used = self._schedule_group(running[index], budget)
            if used is not None:
                budget -= used
                index += 1
            elif self._make_room():
                continue  # there may be room now
            elif len(running) > 1:
                victim = self._victim(index)
                self._preempt(victim, self._cheaper_way(victim))
            else:
                self._fail(running[0])
        # A step that preempted admits nobody, because the victim would take back at once the blocks that others need.
        return self._schedule_others(budget if len(output.preempted) == num_preempted else 0)

    def _schedule_others(self, budget: int) -> SchedulerOutput:
        """Resume swapped groups and admit new ones within what is left of the budget."""
        if budget > 0:
            self.sort_waiting()
            budget = self._resume_swapped(budget)
            # While a group is swapped, none is admitted: new ones would take the blocks for which it waits.
            if not self.swapped:
                self._admit(budget)
        output = self._taken = self._output
        self._output = SchedulerOutput()
        for side in self.side_memories:
            side.fill(output)
        return output

    def _plan_running(self, budget: int) -> tuple[Plan, int]:
        """Plan what all running groups compute next if there are enough blocks; also return the remaining budget."""
        plan: Plan = []
        chunk = self._chunk
        self._waits_for_room = False
        shares = self._divide(budget, self._starting) if self._is_divided else None
        for group in self.running:
            if budget <= 0:
                break
            if shares and not (chunk := min(self._chunk, shares.get(group, budget))):
                continue
            # For most groups, these lines do what `group.plan` does, without the time of a call.
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
            self._waits_for_room |= not own and group.has_runs
            budget -= sum([num_tokens for _, num_tokens in own])
            plan += own
        return plan, budget

    def _resume_swapped(self, budget: int) -> int:
        while self.swapped and budget > 0:
            group = self.swapped[0]
            if not self._is_ready(group):
                break
            missing = self._tables.num_missing_swapped(group, self._watermark, self._blocks_needed(group))
            if missing <= 0:
                self._tables.swap_in(group, self._output.swap_in)
                self._output.resumed.append(group)
                budget -= self._start(group, budget)
            elif self._make_room(group, missing):
                continue  # there may be room now
            elif self.running:
                break
            else:
                # It needs fewer blocks if it is recomputed, because it then shares those of pinned prefixes.
                self._start_over(group)
        return budget

    def _admit(self, budget: int) -> None:
        if not (waiting := self.waiting):
            return
        places = self.config.max_num_seqs - self.num_seqs
        while waiting and budget > 0 and waiting[0].width <= places and self._may_start(waiting[0]):
            group = waiting[0]
            prefix = self._prefixes.match(group)
            missing = self._num_missing(group, prefix)
            if missing <= 0:
                places -= group.width
                self._tables.start(group.live[0], prefix)
                self._prefixes.adopt(group, prefix)
                self._output.admitted.append(group)
                budget -= self._start(group, budget)
            elif self._make_room(group, missing):
                continue  # there may be room now
            elif self.running:
                break
            else:
                self._fail(group)

    def _make_room(self, but: SequenceGroup | None = None, missing: int = 0) -> bool:
        """Evict something from a side memory that neither a running group nor `but` uses. Returns False if there is
        nothing to evict, or if all of it is less than `missing` while groups run: waiting for these is better."""
        if self.running and missing > sum([side.num_idle_blocks(but) for side in self.side_memories]):
            return False
        return any(side.evict(but) for side in self.side_memories)

    @property
    def _watermark(self) -> float:
        return self.config.watermark if self.running else 0.0

    def _start(self, group: SequenceGroup, budget: int) -> int:
        self._set_status(group, SeqStatus.RUNNING)
        return self._schedule_group(group, budget) or 0

    def _schedule_group(self, group: SequenceGroup, budget: int) -> int | None:
        """Schedule what the budget and the blocks allow; returns the number of tokens, None if blocks are missing."""
        if group.has_branches:
            self._tables.fork_branches(group, self._output.forks)
        plan = group.plan(min(budget, max(self._chunk, group.width), self._shares.get(group, budget)))
        if not plan:
            return 0
        plan = self._tables.append_part(plan, self._output.block_copies)
        if not plan:
            return None
        self._output.scheduled.extend(plan)
        return sum([num_tokens for _, num_tokens in plan])

    # -- preemption ---------------------------------------------------------------------------------------------

    def _cheaper_way(self, group: SequenceGroup) -> Preemption:
        """In mode "auto": recompute what one step can recompute, swap what takes several."""
        if self.config.preemption != "auto":
            return self.config.preemption
        # Recomputing a prompt that fits in one step costs about its arithmetic; a swap moves every block twice. A
        # longer prompt, or a group with several sequences, would cost several steps (the paper too swaps groups).
        one_step = len(group.live) == 1 and group.live[0].num_computed_tokens <= self._token_budget
        return "recompute" if one_step else "swap"

    def _preempt(self, group: SequenceGroup, mode: Preemption) -> None:
        """Take all blocks of a running group outside of this step. Without swap space, the group is recomputed."""
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
        """Drop cached results of former weights, so that no later group uses them. Groups that began with the former
        weights cache no further blocks."""
        self._prefixes.forget((*self.running, *self.swapped))
        for side in self.side_memories:
            side.forget()

    def begin_anew(self, *, shares_prefixes: bool) -> None:
        """Adapt to another way to compute the model, between two steps: begin partly computed prompts again, and drop
        all cached prefixes. shares_prefixes: whether prefixes are cached from now on."""
        for group in (*self.running, *self.swapped):
            if any(seq.num_computed_tokens < seq.num_prompt_tokens for seq in group.live):
                self._start_over(group)
        self.forget_prefixes()
        self._prefixes.is_on = shares_prefixes

    def recompute_all(self) -> None:
        """Free the K/V of all running and swapped groups, between two steps. They wait as after a preemption."""
        self.recompute((*self.running, *self.swapped))

    def recompute(self, groups: Iterable[SequenceGroup]) -> None:
        """Free the K/V of these groups, between two steps. They wait as after a preemption."""
        for group in groups:
            self._recompute(group)

    # -- after the forward --------------------------------------------------------------------------------------

    def update(self, output: SchedulerOutput) -> None:
        """Record that the step is computed. Sequences that have ended meanwhile are skipped."""
        # First, because the prefixes advance `num_computed_tokens`, which side memories need as it was.
        for side in self.side_memories:
            side.computed(output)
        self._prefixes.computed(output.scheduled, output.drafts)
        self._tell(output)
        self._settle()

    def accept_draft(self, seq: Sequence) -> None:
        """Record, after `update`, that `seq` has taken its next drafted token, whose K/V is computed."""
        self._prefixes.accepted(seq)

    def drop_drafts(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the slots of drafted tokens that were not accepted. num_tokens: how many tokens stay computed, in
        side memories too. The sequence computes all later ones again."""
        for side in self.side_memories:
            side.verified(seq)
        if seq.finish_reason is None and seq.group.status is SeqStatus.RUNNING:
            seq.num_computed_tokens = num_tokens
            self._tables.take_back(seq)
            self._prefixes.verified(seq)

    def discard_plan(self) -> None:
        """Forget the plan of an interrupted `schedule`, and put the queues in order. The caller must have finished all
        groups that hold blocks. A waiting group that was about to start is restarted."""
        self._restore()
        finished = (*self._taken.finished_seq_ids, *self._output.finished_seq_ids)
        self._output = SchedulerOutput()
        self._output.finished_seq_ids.extend(finished)
        for group in self.waiting:
            group.restart()
        for side in self.side_memories:
            side.recover()
        for seq_id in set(self.manager.seq_ids) - self._other_tables():
            self.manager.free(seq_id)

    def _other_tables(self) -> set[object]:
        """Ids of tables that belong to no group."""
        pins: list[object] = [] if self.prefix_cache is None else [*self.prefix_cache.pins]
        return {*pins, *(table for side in self.side_memories for table in side.table_ids)}

    def rollback(self, output: SchedulerOutput) -> None:
        """Undo the appends of a step whose forward has failed. Its block copies must have been made, if it has any.
        The next step frees what this one has not freed of ended sequences."""
        self._output.finished_seq_ids.extend(output.finished_seq_ids)
        for seq, _ in output.scheduled:
            if seq.finish_reason is None and seq.group.status is SeqStatus.RUNNING:
                self._tables.take_back(seq)

    def fork(self, parent: Sequence, tokens: list[int]) -> list[Sequence]:
        """Continue `parent` with the first of `tokens`, and one copy of it with each of the others.

        Returns the sequences in the order of `tokens`. The copies share the parent's blocks; no memory is taken.
        """
        return self._tables.fork(parent, tokens, self._output.forks)

    def reorder(self, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]:
        """Make live sequence i continue live sequence `parents[i]` with `tokens[i]` (beam search).

        Parents are forked, sequences without a continuation are freed, and K/V never moves. The number of beams may
        change, up to the width of the group. Returns the new `group.live`.
        """
        losers = self._tables.reorder(group, parents, tokens, self._output.forks)
        self._output.finished_seq_ids.extend(seq.seq_id for seq in losers)
        for seq in losers:
            for side in self.side_memories:
                side.ended(seq, is_lost=True)
            seq.finish_reason = FinishReason.STOP
        return group.live

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the class does not hold (between two steps)."""
        self.check_queues()
        for side in self.side_memories:
            side.check_integrity()
        self._tables.check_integrity(self.running, self.swapped, self._other_tables())
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity()
