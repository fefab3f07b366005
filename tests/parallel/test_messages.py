"""What the driver sends: carried out elsewhere, it leaves the same K/V; the driver's tokens are those of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hf_paged import CacheConfig, Engine, SchedulerConfig, UnsupportedModelError
from hf_paged.cache.block_manager import BlockCopy
from hf_paged.features import executors
from hf_paged.features.ranks import parallel
from hf_paged.features.ranks.message import Forward, StepMessage
from hf_paged.features.ranks.ranks import check_heads
from hf_paged.generation.engine import sizing
from hf_paged.kernels.metadata import StepArrays, step_arrays
from tests import models
from tests.forwards import runner_of
from tests.generation.solo import config, solo


class Line:
    """The ranks of this test: two engines in one process, of which the second carries out each message at once."""

    size, failure = 2, None

    def __init__(self, rank: int) -> None:
        self.rank, self.is_driver = rank, rank == 0
        self.obey: Callable[[Any], None] = lambda message: None
        self.num_bytes: list[int] = []

    def send(self, data: bytes) -> None:
        self.num_bytes.append(len(data))
        self.obey(bytearray(data))

    def smallest(self, call: Callable[[], int]) -> int:
        return call()

    def guard(self) -> Any:
        return nullcontext()

    def check(self) -> None: ...

    def check_same_messages(self) -> None: ...

    def when_failed(self, call: Callable[[str], Any]) -> None: ...

    def close(self, *, is_done: bool) -> None: ...


def pair(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], **options: Any) -> tuple[Engine, Engine, Line]:
    """A driver and its follower, each with a model of its own."""
    engines, lines = [], []
    for rank in (0, 1):
        lines.append(Line(rank))
        monkeypatch.setattr(sizing, "ranks_of", lambda model: lines[-1])
        engines.append(Engine(make(), **options))
    follower: Any = runner_of(engines[1])
    lines[0].obey = lambda message: follower._obey(message, None)
    assert engines[0].is_driver and not engines[1].is_driver
    return engines[0], engines[1], lines[0]


def compare(driver: Engine, follower: Engine) -> None:
    """Every computed token has the same K/V in both."""
    memory = driver._memory
    for seq_id in memory.manager.seq_ids:
        for index, layer in memory.pool.layers.items():
            table = memory.manager.block_table(seq_id, memory.group_index(index))
            held = [b for b in table if b >= 0]
            count = memory.manager.num_tokens(seq_id) - (len(table) - len(held)) * memory.block_size
            for mine, theirs in zip(layer.tensors, follower._memory.pool.layers[index].tensors):
                assert torch.equal(*(t[held].flatten(0, 1)[:count] for t in (mine, theirs)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_follower_has_the_same_kv(family: str, preemption: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, follower, _ = pair(
        monkeypatch,
        lambda: models.build(family),
        cache_config=CacheConfig(num_blocks=16, block_size=4, swap_memory="1MiB"),
        scheduler_config=SchedulerConfig(preemption=preemption, max_num_batched_tokens=16),
    )
    names = ["greedy", "four samples", "beams", "sample", "processors"]
    prompts = models.prompts(5, 9, 13, 17, 6)
    with follower, driver:
        configs = [config(name) for name in names]
        configs[0].prompt_lookup_num_tokens, configs[0].num_assistant_tokens_schedule = 3, "constant"
        ids = [driver.add_request(prompt, own) for prompt, own in zip(prompts, configs)]
        outputs = {}
        while driver.has_unfinished_requests():
            outputs |= {output.request_id: output for output in driver.step()}
            compare(driver, follower)
        last = driver.add_request(prompts[0], configs[0])  # waiting prompts may have left no room for its drafts
        while driver.has_unfinished_requests():
            outputs |= {output.request_id: output for output in driver.step()}
            compare(driver, follower)
        stats = driver.stats()
        assert stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute
        assert stats.cow_copies and (stats.drafted_tokens or family == "gemma3")  # whose texts repeat nothing
        driver.check_integrity()
    for request_id, prompt, name in zip([*ids, last], [*prompts, prompts[0]], [*names, names[0]]):
        got = [list(each.token_ids) for each in outputs[request_id].outputs]
        assert got == solo(models.shared(family), prompt, config(name))[0]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_adapters_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from tests.model.adapted import NAMES, delete, with_transformers  # needs PEFT itself

    def make() -> Any:
        torch.manual_seed(1)
        return with_transformers()

    driver, follower, _ = pair(monkeypatch, make)
    with follower, driver:
        for prompt, name in zip(models.prompts(5, 9, 13, 6), NAMES):
            driver.add_request(prompt, config("greedy"), adapter=name)
        while driver.has_unfinished_requests():
            driver.step()
            compare(driver, follower)
        driver.add_request(models.prompts(5)[0], config("greedy"), adapter="y")
        delete(follower.model, "y")
        with pytest.raises(RuntimeError, match="without adapter 'y'; load the same adapters"):
            runner_of(follower)._obey(*_next_message(driver))


def _next_message(driver: Engine) -> tuple[Any, None]:
    sent: list[Any] = []
    runner_of(driver)._ranks.obey = sent.append
    driver.step()
    return sent[0], None


def test_a_message_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, follower, line = pair(monkeypatch, lambda: models.build("llama"))
    with follower, driver:
        driver.generate(models.prompts(*[50] * 64), config("greedy", max_new_tokens=4))
    assert max(line.num_bytes[-3:]) < 16_384 // 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("wanted, adapters", [(None, None), ([0], b"adapters"), ([], b"")])
def test_a_message_is_plain_data(count: int, wanted: list[int] | None, adapters: bytes | None) -> None:
    """Its bytes make the same step elsewhere, with aligned arrays."""
    tables = [[[index, 7] for index in range(count)]] * 2
    rows = None if wanted is None else np.array(wanted, dtype=np.int64)
    tokens = np.arange(2 * count)[::2]  # not contiguous
    forward = Forward(tokens, step_arrays(tables, [20] * count, [1] * count, 16), rows, adapters)
    copies = [[BlockCopy(1, 2)], [BlockCopy(3, 4), BlockCopy(2**40, 6)], []]
    sent = StepMessage(*copies, [forward] * (count - 1), count)
    step = StepMessage.from_bytes(bytearray(sent.to_bytes()))
    assert (step.swap_out, step.swap_in, step.block_copies, step.weights_epoch) == (*copies, count)
    assert len(step.forwards) == count - 1
    for got in step.forwards:
        for name in (field.name for field in dataclasses.fields(StepArrays)):
            theirs, ours = getattr(got.step, name), getattr(forward.step, name)
            np.testing.assert_equal(theirs, ours)
            for array in theirs if isinstance(theirs, list) else [theirs] if isinstance(theirs, np.ndarray) else []:
                assert array.flags.aligned and array.flags.writeable
        np.testing.assert_equal((got.tokens, got.wanted, got.adapters), (forward.tokens, rows, adapters))
        assert got.tokens.dtype == forward.tokens.dtype


def test_what_a_follower_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, follower, _ = pair(monkeypatch, lambda: models.build("llama"))
    with follower, driver:
        for call in (follower.add_request, follower.cache_prefix, lambda ids: follower.generate([ids])):
            with pytest.raises(RuntimeError, match="rank 1 follows rank 0, which takes the requests; call run_worker"):
                call(models.prompts(5)[0])
        with pytest.raises(RuntimeError, match="is for ranks above 0"):
            driver.run_worker()


def test_what_ranks_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(models.shared("llama")) as alone:
        assert alone.is_driver
    monkeypatch.setattr(parallel, "num_ranks", lambda model: 2)
    monkeypatch.setattr(executors, "num_ranks", lambda model: 2)
    with pytest.raises(ValueError, match="async_scheduling=True: the model is on 2 ranks"):
        Engine(models.shared("llama"), None, SchedulerConfig(async_scheduling=True))
    with pytest.raises(ValueError, match="cuda_graphs=True: the model is on 2 ranks"):
        Engine(models.shared("llama"), cuda_graphs=True)
    with pytest.raises(ValueError, match="warmup=True: the model is on 2 ranks"):
        Engine(models.shared("llama"), warmup=True)


def test_heads_that_cannot_be_divided() -> None:
    class Divided:
        config = models.shared("llama").config
        tp_plan: ClassVar[dict[str, str]] = {"model.layers.*.self_attn.k_proj": "colwise"}

    check_heads(Divided, 2)
    with pytest.raises(UnsupportedModelError, match="2 K/V heads cannot be divided among 4 ranks; use"):
        check_heads(Divided, 4)
    Divided.tp_plan = {"model.layers.*.self_attn.k_proj": "colwise_gather_output"}
    check_heads(Divided, 4)


def test_a_pause_and_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, follower, line = pair(monkeypatch, lambda: models.build("llama"), prepack=True)
    prompt = models.prompts(20)[0]
    pauses: list[int] = []
    runner: Any = runner_of(follower)
    with follower, driver, torch.no_grad():
        driver.generate([prompt], config("greedy"))
        line.obey = lambda message: runner._obey(message, lambda: pauses.append(1))
        with driver.pause():
            for engine in (driver, follower):
                engine.model.model.layers[0].mlp.down_proj.weight.data.mul_(0.5)
        assert pauses == [1]
        driver.add_request(prompt, config("greedy"))
        while driver.has_unfinished_requests():
            driver.step()
            compare(driver, follower)


def test_other_modules_are_not_tried_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of the model would wait for the other ranks. Modules beside the attention are followed without one."""

    def try_model(model: Any) -> None:
        raise AssertionError("the other ranks do not try theirs")

    driver, follower, _ = pair(monkeypatch, lambda: models.build("llama", eos_token_id=None))
    prompt, other = models.prompts(9)[0], models.build("llama", seed=1)
    with follower, driver:
        for name in ("refuse_unsupported", "examine"):
            monkeypatch.setattr(f"hf_paged.generation.engine.binding.{name}", try_model)
        for each in (driver, follower):
            each.model.model.layers[0].mlp = other.model.layers[0].mlp
        (output,) = driver.generate([prompt], config("greedy"))
        assert list(output.outputs[0].token_ids) == solo(driver.model, prompt, config("greedy"))[0][0]
        driver.model.model.layers[0] = other.model.layers[0]
        (output,) = driver.generate([prompt], config("greedy"), raise_on_error=False)
        assert output.error is not None and "several ranks; make a new engine" in output.error
