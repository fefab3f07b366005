"""The engine against `generate` of each request alone: in any batch, under memory pressure, and after failures."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.cache import swap
from hf_paged.generation import prepare
from hf_paged.generation.requests.request import ending_tokens
from tests import encoder_models, models, streams
from tests.generation.solo import OPTIONS, Streamer, assert_as_solo, assert_idle, config, ended, requests
from tests.noted import note_calls
from tests.preempting import force_preempt
from tests.schedulings import in_both_schedulings

pytestmark = [pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")]


# -- the same answers ---


@in_both_schedulings
@pytest.mark.covering(1)
@pytest.mark.smoke_cases("llama")
def test_mixed_requests_equal_their_solo_runs(family: str) -> None:
    model = models.shared(family)
    wanted = requests(24)
    with Engine(model, CacheConfig(memory="64MiB")) as engine:
        outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted])
        assert_idle(engine)
        assert engine.stats().cow_copies > 0
    assert_as_solo(model, outputs, wanted)


@pytest.mark.parametrize(("family", "chance"), [("llama", 0.0), ("gemma3", 0.3)])
def test_swaps_beside_the_steps_change_nothing(family: str, chance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps run while blocks are still being swapped out, until a step needs these blocks."""
    device = streams.Device(is_eager=True, chance=chance)
    streams.install(monkeypatch, device)
    monkeypatch.setattr(swap, "STAGING_BYTES", 5000)  # a block or two a round
    test_a_small_pool_changes_nothing(family, "swap")
    test_groups_preempted_at_every_step_beside_others(family, "beams")
    assert device.waits > 20


@in_both_schedulings
@pytest.mark.smoke_cases("llama")
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.covering(1)
def test_a_small_pool_changes_nothing(family: str, preemption: Any) -> None:
    model = models.shared(family)
    wanted = requests(16, seed=1)
    scheduler = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, preemption=preemption)
    # Where every layer has a window of 8, four beams live in 12 blocks however long they are.
    cache = CacheConfig(num_blocks=14 if family == "mistral" else 26, block_size=4)
    with Engine(model, cache, scheduler) as engine:
        outputs = engine.generate([p for p, _ in wanted], [c for _, c in wanted])
        assert_idle(engine)
        stats = engine.stats()
    assert stats.preemptions_recompute + stats.preemptions_swap > 0
    assert (stats.preemptions_swap > 0) <= (preemption != "recompute")
    assert_as_solo(model, outputs, wanted)


@in_both_schedulings
def test_logprobs_are_those_of_the_model() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(12)
    options = config("processors", output_scores=True)
    with Engine(model) as engine:
        (output,) = engine.generate([prompt], options)
    (completion,) = output.outputs
    plain = model.generate(
        prompt[None], generation_config=options, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    raw = [float(torch.log_softmax(x[0], -1)[t]) for x, t in zip(plain.logits, completion.token_ids)]
    processed = [float(torch.log_softmax(x[0], -1)[t]) for x, t in zip(plain.scores, completion.token_ids)]
    assert completion.logprobs == pytest.approx(raw, abs=1e-3)
    assert completion.processed_logprobs == pytest.approx(processed, abs=1e-3)
    assert completion.cumulative_logprob == pytest.approx(sum(raw), abs=1e-3)


@in_both_schedulings
def test_processors_and_criteria_of_the_caller_see_the_rows_of_a_solo_run() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(6)

    def recorder() -> tuple[list[Any], Any, Any]:
        seen: list[Any] = []

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(("processor", ids.tolist()))
            scores[:, 50] += 3.0
            return scores

        def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            seen.append(("criterion", ids.tolist()))
            return ids[:, -1] == 50

        return seen, processor, criterion

    for name in ("greedy", "four samples", "beams"):
        options = config(name, eos_token_id=models.EOS)
        seen, processor, criterion = recorder()
        with Engine(model) as engine:
            engine.add_request(*models.prompts(9, seed=7), config("greedy"))
            key = engine.add_request(prompt, options, logits_processor=[processor], stopping_criteria=[criterion])
            results = ended(engine)
        ours = list(seen)
        seen.clear()
        if hasattr(options, "seed"):
            torch.manual_seed(options.seed)
        plain = model.generate(
            prompt[None], generation_config=options, logits_processor=[processor], stopping_criteria=[criterion]
        )
        assert ours == seen
        first = results[key].outputs[0].token_ids
        assert plain[0, len(prompt) :].tolist()[: len(first)] == first


def test_stop_strings_are_looked_for_after_tokens_that_may_end_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = models.shared("llama"), models.tokenizer()
    (prompt,) = models.prompts(8)
    tokens = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, 8:]
    options = config("greedy", max_new_tokens=12, stop_strings=[tokenizer.decode(tokens[:7])[-3:]])
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=options.stop_strings)
    endings = ending_tokens(criterion)
    assert endings is not None and int(tokens[6]) in endings
    for _ in range(300):
        ids = torch.randint(0, len(tokenizer) + 3, (1, random.randint(1, 9)))
        assert int(ids[0, -1]) in endings or not criterion(ids, None)
    asked = note_calls(
        monkeypatch, StopStringCriteria, "__call__", lambda _, input_ids, *__, **___: int(input_ids[0, -1])
    )
    plain = model.generate(prompt[None], generation_config=options, tokenizer=tokenizer)[0, 8:].tolist()
    assert asked == plain
    asked.clear()
    with Engine(model, tokenizer=tokenizer) as engine:
        (output,) = engine.generate([prompt], options)
    assert output.outputs[0].token_ids == plain
    assert asked == [token for token in plain if token in endings] != plain


