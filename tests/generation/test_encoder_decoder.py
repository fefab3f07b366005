"""Paged `generate` of encoder-decoder models: everything that plain `generate` returns, over blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import BaseModelOutput

import hf_paged
from hf_paged.features.encoder_decoder.encoder_decoder import EncoderDecoderModel
from hf_paged.generation import paged_generate
from hf_paged.integration.names import CACHE
from hf_paged.model.weights import Weights
from tests import encoder_models, models
from tests.architectures.tiny import tiny_model
from tests.encoder_models import MODES, whisper
from tests.noted import note_calls


def both(name: str, route: str = "packed", **options: Any) -> tuple[Any, Any, hf_paged.CallRecord]:
    """The results of plain and of paged `generate`, after the same seed, and the record of the paged call."""
    model = encoder_models.model(name)
    given = {"max_new_tokens": 20, **encoder_models.inputs(name), **options}
    run = transformers.GenerationMixin.generate
    torch.manual_seed(3)
    plain = run(model, **copy.deepcopy(given))
    torch.manual_seed(3)
    with hf_paged.record_calls() as records:
        paged = run(model, **copy.deepcopy(given), cache_implementation="paged")
    assert [record.route for record in records] == [route], records[0].reason
    assert not blocks_in_use(model)
    return plain, paged, records[0]


def blocks_in_use(model: Any) -> int:
    return sum(memory.stats().blocks_used for memory in paged_generate._idle_pools(model))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", encoder_models.NAMES)
def test_tokens_are_those_of_plain_generate(name: str, mode: str) -> None:
    plain, paged, _ = both(name, **MODES[mode])
    assert torch.equal(plain, paged)
    assert len(plain.unique()) > 2


def test_a_decoder_with_an_attention_of_its_own_gets_gathered_keys_and_values() -> None:
    report = hf_paged.check(encoder_models.model("trocr"))
    assert not report.native and report.gathers and "code of its own" in report.reason
    assert {layer.mode for layer in report.layers} == {"dense view"} and "gathered" in str(report)


@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_states_that_a_decoder_writes_to(mode: str) -> None:
    """It adds positions to the encoder's states in every forward."""
    model = tiny_model("MoonshineStreamingForConditionalGeneration")
    model.generation_config.decoder_start_token_id = 1
    recordings = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    tokens = []
    for cache in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(3)
        with hf_paged.record_calls() as records:
            tokens.append(model.generate(input_values=recordings, max_new_tokens=9, **MODES[mode], **cache))
    assert torch.equal(*tokens) and records[0].route == "packed"


def test_a_tokenizer_is_no_input_of_layers() -> None:
    given = {"tokenizer": models.tokenizer(), "stop_strings": ["b"]}
    for own in (given, {"tokenizer": models.tokenizer()}):
        plain, paged, _ = both("t5", **own)
        assert torch.equal(plain, paged)


OPTIONS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "of the encoder": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 2, "suppress_tokens": [7, 8]},
    "length": {"max_new_tokens": None, "max_length": 9, "num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "warpers": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.4},
    "prompt": {"decoder_input_ids": torch.tensor([[2, 11, 12], [2, 13, 14], [2, 11, 12], [2, 15, 16]])},
    "eos": {"do_sample": True, "num_return_sequences": 2, "eos_token_id": list(range(2, 30))},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_options(name: str, options: str) -> None:
    plain, paged, _ = both(name, **OPTIONS[options])
    assert torch.equal(plain, paged)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["bart", "t5", "m2m100", "whisper"])
@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_padded_prompts_of_the_decoder(name: str, mode: str) -> None:
    ids = torch.tensor([[2, 11, 12, 13], [0, 2, 13, 14], [0, 0, 0, 2], [2, 15, 16, 17]])
    mask = (ids != 0).long()
    plain, paged, _ = both(name, decoder_input_ids=ids, decoder_attention_mask=mask, **MODES[mode])
    assert torch.equal(plain, paged)


