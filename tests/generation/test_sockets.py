"""What is plugged into the sockets from elsewhere, without a line of the core: policies, side memories, tasks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import nan
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.cache.block_manager import BlockManager
from hf_paged.config import SchedulerConfig
from hf_paged.features.executors import SIDE_MEMORIES
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, SequenceGroup
from hf_paged.policies import Fair
from hf_paged.sockets import Attachment, Group, Inputs, Policy, SideMemory, Task
from tests import models
from tests.architectures.tiny import tiny_model
from tests.generation import solo
from tests.generation.fake_engine import FakeEngine, Request
from tests.generation.test_scheduler_properties import check_results, random_request
from tests.preempting import force_preempt

MODES = ("auto", "recompute", "swap")


class FairShare(Policy):
    """Whose requests have had fewer tokens computed goes first. The client is the beginning of a request's id."""

    is_static = False

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()

    def key(self, group: Group) -> int:
        return self.served[group.request_id[0]]

    def victim(self, candidates: Any) -> Group:
        return max(candidates, key=self.key)

    def on_served(self, group: Group, num_tokens: int) -> None:
        self.served[group.request_id[0]] += num_tokens


class Dice(Policy):
    """Changes its mind all the time."""

    is_static = False

    def __init__(self, seed: object) -> None:
        self.rng = random.Random(f"{seed}")

    def key(self, group: Group) -> float:
        return self.rng.random()

    def victim(self, candidates: Any) -> Group:
        return self.rng.choice(candidates)

    def shares(self, running: Any, starting: Any, budget: int) -> Any:
        return {g: self.rng.choice([0, 0, 1, 5, budget]) for g in (*running, *starting) if self.rng.random() < 0.8}


class Youngest(Policy):
    """The last to come goes first."""

    def key(self, group: Group) -> float:
        return -group.arrival


class Scratch(SideMemory):
    """Each group of a kind has some blocks of its own while it runs, and a licence, of which there are a few."""

    def __init__(self, num_blocks: int, licences: int) -> None:
        self.num_blocks, self.licences = num_blocks, licences
        self.tables: dict[Group, Hashable] = {}

    def bind(self, schedule: Any) -> None:
        self.manager: BlockManager = schedule.manager

    def is_ready(self, group: Group) -> bool:
        return not group.priority or len(self.tables) < self.licences

    def blocks_needed(self, group: Group) -> int:
        return self.num_blocks if group.priority else 0

    def take(self, group: Group) -> None:
        if group.priority:
            self.tables[group] = ("scratch", group.request_id)
            self.manager.append_all([(self.tables[group], self.num_blocks * self.manager.block_size)])

    def give_up(self, group: Group, *, restarts: bool) -> None:
        if (table := self.tables.pop(group, None)) is not None:
            self.manager.free(table)

    @property
    def table_ids(self) -> set[Hashable]:
        return set(self.tables.values())

    def check_integrity(self) -> None:
        assert all(group.status is SeqStatus.RUNNING for group in self.tables)


def first_steps(policy: Any) -> dict[str, int]:
    """In which step each request starts, when "b" comes after a flood of "a"."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, policy=policy)
    engine, starts = FakeEngine(config, num_blocks=24), {}
    for number in range(33):
        name = f"b{number}" if number in (20, 21, 22) else f"a{number}"
        engine.add(Request(tuple(range(number, number + 9)), 8, num_eos=0, request_id=name))
    while engine.scheduler.has_unfinished():
        starts |= dict.fromkeys([group.request_id for group in engine.step().admitted], engine.num_steps)
    engine.check_empty()
    check_results(engine)
    return starts


def test_a_client_that_floods_holds_up_no_other() -> None:
    late = first_steps("fcfs")
    assert min(late["b20"], late["b21"]) > 40
    for policy in (FairShare(), "fair"):
        fair = first_steps(policy)
        assert max(fair["b20"], fair["b21"]) < 15


def test_who_comes_back_has_saved_no_turns() -> None:
    """Twice the weight gives twice the tokens, and of one client's requests priority decides."""
    policy, groups = Fair({"b": 2}), {}

    def key(client: str, number: int = 0, priority: int = 0) -> Any:
        group = groups.setdefault((client, number), SequenceGroup(f"{number}", [1], client=client, priority=priority))
        return policy.key(group)

    assert key("a") == key("b")
    policy.on_served(groups["a", 0], 100)
    policy.on_served(groups["b", 0], 100)
    assert key("b") < key("a") and key("a", 1, -1) < key("a") and key("c")[0] == 50
    assert policy.victim([groups["a", 0], groups["b", 0]]) is groups["a", 0]
    groups["b", 0].live.clear()
    policy.on_served(groups["c", 0], 20)
    assert key("b", 1)[0] == 70 and key("d")[0] == 70
    for group in groups.values():
        group.live.clear()
    for number in range(5100):
        key(f"{number}")
        groups.popitem()[1].live.clear()  # it may be long until it is collected as garbage
    assert len(policy._served) < 5000
    for wrong in (0, -1, True, nan, "1"):
        with pytest.raises(ValueError, match=r"weights=\{'a': .*\}: a positive number"):
            Fair({"a": wrong})  # type: ignore[dict-item]


