"""transformers' continuous batching on our engine, against plain generate; how it is put in and taken out."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import hf_paged
from hf_paged import plugin
from tests import conftest, models
from tests.waiting import Gate, until

PAGE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    hf_paged.install_serving()
    yield
    hf_paged.uninstall_serving()
    assert conftest.blocks_in_use() == 0


def batching(**options: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{PAGE: 16, "num_blocks": 256, **options})


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 10, "do_sample": False, "pad_token_id": models.PAD, **options})


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [prompt.tolist() for prompt in models.prompts(*lengths, seed=seed)]


def plain(prompt: list[int], generation_config: GenerationConfig, **options: Any) -> list[list[int]]:
    """The tokens after the prompt of each row, cut after an EOS."""
    ids = torch.tensor([prompt])
    rows = models.shared("llama").generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=generation_config, **options
    )[:, len(prompt) :]
    ends = [(row == models.EOS).nonzero().flatten().tolist() for row in rows]
    return [row[: end[0] + 1 if end else None].tolist() for row, end in zip(rows, ends)]


def tokens_of(results: dict[str, Any]) -> list[list[int]]:
    assert all(result.error is None and result.status == RequestStatus.FINISHED for result in results.values())
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.4, "min_new_tokens": 4}, {"eos_token_id": list(range(3, 24))}, {"num_beams": 3}],
    ids=["processors", "eos", "beams"],
)
def test_generate_batch_equals_plain_generate(options: dict[str, Any]) -> None:
    model, given = models.shared("llama"), prompts(5, 23, 9, 40)
    named = {"max_new_tokens": 9}  # in place of the config's
    results = model.generate_batch(given, config(**options), batching(), **named)
    options |= named
    own = options.get("eos_token_id", [models.EOS])
    expected = []
    for prompt in given:
        row = plain(prompt, config(**options))[0]
        expected.append(row[: next((i + 1 for i, token in enumerate(row) if token in own), None)])
    assert tokens_of(results) == expected and list(results) == [f"req_{i}" for i in range(4)]
    assert [result.prompt_ids for result in results.values()] == given
    assert results["req_0"].logprobs == [] and results["req_0"].timestamps is None


def test_several_sequences_of_a_prompt() -> None:
    model, prompt = models.shared("llama"), prompts(9)[0]
    options = config(do_sample=True, temperature=1.5, num_return_sequences=3)
    torch.manual_seed(3)
    expected = plain(prompt, options)
    with model.continuous_batching_context_manager(options, continuous_batching_config=batching()) as manager:
        torch.manual_seed(3)
        manager.add_requests([prompt])
        results = {output.request_id: output for output in (manager.get_result(timeout=120) for _ in range(3))}
    names = ["req_0", "req_0__child#0", "req_0__child#1"]
    assert [results[name].generated_tokens for name in names] == expected


def test_sampling_repeats_by_the_seed_of_torch_and_by_its_own() -> None:
    model, given = models.shared("llama"), prompts(5, 9, 12)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tokens_of(model.generate_batch(given, config(do_sample=True, temperature=2.0), batching())))
    assert runs[0] == runs[1] != runs[2]
    own = [
        tokens_of(model.generate_batch(given, config(do_sample=True, temperature=2.0), batching(seed=5)))
        for _ in range(2)
    ]
    assert own[0] == own[1] and own[0] != runs[0]


def test_logprobs_and_times() -> None:
    model, prompt = models.shared("llama"), prompts(8)[0]
    options = config(do_sample=True, temperature=0.7, return_dict_in_generate=True, output_scores=True)
    result = model.generate_batch([prompt], options, batching(return_logprobs=True), record_timestamps=True)["req_0"]
    ids = torch.tensor([[*prompt, *result.generated_tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / 0.7
    expected = logits.log_softmax(-1).gather(1, torch.tensor(result.generated_tokens)[:, None]).flatten()
    torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert len(result.timestamps) == len(result.generated_tokens) and result.timestamps == sorted(result.timestamps)
    assert result.created_time <= result.lifespan[0] <= result.timestamps[0] <= result.lifespan[1]


def test_streaming_and_the_request_without_a_limit() -> None:
    model, given = models.shared("llama"), prompts(6, 9)
    options = GenerationConfig(do_sample=False, pad_token_id=models.PAD)
    with model.continuous_batching_context_manager(options, continuous_batching_config=batching()) as manager:
        stream = manager.add_request(given[0], streaming=True, max_new_tokens=8)
        seen = [output.generated_tokens for output in manager.request_id_iter(stream)]
        assert seen[-1] == plain(given[0], config(max_new_tokens=8))[0]
        assert all(after[: len(before)] == before for before, after in pairwise(seen)) and len(seen) > 1
        manager.add_request(given[1], request_id="endless", eos_token_id=-1)
        assert len(manager.get_result("endless", timeout=120).generated_tokens) == models.MAX_POSITIONS - 9


def test_a_wrong_prompt_fails_alone() -> None:
    model, good = models.shared("llama"), prompts(6)[0]
    bad = [[models.VOCAB + 5, 3], [5] * 500]
    results = model.generate_batch([bad[0], good, bad[1]], config(), batching())
    assert [result.status for result in results.values()] == [
        RequestStatus.FAILED,
        RequestStatus.FINISHED,
        RequestStatus.FAILED,
    ]
    assert "outside the vocabulary" in results["req_0"].error and "max_position_embeddings" in results["req_2"].error
    assert results["req_1"].generated_tokens == plain(good, config())[0]


@pytest.mark.parametrize(("options", "words"), [
    ({"num_return_sequences": 300, "do_sample": True}, "max_num_seqs"),
    ({"output_attentions": True}, "output_attentions=True"),
])  # fmt: skip
def test_a_wrong_config_is_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        models.shared("llama").generate_batch(prompts(4), config(**options), batching())


def test_cancel_hard_stop_and_an_error_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    manager = model.init_continuous_batching(config(max_new_tokens=120, eos_token_id=-1), batching())
    manager.start()
    results = iter(lambda: manager.get_result(timeout=120), None)
    gate = Gate(manager._engine, 1)
    manager.add_request([5, 6, 7], request_id="cancelled", streaming=True)
    assert next(results).request_id == "cancelled"
    gate.wait()
    manager.cancel_request("cancelled")
    gate.open()
    manager.add_request([5, 6], request_id="next", max_new_tokens=2)
    # The step in progress has one more token of the cancelled request.
    assert [(each.request_id, each.is_finished()) for each in (next(results), next(results))] == [
        ("cancelled", False),
        ("next", True),
    ]
    gate = Gate(manager._engine, 1)
    manager.add_request([5, 6, 7], request_id="stopped", streaming=True)
    assert next(results).request_id == "stopped"
    gate.wait()
    stopping = threading.Thread(target=manager.stop, kwargs={"hard_stop": True})
    stopping.start()
    until(manager._stop_wanted.is_set)
    gate.open()
    stopping.join(120)
    last = list(manager.output_router.output_queue.queue)[-1]
    assert last.request_id == "stopped" and last.status == RequestStatus.FAILED and "stopped before" in last.error
    manager.start()
    monkeypatch.setattr(hf_paged.Engine, "step", lambda self: 1 / 0)
    manager.add_request([5, 6, 7], request_id="failed")
    failed = next(output for output in results if output.request_id == "failed")
    assert failed.status == RequestStatus.FAILED and "ZeroDivisionError" in failed.error
    manager._generation_thread.join(120)
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="fatal error"):
        manager.add_request([5, 6, 7])
    manager.destroy()


def turn(manager: Any, engine: hf_paged.Engine) -> None:
    """One turn of the manager's thread, in this one."""
    manager._obey(engine)
    manager._deliver(engine.step())