@pytest.mark.parametrize("mode", ["samples", "beams"])
def test_scores_and_cache_are_returned(mode: str) -> None:
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    model = encoder_models.model("bart")
    plain, paged, _ = both("bart", **MODES[mode], **returned)
    assert type(paged) is type(plain) and list(paged) == list(plain)
    assert torch.equal(plain.sequences, paged.sequences)
    for a, b in zip([*plain.scores, *plain.logits], [*paged.scores, *paged.logits], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    if "num_beams" in MODES[mode]:
        torch.testing.assert_close(plain.sequences_scores, paged.sequences_scores)
        assert torch.equal(plain.beam_indices, paged.beam_indices)
    caches = [(result.past_key_values, cache) for result in (plain, paged) for cache in ("self_attention_cache",)]
    for layer in range(model.config.decoder_layers):
        own, other = (getattr(pair, cache).layers[layer].keys for pair, cache in caches)
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)
        theirs = plain.past_key_values.cross_attention_cache.layers[layer].values
        ours = paged.past_key_values.cross_attention_cache.layers[layer].values
        seen = encoder_models.inputs("bart")["attention_mask"].bool()
        seen = seen.repeat_interleave(len(ours) // len(seen), dim=0)
        torch.testing.assert_close(theirs.transpose(1, 2)[seen], ours.transpose(1, 2)[seen])


def test_given_states_of_the_encoder() -> None:
    model, given = encoder_models.model("bart"), encoder_models.inputs("bart")
    with torch.no_grad():
        states = model.get_encoder()(**given).last_hidden_state
    plain, paged, _ = both("bart", encoder_outputs=BaseModelOutput(last_hidden_state=states), **MODES["beams"])
    assert torch.equal(plain, paged)


def test_finished_rows_and_their_encoders_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different steps; one that has ended needs no block any more. No step copies tokens to the host."""
    copied = note_calls(monkeypatch, EncoderDecoderModel, "run", lambda _, parts: any(parts.tokens))
    looks = note_calls(monkeypatch, Weights, "look", lambda *_, **__: None)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 40}
    plain, paged, record = both("bart", eos_token_id=list(range(2, 12)), **options)
    assert torch.equal(plain, paged)
    ends = ((plain >= 2) & (plain < 12))[:, 1:].int().argmax(dim=1)
    assert len(ends.unique()) > 3
    assert not any(copied) and len(copied) <= len(looks) < 2 * len(copied)  # the weights, once in a step
    _, _, longer = both("bart", eos_token_id=98, **options)
    assert record.peak_blocks_used < longer.peak_blocks_used


@pytest.mark.parametrize("mode", [{"num_beams": 8}, {"do_sample": True, "num_return_sequences": 8}])
def test_beams_and_samples_share_the_states_of_their_encoder(mode: dict[str, Any]) -> None:
    """Blocks of eight beams of one new token each, over the blocks of one: all but the few of the beams' own tokens."""
    model = encoder_models.model("whisper")
    features = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(1))
    used = {}
    for count, options in ((1, {}), (8, mode)):
        with hf_paged.record_calls() as records:
            transformers.GenerationMixin.generate(
                model, input_features=features, max_new_tokens=2, eos_token_id=None, cache_implementation="paged",
                cache_config={"block_size": 1}, **options,
            )  # fmt: skip
        used[count] = records[0].peak_blocks_used
    own = {1: 2, 8: 9}  # the start token, and one more for each row
    assert used[1] - own[1] == 50  # states of the encoder
    assert records[0].kv_bytes_contiguous > 7 * records[0].kv_bytes_used
    assert used[8] - own[8] <= 1.1 * (used[1] - own[1])


def test_a_sampled_pad_moves_its_own_row_only() -> None:
    """Models that number the tokens by `ids != pad` continue as in plain generate after a pad that was drawn."""
    bias = {(encoder_models.PAD,): 6.0}
    plain, paged, _ = both("m2m100", sequence_bias=bias, eos_token_id=None, **MODES["samples"])
    assert torch.equal(plain, paged)
    pads = (plain[:, 1:] == encoder_models.PAD).sum(dim=1)
    assert pads.max() > pads.min() > 0