def test_a_newcomer_has_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While several clients are about, steps are short, and prompts of one client only; one client alone has all."""
    monkeypatch.setattr("hf_paged.policies._LEAST", 4)
    engine, steps = FakeEngine(SchedulerConfig(max_num_batched_tokens=40, policy="fair")), []
    for name, length in {"a1": 60, "a2": 60, "b1": 3, "": 0, "b2": 9}.items():
        if length:
            engine.add(Request(tuple(range(length)), 2, num_eos=0, request_id=name))
        if name != "a1":  # whose first step would be without another client
            steps.append({seq.group.request_id: count for seq, count in engine.step().scheduled})
    assert steps == [{"a1": 40}, {"b1": 3, "a1": 1}, {"b1": 1, "a1": 4}, {"b2": 9, "a1": 1}]
    engine.run()


def test_a_policy_is_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduling, model = SchedulerConfig(policy=Fair()), models.shared("llama")
    for _ in range(2):
        words = r"policy=<.*Fair object.* is that of another engine"
        with Engine(model, CacheConfig(num_blocks=16), scheduling), pytest.raises(ValueError, match=words):
            Engine(model, CacheConfig(num_blocks=16), scheduling)
        with monkeypatch.context() as broken, pytest.raises(TypeError):
            broken.setattr("hf_paged.generation.engine.binding.warm_up", None)
            Engine(model, CacheConfig(num_blocks=16), scheduling)


def test_a_prompt_does_not_wait_for_one_without_room() -> None:
    scratch, config = Scratch(0, 1), SchedulerConfig(max_num_batched_tokens=40, policy="fair")
    scratch.stops_prompts = True
    engine = FakeEngine(config, num_blocks=26, side_memories=[scratch])
    for length, name in ((90, "a1"), (30, "b1")):
        engine.add(Request(tuple(range(length)), 2, num_eos=0, request_id=name))
        counts = [count for _, count in engine.step().scheduled]
    assert counts == [16]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [FairShare, Dice, Youngest, Fair])
def test_no_policy_changes_an_answer_or_holds_up_all(policy: Any, mode: Any) -> None:
    """Nor does a side memory that takes blocks, while requests are preempted, and may be aborted."""
    num_preempted = 0
    for seed in range(3):
        rng = random.Random(f"{policy.__name__} {mode} {seed}")
        chosen = policy(seed) if policy is Dice else policy()
        config = SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=20, preemption=mode, policy=chosen)
        scratch = Scratch(rng.randrange(4), rng.randrange(1, 4))
        engine = FakeEngine(config, num_blocks=36, num_host_blocks=rng.choice([6, 30]), side_memories=[scratch])
        for number in range(40):
            request = random_request(rng, request_id=f"{number % 4}-{number}", num_eos=1)
            engine.add(replace(request, max_new_tokens=rng.randrange(10, 30)))
            if rng.random() < 0.4:
                engine.step()
                assert len(scratch.tables) <= scratch.licences
            if engine.scheduler.groups and rng.random() < 0.1:
                engine.abort(rng.choice(engine.scheduler.groups).request_id)
        assert len(engine.run()) == 40
        check_results(engine)
        num_preempted += engine.scheduler.num_preemptions_recompute + engine.scheduler.num_preemptions_swap
    assert num_preempted > 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            ({"policy": each}, "use 'fcfs', 'fair' or an object that is a .*Policy")
            for each in ("fairer", Policy, None)
        ),
        ({"prefix_eviction": "lfu"}, r"use 'lru', 'clock' or a function"),
        ({"prefix_eviction": "clock", "prefix_caching": False}, "no prefix is kept; leave it out"),
    ],
)
def test_what_is_no_order_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(given))}=.*: {words}"):
        SchedulerConfig(**given)


def test_a_flood_of_other_prompts_leaves_a_prefix_that_was_found() -> None:
    """But a prefix that nobody asks for any more is given up in the end, however often it was found."""

    def hits(eviction: Any, num_others: int) -> int:
        engine = FakeEngine(SchedulerConfig(max_num_batched_tokens=32, prefix_eviction=eviction), num_blocks=20)
        for number in range(9 + num_others):
            start = 100 * number if 8 <= number < 8 + num_others else 0
            engine.add(Request(tuple(range(start, start + 17)), 2, num_eos=0, request_id=f"{number}", root=b""))
            group = engine.group(f"{number}")
            engine.run()
        check_results(engine)
        return group.num_cached_tokens

    found = {eviction: [hits(eviction, count) for count in (6, 40)] for eviction in ("lru", "clock")}
    assert found == {"lru": [0, 0], "clock": [16, 0]}
    with pytest.raises(ValueError, match=r"returned -1; return one of the blocks"):
        hits(lambda cached, found: -1, 9)


def test_a_victim_that_was_not_offered_is_refused() -> None:
    class Wrong(Policy):
        def victim(self, candidates: Any) -> None:
            return None

    engine = FakeEngine(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, policy=Wrong()), num_blocks=5)
    for name in "ab":
        engine.add(Request(tuple(range(8)), 9, num_eos=0, request_id=name))
    with pytest.raises(ValueError, match=r"Wrong.*victim\(\) returned None; return one of those"):
        engine.run()


def keyed(keys: list[Any], *, is_static: bool = True) -> tuple[FakeEngine, list[Group]]:
    """An engine, and groups with these keys that it does not have yet."""

    class Keyed(Policy):
        def key(self, group: Group) -> Any:
            assert group.live, "it has ended"
            return keys[int(group.request_id)]

    policy = Keyed()
    policy.is_static = is_static
    engine = FakeEngine(SchedulerConfig(max_num_seqs=9, policy=policy))
    return engine, [SequenceGroup(f"{number}", [1]) for number in range(len(keys))]


@pytest.mark.parametrize("is_static", [True, False])
def test_keys_without_an_order_lose_no_group(is_static: bool) -> None:
    """Nor is anything asked of a group that has ended."""
    engine, groups = keyed([2.0, nan, 1.0, nan, 0.0, 3.0], is_static=is_static)
    scheduler = engine.scheduler
    for group in groups:
        scheduler.enqueue(group)
    assert scheduler.schedule().admitted == scheduler.running != groups
    for group in groups:
        scheduler.finish_group(group, FinishReason.ABORT)
    assert not (scheduler.waiting or scheduler.running or scheduler.groups)


def test_a_group_that_cannot_be_queued_is_unknown() -> None:
    engine, groups = keyed([1, None, 2])
    for group in (groups[0], groups[2]):
        engine.scheduler.enqueue(group)
    for _ in range(2):
        with pytest.raises(TypeError):
            engine.scheduler.enqueue(groups[1])
    engine.scheduler.check_integrity()
    assert engine.scheduler.groups == [groups[0], groups[2]]
    # As if an interrupt had struck the last line.
    del engine.scheduler._groups["0"]
    engine.scheduler.enqueue(groups[0])
    engine.scheduler.check_integrity()


def test_drafts_are_served_too() -> None:
    policy = FairShare()
    engine = FakeEngine(SchedulerConfig(max_num_batched_tokens=16, policy=policy))
    engine.add(Request((1, 2, 3), 8, num_eos=0, request_id="a"))
    engine.step()
    [sequence] = engine.group("a").live
    engine.scheduler.update(engine.scheduler.schedule({sequence: [4, 5]}))
    assert policy.served["a"] == 3 + 1 + 2


def test_a_request_without_a_key_fails_alone() -> None:
    class Known(Policy):
        def key(self, group: Group) -> int:
            return {"known": 1, "later": 2}[group.request_id]

    options, [prompt] = solo.config("greedy", max_new_tokens=2), models.prompts(5)
    with Engine(models.shared("llama"), CacheConfig(num_blocks=16), SchedulerConfig(policy=Known())) as engine:
        for name in ("known", "unknown", "later"):
            engine.add_request(prompt, options, request_id=name)
        outputs = {output.request_id: output for _ in range(4) for output in engine.step()}
        solo.assert_idle(engine)
    assert {name: output.error for name, output in outputs.items()} == {
        "known": None,
        "unknown": "the policy failed: KeyError: 'unknown'",
        "later": None,
    }


def test_a_policy_that_raises_in_a_step_harms_no_request_that_waits() -> None:
    class Breaks(Policy):
        is_static, is_broken = False, False

        def key(self, group: Group) -> int:
            assert not self.is_broken
            return 0

    policy, options = Breaks(), solo.config("greedy", max_new_tokens=4)
    scheduling = SchedulerConfig(max_num_seqs=1, policy=policy)
    with Engine(models.shared("llama"), CacheConfig(num_blocks=16), scheduling) as engine:
        for name, prompt in zip("ab", models.prompts(5, 9)):
            engine.add_request(prompt, options, request_id=name)
        engine.step()
        policy.is_broken = True
        for _ in range(2):
            with pytest.raises(AssertionError):
                engine.step()
        policy.is_broken = False
        outputs = {output.request_id: output for _ in range(5) for output in engine.step()}
        assert (outputs["a"].error or "").startswith("scheduling failed") and outputs["b"].error is None
        solo.assert_idle(engine)


class Embedding(Task):
    """The last hidden state of a prompt, or the mean of all. "broken": it raises."""

    keeps, generates = "hidden", False

    def __init__(self, pooling: str) -> None:
        self.pooling, self.places, self.total = pooling, list[int](), torch.zeros(())

    def begin(self, prompt: Any) -> None:
        self.start, self.stop = 0 if self.pooling == "mean" else len(prompt) - 1, len(prompt)

    def consume(self, first: int, rows: torch.Tensor) -> None:
        assert self.pooling != "broken" and self.start == first < first + len(rows) <= self.stop
        self.places += range(first, first + len(rows))
        self.total = self.total + rows.float().sum(0)

    def fill(self, output: Any) -> None:
        output.result = self.total / max(len(self.places), 1)


@pytest.mark.quick_cases("llama-recompute", "gemma3-swap", "rows-recompute", "lfm2-swap")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "gpt2", "rows", "lfm2", "mamba"])
def test_embeddings_beside_requests_that_generate(family: str, mode: Any) -> None:
    """In the same steps, of prompts in chunks that share a prefix, and after a preemption."""
    shared = {"rows": solo.row_by_row, "lfm2": lambda: tiny_model("lfm2"), "mamba": lambda: tiny_model("mamba")}
    model = shared[family]() if family in shared else models.shared(family)
    long, short, other = models.prompts(25, 5, 33)
    prompts = [long, torch.cat([long[:16], short]), other, short, other]
    poolings = ["mean", "last", "last", "mean", "broken"]
    memory = CacheConfig(num_blocks=64, block_size=4) if family != "mamba" else None
    with Engine(model, memory, SchedulerConfig(max_num_batched_tokens=14)) as engine:
        preempted, found = set[str](), {}
        for _ in range(2):  # the second time with all prefixes in the cache
            engine.add_request(long, solo.config("four samples", max_new_tokens=6), request_id="text")
            for name, (prompt, pooling) in enumerate(zip(prompts, poolings)):
                engine.add_request(prompt, task=Embedding(pooling), request_id=f"{name}")
            while engine.has_unfinished_requests():
                found |= {output.request_id: output for output in engine.step()}
                preempted |= {n for n in "0234" if n not in preempted and force_preempt(engine._scheduler, n, mode)}
            solo.assert_idle(engine)
            for name, (prompt, pooling) in enumerate(zip(prompts, poolings)):
                output = found[f"{name}"]
                if pooling == "broken":
                    assert "the task failed: AssertionError" in (output.error or "")
                    continue
                with torch.no_grad():
                    states = model.base_model(prompt[None]).last_hidden_state[0]
                expected = states.mean(0) if pooling == "mean" else states[-1]
                torch.testing.assert_close(output.result, expected, atol=2e-5, rtol=2e-5)
                assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "stop"
            assert len(preempted) > (family != "mamba")
            solo.assert_as_solo(model, [found["text"]], [(long, solo.config("four samples", max_new_tokens=6))])


def test_rows_of_single_tokens_come_and_what_fails_ends_a_request() -> None:
    model, options = models.shared("llama"), solo.config("greedy", max_new_tokens=3)
    none: Any = {"wanted": lambda *_: range(0)}
    for length, generates, words, changes in (
        (1, True, "", {}),
        (9, True, "", {}),
        (5, True, "ended without the rows of positions 4 to 4", none),
        (5, False, "ended without the rows of positions 4 to 4", none),
        (5, True, "the task failed: ZeroDivisionError", {"fill": lambda _: 1 / 0}),
        (5, True, "ZeroDivisionError", {"wanted": lambda *_: 1 / 0}),
        (9, False, r"wanted(0, 8) of Embedding returned range(7, 9), not some", {"wanted": lambda *_: range(7, 9)}),
    ):
        task, [prompt] = Embedding("last"), models.prompts(length)
        vars(task).update(changes, keeps="logits", generates=generates)
        with Engine(model, CacheConfig(num_blocks=16), SchedulerConfig(max_num_batched_tokens=8)) as engine:
            name, found = engine.add_request(prompt, options, task=task), {}
            engine.add_request(prompt, options, request_id="other")
            while engine.has_unfinished_requests():
                found |= {each.request_id: each for each in engine.step()}
        output = found[name]
        assert words in (output.error or "") and (output.outputs[0].finish_reason == "error") is bool(words)
        solo.assert_as_solo(model, [found["other"]], [(prompt, options)])
        if not words:
            torch.testing.assert_close(output.result, model(prompt[None]).logits[0, -1].detach(), atol=2e-5, rtol=2e-5)


class Disk(SideMemory):
    """Keeps the K/V of evicted blocks, and gives it back to requests that begin alike."""

    def __init__(self) -> None:
        self.kept = dict[tuple[bytes, int], list[torch.Tensor]]()
        self.evictions, self.recalls = dict[tuple[bytes, int], int](), list[tuple[tuple[bytes, int], int]]()

    def use(self, executor: Any) -> None:
        self.memory = executor.memory

    def bind(self, schedule: Any) -> None:
        self.recover()

    def forget(self) -> None:
        self.kept.clear()
        self.recover()

    def recover(self) -> None:
        self.evictions.clear()
        self.recalls.clear()

    def evicted(self, block_id: int, group: int, digest: bytes) -> None:
        self.evictions[digest, group] = block_id

    def num_kept(self, digests: Sequence[bytes]) -> int:
        kept, groups = self.kept.keys() | self.evictions.keys(), range(len(self.memory.groups))
        return len([*takewhile(lambda digest: all((digest, group) in kept for group in groups), digests)])

    def recall(self, blocks: Sequence[tuple[Any, ...]]) -> None:
        self.recalls += [((digest, group), each) for digest, *own in blocks for group, each in enumerate(own)]

    def move(self, output: Any) -> None:
        [rows] = self.memory.pool.by_device().values() or [[]]
        self.kept |= {key: [row[block].clone() for row in rows] for key, block in self.evictions.items()}
        for key, block in self.recalls:
            for row, saved in zip(rows, self.kept[key]):
                row[block] = saved
        self.recover()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_evicted_prefixes_come_back_from_a_side_memory(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Also in the step that evicts them, and beside requests that are preempted."""
    rng, model, options = random.Random(1), models.shared(family), solo.config("greedy", max_new_tokens=6)
    stems, tails = models.prompts(30, 30, 30), models.prompts(*[rng.randrange(1, 9) for _ in range(16)], seed=1)
    prompts = [torch.cat([rng.choice(stems), tail]) for tail in tails]
    computed = []
    for disk in (None, Disk()):
        monkeypatch.setitem(SIDE_MEMORIES, Disk, lambda executor, sizes, disk=disk: disk)
        scheduling = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
        with Engine(model, CacheConfig(block_size=4, num_blocks=16), scheduling) as engine:
            outputs = engine.generate(prompts, options)
            solo.assert_idle(engine)
        solo.assert_as_solo(model, outputs, [(prompt, options) for prompt in prompts])
        computed.append(sum(map(len, prompts)) - sum(each.metrics.num_cached_tokens for each in outputs))
    assert computed[1] < computed[0] * 0.8


