"""Ctrl-C at every possible point: a packed forward restores the model, and after an engine's step no reader hangs."""

import dis
import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.adapters import adapters
from hf_paged.features.encoder_decoder import encoders
from hf_paged.fused.cpu import decoder as fused_decoder
from hf_paged.fused.cpu import norms as fused_norms
from hf_paged.fused.cpu import weights as fused_weights
from hf_paged.generation.engine import arrivals, delivery, engine, loop, scheduler, stepper
from hf_paged.generation.requests import batch, group, request
from hf_paged.integration import attention
from hf_paged.kernels.native import build as native_build
from hf_paged.model import overrides, packed, packed_step
from hf_paged.model.state import state_of
from tests import encoder_models, models

pytestmark = pytest.mark.skipif(sys.gettrace() is not None, reason="needs the tracing that something else uses")
_METHODS = {
    packed_step.PackedStep: ("enter", "leave"), overrides.Overrides: ("apply", "undo", "_take_out", "withdraw"),
    fused_weights.LinearLayers: ("apply", "undo"), fused_norms.NativeLayers: ("apply", "undo"),
    fused_decoder.NativeDecoder: ("apply", "undo", "_choose"), packed.PackedModel: ("forward",),
    adapters.Adapters: ("choose", "run"),
}  # fmt: skip
TRACED = {vars(owner)[name].__code__ for owner, names in _METHODS.items() for name in names}
TRACED |= {overrides._swap.__code__, attention.name_ours.__code__, attention.name_own.__code__}


class Interrupter:
    """Raises KeyboardInterrupt at the `at`-th point of traced functions where CPython handles signals; counts them."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.seen = 0
        self.last: dict[FrameType, str] = {}  # the instruction that each running frame came from

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in TRACED:
            return None
        if event == "call":
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event != "opcode":
            return self
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        # Not where a call has raised: CPython goes to its handler at once, and an interrupt would leave that error set.
        may_come = self.last.get(frame, "").startswith(("CALL", "JUMP_BACKWARD")) and name != "PUSH_EXC_INFO"
        if event == "call" or may_come:
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        self.last[frame] = name
        return self


def interrupted(function: Callable[[], Any], at: int | None) -> int:
    assert sys.exc_info() == (None, None, None)
    interrupter = Interrupter(at)
    previous = sys.gettrace()
    gc.disable()  # what it would run of objects of former turns must not be counted
    sys.settrace(interrupter)
    try:
        function()
    finally:
        sys.settrace(previous)
        gc.enable()
    return interrupter.seen


def interrupted_everywhere(function: Callable[[], Any], more_than: int) -> Iterator[int]:
    """Interrupt the function at each of its points (more than `more_than`); yields after each, for checks."""
    total = interrupted(function, None)
    assert total > more_than
    for at in range(1, total + 1):
        with pytest.raises(KeyboardInterrupt):
            interrupted(function, at)
        yield at


@pytest.mark.slow
def test_a_packed_forward() -> None:
    """A forward that other code has set stays, wherever the interrupt comes."""
    model = models.build("llama", num_hidden_layers=1)
    hf_paged.prepack(model)
    own = model.lm_head.forward
    theirs = model.lm_head.forward = hf_paged.tokenwise(lambda rows: -own(rows))
    ids, implementation = torch.arange(5)[None], model.config._attn_implementation_internal

    def generate() -> torch.Tensor:
        return model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="paged")

    expected = generate()
    for at in interrupted_everywhere(generate, 40):
        assert model.config._attn_implementation_internal == implementation and not attention.in_packed_step(), at
        assert [m for m in model.modules() if "forward" in vars(m)] == [model.lm_head], at
        assert model.lm_head.forward is theirs, at
        assert not attention.names.here.values, at
    assert generate().equal(expected)


@pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")
def test_overrides_of_an_engine() -> None:
    native_build.build()
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    model = LlamaForCausalLM(config).bfloat16().eval()
    namespace = vars(sys.modules[type(model).__module__])
    rotation = namespace["apply_rotary_pos_emb"]
    (prompt,) = models.prompts(9)
    options = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:

        def generate() -> list[int]:
            engine.clear_prefix_cache()
            return engine.generate([prompt], options)[0].outputs[0].token_ids

        expected = generate()
        for at in interrupted_everywhere(generate, 60):
            assert not any("forward" in vars(module) for module in model.modules()), at
            assert namespace["apply_rotary_pos_emb"] is rotation, at
        assert generate() == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_adapters_of_requests() -> None:
    adapted = pytest.importorskip("tests.model.adapted")
    model = models.build("llama", num_hidden_layers=1)
    for name in ("x", "y"):
        adapted.add(model, adapted.lora(["v_proj"]), name)
    adapted.activate(model.eval(), "x")
    layers = [*adapted.layers_of(model)]
    prompts = models.prompts(9, 5, 7)
    options = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)

    def state() -> list[Any]:
        return [[dict(vars(m)) for m in layers], [p.requires_grad for p in model.parameters()]]

    before = state()
    with Engine(model, CacheConfig(num_blocks=64)) as engine:

        def generate() -> list[list[int]]:
            outputs = engine.generate(prompts, options, adapter=["x", "y", "__base__"])
            return [output.outputs[0].token_ids for output in outputs]

        expected = generate()
        for at in interrupted_everywhere(generate, 60):
            assert state() == before, at
            assert not state_of(model).lock._is_owned(), at
            engine.check_integrity()
        assert generate() == expected


class Deaf:
    """A streamer, which may be interrupted too."""

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", [True, False], ids=["async", "sync"])
def test_a_step(scheduling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader waits forever, no block is lost, and every request that ends without an error has the right tokens."""
    owners = (
        engine.Engine, engine.CallMethods, engine.PauseMethods, loop.EngineLoop, arrivals.Arrivals, delivery.Delivery,
        delivery.RequestStream, stepper.Stepper, batch.SampledTokens, request.SingleRequest,
        group.GroupRequest, Deaf,
    )  # fmt: skip
    methods = (method for owner in owners for method in vars(owner).values())
    places = {method.__code__ for method in methods if isinstance(method, FunctionType)}
    places |= {batch.sample_batch.__code__, batch._sample_alike.__code__, batch._extend_histories.__code__}
    # Outputs that are on their way to the caller get lost.
    lost = {Engine.__init__.__code__, Engine.step.__code__, delivery.Delivery.take_unclaimed.__code__}
    monkeypatch.setattr(sys.modules[__name__], "TRACED", places - lost)
    model = models.build("llama", num_hidden_layers=1)
    kinds: list[dict[str, Any]] = [
        {"max_new_tokens": 8},
        {"max_new_tokens": 3, "do_sample": True, "temperature": 2.0, "seed": 1},  # ends in the step that is interrupted
        {"max_new_tokens": 5, "num_beams": 3},
        {"max_new_tokens": 5, "do_sample": True, "num_return_sequences": 3, "temperature": 2.0, "seed": 2},
        {"max_new_tokens": 5},  # whose prompt is computed in that step
    ]
    prompts = models.prompts(5, 9, 7, 11, 12)
    configs = [GenerationConfig(**{"eos_token_id": None, "pad_token_id": 0, "seed": 0, **kind}) for kind in kinds]
    scheduler_config = SchedulerConfig(async_scheduling=scheduling)

    def begun() -> tuple[Engine, list[str], dict[str, Any]]:
        opened = Engine(model, CacheConfig(num_blocks=100, block_size=4), scheduler_config)
        streamers = [Deaf(), Deaf(), None, None]
        ids = [opened.add_request(p, c, streamer=s) for p, c, s in zip(prompts, configs, streamers)]
        outputs: dict[str, Any] = {}
        for _ in range(3 if scheduling else 2):
            step(opened, outputs)
        return opened, [*ids, opened.add_request(prompts[4], configs[4])], outputs

    def step(opened: Engine, outputs: dict[str, Any]) -> None:
        outputs |= {output.request_id: output for output in opened.step()}

    def ended(opened: Engine, ids: list[str], outputs: dict[str, Any]) -> list[Any]:
        for _ in range(20):
            opened.check_integrity()
            step(opened, outputs)
        assert not opened.has_unfinished_requests() and opened.stats().blocks_used == 0
        opened.close()
        return [outputs[key] for key in ids]

    expected = [[c.token_ids for c in output.outputs] for output in ended(*begun())]
    opened, *_ = begun()
    total = interrupted(opened.step, None)
    assert total > 150
    unharmed = 0
    for at in range(1, total + 1):
        opened, ids, outputs = begun()
        with pytest.raises(KeyboardInterrupt):
            interrupted(partial(step, opened, outputs), at)
        for output, tokens in zip(ended(opened, ids, outputs), expected):
            assert output.finished, at
            if output.error is None:
                assert [c.token_ids for c in output.outputs] == tokens, at
                unharmed += 1
    assert unharmed > total


