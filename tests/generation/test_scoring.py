"""`Engine.score`: the log-probabilities of given completions."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, StoppingCriteria

from hf_paged import Engine, SchedulerConfig, UnsupportedModelError
from hf_paged.kernels import ops
from tests import encoder_models, models
from tests.architectures.tiny import tiny_model
from tests.model import adapted

PROMPTS = [prompt.tolist() for prompt in models.prompts(3, 20, 41, 9)]
COMPLETIONS = [completion.tolist() for completion in models.prompts(6, 1, 12, 30, seed=3)]
needs_one_order = pytest.mark.skipif(ops.default_impl("cpu") != "native", reason="only native kernels sum in one order")


def plain(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    ids = torch.tensor([prompt + completion])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_values_are_those_of_the_model(family: str) -> None:
    model = models.shared(family)
    with Engine(model) as engine:
        scores = engine.score([*PROMPTS, PROMPTS[2], PROMPTS[2]], [*COMPLETIONS, COMPLETIONS[0], []])
    for found, prompt, completion in zip(scores, PROMPTS, COMPLETIONS):
        assert found.dtype == torch.float32 and not found.requires_grad
        torch.testing.assert_close(found, plain(model, prompt, completion), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores[4], plain(model, PROMPTS[2], COMPLETIONS[0]), atol=1e-4, rtol=0)
    assert scores[5].shape == (0,)


def test_tensors_and_padding_tokens_are_tokens() -> None:
    model = models.shared("llama")
    with Engine(model) as engine:
        expected = engine.score([[0, 5, 6]], [[7, 8, 0, 0]])
        assert engine.score([torch.tensor([0, 5, 6])], [torch.tensor([[7, 8, 0, 0]])])[0].equal(expected[0])
    torch.testing.assert_close(expected[0], plain(model, [0, 5, 6], [7, 8, 0, 0]), atol=1e-4, rtol=0)


def test_the_last_token_needs_no_place_after_it() -> None:
    """Nor do time limits of the checkpoint concern completions."""
    model = models.build("gpt2", n_positions=16)
    model.generation_config.max_time = 1e-9
    with Engine(model) as engine:
        (found,) = engine.score([[5] * 6], [[7] * 11])
    assert found.shape == (11,)
    torch.testing.assert_close(found[:10], plain(model, [5] * 6, [7] * 10), atol=1e-4, rtol=0)


def test_equal_prompts_are_read_once() -> None:
    prompt = models.prompts(120)[0].tolist()
    with Engine(models.shared("llama")) as engine:
        engine.score([prompt] * 4, [[5, 6], [7, 8], [9, 1], [2, 3]])
        assert engine.stats().prefix_cache_hit_tokens >= 3 * 112


@pytest.mark.covering(1)
@needs_one_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"num_return_sequences": 3}, {"num_beams": 3, "num_return_sequences": 3}], ids=str
)
def test_scores_are_those_of_decoding_to_the_last_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    config = GenerationConfig(
        max_new_tokens=20, do_sample="num_beams" not in options, top_k=0, pad_token_id=0, **options
    )
    with Engine(models.build("qwen3").to(dtype), None, SchedulerConfig(batch_invariant=True)) as engine:
        for output in engine.generate(PROMPTS, config, progress=False):
            samples = output.outputs
            scores = engine.score([output.prompt_token_ids] * len(samples), [own.token_ids for own in samples])
            assert [score.tolist() for score in scores] == [own.logprobs for own in samples]


def test_a_graph_has_the_same_values_and_the_gradients_of_the_model() -> None:
    model = models.build("llama")
    with Engine(model, None, SchedulerConfig(batch_invariant=ops.default_impl("cpu") == "native")) as engine:
        values = engine.score(PROMPTS, COMPLETIONS)
        graphs = engine.score(PROMPTS, COMPLETIONS, grad=True)
    for graph, value in zip(graphs, values):
        assert graph.requires_grad
        torch.testing.assert_close(graph.detach(), value, atol=1e-4, rtol=0)
        assert ops.default_impl("cpu") != "native" or graph.detach().equal(value)
    weights = [torch.linspace(-1, 1, len(each)) for each in COMPLETIONS]
    sum((graph * weight).sum() for graph, weight in zip(graphs, weights)).backward()  # type: ignore[union-attr]
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    rows = zip(PROMPTS, COMPLETIONS, weights)
    sum((plain(model, prompt, own) * weight).sum() for prompt, own, weight in rows).backward()  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        assert (parameter.grad - found[name]).abs().max() <= 1e-5 * parameter.grad.abs().max() + 1e-8, name


def test_wrong_arguments() -> None:
    with Engine(models.shared("llama")) as engine:
        with pytest.raises(ValueError, match="2 completions for 1 prompts"):
            engine.score([[5]], [[5], [6]])
        with pytest.raises(ValueError, match="adapter"):
            engine.score([[5]], [[]], adapter="missing")
        with pytest.raises(ValueError, match="completions: a list of token ids"):
            engine.score([[5]], [None])
        with pytest.raises(ValueError, match=r"cache_salt=.*: 2 for 1 prompts"):
            engine.score([[5]], [[6]], cache_salt=["a", "b"])
        with pytest.raises(ValueError):
            engine.score([[]], [[6]])
        assert not engine.has_unfinished_requests()


def test_what_cannot_be_scored_is_named() -> None:
    model = models.build("llama")
    with Engine(model) as engine:
        with pytest.raises(ValueError, match="completions: token id 1000000"):
            engine.score([[5, 6]], [[10**6]])
        with pytest.raises(ValueError, match="prompts: token id -3"):
            engine.score([[-3]], [[5]])
        with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
            engine.score([[5, 6]], [[7]], grad=True)
        model.train()
        model.model.gradient_checkpointing = True
        with pytest.raises(UnsupportedModelError, match=r"gradient checkpointing is on.*call model.eval\(\) first"):
            engine.score([[5, 6]], [[7]], grad=True)
        with pytest.raises(ValueError, match=r"gradient checkpointing is on .* call model.eval\(\)"):
            Engine(model)
        model.eval()
        assert engine.score([[5, 6]], [[7]])[0].shape == (1,)


def test_training_mode_is_noticed_before_anything_is_computed() -> None:
    """Dropout would be in the results, and in the cached prefixes of later ones."""
    model = models.build("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    with Engine(model) as engine:
        (expected,) = engine.score([PROMPTS[1]], [COMPLETIONS[2]])
        model.train()
        for method in (lambda: engine.score([PROMPTS[1]], [COMPLETIONS[2]]), lambda: engine.generate([PROMPTS[0]])):
            with pytest.raises(UnsupportedModelError, match="training mode"):
                method()
            for request_id in list(engine._requests):
                engine.abort(request_id)
        model.eval()
        (again,) = engine.score([PROMPTS[1]], [COMPLETIONS[2]])
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)


def test_dropout_by_functions_is_noticed() -> None:
    model = tiny_model("opt")
    model.config.dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        Engine(model.train())
    model.config.dropout = 0.0
    with Engine(model) as engine:  # it draws nothing
        assert engine.score([[5, 6]], [[7]])[0].shape == (1,)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("own", [True, False])
def test_an_engine_keeps_its_autocast(name: str, own: bool) -> None:
    """The threads that step do not change what is computed; requests of another autocast would share its prefixes."""
    model, prompt = models.shared("llama") if name == "llama" else encoder_models.model(name), list(range(4, 44))
    options = GenerationConfig(max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=1)

    def logprobs(engine: Engine, within: bool) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=own):
            engine.add_request(prompt, options)
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            while engine.has_unfinished_requests():
                outputs = engine.step()
        assert outputs[0].error is None
        return outputs[0].outputs[0].logprobs

    with torch.autocast("cpu", torch.bfloat16, enabled=own):
        engine = Engine(model)
    with engine:
        expected = logprobs(engine, own)
        assert logprobs(engine, not own) == pytest.approx(expected, abs=1e-5)
        engine.clear_prefix_cache()
        assert logprobs(engine, not own) == expected

        async def streamed() -> list[Any]:
            return [output async for output in engine.astream([prompt], options)]

        with torch.autocast("cpu", torch.bfloat16, enabled=own):
            assert asyncio.run(streamed())[-1].error is None
        with torch.autocast("cpu", torch.bfloat16, enabled=not own):
            for ask in (lambda: asyncio.run(streamed()), partial(engine.add_request, prompt, options)):
                with pytest.raises(UnsupportedModelError, match="autocast"):
                    ask()


@pytest.mark.parametrize("way", ["torch's wrapper", "a forward", "a forward, reentrant"])
def test_a_graph_that_would_be_computed_with_other_adapters_is_refused(way: str) -> None:
    model = adapted.with_transformers(targets={"a": ["v_proj"], "b": ["v_proj"]})
    layer = model.model.layers[0]
    if way == "torch's wrapper":
        layer.mlp = checkpoint_wrapper(layer.mlp)
    else:
        layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=way.endswith("reentrant"))
    with Engine(model) as engine:
        with pytest.raises(ValueError, match=r"adapter='a': a part of the LlamaForCausalLM is checkpointed"):
            engine.score(PROMPTS[:1], COMPLETIONS[:1], grad=True, adapter="a")
        engine.score(PROMPTS[:1], COMPLETIONS[:1], grad=True, adapter="b")[0].sum().backward()


def test_a_row_that_was_aborted_is_an_error() -> None:
    class Aborting(StoppingCriteria):
        """Of another request, in whose step those of `score` wait."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            for request_id in [known for known in engine._requests if known != "own"]:
                engine.abort(request_id)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    config = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=None)
    with Engine(models.shared("llama"), None, SchedulerConfig(max_num_seqs=1)) as engine:
        engine.add_request(PROMPTS[0], config, request_id="own", stopping_criteria=[Aborting()])
        with pytest.raises(RuntimeError, match="completion 1 was not scored to its end"):
            engine.score([PROMPTS[0]], [COMPLETIONS[0]])


def test_a_graph_has_the_positions_of_the_engine() -> None:
    """This model counts positions from another start than the engine's steps, unless they are given."""
    model = tiny_model("roberta")
    with Engine(model) as engine:
        (values,) = engine.score([PROMPTS[0]], [COMPLETIONS[0]])
        (graph,) = engine.score([PROMPTS[0]], [COMPLETIONS[0]], grad=True)
        assert torch.equal(values, graph.detach())
    weight = model.lm_head.dense.weight
    graph.sum().backward()
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    slope = float((weight.grad * direction).sum())
    sums = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        moved.lm_head.dense.weight.data += sign * 1e-3 * direction
        with Engine(moved) as engine:
            sums.append(float(engine.score([PROMPTS[0]], [COMPLETIONS[0]])[0].sum()))
    assert (sums[0] - sums[1]) / 2e-3 == pytest.approx(slope, rel=0.02)
