"""Images in the engine and in paged calls: tokens and log-probabilities of plain `generate`."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, PagedKVCache
from hf_paged import config as config_module
from hf_paged.integration.names import CACHE
from tests.architectures import media
from tests.architectures.vision import IMAGE, MODELS, Row, batch_of, build, doubled
from tests.generation.solo import ended
from tests.preempting import force_preempt

NEW = 12
SMALL = CacheConfig(memory="1MiB", block_size=4)


def model_and_rows(name: str) -> tuple[Any, list[Row]]:
    make, rows = MODELS[name]
    return build(make), rows(torch.Generator().manual_seed(1))


def config(seed: int = 0, **options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "seed": seed, **options})


def plain(model: Any, row: Row, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """The new tokens of each sequence, and the log-probabilities of the first one's tokens."""
    ids = torch.tensor([row.ids])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **row.inputs, generation_config=config(**options),
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = output.sequences[:, len(row.ids) :].tolist()
    logits = torch.stack(output.logits)[:, 0].log_softmax(-1)
    return tokens, logits.gather(1, torch.tensor(tokens[0])[: len(logits), None])[:, 0]


def serve(engine: Engine, rows: list[Row], **options: Any) -> list[Any]:
    names = [engine.add_request(row.ids, config(**options), inputs=row.inputs) for row in rows]
    finished = ended(engine)
    engine._scheduler.check_integrity()
    return [finished[name] for name in names]


def assert_equal(outputs: list[Any], expected: list[Any], atol: float = 5e-5) -> None:
    """expected: what `plain` returns, for each output."""
    for output, (tokens, logprobs) in zip(outputs, expected, strict=True):
        assert output.error is None and output.outputs[0].token_ids == tokens[0]
        torch.testing.assert_close(torch.tensor(output.outputs[0].logprobs), logprobs, atol=atol, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("budget", [512, 16, 5])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "idefics3", "gemma3, a short window"])
