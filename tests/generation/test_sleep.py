"""`Engine.sleep` gives K/V memory back, `wake` goes on with the requests."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from tests import models
from tests.forwards import runner_of
from tests.generation.solo import ended

CONFIG = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
PROMPTS = [prompt.tolist() for prompt in models.prompts(5, 30, 17)]


def rest(engine: Engine) -> dict[str, list[int]]:
    return {name: output.outputs[0].token_ids for name, output in ended(engine).items()}


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)], ids=str)
def test_requests_go_on_after_a_sleep(family: str, dtype: torch.dtype) -> None:
    model = models.build(family).to(dtype)
    with Engine(model, CacheConfig(num_blocks=64), SchedulerConfig()) as engine:
        expected = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, CONFIG, progress=False)]
        ids = [engine.add_request(prompt, CONFIG) for prompt in PROMPTS]
        for _ in range(4):
            engine.step()
        reserved = engine.stats().kv_bytes_reserved
        engine.sleep()
        engine.sleep()
        assert engine.stats().kv_bytes_reserved == 0 < reserved
        late = engine.add_request(PROMPTS[1], CONFIG)
        assert engine.abort(ids[2])
        engine.wake()
        engine.wake()
        assert engine.stats().kv_bytes_reserved == reserved
        found = rest(engine)
        assert [found[request_id] for request_id in (*ids[:2], late)] == [*expected[:2], expected[1]]
        assert engine.stats().blocks_used == 0


def test_memory_is_given_back() -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=models.VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    ).eval()
    with Engine(model, CacheConfig(memory="64MiB")) as engine:
        engine.generate(PROMPTS, CONFIG, progress=False)
        memory = [weakref.ref(tensor) for tensors in engine._memory.pool.by_device().values() for tensor in tensors]
        engine.sleep()
        assert engine.stats().kv_bytes_reserved == 0 and memory and all(tensor() is None for tensor in memory)
        engine.wake()
        assert engine.generate(PROMPTS, CONFIG, progress=False)


def test_steps_of_this_thread_are_refused_and_others_wait() -> None:
    with Engine(models.shared("llama")) as engine:
        expected = engine.generate(PROMPTS[:1], CONFIG, progress=False)[0].outputs[0].token_ids
        engine.sleep()
        with pytest.raises(RuntimeError, match=r"wake\(\)"):
            engine.generate(PROMPTS, CONFIG, progress=False)
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.append(engine.generate(PROMPTS[:1], CONFIG, progress=False)), daemon=True
        )
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not found
        waker = threading.Thread(target=engine.wake)
        waker.start()
        thread.join(60)
        assert found[0][0].outputs[0].token_ids == expected


def test_weights_may_change_while_it_sleeps() -> None:
    model = models.build("llama")
    with Engine(model) as engine:
        engine.generate(PROMPTS, CONFIG, progress=False)
        engine.sleep()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        engine.wake()
        found = engine.generate(PROMPTS, CONFIG, progress=False)
    for prompt, output in zip(PROMPTS, found):
        ids = torch.tensor([prompt])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=CONFIG)
        assert output.outputs[0].token_ids == plain[0, len(prompt) :].tolist()


def test_an_engine_may_be_closed_while_it_sleeps() -> None:
    engine = Engine(models.shared("llama"))
    engine.add_request(PROMPTS[0], CONFIG)
    engine.sleep()
    engine.close()
    with pytest.raises(RuntimeError):
        engine.wake()


def test_memory_for_swapped_blocks_goes_too() -> None:
    cache = CacheConfig(num_blocks=12, block_size=4, swap_memory="64MiB")
    with Engine(models.shared("llama"), cache, SchedulerConfig(preemption="swap")) as engine:
        outputs = engine.generate(PROMPTS[:1] * 4, CONFIG, progress=False)
        assert engine.stats().preemptions_swap
        host = weakref.ref(runner_of(engine)._host_pool)
        engine.sleep()
        assert host() is None
        engine.wake()
        again = engine.generate(PROMPTS[:1] * 4, CONFIG, progress=False)
        assert [output.outputs[0].token_ids for output in again] == [o.outputs[0].token_ids for o in outputs]


def test_the_thread_that_let_it_sleep_may_have_ended() -> None:
    """Another thread may have its number."""
    with Engine(models.shared("llama"), CacheConfig(num_blocks=64)) as engine:
        expected = engine.generate(PROMPTS, CONFIG, progress=False)
        for _ in range(3):
            sleeper = threading.Thread(target=engine.sleep)
            sleeper.start()
            sleeper.join()
            found: list[Any] = []
            worker = threading.Thread(target=lambda f=found: f.extend(engine.generate(PROMPTS, CONFIG, progress=False)))
            worker.start()
            engine.wake()
            worker.join(60)
            assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


def test_an_interrupted_wake_is_made_good_by_the_next() -> None:
    """And an interrupted pause is none."""

    class Interrupting(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            raise KeyboardInterrupt

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key)
            raise KeyboardInterrupt

    with Engine(models.shared("llama"), CacheConfig(num_blocks=64)) as engine:
        expected = engine.generate(PROMPTS, CONFIG, progress=False)
        engine._pauses = Interrupting()
        with pytest.raises(KeyboardInterrupt), engine.pause():
            raise AssertionError
        assert not engine._pauses
        engine._pauses = {}
        engine.sleep()
        engine._pauses = Interrupting(engine._pauses)
        with pytest.raises(KeyboardInterrupt):
            engine.wake()
        engine._pauses = {**engine._pauses}
        engine.wake()
        engine.sleep()
        assert engine.stats().kv_bytes_reserved == 0
        engine.wake()
        again = engine.generate(PROMPTS, CONFIG, progress=False)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
