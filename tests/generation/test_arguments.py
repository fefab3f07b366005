"""Invalid arguments of the engine: refused before anything is built, with a one-line error, the engine unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from tests import models
from tests.forwards import before_forwards
from tests.generation.solo import Streamer, assert_as_solo, assert_idle, config, ended

GREEDY = GenerationConfig(max_new_tokens=4, eos_token_id=None, pad_token_id=models.PAD)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(models.shared("llama"), CacheConfig(num_blocks=32, block_size=4)) as opened:
        yield opened


def with_seed(seed: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=4, do_sample=True, pad_token_id=models.PAD, seed=seed)


def changed(**options: Any) -> GenerationConfig:
    """A config whose options are set after construction, because the constructor would refuse some of them."""
    made = GenerationConfig(max_new_tokens=4, pad_token_id=models.PAD)
    for name, value in options.items():
        setattr(made, name, value)
    return made


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"priority": "high"}, "priority='high'.*finite number"), ({"priority": None}, "priority=None"),
    ({"priority": math.nan}, "priority=nan"), ({"priority": -math.inf}, "priority=-inf"),
    ({"priority": True}, "priority=True"), ({"priority": [1]}, r"priority=\[1\]"),
    ({"request_id": 7}, "request_id=7.*string"), ({"request_id": b"x"}, "request_id=b'x'"),
    ({"request_id": "there"}, "request_id 'there' is in use"), ({"adapter": 3}, "adapter=3 is not loaded"),
    ({"adapter": "sql"}, "adapter='sql' is not loaded"), ({"cache_salt": 3}, "cache_salt=3.*string"),
    ({"streamer": 3}, "streamer=3.*put and end"), ({"streamer": print}, "streamer=.*put and end"),
    ({"streamer": Streamer(), "generation_config": changed(num_beams=2)}, "Streamer follows one sequence"),
    ({"logits_processor": 3}, r"logits_processor=3: a list.*\[processor\]"),
    ({"logits_processor": lambda ids, scores: scores}, r"logits_processor=.*\[processor\]"),
    ({"logits_processor": [3]}, r"logits_processor=\[3\]"),
    ({"stopping_criteria": 3}, r"stopping_criteria=3: a list.*\[criterion\]"),
    ({"stopping_criteria": ["stop"]}, r"stopping_criteria=\['stop'\]"),
    ({"generation_config": {"max_new_tokens": 4}},
        r"generation_config=\{'max_new_tokens': 4\}.*GenerationConfig\(\*\*"),
    ({"generation_config": 4}, "generation_config=4 is a int"),
    ({"generation_config": "greedy"}, "generation_config='greedy'"),
    ({"generation_config": with_seed("abc")}, "seed='abc'"), ({"generation_config": with_seed(1.5)}, r"seed=1\.5"),
    ({"generation_config": with_seed(True)}, "seed=True"),
    ({"generation_config": with_seed(-(2**63) - 1)}, "seed=-9223372036854775809"),
    ({"generation_config": with_seed(2**70)}, r"seed=1180591620717411303424.*2\*\*64"),
    ({"generation_config": changed(num_beams=2.5)}, r"num_beams=2\.5: an integer"),
    ({"generation_config": changed(num_beams="2")}, "num_beams='2'"),
    ({"generation_config": changed(num_beams=0)}, "num_beams=0"),
    ({"generation_config": changed(num_beams=10**5000)}, "num_beams=|integer"),
    ({"generation_config": changed(num_return_sequences=True)}, "num_return_sequences=True"),
    ({"generation_config": changed(num_return_sequences=1_000_000, do_sample=True)},
        "num_return_sequences=1000000.*max_num_seqs=256"),
    ({"generation_config": changed(max_new_tokens=2.5)}, r"max_new_tokens=2\.5"),
    ({"generation_config": changed(max_new_tokens="many")}, "max_new_tokens='many'"),
    ({"generation_config": changed(max_new_tokens=-1)}, "max_new_tokens=-1"),
    ({"generation_config": changed(min_new_tokens="few")}, "min_new_tokens='few'"),
    ({"generation_config": changed(temperature="hot", do_sample=True)}, "temperature|option"),
    ({"generation_config": changed(top_k="all", do_sample=True)}, "top_k|option"),
    ({"generation_config": changed(repetition_penalty="much")}, "penalty"),
    ({"generation_config": changed(eos_token_id="end")}, "eos|option|token"),
    ({"generation_config": changed(stop_strings=["a"])}, r"stop_strings=\['a'\].*Engine\(model, tokenizer=tokenizer\)"),
    ({"generation_config": changed(use_cache=False)}, "use_cache=False"),
    ({"generation_config": changed(output_scores=True, num_beams=2)}, "output_scores=True.*beams"),
    ({"generation_config": changed(guidance_scale=1.8), "adapter": "x"}, r"guidance_scale=1\.8 with adapter='x'"),
    ({"generation_config": changed(max_new_tokens=500)}, "max_position_embeddings"),
    ({"generation_config": changed(num_beams=300)}, "max_num_seqs"),
    ({"generation_config": changed(output_attentions=True, return_dict_in_generate=True)}, "output_attentions"),
    ({"generation_config": changed(assistant_early_exit=1)}, "generate"),
    ({"prompt_ids": 5}, "prompt_ids=5: a list of token ids"), ({"prompt_ids": []}, "empty"),
    ({"prompt_ids": [5, 1000]}, "1000"), ({"prompt_ids": [5, -1]}, "-1"), ({"prompt_ids": [5, 1.5]}, r"1\.5"),
    ({"prompt_ids": "text"}, "text"), ({"prompt_ids": torch.tensor([[5, 6], [7, 8]])}, "one request"),
    ({"prompt_ids": [5] * 130}, "blocks"), ({"prompt_ids": {"input_ids": [5]}}, "prompt_ids is a dict.*input_ids"),
    ({"prompt_ids": [2**70]}, "outside the vocabulary"),
    ({"prompt_ids": [models.PAD, 5, 6]}, "begins with the padding token 0.*attention_mask"),
    ({"prompt_ids": torch.tensor([5, 6, models.PAD])}, "ends with the padding token 0.*attention_mask"),
    ({"attention_mask": [1, 1]}, "attention_mask=.*5 tokens"),
    ({"attention_mask": [1, 1, 0, 1, 1]}, "zeros between ones"), ({"attention_mask": [0] * 5}, "all zeros"),
    ({"attention_mask": [1, 1, 2, 1, 1]}, "ones and zeros"), ({"attention_mask": "11111"}, "ones and zeros"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:50] for _, message in WRONG])
def test_a_wrong_argument_is_named_and_changes_nothing(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    neighbour = engine.add_request([7, 8, 9], GREEDY, request_id="there")
    before, random = engine.stats(), torch.random.get_rng_state()
    with pytest.raises(ValueError, match=message) as caught:
        engine.add_request(**{"prompt_ids": [5, 6, 7, 8, 9], "generation_config": GREEDY, **arguments})
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value).strip() and len(str(caught.value)) < 400
    assert engine.stats() == before and torch.equal(torch.random.get_rng_state(), random)
    assert engine.abort(neighbour)
    engine.step()
    assert_idle(engine)


def test_a_number_that_torch_cannot_hold() -> None:
    with Engine(models.shared("llama")) as engine, pytest.raises(ValueError, match="cannot be used: RuntimeError"):
        engine.add_request([5, 6, 7], GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=1e19))


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    model = models.shared("llama")
    with Engine(model, CacheConfig(num_blocks=8, block_size=4)) as engine:
        with pytest.raises(
            ValueError, match=r"20 tokens and 20 new ones need 10 blocks of 4, but the cache has 8"
        ) as e:
            engine.add_request([5] * 20, config("greedy", max_new_tokens=20))
        assert "lower max_new_tokens to 13 or less" in str(e.value)
        outputs = engine.generate([[5] * 20], config("greedy", max_new_tokens=13, eos_token_id=models.VOCAB))
        assert len(outputs[0].outputs[0].token_ids) == 13
        with pytest.raises(ValueError, match=r"a prompt of 33 tokens.*has 8; shorten the prompt"):
            engine.add_request([5] * 33, config("greedy", max_new_tokens=1))
        assert_idle(engine)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("options", ["greedy", "beams", "four samples"])
@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.covering(1)
def test_what_is_taken_and_what_is_refused(family: str, options: str, block_size: int) -> None:
    """Without the check, a refused request does not complete; a greedy request that is accepted does."""
    from hf_paged.generation.engine import admission as module

    model, prompt = models.shared(family), models.prompts(9)[0]
    for new in (1, 14):
        made = config(options, max_new_tokens=new, eos_token_id=models.VOCAB)
        for num_blocks in range(1, 40):
            with Engine(model, CacheConfig(num_blocks=num_blocks, block_size=block_size)) as engine:
                try:
                    engine.add_request(prompt, made)
                except ValueError:
                    refused = True
                else:
                    refused = False
            if not refused:
                break
        for count, fits in ((num_blocks - 1, False), (num_blocks, True)):
            if not count or (fits and options != "greedy"):
                continue
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "check_fits", lambda *_: None)
                with Engine(model, CacheConfig(num_blocks=count, block_size=block_size)) as engine:
                    try:
                        (output,) = engine.generate([prompt], made, raise_on_error=False)
                    except ValueError:
                        assert not fits
                    else:
                        assert (output.error is None) == fits, (new, count, output.error)


# -- prompts ---


@pytest.mark.parametrize(("prompts", "message"), [
    ([5, 6, 7], r"prompts=\[5, 6, 7\] is a single prompt.*\[prompt\]"),
    (torch.tensor([5, 6, 7]), r"is a single prompt.*\[prompt\]"), (5, "prompts=5: a list of prompts"),
    ("text", "prompts='text' is text"), (["text"], "is text"), ({"input_ids": [[5]]}, "prompts is a dict.*input_ids"),
    ([], r"prompts=\[\]"), ({(5, 6)}, r"prompts=\{\(5, 6\)\} is a set, which has no order"),
    ([{5, 6}], r"prompt_ids=\{5, 6\} is a set, which has no order"),
    ([frozenset({5})], "is a frozenset, which has no order"),
    ([dict.fromkeys([5, 6]).keys()], "is a dict_keys, which has no order"), ([b"text"], "prompt_ids=b'text' is text"),
    ([[10**30]], f"token id {10**30} in prompt_ids is outside the vocabulary of {models.VOCAB}"),
    ([[5, -(10**5000)]], "token id <int> in prompt_ids is outside the vocabulary"),
    ([torch.zeros(3, dtype=torch.int64, device="meta")], "prompt_ids is on the device 'meta'.*no contents"),
    (torch.zeros(2, 3, dtype=torch.int64, device="meta"), "prompt_ids is on the device 'meta'.*no contents"),
    (torch.ones(1, 3, dtype=torch.uint64), "prompt_ids has dtype torch.uint64"),
])  # fmt: skip
def test_prompts_that_are_none(engine: Engine, prompts: Any, message: str) -> None:
    for enter in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=message):
            enter(prompts, GREEDY)
    assert_idle(engine)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_with_their_mask(engine: Engine, side: str) -> None:
    model, padded = models.shared("llama"), models.batch(3, 9, 6, side=side, padding=models.PAD)
    wanted = [(prompt, GREEDY) for prompt in models.prompts(3, 9, 6)]
    ids, mask = padded["input_ids"], padded["attention_mask"]
    assert_as_solo(model, engine.generate(ids, GREEDY, attention_mask=mask), wanted)
    assert_as_solo(model, engine.generate(list(ids), GREEDY, attention_mask=mask.tolist()), wanted)
    outputs = {o.request_id: o for o in engine.stream(ids, GREEDY, attention_mask=mask) if o.finished}
    assert_as_solo(model, list(outputs.values()), wanted)
    engine.add_request(ids[0], GREEDY, attention_mask=mask[0])
    assert_as_solo(model, [*ended(engine).values()], wanted[:1])
    with pytest.raises(ValueError, match="with the padding token 0"):
        engine.generate(ids, GREEDY)
    with pytest.raises(ValueError, match="attention_mask has 2 rows for 3 prompts"):
        engine.generate(ids, GREEDY, attention_mask=mask[:2])
    assert_idle(engine)


def test_a_padding_token_that_is_text(engine: Engine) -> None:
    """With a mask it is accepted anywhere; so it is without one if it is also an EOS token."""
    model, prompt = models.shared("llama"), torch.tensor([models.PAD, 5, 6])
    assert_as_solo(model, engine.generate([prompt], GREEDY, attention_mask=[[1, 1, 1]]), [(prompt, GREEDY)])
    other = models.build("llama")
    other.generation_config.pad_token_id = models.EOS
    ending = torch.tensor([models.EOS, 5, models.EOS])
    with Engine(other, CacheConfig(num_blocks=32, block_size=4)) as second:
        assert_as_solo(other, second.generate([ending], GREEDY), [(ending, GREEDY)])


# -- the engine itself ---


@pytest.mark.parametrize(("arguments", "message"), [
    ({"model": "gpt2"}, r"model='gpt2' is a name; write Engine\(AutoModelForCausalLM\.from_pretrained\('gpt2'\)\)"),
    ({"cache_config": {"max_new_tokens": 5}}, "cache_config=.*no field 'max_new_tokens'.*block_size"),
    ({"cache_config": {"num_block": 5}}, "did you mean 'num_blocks'"),
    ({"cache_config": {"num_blocks": -5}}, "num_blocks=-5"),
    ({"cache_config": 5}, "cache_config=5: give a hf_paged.CacheConfig or a dict"),
    ({"cache_config": SchedulerConfig()}, "cache_config=SchedulerConfig"),
    ({"scheduler_config": {"preemption": "kick"}}, "preemption='kick': use 'auto', 'recompute' or 'swap'"),
    ({"scheduler_config": CacheConfig()}, "scheduler_config=CacheConfig"), ({"tokenizer": "gpt2"}, "tokenizer='gpt2'"),
    ({"prepack": "yes"}, "prepack='yes'"), ({"cuda_graphs": 1}, "cuda_graphs=1"), ({"warmup": 1}, "warmup=1"),
    ({"warmup": True}, "warmup=True: the model is on cpu, .*leave it out"),
])  # fmt: skip
def test_arguments_of_the_engine(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(**{"model": models.shared("llama"), **arguments})


@pytest.mark.parametrize(("arguments", "message"), [
    ({"memory": "4GiB"}, r"memory='4GiB' is a field .* give cache_config=hf_paged.CacheConfig\(memory='4GiB'\)"),
    ({"max_num_seqs": 4}, r"give scheduler_config=hf_paged.SchedulerConfig\(max_num_seqs=4\)"),
    ({"dtype": "bf16"}, "Engine got an unexpected argument dtype='bf16'"),
])  # fmt: skip
def test_arguments_that_belong_elsewhere(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Engine(models.shared("llama"), **arguments)


@pytest.mark.filterwarnings("ignore:the K/V pool of:RuntimeWarning")
@pytest.mark.parametrize("fields", [{"num_blocks": 2**62}, {"memory": "9000000TiB"}])
def test_a_pool_that_cannot_be_allocated(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_blocks=\d+: a K/V pool of .* cannot be allocated; give the"):
        Engine(models.shared("llama"), fields)


def test_a_pool_smaller_than_the_forward_that_measures_it() -> None:
    model = models.shared("llama")
    with Engine(model, {"num_blocks": 1, "block_size": 1}) as engine:
        assert engine.stats().num_blocks == 1
        options = config("greedy", max_new_tokens=1)
        assert_as_solo(model, engine.generate([[5]], options), [(torch.tensor([5]), options)])
        assert_idle(engine)


def test_no_model() -> None:
    for model in (3, None, torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="a transformers model is needed"):
            Engine(model)


def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such token")


@pytest.mark.parametrize(("name", "width"), [("greedy", 1), ("beams", 3)])
def test_generate_raises_with_all_outputs_and_the_cause(name: str, width: int) -> None:
    model, prompts = models.shared("llama"), models.prompts(5, 9)
    alone = SchedulerConfig(max_num_seqs=width)  # one request after the other
    with Engine(model, CacheConfig(num_blocks=32, block_size=4), alone) as engine:

        def fails_for_the_second(output: Any) -> None:
            if any(seq.num_prompt_tokens == 9 for seq, _ in output.scheduled):
                raise OSError("no device")

        before_forwards(engine, fails_for_the_second)
        with pytest.raises(
            hf_paged.EngineError, match=r"1 of 2 requests failed.*prompt 2.*OSError: no device"
        ) as caught:
            engine.generate(prompts, config(name))
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.__traceback__ is not None
        done, failed = caught.value.outputs
        assert_as_solo(model, [done.raise_for_error()], [(prompts[0], config(name))])
        assert failed.exception is caught.value.__cause__
        assert failed.outputs[0].finish_reason == "error"
        with pytest.raises(hf_paged.EngineError, match="1 of 1"):
            failed.raise_for_error()
        outputs = engine.generate(prompts, config(name), raise_on_error=False)
        assert outputs[0].error is None and outputs[1].error == failed.error
        assert_idle(engine)


def test_beams_that_fail_have_outputs(engine: Engine) -> None:
    prompt = models.prompts(9)[0]
    engine.add_request(prompt, config("beams"), logits_processor=[broken])
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    assert [c.finish_reason for c in output.outputs][:1] == ["error"]
    assert isinstance(output.exception, KeyError)
    with Engine(models.shared("llama"), CacheConfig(num_blocks=8, block_size=4)) as small:
        options = config("beams to the end", max_new_tokens=12, eos_token_id=models.VOCAB)
        (output,) = small.generate([prompt], options, raise_on_error=False)
        assert output.error is not None and "too small" in output.error
        assert [c.finish_reason for c in output.outputs] == ["error"] * len(output.outputs) and output.outputs
        assert all(len(c.token_ids) >= 1 for c in output.outputs)