def test_equal_to_generate(name: str, budget: int) -> None:
    model, rows = model_and_rows(name)
    expected = [plain(model, row) for row in rows]
    with Engine(model, SMALL, {"max_num_batched_tokens": budget, "max_num_seqs": 4}) as engine:
        text = engine.add_request([5, 6, 7, 8], config())
        outputs = serve(engine, rows)
        assert text not in {output.request_id for output in outputs}
        assert engine.stats().encoder_inputs == (3 if name == "idefics3" else 4)  # one tensor, two images
    assert_equal(outputs, expected)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_pairs_of_images(name: str) -> None:
    """A second prompt finds what ends before its first image that differs, in one number even; with equal ones, all."""
    model, rows = model_and_rows(name)
    rng = random.Random(name)
    with Engine(model, CacheConfig(memory="8MiB", block_size=4), {"max_num_batched_tokens": 64}) as engine:
        serve(engine, rows[:1], max_new_tokens=1)  # which may leave hooks in the model
        engine.step()
        for number in range(6):
            row = rng.choice(rows)
            generator = torch.Generator().manual_seed(100 + number)
            pixels = torch.randn(row.inputs["pixel_values"].shape, generator=generator)
            changed = pixels.clone()
            count = 1 if row is not rows[1] else 2
            which = rng.choice([None, *range(count)])  # the image that differs
            if which is not None:
                part = len(pixels) // count
                changed[which * part].view(-1)[rng.randrange(changed[0].numel())] += 0.5
            pair = [Row(row.ids, {**row.inputs, "pixel_values": each}) for each in (pixels, changed)]
            serve(engine, pair[:1], max_new_tokens=1)
            before = engine.stats().encoder_inputs
            (output,) = serve(engine, pair[1:], max_new_tokens=1)
            encoded = engine.stats().encoder_inputs - before
            cached = output.metrics.num_cached_tokens
            if which is None:
                assert (cached, encoded) == ((len(row.ids) - 1) // 4 * 4, 0)
            else:
                places = [place for place, token in enumerate(row.ids) if token == IMAGE]
                first = places[which * len(places) // count]
                assert (cached, encoded) == (first // 4 * 4, 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_preemption(name: str, preemption: str) -> None:
    model, rows = model_and_rows(name)
    rows = [rows[1], rows[2], rows[0]] * 2
    expected = [plain(model, row, max_new_tokens=20)[0][0] for row in rows]
    cache = CacheConfig(num_blocks=20, block_size=4, swap_memory="1MiB")
    scheduler = {"preemption": preemption, "max_num_batched_tokens": 24, "max_num_seqs": 6, "prefix_caching": False}
    with Engine(model, cache, scheduler) as engine:
        outputs = serve(engine, rows, max_new_tokens=20)
        stats = engine.stats()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert stats.preemptions_recompute + stats.preemptions_swap > 0


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_beams_and_samples(name: str) -> None:
    model, rows = model_and_rows(name)
    options = {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7}
    with Engine(model, CacheConfig(memory="4MiB", block_size=4)) as engine:
        for own in (options, {"num_beams": 3, "num_return_sequences": 2}):
            for row, output in zip(rows, serve(engine, rows, **own)):
                torch.manual_seed(0)  # that of `config`
                assert [each.token_ids for each in output.outputs] == plain(model, row, **own)[0]


def test_a_generated_token_may_be_the_placeholder() -> None:
    model, rows = model_and_rows("llava")
    with torch.no_grad():
        model.lm_head.weight[IMAGE] = 3 * model.lm_head.weight[IMAGE]
    expected = [plain(model, row)[0][0] for row in rows]
    assert any(IMAGE in tokens for tokens in expected)
    cache = CacheConfig(num_blocks=20, block_size=4)
    for cache_config in (SMALL, cache):
        with Engine(model, cache_config, {"max_num_batched_tokens": 16, "max_num_seqs": 4}) as engine:
            outputs = serve(engine, rows)
        assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_later_turn_finds_the_answer() -> None:
    """Though the positions of its tokens are not their indices."""
    model, (row, *_) = model_and_rows("qwen2_vl")
    with Engine(model, SMALL) as engine:
        serve(engine, [row])  # which may leave hooks in the model
        answer = serve(engine, [row])[0].outputs[0].token_ids
        ids = [*row.ids, *answer, 5, 6, 7]
        types = torch.zeros(1, len(ids), dtype=torch.int64)
        types[:, : len(row.ids)] = row.inputs["mm_token_type_ids"]
        turn = Row(ids, {**row.inputs, "mm_token_type_ids": types})
        (output,) = serve(engine, [turn])
        known = {**row.inputs, "mm_token_type_ids": types[:, : len(row.ids) + len(answer) - 1]}
        (scores,) = engine.score([row.ids], [answer], inputs=[known])
        with pytest.raises(ValueError, match="grad=True with inputs"):
            engine.score([row.ids], [answer], grad=True, inputs=[known])
    assert output.outputs[0].token_ids == plain(model, turn)[0][0]
    torch.testing.assert_close(scores, plain(model, row)[1], atol=5e-5, rtol=0)
    assert output.metrics.num_cached_tokens == (len(row.ids) + len(answer) - 1) // 4 * 4


def test_prompts_that_attend_both_ways() -> None:
    """PaliGemma 2: a token of a prompt attends to all others, so that no part of it is like another's."""
    model, rows = model_and_rows("paligemma2")
    longer, longest = (
        Row([*rows[0].ids, *more], {**rows[0].inputs, "token_type_ids": torch.zeros(1, len(rows[0].ids + more)).long()})
        for more in ([7, 8], [7, 8, 9])
    )
    expected = [plain(model, row) for row in (*rows, longer)]
    with Engine(model, SMALL, {"max_num_batched_tokens": 40}) as engine:
        for _ in range(2):
            outputs = serve(engine, [*rows, longer])
            assert_equal(outputs, expected)
        cached = [output.metrics.num_cached_tokens for output in outputs]
        assert cached == [(len(row.ids) - 1) // 4 * 4 for row in (*rows, longer)]
        (output,) = serve(engine, [longest])
        assert output.metrics.num_cached_tokens == 0 and output.error is None


def test_a_step_computes_what_attends_both_ways() -> None:
    """Requests whose runs are longer than a step end by name; others wait for room, and later ones do not pass them."""
    model, rows = model_and_rows("gemma3")
    expected = [plain(model, row)[0][0] for row in rows]
    with Engine(model, SMALL, {"max_num_batched_tokens": 3}) as engine:
        text = engine.add_request([5, 6, 7, 8], config())
        names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in rows]
        finished = ended(engine)
        assert finished[text].error is None and len(finished[text].outputs[0].token_ids) == NEW
        for name in names:
            assert "4 tokens of the prompt attend to one another both ways" in str(finished[name].error)
            assert "max_num_batched_tokens=4" in str(finished[name].error)
    with mock.patch.object(config_module, "_CPU_TOKEN_BUDGET", 3), Engine(model, SMALL) as engine:  # nothing is asked
        outputs = serve(engine, rows)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    with Engine(model, SMALL, {"max_num_batched_tokens": 5, "max_num_seqs": 5}) as engine:
        texts = [engine.add_request([5, 6, 7, number], config(max_new_tokens=40)) for number in range(3, 7)]
        for _ in range(4):
            engine.step()
        name = engine.add_request(rows[0].ids, config(), inputs=rows[0].inputs)
        later = [engine.add_request([9, 8, number], config()) for number in range(3, 6)]
        order = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    order.append(output.request_id)
                    if output.request_id == name:
                        assert output.outputs[0].token_ids == expected[0]
        assert {*texts, name, *later} == {*order} and order.index(name) < order.index(later[-1])


def test_types_of_tokens_are_not_needed() -> None:
    """Without them no token attends to a later one, as in `generate`; beside requests with them."""
    model, rows = model_and_rows("gemma3")
    blind = Row(rows[0].ids, {"pixel_values": rows[0].inputs["pixel_values"]})
    expected = [plain(model, row) for row in (blind, *rows)]
    assert (expected[0][1] - expected[1][1]).abs().max() > 1e-4
    with Engine(model, SMALL) as engine:
        outputs = serve(engine, [blind, *rows])
    assert_equal(outputs, expected)


def test_images_of_gemma4_of_several_sizes() -> None:
    """Whose processor fills up the patches of a small one; its places are -1."""
    model, rows = model_and_rows("gemma4")
    (first, *_), model = map(doubled, rows), model.double()
    at = first.ids.index(IMAGE)
    small = {name: value.clone() for name, value in first.inputs.items()}
    small["image_position_ids"][:, 8:], small["pixel_values"][:, 8:] = -1, 0
    ids = [*first.ids[: at + 2], *first.ids[at + 4 :]]
    other = Row(ids, {**small, "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).long()})
    dims = {"mm_token_type_ids": 1}
    both = Row(
        [*first.ids, *ids],
        {name: torch.cat([value, other.inputs[name]], dims.get(name, 0)) for name, value in first.inputs.items()},
    )
    prompts = [first, both, other]
    expected = [plain(model, row) for row in prompts]
    with Engine(model, CacheConfig(memory="8MiB", block_size=4), {"max_num_batched_tokens": 5}) as engine:
        outputs = serve(engine, prompts)
    assert_equal(outputs, [(tokens, logprobs.float()) for tokens, logprobs in expected], atol=2e-5)


def test_runs_longer_than_a_window_that_spares_them_are_refused() -> None:
    """Of PaliGemma 2: in Gemma 3 the window hides what lies before it, also within an image."""
    model, rows = model_and_rows("paligemma2")
    for layer in model.model.language_model.layers:
        layer.self_attn.sliding_window = None if layer.self_attn.sliding_window is None else 6
    model.config.text_config.sliding_window = 6
    with Engine(model, SMALL) as engine:
        (output,) = serve(engine, rows[:1])
    assert "both ways see more, or less" in str(output.error)


def test_refusals() -> None:
    model, rows = model_and_rows("llava")
    row = rows[0]
    pixels = row.inputs["pixel_values"]
    with Engine(model, SMALL) as engine:
        for ids, inputs, message in (
            (row.ids, None, "4 placeholders of the image token 199 .*give inputs= what the model's processor returns"),
            ([5, 6], {"pixel_values": pixels}, "inputs has 'pixel_values', but the prompt has no placeholders"),
            (row.ids, {"pixels": pixels}, "inputs has 'pixels', which LlavaForConditionalGeneration does not take"),
            (row.ids, {"pixel_values": [1]}, r"inputs\['pixel_values'\] is a list; a tensor is needed"),
            (row.ids, {"attention_mask": pixels}, "give it as the request's own attention_mask"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add_request(ids, config(), inputs=inputs)
        engine._admission._is_alone = False  # as on ranks
        with pytest.raises(ValueError, match="several ranks takes texts only; use one process"):
            engine.add_request(row.ids, config(), inputs=row.inputs)
        engine._admission._is_alone = True
        ended = serve(engine, [Row(row.ids, {"pixel_values": torch.cat([pixels, pixels])}), row])
        assert "4 placeholders of the image token, but the image has 8 features" in str(ended[0].error)
        assert ended[1].error is None


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_types_of_other_tokens_are_refused(name: str) -> None:
    """Those of a padded prompt would say of each token what another one is."""
    model, (row, *_) = model_and_rows(name)
    with Engine(model, SMALL) as engine:
        for key in row.inputs.keys() & {"token_type_ids", "mm_token_type_ids"}:
            types = row.inputs[key]
            for given in (torch.cat([types[:, :2] * 0, types], dim=1), types[:, 1:], types[0], types.repeat(2, 1)):
                with pytest.raises(ValueError, match=rf"{key}'\] .*; \[1, {len(row.ids)}\] is needed"):
                    engine.add_request(row.ids, config(), inputs={**row.inputs, key: given})


def test_a_waiting_request_ends_if_the_model_has_changed_so_that_no_step_runs() -> None:
    model, (row, *_) = model_and_rows("llava")
    with Engine(model, SMALL) as engine:
        engine.add_request(row.ids, config(), inputs=row.inputs)
        model.double()
        (output,) = engine.step()
        assert output.finished and "made for a model in torch.float32" in output.error
        model.float()
        (output,) = serve(engine, [row])
        assert output.outputs[0].token_ids == plain(model, row)[0][0]


@pytest.mark.parametrize(("name", "way"), [("llava", "sleep"), ("qwen2_vl", "pause")])
def test_requests_that_are_computed_again_after_a_change_of_weights(name: str, way: str) -> None:
    """They get features of the new weights, and no later request finds those of the old ones."""
    model, rows = model_and_rows(name)
    weight = next(value for key, value in model.named_parameters() if key.endswith(_LAST[name]))
    row = rows[1]
    with Engine(model, SMALL) as engine:
        name = engine.add_request(row.ids, config(), inputs=row.inputs)
        (first,) = engine.step()
        if way == "sleep":
            engine.sleep()
        with engine.pause(recompute=True), torch.no_grad():
            weight.mul_(-1)
        if way == "sleep":
            engine.wake()
        outputs = ended(engine).values()
        (later,) = serve(engine, [row])
        assert engine.stats().encoder_inputs == 4  # two images, with each weights
    (output,) = outputs
    assert output.request_id == name
    begun = Row([*row.ids, *first.outputs[0].token_ids], dict(row.inputs))
    if "mm_token_type_ids" in begun.inputs:
        begun.inputs["mm_token_type_ids"] = (torch.tensor([begun.ids]) == IMAGE).long()
    assert output.outputs[0].token_ids[1:] == plain(model, begun, max_new_tokens=NEW - 1)[0][0]
    assert_equal([later], [plain(model, row)])


_LAST = {"llava": "multi_modal_projector.linear_1.weight", "qwen2_vl": "merger.mlp.0.weight"}


def test_many_requests_after_a_change_of_weights() -> None:
    """A step encodes one of their images; none of the others goes on with features of the old weights."""
    model, rows = model_and_rows("llava")
    rows = [Row(rows[0].ids, {"pixel_values": rows[0].inputs["pixel_values"] + number}) for number in range(4)]
    with Engine(model, SMALL, {"max_num_batched_tokens": 8}) as engine:
        names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in rows]
        begun: dict[str, list[int]] = {}
        while len(begun) < len(rows):
            begun.update({output.request_id: output.outputs[0].token_ids for output in engine.step()})
        with engine.pause(recompute=True), torch.no_grad():
            model.model.multi_modal_projector.linear_1.weight.mul_(-1)
        finished = {name: output.outputs[0].token_ids for name, output in ended(engine).items()}
        assert engine.stats().encoder_inputs == 2 * len(rows)
    for name, row in zip(names, rows):
        start, tokens = begun[name], finished[name]
        expected = plain(model, Row([*row.ids, *start], row.inputs), max_new_tokens=NEW - len(start))
        assert tokens == [*start, *expected[0][0]]


@pytest.mark.parametrize("way", ["waits", "starts over"])
def test_features_are_in_memory_until_the_prompt_is_computed(way: str) -> None:
    model, rows = model_and_rows("llava")
    row = rows[1]  # has two images
    expected = plain(model, row)[0][0]
    with Engine(model, SMALL) as engine:
        name = engine.add_request(row.ids, config(), inputs=row.inputs)
        outputs = [output for _ in range(4) for output in engine.step()]
        assert 0 < len(outputs[-1].outputs[0].token_ids) < len(expected)
        own: Any = engine._scheduler.get(name).beside["media"]  # type: ignore[union-attr]
        assert not own.encoded.features and not any(unit.features for unit in own.units)
        if way == "starts over":
            engine._scheduler.side_memories[0].close()
            force_preempt(engine._scheduler, name, "recompute")
            outputs += engine.step()
            assert not own.encoded.features
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == expected


@pytest.mark.parametrize("name", ["qwen3_5-image", "llava-image"])
def test_drafts_wait_for_the_last_token_of_a_prompt(name: str) -> None:
    """Which a step computes alone, behind the last full block."""
    case = media.CASES[name]
    model = media.build(case)
    first = media.rows(model, case)[0]
    more = [21, 22, 23, 24] * 12
    row = Row([*first.ids, *more[: 49 - len(first.ids)]], dict(first.inputs))
    for key, value in row.inputs.items():
        if key.endswith("type_ids"):
            row.inputs[key] = torch.cat([value, torch.zeros(1, 49 - value.shape[1], dtype=value.dtype)], 1)
    options = {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    expected = plain(model, row)[0][0]
    with Engine(model, CacheConfig(memory="8MiB")) as engine:
        beside = engine.add_request([5, 6, 7, 8], config(max_new_tokens=30))
        (output,) = [each for each in serve(engine, [row], **options) if each.request_id != beside]
    assert len(row.ids) == 49 and output.error is None and output.outputs[0].token_ids == expected


def test_other_salts_encode_again() -> None:
    """The time to the first token shows no user that another one has sent the same image."""
    model, rows = model_and_rows("llava")
    expected = plain(model, rows[0])[0][0]
    with Engine(model, SMALL) as engine:
        for salt, encoded in ((None, 1), ("a", 2), ("b", 3), ("a", 3), (None, 3)):
            engine.add_request(rows[0].ids, config(), inputs=rows[0].inputs, cache_salt=salt)
            (output,) = ended(engine).values()
            assert output.outputs[0].token_ids == expected
            assert engine.stats().encoder_inputs == encoded
        assert engine.stats().encoder_hits == 2


def test_what_callers_do_with_their_tensors_later() -> None:
    model, rows = model_and_rows("llava")
    expected = plain(model, rows[0])
    inputs = {name: value.clone() for name, value in rows[0].inputs.items()}
    with Engine(model, SMALL) as engine:
        engine.add_request(rows[0].ids, config(), inputs=inputs)
        inputs["pixel_values"].zero_()
        (output,) = ended(engine).values()
    torch.testing.assert_close(torch.tensor(output.outputs[0].logprobs), expected[1], atol=5e-5, rtol=0)


def test_prompts_that_begin_or_end_with_an_image() -> None:
    """`generate` counts on from the last token's positions, of which Qwen2-VL has three within an image."""
    for name in ("llava", "qwen2_vl", "gemma3"):
        model, rows = model_and_rows(name)
        ids = rows[0].ids
        first, last = ids.index(IMAGE), len(ids) - ids[::-1].index(IMAGE)
        parts = [slice(0, last), slice(first, len(ids))]
        begins, ends = (
            Row(ids[part], {k: v[:, part] if k.endswith("_ids") else v for k, v in rows[0].inputs.items()})
            for part in parts[::-1]
        )
        with Engine(model, SMALL, {"max_num_batched_tokens": 512}) as engine:
            outputs = serve(engine, [begins, ends])
        for row, output in zip((begins, ends), outputs):
            tokens, logprobs = plain(model, row)
            if name == "qwen2_vl" and row is ends:
                assert "the prompt ends within an image or a video" in str(output.error)
                options = {**row.inputs, "generation_config": config(), "attention_mask": torch.ones(1, len(row.ids))}
                again = model.generate(torch.tensor([row.ids]), **options, cache_implementation="paged")
                assert again[0, len(row.ids) :].tolist() == tokens[0]
            else:
                assert_equal([output], [(tokens, logprobs)])


def test_a_replaced_function_of_torch_encodes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no native code stands in for."""
    model, rows = model_and_rows("llava")
    own = torch.nn.functional.embedding
    with Engine(model, SMALL) as engine:
        for factor in (1.0, 0.5, 0.25, 1.0):
            monkeypatch.setattr(torch.nn.functional, "embedding", own if factor == 1 else scaled(own, factor))
            (output,) = serve(engine, rows[:1])
            assert output.outputs[0].token_ids == plain(model, rows[0])[0][0]
        assert engine.stats().encoder_inputs == 4


def scaled(function: Any, factor: float) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's use of transformers
def test_features_of_each_adapter() -> None:
    """An adapter of the projector changes the features of the same image."""
    peft = pytest.importorskip("peft")
    model, rows = model_and_rows("llava")
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear_1", "q_proj"], r=4)).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    expected = plain(tuned, rows[0])[0][0]
    with tuned.disable_adapter():
        base = plain(tuned, rows[0])[0][0]
    assert base != expected
    with Engine(tuned, SMALL) as engine:
        for _ in range(2):
            names = [
                engine.add_request(rows[0].ids, config(), inputs=rows[0].inputs, adapter=adapter)
                for adapter in ("default", "__base__")
            ]
            finished = ended(engine)
            assert [finished[name].outputs[0].token_ids for name in names] == [expected, base]
        assert engine.stats().encoder_inputs == 2


# -- paged calls of `generate` ---

PACKED = ("llava", "qwen2_vl", "idefics3", "gemma3", "gemma4", "paligemma2")
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {}, "beams": {"num_beams": 3, "num_return_sequences": 2}, "chunks": {"prefill_chunk_size": 5},
    "samples": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
}  # fmt: skip


def call(model: Any, batch: dict[str, Any], *, paged: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    if paged:
        given["cache_implementation"] = "paged"
    else:
        given.pop("prefill_chunk_size", None)  # which changes nothing, but for runs that attend both ways
    return model.generate(**batch, return_dict_in_generate=True, output_logits=True, **given)


def check(model: Any, batch: dict[str, Any], route: str = "packed", **options: Any) -> None:
    plain = call(model, batch, paged=False, **options)
    with hf_paged.record_calls() as calls:
        paged = call(model, batch, paged=True, **options)
    assert (calls[0].route, calls[0].reason is None) == (route, route == "packed"), calls[0].reason
    assert torch.equal(paged.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(paged.logits), torch.stack(plain.logits), atol=2e-5, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PACKED)
def test_equal_to_plain(name: str, options: str) -> None:
    if (name, options) == ("paligemma2", "chunks"):
        pytest.skip("all tokens of a prompt attend to one another")
    model, rows = model_and_rows(name)
    if name == "gemma4":  # in float32 plain logits are 5e-5 from those in float64
        model, rows = model.double(), [doubled(row) for row in rows]
    batches = [rows[:1]]
    if name != "idefics3":  # whose processor pads images too
        batches += [rows, [rows[0], rows[0], rows[1]]]
    for each in batches:
        check(model, batch_of(each), **OPTIONS[options])


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_rows_with_and_without_images(name: str) -> None:
    model, rows = model_and_rows(name)
    text = Row([5, 6, 7, 8, 9, 10], {key: value[:0] for key, value in rows[0].inputs.items()})
    types = [key for key in text.inputs if key.endswith("type_ids")]
    text.inputs.update({key: torch.zeros(1, 6, dtype=torch.int64) for key in types})
    for options in ({}, OPTIONS["beams"]):
        check(model, batch_of([rows[1], text, rows[0]]), **options)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_rows_that_differ_in_their_images_alone(name: str) -> None:
    """Equal tokens, other images: nothing that depends on the image is shared, and what stands before it is."""
    model, rows = model_and_rows(name)
    other = {**rows[2].inputs, "pixel_values": rows[2].inputs["pixel_values"] + 1}
    pair = [rows[2], Row(rows[2].ids, other), rows[2]]
    plain = call(model, batch_of(pair), paged=False)
    assert not torch.equal(plain.logits[0][0], plain.logits[0][1])
    check(model, batch_of(pair))
    with hf_paged.record_calls() as calls:
        call(model, batch_of(pair), paged=True, cache_config={"block_size": 4})
    blocks = -(-(len(pair[0].ids) + 9) // 4)
    first = pair[0].ids.index(IMAGE) // 4
    if name == "llava":  # layers with windows share no beginnings
        assert calls[0].peak_blocks_used <= 3 * blocks - 2 * first


def test_a_returned_cache_goes_on() -> None:
    """After images, positions are counted by the model: the call goes through transformers' loop."""
    model, rows = model_and_rows("qwen2_vl")
    batch = batch_of(rows[:1])
    ends = []
    for paged in (False, True):
        first = call(model, batch, paged=paged)
        ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: first.past_key_values}
        assert isinstance(first.past_key_values, PagedKVCache) == paged
        with hf_paged.record_calls() as calls:
            ends.append(call(model, again, paged=paged).sequences)
        if paged:
            assert calls[0].route == "hf_loop" and "counts positions" in calls[0].reason
    assert torch.equal(*ends)


def test_a_model_that_prepares_steps_otherwise_takes_the_loop() -> None:
    """Its attention has no mask where nothing is masked, and attends both ways."""
    model, rows = model_and_rows("paligemma")
    check(model, batch_of(rows), route="hf_loop")


def test_a_model_that_goes_on_in_its_own_way_takes_the_loop() -> None:
    """One that makes other positions, or wants to see more; other types of generated tokens change nothing."""
    model, rows = model_and_rows("llava")
    name = "_update_model_kwargs_for_generation"
    own = getattr(type(model), name)

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        made: dict[str, Any] = own(*args, **options)
        return {**made, "position_ids": made["position_ids"] * 2}

    def typed(*args: Any, **options: Any) -> dict[str, Any]:
        return {**own(*args, **options), "token_type_ids": None}

    def greedy(model: Any, outputs: Any, *args: Any, **options: Any) -> dict[str, Any]:
        assert outputs.past_key_values is not None
        made: dict[str, Any] = own(model, outputs, *args, **options)
        return made

    for function, route in ((changed, "hf_loop"), (typed, "packed"), (greedy, "hf_loop")):
        with mock.patch.object(type(model), name, function):
            check(model, batch_of(rows[:1]), route=route)


def test_runs_are_not_divided() -> None:
    model, rows = model_and_rows("gemma3")
    with pytest.raises(ValueError, match="4 tokens of a prompt attend to one another both ways"):
        call(model, batch_of(rows), paged=True, prefill_chunk_size=3)