def test_requests_with_the_same_stop_strings_share_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers works through the whole vocabulary for each."""
    model, tokenizer = models.shared("llama"), models.tokenizer.__wrapped__()  # which gets a token
    prompts = models.prompts(8, 5, 11)
    texts = [tokenizer.decode(model.generate(p[None], max_new_tokens=9, do_sample=False)[0, len(p) :]) for p in prompts]
    stops = [text[4:6] for text in texts]
    wanted = [config("greedy", stop_strings=stops), config("sample", stop_strings=stops[:]), config("greedy")]
    mine = StopStringCriteria(tokenizer, [stops[1]])
    plain = [
        model.generate(p[None], generation_config=c, tokenizer=tokenizer) for p, c in zip(prompts[::2], wanted[::2])
    ]
    made = note_calls(monkeypatch, StopStringCriteria, "__init__", lambda self, **kwargs: kwargs["stop_strings"])
    with Engine(model, tokenizer=tokenizer) as engine:
        outputs = engine.generate(prompts[::2], wanted[::2])
        assert [o.outputs[0].token_ids for o in outputs] == [
            row[0, len(p) :].tolist() for p, row in zip(prompts[::2], plain)
        ]
        engine.generate(prompts, wanted[1])
        assert made == [stops]
        engine.generate(prompts, config("greedy", stop_strings=stops[0]))
        engine.add_request(prompts[0], wanted[0], stopping_criteria=[mine])  # which transformers prefers
        ended(engine)
        assert made[:2] == [stops, stops[0]]
        tokenizer.add_tokens(["a token that is new"])
        del made[:]
        engine.generate(prompts, wanted[0])
        assert made == [stops]
        for n in range(20):
            engine.generate(prompts[:1], config("greedy", max_new_tokens=1, stop_strings=stops[0] * (n + 1)))
        assert len(prepare.STOP_STRINGS._made) <= 16


def test_stop_strings_are_kept_by_device() -> None:
    kept, tokenizer = prepare.StopStrings(), models.tokenizer()
    cpu, other = (kept.criterion(tokenizer, "ab", torch.device(name)) for name in ("cpu", "meta"))
    assert cpu is not other  # each moves its table to the device of its calls
    assert kept.criterion(tokenizer, "ab", torch.device("cpu")) is cpu


def test_finish_reasons_and_metrics() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(8)
    tokens = model.generate(prompt[None], max_new_tokens=3, do_sample=False, eos_token_id=None)[0, 8:].tolist()
    with Engine(model) as engine:
        eos, length = engine.generate([prompt, prompt], [config("greedy", eos_token_id=tokens[1]), config("greedy")])
    assert eos.outputs[0].finish_reason == "eos"
    assert eos.outputs[0].token_ids == tokens[:2]
    assert length.outputs[0].finish_reason == "length"
    metrics = length.metrics
    assert metrics.first_token_time is not None and metrics.finish_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time


def test_samples_share_a_sequence_until_they_differ() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(20)
    with Engine(model) as engine:
        engine.add_request(prompt, config("cold samples", temperature=1e-6, num_return_sequences=8))
        engine.step()
        engine.step()
        stats = engine.stats()
        assert stats.blocks_shared == 0
        assert stats.blocks_used == 2  # 21 tokens, once
        assert stats.num_running == 1


# -- preemption, aborts, accidents ---


@in_both_schedulings
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if len(options) > 1])
@pytest.mark.covering(1)
def test_groups_preempted_at_every_step_beside_others(family: str, name: str) -> None:
    """The group is swapped out at every step, and loses all computed K/V at every ninth."""
    model = models.shared(family)
    (prompt,) = models.prompts(13, seed=9)
    others = requests(6, seed=10)
    options = config(name)
    finished = {}
    with Engine(model, CacheConfig(num_blocks=40, block_size=4), SchedulerConfig(max_num_batched_tokens=64)) as engine:
        for index, (other, other_options) in enumerate(others):
            engine.add_request(other, other_options, request_id=str(index))
        engine.add_request(prompt, options, request_id="it", priority=-1)
        for step in itertools.count():
            force_preempt(engine._scheduler, "it", "swap" if step % 9 else "recompute")
            finished.update({o.request_id: o for o in engine.step() if o.finished})
            if not engine.has_unfinished_requests():
                break
            assert step < 1000
        assert_idle(engine)
        assert engine.stats().preemptions_swap + engine.stats().preemptions_recompute >= 2
    assert_as_solo(model, [finished["it"]], [(prompt, options)])
    assert_as_solo(model, [finished[str(i)] for i in range(6)], others)


@pytest.mark.parametrize(("move", "error"), [("swap_out", MemoryError), ("swap_in", KeyboardInterrupt)])
def test_a_swap_that_fails_is_an_error_of_all_that_have_blocks(
    move: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that were being swapped out fail too, because their K/V is lost; a waiting request is computed."""
    model = models.shared("llama")
    prompts = models.prompts(30, 25, 28, 20)
    options = config("greedy", max_new_tokens=20, eos_token_id=models.VOCAB)
    done = getattr(swap.HostPool, move)
    failed = []

    def fails_once(self: swap.HostPool, copies: list[tuple[int, int]]) -> None:
        if copies and not failed:
            failed.append(copies)
            raise error
        done(self, copies)

    scheduler = SchedulerConfig(max_num_seqs=3, preemption="swap", prefix_caching=False)
    with Engine(model, CacheConfig(num_blocks=28, block_size=4), scheduler) as engine:
        monkeypatch.setattr(swap.HostPool, move, fails_once)
        keys = [engine.add_request(prompt, options) for prompt in prompts]
        outputs = {}
        while engine.has_unfinished_requests():
            try:
                outputs.update({o.request_id: o for o in engine.step()})
            except KeyboardInterrupt:
                engine.check_integrity()
        assert_idle(engine)
    assert failed
    errors = [outputs[key].error for key in keys]
    assert sum(e is not None for e in errors) >= 2
    assert all(e is None or e.startswith(f"moving blocks failed: {error.__name__}") for e in errors)
    right = [(outputs[key], (prompt, options)) for key, prompt in zip(keys, prompts) if outputs[key].error is None]
    assert right
    assert_as_solo(model, [output for output, _ in right], [wanted for _, wanted in right])


