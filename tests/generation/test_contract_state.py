"""Around the call: spelling, the model afterwards, other threads, repeated calls; uninstall."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import hf_paged
from tests import conftest, models
from tests.generation.test_contract_processors import EVERY, LENGTHS, Compare, few
from tests.generation.test_contract_processors import MODES as EVERY_MODE
from tests.implementations import compute_by
from tests.versions.marks import since

MODES = {name: EVERY_MODE[name] for name in EVERY}


def _inputs(model: Any) -> dict[str, Any]:
    inputs = models.batch(*LENGTHS)
    return {**inputs, "eos_token_id": models.ending(model, inputs), "pad_token_id": models.PAD, "max_new_tokens": 9}


# -- spelling ----------------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("mode", MODES)
def test_generation_config_spelling(family: str, mode: str) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    config = GenerationConfig(**MODES[mode], max_new_tokens=9, pad_token_id=0, eos_token_id=models.EOS)
    torch.manual_seed(3)
    plain = model.generate(**inputs, generation_config=config)
    config.cache_implementation = "paged"
    for call in (
        lambda: model.generate(**inputs, generation_config=config),
        lambda: model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"]),
    ):
        torch.manual_seed(3)
        with hf_paged.record_calls() as records:
            paged = call()
        assert torch.equal(paged, plain)
        assert len(records) == 1 and records[0].route == "packed"
    assert config.cache_implementation == "paged", "the caller's config is left alone"


def test_model_generation_config_defaults() -> None:
    model, inputs = models.build("llama"), models.batch(*LENGTHS)
    defaults = {"num_beams": 2, "num_return_sequences": 2, "repetition_penalty": 1.7, "max_new_tokens": 7}
    model.generation_config.update(**defaults, do_sample=False)
    plain = model.generate(**inputs)
    assert torch.equal(model.generate(**inputs, cache_implementation="paged"), plain)
    model.generation_config.cache_implementation = "paged"
    with hf_paged.record_calls() as records:
        assert torch.equal(model.generate(**inputs), plain)
        assert len(records) == 1
        # An explicit other cache wins over the default.
        assert torch.equal(model.generate(**inputs, cache_implementation="dynamic"), plain)
        assert len(records) == 1


def test_custom_generate_from_a_folder(tmp_path: Path) -> None:
    """Code named by a string gets all arguments unchanged, the cache implementation included."""
    folder = tmp_path / "custom_generate"
    folder.mkdir()
    (folder / "generate.py").write_text(
        "def generate(model, input_ids, cache_implementation=None, **kwargs):\n"
        "    assert cache_implementation == 'paged'\n"
        "    kwargs.pop('custom_generate', None)\n"
        "    return model.generate(input_ids, cache_implementation=cache_implementation, max_new_tokens=5)\n"
    )
    model, ids = models.shared("llama"), models.prompts(9)[0][None]
    plain = model.generate(ids, max_new_tokens=5)
    with hf_paged.record_calls() as records:
        paged = model.generate(
            input_ids=ids, custom_generate=str(tmp_path), trust_remote_code=True, cache_implementation="paged"
        )
    assert torch.equal(paged, plain)
    assert len(records) == 1


# -- the model afterwards ----------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("mode", MODES)
def test_training_mode_without_dropout(family: str, mode: str, paged_equals_plain: Compare) -> None:
    """Trainers generate in training mode, which the call must not change."""
    model = models.build(family, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, dropout=0.0, attention_dropout=0.0)
    model.train()
    paged_equals_plain(model, **_inputs(model), **MODES[mode])
    assert model.training


def test_training_mode_with_dropout_takes_the_batch_layout(paged_equals_plain: Compare) -> None:
    """With dropout on, the random state decides: only the same layout gives the same text."""
    model = models.build("llama", attention_dropout=0.1)
    model.train()
    paged_equals_plain(
        model, **models.batch(9, 9), max_new_tokens=6, do_sample=False, eos_token_id=None, route="hf_loop"
    )


def test_gradients_are_left_alone(paged_equals_plain: Compare) -> None:
    model = models.build("llama")
    ids = models.prompts(9)[0][None]
    model(ids, labels=ids).loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    paged_equals_plain(model, ids, max_new_tokens=5, do_sample=False)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))
    model(ids, labels=ids).loss.backward()


@few
def test_ordinary_generate_is_bit_for_bit_what_it_was(family: str) -> None:
    model, inputs = models.shared(family), _inputs(models.shared(family))
    options = {**inputs, "return_dict_in_generate": True, "output_logits": True, "num_beams": 2, "do_sample": False}
    hf_paged.uninstall()
    try:
        expected = model.generate(**options)
    finally:
        hf_paged.install()
    for _ in range(2):
        actual = model.generate(**options)
        assert torch.equal(actual.sequences, expected.sequences)
        assert all(torch.equal(a, e) for a, e in zip(actual.logits, expected.logits))
        assert type(actual.past_key_values) is type(expected.past_key_values)
        model.generate(**inputs, cache_implementation="paged")


@few
def test_an_error_inside_the_call_leaves_nothing_behind(family: str) -> None:
    class Fails(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if input_ids.shape[1] > max(LENGTHS) + 3:
                raise RuntimeError("the processor broke")
            return scores

    model = models.shared(family)
    before = conftest.state_of(model)
    for mode in (*MODES.values(), {"prompt_lookup_num_tokens": 2}, {"return_dict_in_generate": True}):
        inputs = _inputs(model)
        if "prompt_lookup_num_tokens" in mode:
            inputs = {**inputs, "input_ids": inputs["input_ids"][1:2], "attention_mask": None}
        inputs["eos_token_id"] = None
        with pytest.raises(RuntimeError, match="the processor broke") as kept:
            model.generate(**inputs, **mode, logits_processor=[Fails()], cache_implementation="paged")
        assert conftest.state_of(model) == before
        assert conftest.blocks_in_use() == 0 and kept.tb, "a traceback that the caller keeps holds no blocks"


def test_second_call_reuses_the_memory() -> None:
    model, inputs = models.shared("llama"), _inputs(models.shared("llama"))
    with hf_paged.record_calls() as records:
        model.generate(**inputs, cache_implementation="paged")
        count = len(conftest._memories)
        for _ in range(3):
            model.generate(**inputs, cache_implementation="paged")
    assert len(conftest._memories) == count
    assert len({record.kv_bytes_reserved for record in records}) == 1
    assert len({record.peak_blocks_used for record in records}) == 1
    hf_paged.release_memory(model)
    model.generate(**inputs, cache_implementation="paged")
    assert len(conftest._memories) <= count + 1


@pytest.mark.quick_cases("[llama")
@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma3", "eager")])
def test_plain_generate_in_another_thread_meanwhile(family: str, attention: str) -> None:
    model = models.shared(family, attention)
    jobs = []
    for i in range(4):
        inputs = {**models.batch(5 + i, 19, 3, seed=i), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        jobs.append((inputs, model.generate(**inputs)))
    before = conftest.state_of(model)
    served: list[bool] = []
    start = threading.Barrier(4)

    def work(index: int, given: dict[str, Any]) -> None:
        inputs, expected = jobs[index]
        start.wait()
        for _ in range(4):
            served.append(torch.equal(model.generate(**inputs, **given), expected))

    paged: dict[str, Any] = {"cache_implementation": "paged"}
    threads = [threading.Thread(target=work, args=(i, paged if i % 2 else {})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served == [True] * 16
    assert conftest.state_of(model) == before
    assert conftest.blocks_in_use() == 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_in_training_mode(paged_equals_plain: Compare) -> None:
    """transformers then drops the cache; what plain generate makes of that, paged generate makes too."""
    model = models.build("llama")
    inputs = {**models.batch(9, 9), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    paged_equals_plain(model, **inputs)
    model.train()
    model.gradient_checkpointing_enable()
    plain = model.generate(**inputs)
    assert torch.equal(model.generate(**inputs, cache_implementation="paged"), plain)
    model.gradient_checkpointing_disable()
    paged_equals_plain(model, **inputs)


# -- models and wrappers with ideas of their own -----------------------------------------------------------------------


def test_a_model_that_prepares_its_inputs_otherwise(paged_equals_plain: Compare) -> None:
    """Changes that a subclass or a patch makes to a step's inputs reach the model."""
    import transformers

    def louder(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        embeds = model.get_input_embeddings()(inputs.pop("input_ids"))
        return {**inputs, "inputs_embeds": embeds * 1.5}

    class Louder(transformers.LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return louder(self, super().prepare_inputs_for_generation(*args, **kwargs))

    model = Louder(models.shared("llama").config).eval()
    model.load_state_dict(models.shared("llama").state_dict())
    inputs = {**models.batch(5, 19), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    text = paged_equals_plain(model, **inputs, route="hf_loop").paged
    assert text.tolist() != models.shared("llama").generate(**inputs).tolist()
    patched = models.build("llama")
    prepare = patched.prepare_inputs_for_generation
    patched.prepare_inputs_for_generation = lambda *args, **kwargs: louder(patched, prepare(*args, **kwargs))
    assert torch.equal(paged_equals_plain(patched, **inputs, route="hf_loop").paged, text)


@since("5.18", "plain generate forgets the prompt when the cache begins again")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_that_restarts_its_cache(scaled: bool, paged_equals_plain: Compare) -> None:
    """Phi-3 recomputes the prompt when it passes from short to long rotary factors."""
    import transformers

    sizes = {"vocab_size": models.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.6, "pad_token_id": 0}
    sizes |= {"max_position_embeddings": 96, "original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    config = transformers.Phi3Config(**sizes, **({"rope_parameters": rope} if scaled else {}))
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(config).eval()
    inputs = {**models.batch(5, 19), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    paged_equals_plain(model, **inputs, route="hf_loop" if scaled else "packed")


@pytest.mark.covering(1)
@pytest.mark.parametrize("impl", ["reference", "torch", "native"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"]
)
def test_calls_in_and_outside_inference_mode(impl: str, options: dict[str, Any], monkeypatch: Any) -> None:
    """Memory that a call keeps in one mode is used by the next call in the other mode."""
    compute_by(monkeypatch, impl)
    model, inputs = models.build("llama"), models.batch(*((20,) if "prompt_lookup_num_tokens" in options else (9, 20)))
    options = {**inputs, **options, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**options)
    for is_inference in (True, False, True, False):
        with torch.inference_mode(is_inference):
            assert model.generate(**options, cache_implementation="paged").equal(expected)


@pytest.mark.parametrize("impl", ["torch", "native"])
def test_autocast(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, attention gets K and V of different dtypes."""
    compute_by(monkeypatch, impl)
    model, inputs = models.build("llama"), models.batch(9, 5)
    options = {**inputs, "max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    options["output_logits"] = True
    plain = model.generate(**options).logits[0]
    model.generate(**options, cache_implementation="paged")  # examines the model, outside
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model.generate(**options).logits[0].float()
            with hf_paged.record_calls() as records:
                paged = model.generate(**options, cache_implementation="paged").logits[0].float()
            assert records[0].route == "packed"
            with hf_paged.Engine(model) as engine:
                (output,) = engine.generate([inputs["input_ids"][0]], GenerationConfig(max_new_tokens=4))
                assert output.error is None
        scale = plain.abs().max()
        assert 1e-4 < (paged - plain).abs().max() / scale < 0.05 and (paged - expected).abs().max() / scale < 0.05
        outside = model.generate(**options, cache_implementation="paged").logits[0]
        assert (outside - plain).abs().max() / scale < 1e-5