class Tag(Attachment):
    def __init__(self, number: int) -> None:
        self.number = number

    def keyed(self, token_ids: Sequence[int]) -> list[int]:
        return [token + 1000 * self.number for token in token_ids]


class Tags(SideMemory):
    def read(self, inputs: Inputs) -> None:
        if "tag" in inputs.others:
            inputs.beside["tag"] = Tag(inputs.others.pop("tag"))


def test_a_side_memory_reads_its_part_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class and a line of the table are all that it takes: prompts with other tags share no prefix."""
    monkeypatch.setitem(SIDE_MEMORIES, Tags, lambda executor, sizes: Tags())
    prompt, greedy = list(range(5, 25)), GenerationConfig(max_new_tokens=2, do_sample=False)
    with Engine(models.build("llama"), CacheConfig(num_blocks=32, block_size=4)) as engine:
        given: list[Any] = [{"tag": 1}, {"tag": 2}, {"tag": 1}, None]
        outputs = [engine.generate([prompt], greedy, inputs=each)[0] for each in given]
        assert [each.metrics.num_cached_tokens for each in outputs] == [0, 0, 16, 0]
        with pytest.raises(ValueError, match="inputs has 'other': LlamaForCausalLM takes no such inputs"):
            engine.add_request(prompt, greedy, inputs={"tag": 1, "other": 2})
