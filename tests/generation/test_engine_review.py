"""The engine's callers: abandoned and concurrent readers, callbacks that call the engine, interrupts."""

from __future__ import annotations

import asyncio
import gc
from functools import partial

import pytest
import torch
from transformers import LogitsProcessorList

from hf_paged import CacheConfig, Engine, SchedulerConfig
from tests import models
from tests.forwards import fail_forward
from tests.generation import solo
from tests.generation.solo import assert_idle, ended
from tests.waiting import Gate

config = partial(solo.config, "greedy", max_new_tokens=8)


def opened() -> Engine:
    return Engine(models.shared("llama"), CacheConfig(num_blocks=64))


@pytest.mark.parametrize("way", ["closed", "forgotten", "forgotten after one output"])
def test_a_stream_that_is_not_read_is_an_abort(way: str) -> None:
    with opened() as engine:
        stream = engine.stream(models.prompts(5, 9, 20), config())
        if way == "forgotten after one output":
            next(stream)
        if way == "closed":
            stream.close()
        else:
            del stream
            gc.collect()
            assert engine.step() == []
        assert_idle(engine)


def test_a_stream_that_is_given_up_frees_its_ids_and_its_places() -> None:
    first, second = models.prompts(5, 9)
    with Engine(
        models.shared("llama"), CacheConfig(num_blocks=64), SchedulerConfig(max_num_seqs=1, max_waiting=2)
    ) as e:
        for _ in range(3):
            for _ in e.stream([first, second], config(), request_id=["a", "b"]):
                break
        e.step()
        assert_idle(e)


def test_an_async_reader_cancelled_in_the_middle_of_a_step() -> None:
    with opened() as engine:
        gate = Gate(engine, 0)

        async def read() -> None:
            async for _ in engine.astream(models.prompts(5, 9), config(max_new_tokens=100)):
                pass

        async def main() -> None:
            task = asyncio.create_task(read())
            await asyncio.to_thread(gate.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.open()

        asyncio.run(main())
        assert_idle(engine)


def test_steps_done_for_others_keep_the_outputs_of_step() -> None:
    first, second = models.prompts(5, 9)
    with opened() as engine:
        engine.add_request(first, config(max_new_tokens=2), request_id="mine")
        engine.generate([second], config())
        (output,) = engine.step()
        assert (output.request_id, output.finished) == ("mine", True)
        engine.add_request(first, config(max_new_tokens=2), request_id="mine")
        engine.cache_prefix(torch.cat([second, second, second]))
        assert [o.request_id for o in engine.step()] == ["mine"]
        assert engine.step() == []


def test_closing_lets_go_of_pinned_prefixes_and_of_what_was_not_delivered() -> None:
    (prompt,) = models.prompts(40)
    with opened() as engine:
        assert engine.cache_prefix(prompt) == 32
        engine.add_request(prompt, config())
    assert not engine.has_unfinished_requests()
    assert engine.stats().blocks_used == 0


def test_a_prefix_that_cannot_be_computed_is_an_error() -> None:
    with opened() as engine:
        fail_forward(engine, OSError("no device"))
        with pytest.raises(RuntimeError, match="no device"):
            engine.cache_prefix(models.prompts(40)[0])
        assert_idle(engine)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_processor_may_abort(victim: str) -> None:
    prompts = models.prompts(5, 9)
    with opened() as engine:

        def abort(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            engine.abort(victim)
            return scores

        engine.add_request(prompts[0], config(), request_id="a", logits_processor=LogitsProcessorList([abort]))
        engine.add_request(prompts[1], config(do_sample=True), request_id="b")
        reasons = {name: output.outputs[0].finish_reason for name, output in ended(engine).items()}
        assert reasons.pop(victim) == "abort"
        assert set(reasons.values()) == {"length"}
        assert_idle(engine)


def test_an_interrupt_while_sampling_leaves_nobody_waiting() -> None:
    prompts = models.prompts(5, 9)

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with opened() as engine:
        engine.add_request(prompts[0], config(), request_id="neighbour")
        engine.add_request(prompts[1], config(), logits_processor=LogitsProcessorList([interrupt]))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        outputs = engine.step()
        assert len(outputs) == 2
        assert all(o.finished and o.error and "KeyboardInterrupt" in o.error for o in outputs)
        assert_idle(engine)


def test_ids_of_callers_and_of_the_engine() -> None:
    prompts = models.prompts(5, 9, 20)
    with opened() as engine:
        engine.add_request(prompts[0], config(), request_id="request-0")
        assert engine.add_request(prompts[1], config()) == "request-1"
        stream = engine.stream(prompts[:2], [config(max_new_tokens=1), config()])
        assert {o.request_id for o in engine.step()} <= {"request-0", "request-1"}  # those of streams are theirs alone
        ended = next(o.request_id for o in stream if o.finished)
        engine.add_request(prompts[2], config(max_new_tokens=1), request_id=ended)
        assert all(o.request_id != ended for o in stream)


def test_what_the_models_own_generation_config_says() -> None:
    model = models.build("llama")
    model.generation_config = config(do_sample=True, seed=5)
    (prompt,) = models.prompts(9)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        first, second = (engine.generate([prompt])[0].outputs[0].token_ids for _ in range(2))
        assert first == second
        model.generation_config.output_attentions = True
        with pytest.raises(ValueError, match="output_attentions=True"):
            engine.generate([prompt])