@in_both_schedulings
def test_a_forward_that_raises_fails_the_requests_of_its_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    prompts = models.prompts(5, 9)
    with Engine(model, CacheConfig(num_blocks=64, block_size=4)) as engine:
        engine.generate([prompts[0]], config("greedy"))
        real = model.forward
        engine.add_request(prompts[0], config("beams"), request_id="beams")
        engine.step()

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("device lost")

        monkeypatch.setattr(model, "forward", broken)
        (output,) = engine.step()
        assert output.finished and output.error is not None and "device lost" in output.error
        assert output.outputs[0].finish_reason == "error"
        monkeypatch.setattr(model, "forward", real)
        assert_idle(engine)
        assert_as_solo(model, engine.generate([prompts[1]], config("beams")), [(prompts[1], config("beams"))])


@in_both_schedulings
def test_logits_that_are_nan_fail_their_request_only() -> None:
    model = models.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = float("nan")
    good, bad = models.prompts(7)[0].clamp(max=94), torch.tensor([5, 95, 7])
    with Engine(model) as engine:
        with pytest.raises(hf_paged.EngineError, match=r"1 of 2 requests failed.*prompt 2.*NaN") as caught:
            engine.generate([good, bad], config("greedy", suppress_tokens=[95]))
        outputs = caught.value.outputs
        assert_idle(engine)
    assert outputs[0].error is None
    assert "NaN" in str(outputs[1].error)