@pytest.mark.slow
def test_requests_that_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep no blocks, those of an encoder's states included, and start again."""
    chosen = scheduler.Scheduler
    starting: list[Any] = [chosen._admit, chosen._start, chosen._set_status, encoders.EncoderTables.take]
    monkeypatch.setattr(sys.modules[__name__], "TRACED", {function.__code__ for function in starting})
    config = GenerationConfig(max_new_tokens=3, eos_token_id=98, pad_token_id=0)

    def begun() -> tuple[Engine, list[str]]:
        opened = Engine(encoder_models.model("bart"), CacheConfig(num_blocks=60, block_size=4))
        first = opened.add_request([5, 6, 7, 8], config)
        opened.step()
        return opened, [first, *(opened.add_request(prompt, config) for prompt in ([9, 10, 11], [5, 6, 7, 8]))]

    def ended(opened: Engine) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        while opened.has_unfinished_requests():
            opened.check_integrity()
            outputs |= {output.request_id: output for output in opened.step()}
        opened.check_integrity()
        assert opened.stats().blocks_used == 0
        opened.close()
        return outputs

    opened, ids = begun()
    total = interrupted(opened.step, None)
    expected = ended(opened)
    assert total > 20
    unharmed = 0
    for at in range(1, total + 1):
        opened, ids = begun()
        with pytest.raises(KeyboardInterrupt):
            interrupted(opened.step, at)
        outputs = ended(opened)
        for key in ids:
            if key in outputs and outputs[key].error is None:
                assert outputs[key].outputs[0].token_ids == expected[key].outputs[0].token_ids, at
                unharmed += 1
    assert unharmed > total