def test_a_cancelled_requests_output_is_not_that_of_the_next_with_its_id() -> None:
    model, (old, new) = models.shared("llama"), prompts(6, 9)
    manager = model.init_continuous_batching(config(), batching())
    with hf_paged.Engine(model, {"num_blocks": 64}) as engine:
        manager.add_request(old, request_id="x")
        turn(manager, engine)
        manager.cancel_request("x")
        manager.add_request(new, request_id="x")
        while manager.output_router.output_queue.empty():
            turn(manager, engine)
    assert manager.get_result("x").generated_tokens == plain(new, config())[0]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_the_longest_request_fits_into_every_group_of_layers(num_beams: int) -> None:
    from hf_paged.bridges.cb_options import longest_request

    with hf_paged.Engine(models.shared("gemma3"), {"num_blocks": 6, "block_size": 8}) as engine:
        assert len(engine._memory.groups) >= 2
        longest = longest_request(engine, config(num_beams=num_beams))
        assert longest >= (6 - num_beams + 1) * 8  # full layers have what windows leave
        for length in (longest, longest + 1):  # K/V of the last token is not stored
            engine.add_request([5] * 4, config(max_new_tokens=None, max_length=length, num_beams=num_beams))
        with pytest.raises(ValueError, match=r"the cache has \d+"):
            engine.add_request([5] * 4, config(max_new_tokens=None, max_length=longest + 2, num_beams=num_beams))


