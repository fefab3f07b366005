"""Record what the scheduler decides in random runs without tensors, as one digest of all its outputs.

    python scripts/record_plans.py                  # 1,000 runs, some seconds
    python scripts/record_plans.py --runs 10000

Two versions of the scheduler with equal digests have decided alike, block by block: run it before and after a change
that is to change no decision. Ids are numbered anew in each run. The runs have samples, beams, priorities, windows,
prefixes, pins, drafts, swaps, failed and interrupted steps, encoders, media, and recurrent states with checkpoints,
in memory of their own and in that of the blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import warnings
from collections.abc import Hashable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import FULL, Chunk, LayerGroup, Window
from hf_paged.config import SchedulerConfig
from hf_paged.features.encoder_decoder import encoders
from hf_paged.features.encoder_decoder.encoders import EncoderTables
from hf_paged.features.media.media_memory import MediaMemory
from hf_paged.features.media.media_store import MediaStore
from hf_paged.features.rows.checkpoints import CheckpointRules, StateMoves
from hf_paged.features.rows.state_memory import StateMemory
from hf_paged.generation.engine import prefixes
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import EncoderInput, FinishReason, SeqStatus, Sequence, SequenceGroup
from hf_paged.sockets import Executor, Task
from tests.generation.fake_engine import due

VOCAB = 9
TEXTS = [[random.Random(text).randrange(VOCAB) for _ in range(48)] for text in range(3)]
ROOTS = (None, b"a", b"a", b"b")
KINDS = [(FULL,), (FULL,), (FULL, Window(6)), (Chunk(7),)]
FEATURES = ("plain", "encoders", "media", "states", "shared memory")


class Encoders(Executor):
    """It has written no states that the run does not tell of."""

    written: frozenset[Hashable] = frozenset()


class Tenants:
    """The scheduler of a run with the memory besides block tables that its groups need."""

    def __init__(self, rng: random.Random, feature: str, config: SchedulerConfig, *managers: Any) -> None:
        self.has_states = feature in ("states", "shared memory")
        blocks = rng.choice([0.3, 1.0, 2.5]) if feature == "shared memory" else 0.0
        rules, in_pieces = None, rng.random() < 0.7
        if self.has_states and rng.random() < 0.85:
            rules = CheckpointRules(rng.randrange(4, 9), rng.randrange(3), config.max_num_seqs, in_pieces, blocks)
        chunk = rng.choice([None, None, 6])
        self.states = StateMemory(rules, blocks)
        self.encoders, self.media, self.executor = EncoderTables(), MediaMemory(MediaStore()), Encoders()
        self.encoders.use(self.executor)
        sides = {"encoders": [self.encoders], "media": [self.media]}.get(feature, [self.states] * self.has_states)
        self.scheduler = Scheduler(config, *managers, chunk, side_memories=sides)
        self.scheduler.may_grow = rng.random() < 0.5

    def unencoded(self) -> list[SequenceGroup]:
        return self.encoders.unready() if self.scheduler.side(EncoderTables) else []

    def encoded(self, group: SequenceGroup, num_states: int) -> None:
        self.encoders.ran(group, num_states)

    def wrote(self, output: SchedulerOutput) -> None:
        if output.encoders:
            self.encoders.wrote(each.seq_id for each in output.encoders)

    def unencoded_media(self) -> list[SequenceGroup]:
        return self.media.unready() if self.scheduler.side(MediaMemory) else []

    def figures(self) -> tuple[Any, ...]:
        kept, states = self.scheduler.side(EncoderTables), self.scheduler.side(StateMemory)
        hits = () if kept is None else (kept.num_idle_blocks(), kept.num_hits)
        return (0, 0) if states is None else states.num_blocks, hits


class Media:
    """Runs of tokens that one step computes together."""

    def __init__(self, rng: random.Random, length: int) -> None:
        first = rng.randrange(length)
        self.span = (first, min(first + rng.randrange(12), length - 1))
        self.encoded: Any = None
        self.has_features = False

    @property
    def num_missing(self) -> int:
        return 0 if self.has_features else self.longest_run

    def drop_features(self) -> None:
        self.has_features = False

    def keyed(self, token_ids: list[int]) -> list[int]:
        first, last = self.span
        return [token + VOCAB * (first <= place <= last) for place, token in enumerate(token_ids)]

    @property
    def longest_run(self) -> int:
        return self.span[1] - self.span[0] + 1

    def undivided(self, start: int, count: int) -> int:
        first, last = self.span
        return max(first - start, 0) if first < start + count <= last else count


class Run:
    """Some dozen requests through one scheduler. Every choice is drawn from `seed`."""

    def __init__(self, seed: int, digest: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.digest = digest
        self.feature = FEATURES[seed % len(FEATURES)]
        kinds = (FULL,) if self.feature == "encoders" else rng.choice(KINDS)
        if self.feature == "states" and rng.random() < 0.3:
            kinds = ()
        groups, size = [LayerGroup(kind) for kind in kinds], rng.choice([2, 4])
        count = rng.randrange(14, 60) * max(len(kinds), 1)
        self.manager = BlockManager(BlockAllocator(count), size, groups=groups)
        host = BlockManager(BlockAllocator(rng.choice([8, count])), size, groups=groups)
        config = SchedulerConfig(
            max_num_seqs=rng.randrange(4, 12),
            max_num_batched_tokens=rng.choice([12, 17, 40, 64]),
            preemption=rng.choice(["auto", "recompute", "swap"]) if kinds else "recompute",
            prefix_caching=rng.random() < 0.8,
            watermark=rng.choice([0.0, 0.01, 0.2]),
        )
        self.tenants = Tenants(rng, self.feature, config, self.manager, host if rng.random() < 0.8 else None)
        self.scheduler = self.tenants.scheduler
        self.ends: dict[str, int] = {}
        self.num_states: dict[bytes, int] = {}
        self.numbers: dict[object, int] = {}  # of the ids of sequences
        self.num_added = 0

    def run(self, num_requests: int = 20) -> None:
        rng, scheduler = self.rng, self.scheduler
        while self.num_added < num_requests or scheduler.has_unfinished():
            if self.num_added < num_requests and rng.random() < 0.5:
                self.add()
            self.encode()
            self.step()
            self.happen()
            scheduler.check_integrity()
        self.note(scheduler.schedule())

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(TEXTS)[: rng.randint(1, 40)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
        options: dict[str, Any] = {}
        if self.feature == "encoders":
            options["encoder"] = EncoderInput(rng.choice([b"x", b"y", b"z", bytes([self.num_added])]), None)
        elif self.feature == "media" and rng.random() < 0.7:
            options["media"] = Media(rng, len(prompt))
        name = str(self.num_added)
        self.num_added += 1
        group = SequenceGroup(
            name,
            prompt,
            width=rng.choice([1, 1, 1, 3]),
            priority=rng.choice([0, 0, 1]),
            arrival=float(self.num_added),
            cache_root=rng.choice(ROOTS),
            **options,
        )
        if rng.random() < 0.1:
            group.task = Task()
            group.task.start = rng.randrange(len(prompt))
        self.ends[name] = len(prompt) + rng.randrange(1, 20)
        try:
            self.scheduler.check(group)
        except ValueError:
            self.digest.update(b"refused")
            return
        self.scheduler.enqueue(group)

    def encode(self) -> None:
        for group in self.tenants.unencoded():
            if self.rng.random() < 0.05:
                self.scheduler.finish_group(group, FinishReason.ERROR)
                continue
            assert group.encoder is not None
            count = self.num_states.setdefault(group.encoder.digest, self.rng.randrange(1, 20))
            self.tenants.encoded(group, count)
        for group in self.tenants.unencoded_media():
            media: Any = group.media
            if self.rng.random() < 0.05 or media.longest_run > self.scheduler.make_room_for(media.longest_run):
                self.scheduler.finish_group(group, FinishReason.ERROR)
            else:
                media.encoded = media.has_features = True

    def drafts(self) -> dict[Sequence, list[int]]:
        if self.feature == "media" or self.rng.random() < 0.5:
            return {}
        live = [seq for group in self.scheduler.running if group.width == 1 for seq in group.live]
        drafted = [seq for seq in live if seq.num_uncomputed_tokens == 1 and self.rng.random() < 0.7]
        return {seq: [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 5))] for seq in drafted}

    def step(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        drafts = self.drafts()
        output = None if drafts or rng.random() < 0.5 else scheduler.schedule_without_preempting()
        if output is None:
            output = scheduler.schedule(drafts)
        self.note(output)
        if (states := output.states) is not None:
            states.clears = False
            states.lost += [number for _, _, number in states.kept if rng.random() < 0.05]
            states.kept.clear()
        if rng.random() < 0.04:
            scheduler.rollback(output)
            if rng.random() < 0.5:  # as if the step had been broken off
                for group in scheduler.groups:
                    if group.status is not SeqStatus.WAITING:
                        scheduler.finish_group(group, FinishReason.ERROR)
                scheduler.discard_plan()
            return
        before = {seq: seq.num_computed_tokens for seq in output.drafts}
        self.tenants.wrote(output)
        scheduler.update(output)
        for group, seqs in due(output).items():
            self.advance(group, seqs, output)
            if group.live and max(seq.num_tokens for seq in group.live) >= self.ends[group.request_id]:
                scheduler.finish_group(group, FinishReason.LENGTH)
        for seq, draft in output.drafts.items():
            is_wrong = seq.num_tokens - before[seq] < len(draft) + 2
            goes_back = self.tenants.has_states and is_wrong
            scheduler.drop_drafts(seq, before[seq] if goes_back else seq.num_computed_tokens)

    def advance(self, group: SequenceGroup, seqs: list[Sequence], output: SchedulerOutput) -> None:
        rng, scheduler = self.rng, self.scheduler
        if len(seqs) == 1 and group.width == 3:
            scheduler.fork(seqs[0], [rng.randrange(VOCAB) for _ in range(3)])
        elif len(seqs) == 3 and rng.random() < 0.5:
            count = rng.randrange(1, 4)
            tokens = [rng.randrange(VOCAB) for _ in range(count)]
            scheduler.reorder(group, [rng.randrange(3) for _ in range(count)], tokens)
        else:
            for seq in seqs:
                seq.token_ids.append(rng.randrange(VOCAB))
                for _ in range(rng.randint(0, len(output.drafts.get(seq, ())))):
                    scheduler.accept_draft(seq)
                    seq.token_ids.append(rng.randrange(VOCAB))
                if rng.random() < 0.02:
                    scheduler.finish(seq, FinishReason.EOS)

    def happen(self) -> None:
        """What others do between two steps."""
        rng, scheduler, event = self.rng, self.scheduler, self.rng.random()
        alive, cache = scheduler.groups, scheduler.prefix_cache
        if alive and event < 0.06:
            scheduler.finish_group(rng.choice(alive), FinishReason.ABORT)
        elif event < 0.12:
            running = [group for group in alive if group.status is SeqStatus.RUNNING]
            if running and self.manager.groups:
                scheduler._preempt(rng.choice(running), rng.choice(["swap", "recompute"]))
        elif event < 0.13:
            scheduler.recompute_all()
        elif event < 0.14:
            scheduler.forget_prefixes()
        elif event < 0.15:
            scheduler.begin_anew(shares_prefixes=rng.random() < 0.7)
        elif event < 0.18 and cache is not None:
            change = rng.choice([cache.pin, cache.unpin])
            try:
                change(rng.choice(TEXTS)[: rng.randint(1, 24)], b"a")
            except ValueError as error:
                self.digest.update(str(error).encode())

    def note(self, output: SchedulerOutput) -> None:
        """Enter a step into the digest."""
        number, scheduler = self._number, self.scheduler
        states = StateMoves() if output.states is None else output.states
        allocator = self.manager.allocator
        step = (
            output.block_copies, output.swap_out, output.swap_in, output.untouched, output.untouched_on_host,
            [(number(seq.seq_id), count, seq.num_computed_tokens) for seq, count in output.scheduled],
            [(number(seq.seq_id), draft) for seq, draft in output.drafts.items()],
            [(group.request_id, way) for group, way in output.preempted],
            [[group.request_id for group in each] for each in (output.failed, output.admitted, output.resumed)],
            [(number(parent), number(child)) for parent, child in output.forks],
            [number(seq_id) for seq_id in output.finished_seq_ids],
            [(seq_id, [group.request_id for group in groups]) for seq_id, groups in output.encoders],
            states.clears, states.dropped,
            [(number(seq_id), count, kept) for seq_id, count, kept in states.kept],
            [(kept, number(seq_id), count) for kept, seq_id, count in states.restored],
            [self.manager.block_table(seq.seq_id, 0) for seq, _ in output.scheduled if self.manager.groups],
            (allocator.num_free, allocator.num_cached, allocator.num_withheld, self.tenants.figures()),
            (scheduler.num_waiting, scheduler.num_running, scheduler.num_swapped, scheduler.token_budget),
        )  # fmt: skip
        self.digest.update(repr(step).encode())

    def _number(self, seq_id: object) -> int:
        return self.numbers.setdefault(seq_id, len(self.numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of swap memory that is full, as it is meant to be
    prefixes.LEAST_PREFIX, prefixes.SINGLES, encoders.KEPT_FRACTION = 4, 1, 1 / 3
    whole = hashlib.sha256()
    totals: dict[str, list[int]] = {feature: [0, 0, 0, 0] for feature in FEATURES}
    for seed in range(given.first, given.first + given.runs):
        digest = hashlib.sha256()
        run = Run(seed, digest)
        run.run()
        whole.update(digest.digest())
        scheduler, cache, total = run.scheduler, run.scheduler.prefix_cache, totals[run.feature]
        total[0] += scheduler.num_preemptions_recompute
        total[1] += scheduler.num_preemptions_swap
        total[2] += 0 if cache is None else cache.hit_tokens
        total[3] += 0 if cache is None else cache.num_evictions
    for feature, (recomputed, swapped, hits, evicted) in totals.items():
        print(f"{feature}: {recomputed} recomputed, {swapped} swapped, {hits} tokens found, {evicted} blocks evicted")
    print(f"{given.runs} runs from {given.first}: {whole.hexdigest()[:32]}")


if __name__ == "__main__":
    main()
