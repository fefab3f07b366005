"""Which states the scheduler keeps, restores and drops, with a runner whose states are the tokens of the states."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import FULL, Chunk, LayerGroup, Window
from hf_paged.config import SchedulerConfig
from hf_paged.features.rows import checkpoints as of_states
from hf_paged.features.rows.checkpoints import CheckpointRules
from hf_paged.features.rows.state_memory import StateMemory
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup
from tests.generation.fake_engine import due
from tests.preempting import force_preempt

BLOCK = 4
SEATS, COUNT, SPARE = 8, 5, 2
GROUPS = {"states alone": (), "full": (FULL,), "full and a window": (FULL, Window(6)), "chunks": (Chunk(7),)}


class Runner:
    """The states of sequences and checkpoints, each as the tokens that it stands for."""

    def __init__(self, *, in_pieces: bool) -> None:
        self.states: dict[int, tuple[int, ...]] = {}
        self.checkpoints: dict[int, tuple[int, ...]] = {}
        self.in_pieces = in_pieces
        self.num_restored = 0

    def prepare(self, output: SchedulerOutput) -> None:
        (moves,) = output.moves.values()
        late = {seq_id for _, seq_id, _ in moves.restored}
        later = []
        for parent, child in output.forks:
            if parent in late:
                late.add(child)
                later.append((parent, child))
            elif parent in self.states:
                self.states[child] = self.states[parent]
        if moves.clears:
            self.checkpoints.clear()
        for seq_id, num_tokens, number in moves.kept:
            assert len(self.states[seq_id]) == num_tokens
            self.checkpoints[number] = self.states[seq_id]
        for seq_id in output.finished_seq_ids:
            self.states.pop(seq_id, None)
        for group, way in output.preempted:
            if way == "recompute":
                for seq in group.sequences:
                    self.states.pop(seq.seq_id, None)
        for number, seq_id, num_tokens in moves.restored:
            assert len(self.checkpoints[number]) == num_tokens
            self.states[seq_id] = self.checkpoints[number]
            self.num_restored += 1
        for parent, child in later:
            self.states[child] = self.states[parent]
        for number in moves.dropped:
            self.checkpoints.pop(number, None)

    def run(self, output: SchedulerOutput) -> None:
        for seq, count in output.scheduled:
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
            done = tuple(seq.token_ids[:end])
            if start and not (not self.in_pieces and start < seq.group.whole):
                assert self.states[seq.seq_id] == done[:start], "a state of other tokens"
            if self.in_pieces or end >= seq.group.whole:
                self.states[seq.seq_id] = done


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_pieces", [True, False], ids=["in pieces", "by one"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("seed", range(6))
def test_states_are_those_of_their_tokens(groups: str, in_pieces: bool, seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(of_states, "LEAST_PREFIX", BLOCK)
    monkeypatch.setattr(of_states, "SINGLES", 1)
    rng = random.Random(f"{groups} {in_pieces} {seed}")
    kinds = [LayerGroup(kind) for kind in GROUPS[groups]]
    num_blocks = 60 * max(len(kinds), 1)
    manager, host = (BlockManager(BlockAllocator(count), BLOCK, groups=kinds) for count in (num_blocks, num_blocks))
    config = SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=rng.choice([9, 17, 64]))
    rules = CheckpointRules(COUNT, SPARE, SEATS, in_pieces)
    scheduler = Scheduler(config, manager, host, side_memories=[StateMemory(rules)])
    assert scheduler.prefix_cache is not None
    checkpoints: Any = scheduler.prefix_cache.ends
    runner, texts, number = Runner(in_pieces=in_pieces), [[rng.randrange(9) for _ in range(30)] for _ in range(3)], 0
    ends: dict[str, int] = {}
    while number < 60 or scheduler.has_unfinished():
        if number < 60 and rng.random() < 0.5:
            text = rng.choice(texts)
            prompt = text[: rng.randint(1, 30)] + [rng.randrange(9) for _ in range(rng.randrange(6))]
            group = SequenceGroup(
                f"{number}", prompt, width=rng.choice([1, 1, 1, 3]), cache_root=rng.choice([b"a", b"b"])
            )
            ends[group.request_id] = len(prompt) + rng.randrange(1, 14)
            scheduler.enqueue(group)
            number += 1
        output = scheduler.schedule()
        runner.prepare(output)
        running = sum(group.width for group in scheduler.groups if group.status.value == "running")
        assert len(checkpoints) <= checkpoints.capacity == COUNT + SPARE * max(SEATS - running, 0)
        assert len(runner.checkpoints) <= COUNT + SPARE * SEATS
        runner.run(output)
        scheduler.update(output)
        for group, seqs in due(output).items():
            if len(seqs) == 1 and group.width == 3:
                scheduler.fork(seqs[0], [rng.randrange(9) for _ in range(3)])
            elif len(seqs) == 3 and rng.random() < 0.5:
                scheduler.reorder(group, [rng.randrange(3) for _ in range(3)], [rng.randrange(9) for _ in range(3)])
            else:
                for seq in seqs:
                    seq.token_ids.append(rng.randrange(9))
            if group.live[0].num_tokens >= ends[group.request_id]:
                scheduler.finish_group(group, FinishReason.LENGTH)
        event, alive = rng.random(), [group.request_id for group in scheduler.groups]
        if alive and event < 0.15 and kinds:
            force_preempt(scheduler, rng.choice(alive), rng.choice(["swap", "recompute"]))
        elif alive and event < 0.2:
            scheduler.finish_group(scheduler.get(rng.choice(alive)), FinishReason.ABORT)  # type: ignore[arg-type]
        elif event < 0.25:
            for digest in list(checkpoints):
                if rng.random() < 0.4:
                    checkpoints.drop(digest)
        elif event < 0.27:
            scheduler.forget_prefixes()
        elif event < 0.29:
            scheduler.recompute_all()
        scheduler.check_integrity()
    output = scheduler.schedule()
    runner.prepare(output)
    assert not runner.states
    assert set(runner.checkpoints) == set(checkpoints._ids.values())
    assert runner.num_restored or not in_pieces
