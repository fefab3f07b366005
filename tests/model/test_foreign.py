"""Hooks, forwards and functions that others put into a model: its results are those of plain `generate`."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.logits_process import TopKLogitsWarper
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm

import hf_paged
from hf_paged import CacheConfig, Engine, EngineError, UnsupportedModelError
from hf_paged.errors import described
from hf_paged.features.watch.foreign import ForeignCode, bare_copy, foreign_code
from hf_paged.model.calls import helpers, without_modes
from hf_paged.model.state import state_of
from tests import models
from tests.architectures.tiny import tiny_model
from tests.encoder_models import model as encoder_model
from tests.forwards import bound_model
from tests.model.foreign_code import (
    FUNCTIONS,
    HOOKS,
    DoublesActivations,
    forward_hook,
    only_steps,
    own_forward,
    registered,
    steer_last,
    window_attention,
)

CASES = HOOKS | FUNCTIONS
NEW_TOKENS = 5
LENGTHS = (13, 5, 9)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
}
FEW_BLOCKS = CacheConfig(num_blocks=40, block_size=4)
CHUNKS = {"max_num_batched_tokens": 8}


def config(mode: str = "greedy", **options: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, **MODES[mode], **options)


def called(model: Any, mode: str, **options: Any) -> list[list[int]]:
    """Texts of a ragged batch."""
    torch.manual_seed(3)
    return model.generate(**models.batch(*LENGTHS), generation_config=config(mode), **options).tolist()


def alone(model: Any, mode: str = "greedy") -> list[list[int]]:
    """What plain `generate` continues each prompt with."""
    rows = []
    for prompt in models.prompts(*LENGTHS):
        torch.manual_seed(3)
        rows.append(model.generate(prompt[None], generation_config=config(mode))[0, len(prompt) :].tolist())
    return rows


def served(engine: Engine, mode: str = "greedy") -> list[list[int]]:
    options = config(mode, **({"seed": 3} if mode == "sampling" else {}))
    return [output.outputs[0].token_ids for output in engine.generate(models.prompts(*LENGTHS), options)]


@pytest.fixture
def model() -> Any:
    return models.build("llama", eos_token_id=None, head_dim=32)  # a size of which native code computes whole layers


@functools.cache
def untouched() -> tuple[list[list[int]], list[list[int]]]:
    """What `alone` and `called` return for the fixture's model."""
    made = models.build("llama", eos_token_id=None, head_dim=32)
    return alone(made), called(made, "greedy")


def on_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    own = type(model).prepare_inputs_for_generation
    patch.setattr(type(model), "prepare_inputs_for_generation", lambda *args, **kwargs: own(*args, **kwargs))


def in_subclass(model: Any, patch: pytest.MonkeyPatch) -> None:
    own = type(model)
    patch.setattr(model, "__class__", type("Own", (own,), {"_sample": lambda *args, **kwargs: own._sample(*args)}))


def in_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "multinomial", lambda probs, *args, **kwargs: probs.argmin(-1, keepdim=True))


def updates_on_instance(model: Any, patch: pytest.MonkeyPatch) -> None:
    own = model._update_model_kwargs_for_generation
    patch.setattr(model, "_update_model_kwargs_for_generation", lambda *args, **kw: own(*args, **kw), raising=False)


def generate_on_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    own = type(model).generate
    penalty = {"repetition_penalty": 2.5}
    patch.setattr(type(model), "generate", lambda *args, **kwargs: own(*args, **{**kwargs, **penalty}))


GOES_AROUND = {
    on_class: "prepare_inputs", updates_on_instance: "_update_model_kwargs", generate_on_class: "generate",
    in_subclass: "_sample", in_torch: "multinomial",
}  # fmt: skip