def test_unsupported_models_and_a_closed_engine() -> None:
    hooked = copy.deepcopy(encoder_models.model("bart"))
    hooked.model.decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"with its own loop.*hook"):
        Engine(hooked)
    engine = Engine(models.shared("llama"))
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request([5])


@in_both_schedulings
@pytest.mark.smoke
def test_a_cached_prefix_is_not_computed_again() -> None:
    model = models.shared("llama")
    system, *tails = models.prompts(32, 5, 9, 7)
    prompts = [torch.cat([system, tail]) for tail in tails]
    with Engine(model, CacheConfig(num_blocks=64, block_size=8)) as engine:
        assert engine.cache_prefix(system) == 32
        assert engine.stats().blocks_used == 4
        outputs = engine.generate(prompts, config("greedy"))
        stats = engine.stats()
        assert stats.prefix_cache_hit_tokens == 3 * 32
        assert stats.prefix_cache_hit_rate > 0.5
        assert [output.metrics.num_cached_tokens for output in outputs] == [32, 32, 32]
        assert stats.blocks_used == 4
        # Another salt shares nothing.
        key = engine.add_request(prompts[0], config("greedy"), cache_salt="tenant")
        last = ended(engine)
        assert engine.stats().prefix_cache_hit_tokens == 3 * 32
        assert last[key].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        assert engine.release_prefix(system)
        assert not engine.release_prefix(system)
        assert_idle(engine)
        engine.clear_prefix_cache()
        assert engine.stats().blocks_cached == 0
    assert_as_solo(model, outputs, [(p, config("greedy")) for p in prompts])


def test_memory_is_sized_as_asked() -> None:
    model = models.shared("llama")
    per_block = 2 * 2 * 16 * 2 * 8 * 4  # layers, K and V, block_size, KV heads, head_dim, fp32
    with Engine(model, CacheConfig(memory="1MiB")) as engine:
        assert engine.stats().num_blocks == 2**20 // per_block
        assert engine.stats().kv_bytes_reserved == engine.stats().num_blocks * per_block
    with Engine(model, CacheConfig(memory_fraction=0.001)) as engine:
        assert engine.stats().num_blocks > 100
    with pytest.raises(ValueError, match="no block"):
        Engine(model, CacheConfig(memory=100))
    with pytest.raises(ValueError, match="swap_memory"):
        Engine(model, CacheConfig(num_blocks=4, swap_memory=0), SchedulerConfig(preemption="swap"))


# -- callers ---


@in_both_schedulings
@pytest.mark.smoke
def test_streams() -> None:
    model = models.shared("llama")
    wanted = requests(6, seed=5)
    with Engine(model) as engine:
        grown: dict[str, list[int]] = {}
        final = []
        for output in engine.stream([p for p, _ in wanted], [c for _, c in wanted]):
            first = output.outputs[0].token_ids if output.outputs else []
            before = grown.get(output.request_id, [])
            assert first[: len(before)] == before
            grown[output.request_id] = first
            if output.finished:
                final.append(output)
        final.sort(key=lambda output: int(output.request_id.split("-")[1]))
        assert_as_solo(model, final, wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["greedy", "greedy with eos", "sample", "processors"])