def output(request_id: str = "x", **fields: Any) -> GenerationOutput:
    return GenerationOutput(request_id, **fields)


def test_a_closed_event_loop_ends_its_handler_only() -> None:
    manager = models.shared("llama").init_continuous_batching(config(), batching())
    router, got = manager.output_router, []

    async def register() -> None:
        manager.register_result_handler("x", got.append)

    asyncio.run(register())  # and closes the loop
    router.deliver(output())
    assert not got and not router.result_handlers
    router.deliver(output())
    assert manager.output_router.output_queue.get_nowait().request_id == "x"


def test_results_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler can be registered between the look for one and the delivery into the queue."""
    manager = models.shared("llama").init_continuous_batching(config(), batching())
    router, locked = manager.output_router, []
    monkeypatch.setattr(router.output_queue, "put", lambda result: locked.append(router._lock.locked()))
    router.deliver(output())
    assert locked == [True]


def test_a_handler_ends_with_its_request() -> None:
    manager, got = models.shared("llama").init_continuous_batching(config(), batching()), []

    async def main() -> None:
        manager.register_result_handler("x", got.append)
        for status in (RequestStatus.DECODING, RequestStatus.FINISHED, RequestStatus.DECODING):
            manager.output_router.deliver(output(status=status))
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [each.status for each in got] == [RequestStatus.DECODING, RequestStatus.FINISHED]


def test_values_that_look_alike_are_not_taken_for_equal() -> None:
    manager = models.shared("llama").init_continuous_batching(config(), batching())
    one = torch.arange(3000)
    other = one.clone()
    other[1500] = 0
    made = [manager._config(None, None, {"suppress_tokens": tokens}) for tokens in (one, other)]
    assert made[0].suppress_tokens is one and made[1].suppress_tokens is other


def test_a_manager_with_other_engine_options_is_a_new_one() -> None:
    model, given = models.build("llama"), batching()
    manager = model.init_continuous_batching(config(), given)
    model._cached_continuous_batching_manager = manager
    assert model.init_continuous_batching(config(), given) is manager
    given.num_blocks = 128
    assert model.init_continuous_batching(config(), given) is not manager


def test_stop_inside_a_pause_is_refused() -> None:
    manager = models.shared("llama").init_continuous_batching(config(), batching())
    manager.start()
    with manager.pause(), pytest.raises(RuntimeError, match=r"leave `with manager\.pause"):
        manager.stop(block=False)
    manager.stop()


def test_requests_that_are_queued_at_the_end_fail_with_its_error() -> None:
    manager = models.shared("llama").init_continuous_batching(GenerationConfig(), batching())
    manager.add_request([5, 6], request_id="late")
    manager.cancel_request("other")
    manager._end_all("ValueError: it")
    late = manager.output_router.output_queue.get_nowait()
    assert late.request_id == "late" and late.error == "the manager has ended: ValueError: it"


def test_a_handler_gets_what_came_before_it() -> None:
    async def main() -> list[Any]:
        model = models.shared("llama")
        manager = model.init_continuous_batching(config(), batching())
        manager.start()
        manager.add_request([5, 6, 7], request_id="early", streaming=True)
        manager.stop()  # after which all results are in the queue
        got: list[Any] = []
        manager.register_result_handler("early", got.append)
        while not got:
            await asyncio.sleep(0)
        return got

    (only,) = asyncio.run(main())
    assert only.is_finished() and only.generated_tokens == plain([5, 6, 7], config())[0]


def test_a_persistent_manager_takes_the_next_calls_config() -> None:
    model, given = models.build("llama"), prompts(40)
    model.generate_batch(given, config(), batching(), persistent_manager=True)
    manager = model._cached_continuous_batching_manager
    engine = manager._engine
    options = config(repetition_penalty=1.7)
    assert tokens_of(model.generate_batch(given, options, persistent_manager=True))[0] == plain(given[0], options)[0]
    assert model._cached_continuous_batching_manager is manager and manager._engine is engine
    assert engine.stats().prefix_cache_hit_rate > 0
    model.destroy_cached_continuous_batching_manager()
    assert manager._engine is None and not hasattr(model, "_cached_continuous_batching_manager")


def test_pause_lets_the_weights_change() -> None:
    model = models.build("llama")
    with model.continuous_batching_context_manager(config(), continuous_batching_config=batching()) as manager:
        with manager.pause(), torch.no_grad():
            model.lm_head.weight.mul_(-1)
        manager.add_request([5, 6, 7], request_id="it")
        got = manager.get_result("it", timeout=120).generated_tokens
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config())[0, 3:].tolist()
    assert got == expected


def test_a_full_queue_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.bridges import continuous_batching as ours

    monkeypatch.setattr(ours, "_PUT_SECONDS", 0.01)
    manager = models.shared("llama").init_continuous_batching(config(), batching(max_queue_size=1))
    manager.add_request([5, 6])  # the thread has not been started
    with pytest.raises(queue.Full):
        manager.add_request([5, 6])
    manager._generation_thread = threading.Thread()  # one that empties no queue
    manager.stop(block=False)


# -- ContinuousBatchingConfig ----------------------------------------------------------------------------------------


def test_what_the_engine_is_made_of() -> None:
    from hf_paged.bridges.cb_options import engine_options

    default = engine_options(ContinuousBatchingConfig(num_blocks=4))
    assert (default.cache_config.block_size, default.cache_config.num_blocks) == (16, 64)  # as many tokens
    options = engine_options(
        ContinuousBatchingConfig(
            **{PAGE: 32}, max_memory_percent=0.25, max_batch_tokens=300, max_requests_per_batch=7,
            allow_block_sharing=False, cpu_offload_space=0.5, use_cuda_graph=(False, False),
        ),
    )  # fmt: skip
    cache, scheduler = options.cache_config, options.scheduler_config
    assert (cache.block_size, cache.memory_fraction, cache.swap_bytes) == (32, 0.25, 2**29)
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.prefix_caching) == (300, 7, False)
    assert options.cuda_graphs is False


def test_what_is_refused_and_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    from hf_paged.bridges import cb_options

    with pytest.raises(ValueError, match="scheduler_type='prefill_first'"):
        cb_options.engine_options(ContinuousBatchingConfig(scheduler_type="prefill_first"))
    with caplog.at_level(logging.WARNING, "hf_paged"):
        cb_options.engine_options(ContinuousBatchingConfig(default_compile_level=1))
    assert "without effect there: default_compile_level" in caplog.text


def test_a_field_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.bridges import cb_options

    monkeypatch.setattr(cb_options, "_HONOURED", cb_options._HONOURED - {"seed"})
    with pytest.raises(ValueError, match="seed=1 is not known to this version"):
        cb_options.engine_options(ContinuousBatchingConfig(seed=1))


# -- installing ------------------------------------------------------------------------------------------------------


def test_it_is_taken_out_and_put_in() -> None:
    mixin = continuous_api.ContinuousMixin
    patched = vars(mixin)["init_continuous_batching"]
    hf_paged.install_serving()
    assert vars(mixin)["init_continuous_batching"] is patched and plugin.is_serving_installed()
    hf_paged.uninstall_serving()
    assert "hf_paged" not in vars(mixin)["init_continuous_batching"].__code__.co_filename
    hf_paged.uninstall_serving()
    assert not plugin.is_serving_installed()
    hf_paged.install_serving()
    assert vars(mixin)["init_continuous_batching"] is patched
    hf_paged.uninstall()  # everything
    assert not plugin.is_serving_installed()
    hf_paged.install()
    assert not plugin.is_serving_installed()


def test_an_unknown_transformers_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_paged.uninstall_serving()

    def init_continuous_batching(self: Any, options: Any) -> None: ...

    monkeypatch.setattr(continuous_api.ContinuousMixin, "init_continuous_batching", init_continuous_batching)
    with pytest.raises(RuntimeError, match=r"init_continuous_batching takes \(self.*nothing was patched"):
        hf_paged.install_serving()
    assert not plugin.is_serving_installed()
    assert vars(continuous_api.ContinuousMixin)["init_continuous_batching"] is init_continuous_batching


def test_two_threads_use_one_model() -> None:
    model, given = models.shared("llama"), prompts(5, 9)
    found: dict[int, Any] = {}

    def work(place: int) -> None:
        found[place] = tokens_of(model.generate_batch([given[place]], config(), batching()))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == [[plain(prompt, config())[0]] for prompt in given]