def test_a_bounded_pool_refuses_prompts_that_do_not_fit() -> None:
    model, given = encoder_models.model("bart"), encoder_models.inputs("bart")
    with pytest.raises(ValueError, match=r"the prompts need \d+ blocks of 4 tokens, the cache has num_blocks=6"):
        model.generate(**given, cache_implementation="paged", cache_config={"block_size": 4, "num_blocks": 6})
    assert not blocks_in_use(model)
    paged = model.generate(**given, max_new_tokens=6, cache_implementation="paged")
    assert torch.equal(paged, model.generate(**given, max_new_tokens=6))


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_what_shows_tensors_of_the_batch_runs_in_transformers_loop(name: str) -> None:
    options = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    model = encoder_models.model(name)
    own, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        plain, paged, record = both(name, "hf_loop", do_sample=False, num_beams=2, **options)
    finally:
        model.config._attn_implementation = own
    assert "output_attentions" in (record.reason or "")
    assert torch.equal(plain.sequences, paged.sequences)
    for a, b in zip(plain.cross_attentions[-1], paged.cross_attentions[-1], strict=True):
        torch.testing.assert_close(a, b)


def test_assisted_decoding_runs_in_transformers_loop() -> None:
    plain, paged, record = both(
        "bart", "hf_loop", do_sample=False, prompt_lookup_num_tokens=3,
        **{name: value[:1] for name, value in encoder_models.inputs("bart").items()},
    )  # fmt: skip
    assert torch.equal(plain, paged)
    assert "rolls the cache back" in (record.reason or "")


def test_a_row_of_the_encoder_that_is_masked_entirely_is_refused() -> None:
    model, given = encoder_models.model("bart"), encoder_models.inputs("bart")
    given["attention_mask"][2] = 0
    with pytest.raises(ValueError, match=r"row 2 of attention_mask is all zeros"):
        model.generate(**given, cache_implementation="paged")


def test_the_report_and_the_engine() -> None:
    model = encoder_models.model("bart")
    report = hf_paged.check(model)
    assert report.supported and report.native and report.has_encoder
    assert len(report.layers) == model.config.decoder_layers
    with hf_paged.Engine(model) as engine:
        assert engine.stats().num_blocks
    with pytest.raises(ValueError, match="batch_invariant=True: the model has an encoder"):
        hf_paged.Engine(model, None, {"batch_invariant": True})


# -- Whisper's own generate ----------------------------------------------------------------------------------------