@pytest.mark.parametrize("replace", GOES_AROUND)
def test_an_engine_refuses_what_it_would_go_around(replace: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(model, FEW_BLOCKS) as engine:
        first = served(engine)
        with monkeypatch.context() as patch:
            replace(model, patch)
            with pytest.raises((UnsupportedModelError, EngineError), match=f"{GOES_AROUND[replace]}.*test_foreign"):
                served(engine)
            with pytest.raises(UnsupportedModelError, match=f"{GOES_AROUND[replace]}.*test_foreign"):
                Engine(model, FEW_BLOCKS)
            assert f"engine: refused: {GOES_AROUND[replace]}" in str(hf_paged.check(model)).replace("torch.", "")
            if replace is on_class:
                with hf_paged.record_calls() as calls:
                    called(model, "greedy", cache_implementation="paged")
                assert calls[0].route == "hf_loop"
        assert served(engine) == first


def test_processors_of_transformers_that_others_replace(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows share no call of ours."""
    with Engine(model, FEW_BLOCKS) as engine:
        first = served(engine, "sampling")
        monkeypatch.setattr(TopKLogitsWarper, "__call__", lambda self, ids, scores: -scores)
        assert served(engine, "sampling") == alone(model, "sampling") != first


def test_modes_belong_to_a_thread(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads in different modes look at one model in turns: it is examined once, and each hears its own modes."""
    examined, own = [], ForeignCode._examine
    monkeypatch.setattr(ForeignCode, "_examine", lambda self: [examined.append(self), own(self)])
    code, weights, outside = foreign_code(model), state_of(model).weights, set()
    for _ in range(3):
        assert code.look() is None
        outside.add(weights.code)
        with DoublesActivations():
            assert "DoublesActivations is active" in (code.look() or "") and weights.code not in outside
    assert len(outside) == 1
    assert len(examined) == 1


@pytest.mark.parametrize("num_left", [0, 2, 3])
def test_an_interrupt_between_modes_loses_none(num_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trial is not in are modes of others: its device stays."""
    own = torch.overrides._pop_mode

    def interrupted() -> object:
        if len(stack()) == num_left:
            patch.undo()
            raise KeyboardInterrupt
        return own()

    def stack() -> list[object]:
        return torch.overrides._get_current_function_mode_stack()

    with DoublesActivations(), torch.device("meta"), DoublesActivations():
        before = stack()
        with contextlib.suppress(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(torch.overrides, "_pop_mode", interrupted)
            with without_modes():
                assert torch.empty(1).is_meta and len(stack()) == 1
        assert stack() == before


@pytest.mark.parametrize("part", ["_in_modules", "_in_functions", "_in_choice"])
def test_an_interrupted_examination_is_made_again(part: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = foreign_code(model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"hf_paged.features.watch.foreign.{part}", mock.Mock(side_effect=KeyboardInterrupt))
        code.look()
    assert code.look() is None
    monkeypatch.setattr(torch, "rsqrt", lambda x: x)
    assert "torch.rsqrt is replaced" in (code.look() or "")


@pytest.mark.quick_cases("[llama]", "[t5]")
@pytest.mark.parametrize("name", ["llama", "bamba", "t5"])
def test_a_mode_sees_no_trial(name: str) -> None:
    """The first call under a counter of operations counts what the second one does."""
    model = encoder_model(name) if name == "t5" else tiny_model(name)
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            called(model, "greedy", cache_implementation="paged")
            if name != "t5":
                Engine(model, FEW_BLOCKS).close()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", [DynamicCache, DynamicLayer])
def test_methods_of_caches_that_others_replace(kind: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are without effect over blocks, as with a static cache; a trial does not take their work for the model's."""
    own, first = kind.update, called(model, "greedy")
    monkeypatch.setattr(kind, "update", lambda self, k, v, *args, **options: own(self, k, v * 0.5, *args, **options))
    assert called(model, "greedy", cache_implementation="static") == first != called(model, "greedy")
    assert called(model, "greedy", cache_implementation="paged") == first and hf_paged.check(model).native


class PassesOn(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class KeepsCache(LlamaForCausalLM):
    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().forward(input_ids, attention_mask=kwargs.get("attention_mask"))


def test_a_forward_that_takes_any_argument(model: Any) -> None:
    """What it passes on, the trial shows."""
    model.__class__ = PassesOn
    assert called(model, "greedy", cache_implementation="paged") == called(model, "greedy")
    with Engine(model, FEW_BLOCKS) as engine:
        assert served(engine) == alone(model)
    model.__class__ = KeepsCache
    with pytest.raises(UnsupportedModelError, match="its forward writes no K/V into the cache it is given"):
        called(model, "greedy", cache_implementation="paged")


# -- the matrix ------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases(
    "class: only_prompts", "sdpa's mask", "in one layer", "torch's linear", "modules' call", "a class's code",
    "function mode", "dispatch mode",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_what_comes_and_goes(case: str, model: Any) -> None:
    """In an engine that is made while the code is there, when it has gone, when it is back, and with `generate`."""
    plain, own = untouched()
    with contextlib.ExitStack() as code:
        code.callback(CASES[case](model))
        wanted, expected = alone(model), called(model, "greedy")
        with Engine(model, FEW_BLOCKS, CHUNKS) as engine:
            assert served(engine) == wanted != plain
            with hf_paged.record_calls() as calls:
                assert called(model, "greedy", cache_implementation="paged") == expected != own
            assert calls[0].route == "hf_loop" and not hf_paged.check(model).native
            code.close()
            assert served(engine) == plain
            with hf_paged.record_calls() as calls:
                assert called(model, "greedy", cache_implementation="paged") == own
            assert calls[0].route == "packed" and hf_paged.check(model).native
            code.callback(CASES[case](model))
            assert served(engine) == wanted
            engine.check_integrity()


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("of_class", [False, True])
def test_what_the_forward_of_a_norm_calls(of_class: bool, is_marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked, it runs packed; no kernel computes the norm in its place."""
    model = models.build("llama", eos_token_id=None, head_dim=32)
    own, size = Llama4TextRMSNorm._norm, model.config.hidden_size
    norms = [Llama4TextRMSNorm(size) for _ in model.model.layers]
    for layer, norm in zip(model.model.layers, norms, strict=True):
        layer.input_layernorm = norm
    with Engine(model, FEW_BLOCKS) as engine:
        first = served(engine)
        assert first == alone(model)
        with monkeypatch.context() as patch:
            for norm in norms:

                def replaced(*args: Any, norm: Any = norm) -> Any:
                    return own(norm, args[-1]) * -1

                put_in = hf_paged.tokenwise(replaced) if is_marked else replaced
                patch.setattr(Llama4TextRMSNorm if of_class else norm, "_norm", put_in)
            assert served(engine) == alone(model) != first
            assert (foreign_code(model).look() is None) == is_marked
        for norm in norms:
            vars(norm).pop("_norm", None)  # what the patch found there
        assert served(engine) == first


@pytest.mark.parametrize(
    ("family", "dtype", "case"),
    [("gemma3", torch.float32, "steer_last on layer"), ("llama", torch.bfloat16, "only_prompts on layer")],
)
def test_windows_and_bf16(family: str, dtype: torch.dtype, case: str) -> None:
    """Blocks that have left a window are free, also of a prompt that is computed at once after several steps."""
    model = models.build(family, eos_token_id=None).to(dtype)
    with Engine(model, FEW_BLOCKS, CHUNKS) as engine:
        first = served(engine)
        undo = CASES[case](model)
        try:
            assert called(model, "greedy", cache_implementation="paged") == called(model, "greedy")
            assert served(engine) == alone(model)
        finally:
            undo()
        assert served(engine) == first
        engine.check_integrity()


# -- between the steps of a live engine -----------------------------------------------------------------------------


def add_all(engine: Engine, prompts: Sequence[torch.Tensor]) -> None:
    """Their ids are their numbers."""
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, config(), request_id=str(number))


def assert_as_alone(engine: Engine, model: Any, prompts: Sequence[torch.Tensor], outputs: dict[str, Any]) -> None:
    """Run the requests of `add_all` to their end: each gets what it gets alone. outputs: of the steps before, by id."""
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
        engine.check_integrity()
    found = [outputs[str(number)].outputs[0].token_ids for number in range(len(prompts))]
    assert found == [model.generate(p[None], generation_config=config())[0, len(p) :].tolist() for p in prompts]


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_requests_in_every_state(preemption: str, is_async: bool, model: Any) -> None:
    """A hook comes when requests run, are half computed, swapped and wait: for the last it has always been there."""
    prompts = models.prompts(40, 6, 30)
    scheduler = {"max_num_batched_tokens": 16, "preemption": preemption, "async_scheduling": is_async}
    with Engine(model, CacheConfig(num_blocks=24, block_size=4), scheduler) as engine:
        add_all(engine, prompts)
        engine.step()
        undo = forward_hook(steer_last)(model)
        assert_as_alone(engine, model, prompts, {})
        undo()


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_layer_replaced", [False, True])
def test_a_forward_that_leaves_with_a_prompt_computed_in_part(
    is_layer_replaced: bool, is_async: bool, model: Any
) -> None:
    """Modules and code change at once; nothing of such a prompt had been in the blocks."""
    prompts = models.prompts(40, 6)
    scheduler = {**CHUNKS, "async_scheduling": is_async}
    with Engine(model, FEW_BLOCKS, scheduler) as engine:
        undo = own_forward(steer_last)(model)
        add_all(engine, prompts)
        for _ in range(3):
            engine.step()
        undo()
        if is_layer_replaced:
            model.model.layers[1] = models.build("llama", seed=1, head_dim=32).model.layers[1]
        assert_as_alone(engine, model, prompts, {})
        assert served(engine) == served(engine) == alone(model)
        assert engine.stats().prefix_cache_hit_tokens > 0 == engine.stats().blocks_used


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("method", ["settle", "begin_anew"])
def test_an_interrupt_while_the_engine_follows_the_model(method: str, is_async: bool, model: Any) -> None:
    """The next step begins anew what the interrupted one has left: nothing of the prompt had been in the blocks."""
    prompts = models.prompts(40, 6)
    with Engine(model, FEW_BLOCKS, {**CHUNKS, "async_scheduling": is_async}) as engine:
        undo = own_forward(steer_last)(model)
        add_all(engine, prompts)
        outputs = {output.request_id: output for _ in range(3) for output in engine.step()}
        undo()
        with pytest.MonkeyPatch.context() as patch:
            owner = engine._stepper if method == "settle" else engine._scheduler
            patch.setattr(owner, method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert_as_alone(engine, model, prompts, outputs)
        assert served(engine) == served(engine) == alone(model)
        assert engine.stats().prefix_cache_hit_tokens > 0


def interrupt(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_code_that_raises_ends_requests_and_not_steps(model: Any) -> None:
    """Also where it is tried first. When it is gone, the engine serves as before."""
    (prompt,) = models.prompts(6)

    def fails(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        raise OSError("of the caller")

    with Engine(model, FEW_BLOCKS, CHUNKS) as engine:
        first = served(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model.get_decoder().layers[0].mlp), "forward", fails)
            for _ in range(2):
                engine.add_request(prompt, config())
                (output,) = engine.step()
                assert "OSError: of the caller" in str(output.error) and not engine.has_unfinished_requests()
        assert served(engine) == first
        engine.check_integrity()


@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_a_hook_that_comes_between_two_tokens(mode: str, model: Any) -> None:
    """The text goes on as in `generate` with a streamer that registers the hook after two tokens."""
    (prompt,) = models.prompts(9)

    class Registering:
        """A streamer, which gets the prompt first."""

        calls = 0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 3:
                forward_hook(steer_last)(model)

        def end(self) -> None: ...

    if mode == "greedy":
        expected = model.generate(prompt[None], generation_config=config(), streamer=Registering())[0, 9:].tolist()
        model.get_decoder().layers[0]._forward_hooks.clear()
        with Engine(model, FEW_BLOCKS) as engine:
            engine.add_request(prompt, config(), streamer=Registering())
            while engine.has_unfinished_requests():
                outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == expected
    with pytest.raises(UnsupportedModelError, match=r"since this call began, a LlamaDecoderLayer has a forward hook"):
        options = config(mode)

        class Meddler(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if input_ids.shape[1] == 11:
                    forward_hook(steer_last)(model)
                return scores

        model.get_decoder().layers[0]._forward_hooks.clear()
        model.generate(
            prompt[None], generation_config=options, logits_processor=[Meddler()], cache_implementation="paged"
        )


def test_no_prefix_is_shared_with_what_a_hook_sees(model: Any) -> None:
    with Engine(model, FEW_BLOCKS) as engine:
        first = served(engine)
        assert served(engine) == first and engine.stats().prefix_cache_hit_tokens > 0
        undo = forward_hook(only_steps)(model)
        hits = engine.stats().prefix_cache_hit_tokens
        assert served(engine) == served(engine) == alone(model)
        assert engine.stats().prefix_cache_hit_tokens == hits
        undo()
        assert served(engine) == first and served(engine) == first
        assert engine.stats().prefix_cache_hit_tokens > hits


# -- what is tried, trusted and kept --------------------------------------------------------------------------------


def test_code_of_others_is_not_tried(model: Any) -> None:
    calls: list[tuple[int, ...]] = []

    def count(module: Any, args: Any, result: torch.Tensor) -> None:
        calls.append(tuple(result.shape))

    model.lm_head.register_forward_hook(count)
    report = hf_paged.check(model)
    assert report.supported and not report.native and "a Linear has a forward hook (tests" in report.reason
    assert "test_code_of_others_is_not_tried.<locals>.count" in str(report) and not calls
    with Engine(model, FEW_BLOCKS) as engine:
        assert not calls
        engine.generate(models.prompts(5), config())
    assert len(calls) == NEW_TOKENS
    called(model, "greedy", cache_implementation="paged")
    assert len(calls) == 2 * NEW_TOKENS


@pytest.mark.parametrize("many", [1, 1000])
def test_what_fails_in_a_trial_is_tried_again(many: int, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may have lacked: a model is refused for as long as it fails, and is not computed slowly for it either."""
    left, own = [many], torch.nn.functional.embedding

    def without_memory(*args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("can't allocate memory")
        return own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "embedding", without_memory)
        patch.setattr(
            "hf_paged.features.watch.foreign._in_torch", lambda **options: None
        )  # it fails as torch's own would
        first = hf_paged.check(model)
        assert first.supported is (many == 1) and "allocate" in first.reason
        left[0] = 0
        assert hf_paged.check(model).native
    assert hf_paged.check(model).native
    with Engine(model, FEW_BLOCKS) as engine:
        assert served(engine) == alone(model)


def test_a_hook_that_is_marked_runs_packed(model: Any) -> None:
    shapes: list[tuple[int, ...]] = []

    @hf_paged.tokenwise
    def shift(module: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(result.shape))
        return result + 3 * torch.arange(96).cos()

    model.lm_head.register_forward_hook(shift)
    assert hf_paged.check(model).native
    with Engine(model, FEW_BLOCKS, {"max_num_batched_tokens": 64}) as engine:
        shapes.clear()
        found = served(engine)
        assert shapes[0] == (1, 3, 96)
    assert found == alone(model)


def test_hooks_of_transformers_and_accelerate_run_packed(model: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model.generate(
        models.prompts(5)[0][None], max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True
    )
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules())
    hooks.add_hook_to_module(model.lm_head, hooks.AlignDevicesHook(execution_device="cpu"))
    assert hf_paged.check(model).native and foreign_code(model).reason is None

    class Own(hooks.ModelHook):  # type: ignore[misc]
        pass

    hooks.add_hook_to_module(model.model.norm, Own())
    assert "the forward of a LlamaRMSNorm is replaced" in hf_paged.check(model).reason


AROUND = """
def around(own):
    @wraps(own)
    def forward(self, *args):
        return own(self, *args)
    return forward
"""


def test_the_forwards_of_compressed_tensors_run_packed(model: Any) -> None:
    """They move the tensors of a module and call its own forward, whose name they bear."""

    def replaced(home: str) -> str | None:
        scope: dict[str, Any] = {"__name__": home, "wraps": functools.wraps}
        exec(AROUND, scope)
        layer = model.model.embed_tokens
        layer.forward = scope["around"](type(layer).forward).__get__(layer)
        return foreign_code(model).look()

    assert replaced("compressed_tensors.offload.module") is None
    assert "the forward of a Embedding is replaced" in str(replaced("compressed_tensors.other"))


COMPILED = {
    "LlamaMLP.forward": """
def forward(self, x):
    result = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return result + 0.5 * result.roll(1, 1) if x.shape[1] > 8 else result
""",
    "rotate_half": """
def rotate_half(x):
    return torch.cat((x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1).roll(1, 1)
""",
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["in place", "by its code"])
@pytest.mark.parametrize("name", COMPILED)
def test_code_compiled_into_a_namespace_of_transformers(name: str, way: str, model: Any, monkeypatch: Any) -> None:
    """It has the module's name, but is not of the module's file."""
    space, scope = vars(sys.modules[type(model).__module__]), dict[str, Any]()
    exec(compile(COMPILED[name], "<patched>", "exec"), space, scope)
    (function,) = scope.values()
    *path, last = name.split(".")
    owner: Any = space[path[0]] if path else sys.modules[type(model).__module__]
    if way == "in place":
        monkeypatch.setattr(owner, last, function)
    else:
        monkeypatch.setattr(getattr(owner, last), "__code__", function.__code__)
    assert f"{last} " in hf_paged.check(model).reason and "is replaced (transformers" in hf_paged.check(model).reason
    assert called(model, "greedy", cache_implementation="paged") == called(model, "greedy")
    with Engine(model, FEW_BLOCKS, CHUNKS) as engine:
        assert served(engine) == alone(model)


@pytest.mark.quick_cases("[mlp]")
@pytest.mark.parametrize("name", ["input_layernorm", "mlp", "self_attn"])
def test_modules_compiled_as_one_graph(name: str, model: Any) -> None:
    """No override is put into them. Attention over blocks is no part of a graph."""
    for layer in model.model.layers:
        setattr(layer, name, torch.compile(getattr(layer, name), backend="eager", fullgraph=True))
    with torch._dynamo.config.patch(recompile_limit=64):
        expected = called(model, "greedy")
        if name == "self_attn":
            with pytest.raises(UnsupportedModelError, match="fullgraph=True does not run in steps"):
                called(model, "greedy", cache_implementation="paged")
        else:
            assert called(model, "greedy", cache_implementation="paged") == expected


def test_only_errors_of_fullgraph_are_put_down_to_it() -> None:
    assert described(torch._dynamo.exc.Unsupported("a break", case_name="")).endswith("leave it out")
    assert described(torch._dynamo.exc.TorchRuntimeError("of sizes")) == "TorchRuntimeError: of sizes"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_compiled_in_place_is_not_foreign(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")
    assert foreign_code(model).look() is None


def test_true_for_cuda_graphs_or_ranks_is_not_ignored(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot leave packed steps ends its requests with an error that says why."""

    def refuse(self: Any, reason: str) -> Any:
        raise UnsupportedModelError(reason)

    with Engine(model, FEW_BLOCKS) as engine:
        first = served(engine)
        monkeypatch.setattr(bound_model(engine), "stand_in", refuse)
        undo = forward_hook(steer_last)(model)
        (output,) = engine.generate(models.prompts(5), config(), raise_on_error=False)
        assert output.error is not None and output.error.startswith("a LlamaDecoderLayer has a forward hook")
        undo()
        assert served(engine) == first
        engine.check_integrity()


def test_functions_are_not_kept_alive() -> None:
    """An attention function keeps its model alive while it is registered; a forward never keeps its class."""
    model = models.build("llama", eos_token_id=None)

    def attend(*args: Any, owner: Any = model, **kwargs: Any) -> Any:
        return window_attention(*args, **kwargs)

    class Scaled(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows)

    assert helpers(Scaled) == []
    undo = registered(attend)(model)
    called(model, "greedy", cache_implementation="paged")
    undo()
    gone = weakref.ref(model), weakref.ref(Scaled)
    del model, attend, undo, Scaled
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_bare_copy_shares_weights_and_nothing_else(model: Any) -> None:
    steering, forward = forward_hook(steer_last)(model), model.lm_head.forward
    model.lm_head.forward = lambda rows: -forward(rows)
    bare = bare_copy(model)
    assert not any(module._forward_hooks or "forward" in vars(module) for module in bare.modules())
    assert model.model.layers[0]._forward_hooks and "forward" in vars(model.lm_head)
    assert all(a is b for a, b in zip(model.parameters(), bare.parameters(), strict=True))
    assert not {id(m) for m in model.modules()} & {id(m) for m in bare.modules()}
    steering()
    del model.lm_head.forward
    assert called(bare, "greedy") == called(model, "greedy")


@pytest.mark.parametrize("change", [only_steps, steer_last])
def test_modules_of_others_are_tried(change: Any, model: Any) -> None:
    """A step of two sequences tells what depends on the number of tokens in a row."""

    class Steered(torch.nn.Module):
        def __init__(self, layer: Any) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return change(self.layer(*args, **kwargs))

    called(model, "greedy", cache_implementation="paged")
    model.model.layers[0] = Steered(model.model.layers[0])
    assert not hf_paged.check(model).native
    assert called(model, "greedy", cache_implementation="paged") == called(model, "greedy")


@pytest.mark.parametrize("mode", ["greedy", "beams"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapter_names(mode: str) -> None:
    """The first call has them, so that the model is examined with PEFT's hooks; no trace is left."""
    tuned = pytest.importorskip("tests.model.adapted").with_peft(models.build("llama", eos_token_id=None))
    rows = {"adapter_names": ["x", "__base__", "y"], **({"num_beams": 3} if mode == "beams" else {})}
    expected = called(tuned, mode, **rows)
    assert called(tuned, mode, **rows, cache_implementation="paged") == expected
    assert not any(module._forward_pre_hooks for module in tuned.modules())
    assert hf_paged.check(tuned).native
    assert called(tuned, mode, cache_implementation="paged") == called(tuned, mode) != expected
    with Engine(tuned, FEW_BLOCKS) as engine:
        assert served(engine) == alone(tuned)
