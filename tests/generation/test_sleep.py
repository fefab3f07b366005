"""`Engine.sleep` gives K/V memory back, `wake` goes on with the requests."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from tests import models

CONFIG = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
PROMPTS = [prompt.tolist() for prompt in models.prompts(5, 30, 17)]


def rest(engine: Engine) -> dict[str, list[int]]:
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
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
        references = [tensor for layer in engine._memory.pool.layers.values() for tensor in layer]
        storages = [tensor.untyped_storage() for tensor in references]
        engine.sleep()
        assert engine.stats().kv_bytes_reserved == 0 and not engine._memory.pool.layers
        del references, storages
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