def sound(rows: int, frames: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask = torch.ones(rows, frames, dtype=torch.int64)
    mask[-1, frames - frames // 3 :] = 0
    return {"input_features": torch.randn(rows, 8, frames, generator=generator), "attention_mask": mask}


def transcribe(given: dict[str, Any], routes: set[str], **options: Any) -> tuple[Any, Any]:
    results = []
    for cache in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(3)
        with hf_paged.record_calls() as records:
            results.append(whisper().generate(**copy.deepcopy(given), max_new_tokens=12, **options, **cache))
    assert {record.route for record in records} == routes, [record.reason for record in records]
    return results[0], results[1]


WHISPER: dict[str, dict[str, Any]] = {
    "detected language": {},
    "beams": {"return_timestamps": True, "language": "en", "num_beams": 3},
    "fallback": {"return_timestamps": True, "language": "en", "temperature": (0.0, 0.4, 0.8), "logprob_threshold": -0.2,
        "compression_ratio_threshold": 0.5},
    "previous tokens": {"return_timestamps": True, "language": "en", "condition_on_prev_tokens": True},
    "prompt": {"language": "en", "prompt_ids": torch.tensor([8, 20, 21])},
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("frames", [100, 260])
@pytest.mark.parametrize("name", WHISPER)
def test_whisper(name: str, frames: int) -> None:
    options = WHISPER[name] | ({"return_timestamps": True} if frames > 100 else {})
    plain, paged = transcribe(sound(2, frames), {"packed"}, **options)
    assert torch.equal(plain, paged)
    assert len(plain.unique()) > 2


def test_whisper_returns_times_of_tokens() -> None:
    """They come from attention weights, which transformers' own loop keeps."""
    plain, paged = transcribe(sound(2, 100), {"hf_loop"}, return_token_timestamps=True, language="en")
    assert torch.equal(plain["sequences"], paged["sequences"])
    torch.testing.assert_close(plain["token_timestamps"], paged["token_timestamps"])


def tokenizer() -> Any:
    """One letter for each of the ids that are neither special nor times."""
    special = {2: "<|endoftext|>", 3: "<|startoftranscript|>", 4: "<|en|>", 5: "<|de|>", 6: "<|transcribe|>"}
    special |= {7: "<|translate|>", 8: "<|startofprev|>", 60: "<|notimestamps|>"}
    vocab = {special.get(i, f"<|{(i - 61) * 0.02:.2f}|>" if i > 60 else chr(33 + i)): i for i in range(99)}
    made = transformers.WhisperTokenizer(vocab=vocab, merges=[])
    made.add_special_tokens({"additional_special_tokens": [*special.values()]})
    return made


@pytest.mark.covering(1)
@pytest.mark.parametrize("seconds", [0.4, 2.5])
@pytest.mark.parametrize("times", [False, True, "word"])
def test_the_pipeline(times: Any, seconds: float) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=160)
    run = transformers.pipeline(
        "automatic-speech-recognition", model=whisper(), tokenizer=tokenizer(), feature_extractor=extractor
    )
    wave = torch.randn(int(16000 * seconds), generator=torch.Generator().manual_seed(1)).numpy()
    options: dict[str, Any] = {"language": "en", "temperature": 1.0, "max_new_tokens": 12}
    results = []
    for cache in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(3)
        with hf_paged.record_calls() as records:
            results.append(run(wave.copy(), return_timestamps=times or seconds > 1, generate_kwargs=options | cache))
    plain, paged = results
    assert plain == paged and len(set(paged["text"])) > 2
    assert {record.route for record in records} == {"hf_loop" if times == "word" else "packed"}


def test_a_generate_of_its_own_is_refused() -> None:
    sizes = {"hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    report = hf_paged.check(transformers.SpeechT5ForTextToSpeech(transformers.SpeechT5Config(**sizes)).eval())
    assert not report.supported and "method of its own" in report.reason


def assert_equal(model: Any, route: str, **options: Any) -> None:
    """Paged `generate` takes this route and returns plain's tokens."""
    model.generation_config.update(pad_token_id=0, decoder_start_token_id=1, max_new_tokens=8)
    with hf_paged.record_calls() as records:
        paged = model.generate(**options, cache_implementation="paged")
    assert records[0].route == route and torch.equal(model.generate(**options), paged)


def test_a_router_that_reads_the_mask_takes_padded_prompts_in_transformers_loop() -> None:
    model = tiny_model("NllbMoeForConditionalGeneration")
    texts = torch.randint(3, 60, (3, 20), generator=torch.Generator().manual_seed(0))
    prompts = torch.tensor([[1, 7, 8], [0, 1, 9], [0, 0, 1]])
    assert_equal(model, "packed", input_ids=texts)
    mask = (prompts != 0).long()
    assert_equal(model, "hf_loop", input_ids=texts, decoder_input_ids=prompts, decoder_attention_mask=mask)


@pytest.mark.slow
def test_a_decoder_without_embeddings_of_its_own_class() -> None:
    texts, prompts = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[3, 7, 8]])
    assert_equal(tiny_model("FSMTForConditionalGeneration"), "packed", input_ids=texts, decoder_input_ids=prompts)


def test_an_encoder_with_more_positions_than_the_decoder() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    encoder = transformers.BertConfig(vocab_size=99, max_position_embeddings=128, **sizes)
    decoder = transformers.BertConfig(
        vocab_size=99, max_position_embeddings=40, is_decoder=True, add_cross_attention=True, **sizes
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.pad_token_id, config.decoder_start_token_id = 0, 1
    texts = torch.randint(3, 99, (2, 100), generator=torch.Generator().manual_seed(0))
    assert_equal(transformers.EncoderDecoderModel(config=config).eval(), "packed", input_ids=texts)


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 3}])
def test_a_returned_cache_is_continued_and_frees_its_blocks(drafts: dict[str, int]) -> None:
    model, given = encoder_models.model("bart"), encoder_models.inputs("bart")
    one = {name: value[:1] for name, value in given.items()}
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, **one}
    continued = []
    for paged in ({}, {"cache_implementation": "paged"}):
        begun = model.generate(**options, **paged, max_new_tokens=5)
        beside = {"decoder_input_ids": begun.sequences, CACHE: begun.past_key_values}
        continued.append(model.generate(**options, **beside, max_new_tokens=7, **drafts).sequences)
    assert torch.equal(*continued)
    memory = begun.past_key_values.self_attention_cache.memory
    assert memory.stats().blocks_used
    begun.past_key_values.reset()
    assert not memory.stats().blocks_used