def test_a_streamer_gets_what_generate_would_give_it(name: str) -> None:
    model = models.shared("llama")
    made = config(name, max_new_tokens=12)
    (prompt,) = models.prompts(9)
    expected, got = Streamer(), Streamer()
    if hasattr(made, "seed"):
        torch.manual_seed(made.seed)
    model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=made, streamer=expected
    )
    with Engine(model) as engine:
        for other, options in requests(4, seed=3):
            engine.add_request(other, options)
        engine.add_request(prompt, made, streamer=got)
        ended(engine)
    assert got.got == expected.got and got.ended == expected.ended == 1


def test_streamers_that_fail_are_aborted_or_cannot_be() -> None:
    model = models.shared("llama")
    made = config("greedy", eos_token_id=models.VOCAB)
    first, second = models.prompts(9, 5)
    with Engine(model) as engine:
        failing, aborted, fine = Streamer(fails_at=3), Streamer(), Streamer()
        keys = [engine.add_request(first, made, streamer=s) for s in (failing, aborted, fine)]
        outputs = {}
        for step in range(20):
            if step == 4:
                engine.abort(keys[1])
            outputs |= {o.request_id: o for o in engine.step()}
        reasons = [outputs[key].outputs[0].finish_reason for key in keys]
        assert reasons == ["error", "abort", "length"]
        assert outputs[keys[0]].error == "the streamer failed: OSError: nobody listens"
        assert (failing.ended, aborted.ended, fine.ended) == (0, 1, 1)
        assert [len(s.got) for s in (failing, aborted, fine)] == [3, 5, 11]
        for name in ("beams", "beams, early", "four samples"):
            with pytest.raises(ValueError, match="Streamer follows one sequence"):
                engine.add_request(second, config(name), streamer=Streamer())
        with pytest.raises(OSError, match="nobody listens"):
            engine.add_request(second, made, streamer=Streamer(fails_at=0))
        assert not engine.has_unfinished_requests()
        assert_idle(engine)


@in_both_schedulings
@pytest.mark.smoke
def test_threads() -> None:
    model = models.shared("llama")
    wanted = requests(12, seed=7)
    results: dict[int, list[hf_paged.RequestOutput]] = {}
    with Engine(model) as engine:

        def work(index: int) -> None:
            mine = wanted[index::3]
            results[index] = engine.generate([p for p, _ in mine], [c for _, c in mine], progress=False)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_idle(engine)
    for index in range(3):
        assert_as_solo(model, results[index], wanted[index::3])


def test_the_model_is_left_as_it_was() -> None:
    from conftest import state_of

    model = models.build("llama")
    before = state_of(model)
    two = [Engine(model), Engine(model)]
    for engine in two:
        engine.generate(models.prompts(5, 9), config("beams"))
    assert state_of(model) == before
    for engine in two:
        engine.close()
    assert state_of(model) == before


def test_a_module_that_keeps_what_it_computes_trains_after_a_step() -> None:
    """Tensors of an engine's step are none of inference mode where a module of a user's class might keep them."""

    class Scale(torch.nn.Module):
        kept: torch.Tensor | None = None

        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kept is None or len(self.kept) < x.shape[1]:  # as caches of masks or frequencies grow
                self.kept = torch.full((x.shape[1], 1), 1.5) * 2
            return self.norm(x) * self.kept[: x.shape[1]]

    model = models.build("llama")
    model.model.norm = Scale(model.model.norm)
    with Engine(model, CacheConfig(memory="8MiB")) as engine:
        engine.generate([[*range(5, 70)]], GenerationConfig(max_new_tokens=2))
    assert len(model.model.norm.kept) == 65
    ids = torch.tensor([[5, 6, 7, 8]])
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
