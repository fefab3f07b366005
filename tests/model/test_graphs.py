"""Decode steps as graphs, with tapes for CUDA graphs: the tokens of plain generate, and eager steps when required."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig, UnsupportedModelError
from hf_paged.cache.kv_pool import KVPool
from hf_paged.features.graphs import graph_inputs, graphs, warmup
from hf_paged.features.graphs.graph_inputs import Inputs, Shape, StepCosts, mixed_shape, padded_size
from hf_paged.features.graphs.graphs import CudaGraphs, NoHostValues
from hf_paged.kernels import metadata as metadata_module
from hf_paged.kernels.metadata import step_arrays
from tests import models
from tests.forwards import graphs_of, runner_of
from tests.generation import tape
from tests.generation.drafters import Oracle
from tests.generation.solo import NEVER, assert_as_solo, assert_idle, config, plain, requests
from tests.generation.tape import TapedGraphs
from tests.schedulings import in_both_schedulings

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # what PEFT asks
    pytest.mark.filterwarnings("error:decode steps run without CUDA graphs:RuntimeWarning"),
]


NO_PREFIXES = SchedulerConfig(prefix_caching=False)


@pytest.fixture(autouse=True)
def _taped(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch)


def opened(model: Any, num_blocks: int = 200, scheduler: SchedulerConfig | None = None, **options: Any) -> Engine:
    """An engine with small blocks and NaN in every slot."""
    engine = Engine(model, CacheConfig(num_blocks=num_blocks, block_size=4), scheduler, **options)
    for tensor in tensors_of(engine):
        tensor.fill_(torch.nan)
    return engine


def tensors_of(engine: Engine) -> list[torch.Tensor]:
    return [tensor for layer in engine._memory.pool.layers.values() for tensor in layer.tensors]


def captured_of(engine: Engine) -> Any:
    (captured,) = graphs_of(engine)._captured.values()
    return captured


def generated(engine: Engine, prompts: list[torch.Tensor], **options: Any) -> list[list[int]]:
    outputs = engine.generate(prompts, config("greedy", **{"eos_token_id": NEVER, **options}))
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


@in_both_schedulings
@pytest.mark.smoke_cases("[decode steps-waiting")
@pytest.mark.parametrize("costs", [None, StepCosts()], ids=["decode steps", "all steps"])
def test_mixed_requests_equal_their_solo_runs(costs: StepCosts | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if costs is not None:
        tape.install(monkeypatch, costs)
    model = models.shared("gemma3")
    wanted = requests(24)
    prompts, configs = [p for p, _ in wanted], [c for _, c in wanted]
    with opened(model, 400) as engine:
        outputs = engine.generate(prompts, configs)
        assert_idle(engine)
        stats = engine.stats()
    assert stats.graph_replays == stats.steps - (costs is None)  # the first one has nothing but prompts
    assert TapedGraphs.captures > 1  # the batch grows and shrinks
    assert_as_solo(model, outputs, wanted)
    with opened(model, 400, cuda_graphs=False) as engine:
        eager = engine.generate(prompts, configs)
        assert engine.stats().graph_replays == 0
    for ours, theirs in zip(outputs, eager):
        for one, other in zip(ours.outputs, theirs.outputs):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("max_num_seqs", [3, 16])
def test_steps_with_drafts(max_num_seqs: int) -> None:
    """A graph for each size, also where a step has more rows of logits than sequences run."""
    model, prompts = models.shared("llama"), [[5, 6, 7, 8] * 4, [9, 3, 4] * 5, [11, 12, 13]]
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
    options = {"max_new_tokens": 20}
    with opened(model, 400, scheduler) as engine:
        expected = generated(engine, prompts, **options)
    known = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected)]
    drafts = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    captures = TapedGraphs.captures
    with opened(model, 400, scheduler, assistant_model=Oracle(known, 0.8)) as engine:
        found = generated(engine, prompts, **options, **drafts)
        stats = engine.stats()
        shapes = captured_of(engine).replays
    assert found == expected and stats.accepted_tokens > 20
    assert stats.graph_replays == stats.steps - 1 and TapedGraphs.captures > captures
    assert any(shape.num_rows == shape.num_tokens > max_num_seqs for shape in shapes) or max_num_seqs > 3


def test_tables_grow_between_replays() -> None:
    """From one block to many, and past the window; three rows in a graph of four."""
    model = models.shared("gemma3")
    prompts = models.prompts(1, 2, 9)
    with opened(model) as engine:
        assert generated(engine, prompts, max_new_tokens=60) == plain(model, prompts, max_new_tokens=60)
        stats = engine.stats()
    assert (stats.graph_replays, TapedGraphs.captures) == (59, 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_replay_writes_the_slots_of_its_tokens_only(family: str) -> None:
    """Padding rows write nothing, stale entries of the tables do no harm."""
    model = models.shared(family)
    with opened(model) as engine:
        for prompt in models.prompts(3, 14, 30):
            engine.add_request(prompt, config("greedy", max_new_tokens=30, eos_token_id=NEVER))
        for _ in range(12):
            engine.step()
        before = [tensor.clone() for tensor in tensors_of(engine)]
        seqs = [seq for group in engine._scheduler.groups for seq in group.live]
        expected = set()
        engine.step()
        manager = engine._memory.manager
        for group in range(len(manager.groups)):
            ends = [(seq.seq_id, end) for seq in seqs if (end := seq.num_computed_tokens)]
            expected |= {manager.slots(seq_id, end - 1, end, group)[0] for seq_id, end in ends}
        assert engine.stats().graph_replays > 8 and len(expected) >= 3
        changed: set[int] = set()
        for old, new in zip(before, tensors_of(engine)):
            same = (old == new) | (old.isnan() & new.isnan())
            changed |= set((~same.flatten(2).all(-1)).flatten().nonzero()[:, 0].tolist())
        assert changed == expected


@contextmanager
def aborted(*_: Any, **__: Any) -> Iterator[None]:
    """A capture that CUDA aborts."""
    yield
    raise RuntimeError("capture aborted")


def test_a_graph_whose_capture_failed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator of pinned memory still refers to it."""
    made: list[weakref.ref[Any]] = []

    class Graph:
        replay = None

        def __init__(self) -> None:
            made.append(weakref.ref(self))

    device = object.__new__(CudaGraphs)
    for name, value in (("_pool", None), ("_stream", None)):
        monkeypatch.setattr(device, name, value, raising=False)
    monkeypatch.setattr(graphs, "_broken", [])
    monkeypatch.setattr(device, "_aside", lambda work: work(), raising=False)
    monkeypatch.setattr(device, "_end_broken_capture", lambda: None, raising=False)
    monkeypatch.setattr(device, "_capture_nothing", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", aborted)
    with pytest.raises(RuntimeError, match="capture aborted"):
        device.capture(lambda: None)
    gc.collect()
    assert made[0]() is not None
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    device.capture(lambda: None)
    gc.collect()
    assert made[0]() is not None and made[1]() is None


@pytest.mark.parametrize("max_seqs", [1, 20, 256])
def test_padded_sizes(max_seqs: int) -> None:
    sizes = [padded_size(count, max_seqs) for count in range(1, max_seqs + 1)]
    assert all(count <= size <= max_seqs for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and sizes[-1] == max_seqs
    for count, size in enumerate(sizes, 1):
        assert size < 2 * count if count <= 8 else size - count < max(8, count / 8)
    assert len(set(sizes)) < 50
    coarse = [padded_size(count, max_seqs, coarse=True) for count in range(1, max_seqs + 1)]
    assert all(count <= size <= max_seqs and size - count < max(16, count / 4) for count, size in enumerate(coarse, 1))
    if max_seqs == 256:
        assert sorted(set(sizes))[:6] == [1, 2, 4, 8, 16, 24]
        assert (len(set(sizes)), len(set(coarse))) == (27, 16)


DRAFTS = {graph_inputs.draft_shape(count) for count in range(1, graph_inputs.MAX_DRAFT_TOKENS + 1)}


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_a_warm_up_captures_all_sizes_and_writes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no more positions than a model has, and leaves the answers as they were."""
    monkeypatch.setattr(warmup, "DEVICE_TYPE", "cpu")
    model = models.shared(family)
    prompts = models.prompts(5, 9, 30)
    with opened(model, scheduler=SchedulerConfig(max_num_seqs=20), warmup=False) as engine:
        runner = runner_of(engine)
        warmup.warm_up(runner.way[0], runner.captures(), engine.scheduler_config, True)
        assert set(captured_of(engine).replays) == {Shape(n, n) for n in (1, 2, 4, 8, 16, 20)} | DRAFTS
        assert all(tensor.isnan().all() for tensor in tensors_of(engine))
        captures = TapedGraphs.captures
        assert (captures, engine.stats().graph_replays, engine.stats().blocks_used) == (6 + len(DRAFTS), 0, 0)
        assert generated(engine, prompts) == plain(model, prompts) and TapedGraphs.captures == captures
        assert engine.stats().graph_replays > 0


@pytest.mark.parametrize("family, replayed", [("llama", True), ("mistral", False)])
def test_sequences_with_a_common_prefix_have_other_graphs(family: str, replayed: bool, monkeypatch: Any) -> None:
    """Chosen by the host from the block tables; not with a sliding window in all layers."""
    for module in (metadata_module, graph_inputs):
        monkeypatch.setattr(module, "MIN_SHARED_KEYS", 16)
    model, prompts = models.shared(family), models.prompts(24, 30)
    prompts = [torch.cat([prompts[0], torch.tensor([5])]), prompts[1], torch.cat([prompts[0], torch.tensor([7])])]
    with opened(model, 400) as engine:
        assert generated(engine, prompts) == plain(model, prompts)
        assert not any(shape.shares for shape in captured_of(engine).replays)  # the prompts arrived at once
        assert generated(engine, prompts) == plain(model, prompts)
        shapes = set(captured_of(engine).replays)
    assert {shape for shape in shapes if shape.shares} == ({Shape(4, 4, None, True)} if replayed else set())


def test_which_tables_share() -> None:
    tables = [[*range(16), *range(20, 30)], [*range(40, 70)], [*range(16), *range(30, 40)]]
    assert step_arrays([tables], [300, 400, 300], [1, 1, 1], 16).shares
    assert not step_arrays([tables], [300, 400, 256], [1, 1, 1], 16).shares  # the last key is never shared
    assert not step_arrays([tables[:2]], [300, 400], [1, 1], 16).shares
    gone = [[-1] * 16 + table[16:] for table in tables]
    assert not step_arrays([gone], [300, 400, 300], [1, 1, 1], 16).shares
    assert step_arrays([gone, tables], [300, 400, 300], [1, 1, 1], 16).shares


def test_a_warm_up_is_what_the_limits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "DEVICE_TYPE", "cpu")
    assert warmup.rehearsals(256, 8192) == list(warmup.REHEARSALS)
    assert {each.query_lens for each in warmup.rehearsals(1, 16)} == {(1,), (2,)}
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16)
    with opened(models.shared("llama"), scheduler=limits) as engine:
        assert set(captured_of(engine).replays) == {Shape(1, 1)} | DRAFTS
    with opened(models.shared("llama"), warmup=False) as engine:
        assert not graphs_of(engine)._captured
    with opened(models.shared("llama"), cuda_graphs=False) as engine:
        assert graphs_of(engine) is None


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch, StepCosts())


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("is_async", [False, True])
def test_prompts_arrive_between_tokens(is_async: bool) -> None:
    """Chunks of prompts beside decodes whose last tokens the host may not know yet; tokens are no more than 24."""
    model = models.shared("llama")
    prompts = models.prompts(*range(3, 90, 10))
    limits = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=5, async_scheduling=is_async)
    with opened(model, 400, limits) as engine:
        assert generated(engine, prompts, max_new_tokens=12) == plain(model, prompts, max_new_tokens=12)
        stats, replays = engine.stats(), captured_of(engine).replays
    assert stats.graph_replays == stats.steps and Shape(5 + 64, 64, 5) in replays


@pytest.mark.usefixtures("mixed")
def test_a_prompt_whose_logits_are_wanted_is_computed_eagerly() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(30)
    scores, replays = [], []
    for cuda_graphs in (None, False):
        with opened(model, 400, SchedulerConfig(max_num_seqs=4), cuda_graphs=cuda_graphs) as engine:
            (output,) = engine.generate([prompt], config("greedy", eos_token_id=NEVER), prompt_logprobs=2)
            scores.append(output.prompt_logprobs[1:])
            replays.append(engine.stats().graph_replays)
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and replays == [9, 0]


class Asking(nn.Module):
    """Reads a value on the host if there are so many tokens, as routers of experts do."""

    def __init__(self, inner: nn.Module, least: int = 1) -> None:
        super().__init__()
        self.inner, self.least = inner, least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.shape[1] < self.least or x.isfinite().all() else x


@pytest.mark.usefixtures("mixed")
def test_prompts_that_cannot_be_captured_leave_decode_steps_their_graphs() -> None:
    model = models.build("llama")
    model.model.layers[0].mlp = Asking(model.model.layers[0].mlp, 64).eval()
    prompts = models.prompts(5, 9)
    with opened(model, cuda_graphs=True) as engine:
        with pytest.warns(RuntimeWarning, match="steps with prompts or drafts run without CUDA graphs: Llama"):
            assert generated(engine, prompts) == plain(model, prompts)
        assert engine.stats().graph_replays == 9


@pytest.mark.usefixtures("mixed")
@pytest.mark.parametrize("max_seqs", [1, 20])
def test_a_warm_up_captures_steps_with_prompts(max_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "DEVICE_TYPE", "cpu")
    model, limits = models.shared("gpt2"), SchedulerConfig(max_num_seqs=max_seqs)
    prompts = models.prompts(5, 90, 30)
    with opened(model, scheduler=limits, warmup=False) as engine:
        runner = runner_of(engine)
        warmup.warm_up(runner.way[0], runner.captures(), engine.scheduler_config, True)
        assert all(tensor.isnan().all() for tensor in tensors_of(engine))
        captures = TapedGraphs.captures
        # One sequence has no more than 160 tokens.
        assert captures == len(captured_of(engine).replays) == (4 if max_seqs == 1 else 14) + len(DRAFTS)
        assert generated(engine, prompts) == plain(model, prompts) and TapedGraphs.captures == captures
        assert engine.stats().graph_replays == engine.stats().steps


def test_padding_of_a_step_with_prompts() -> None:
    with opened(models.shared("mistral")) as engine:
        memory = engine._memory
        memory.append([("a", 7), ("b", 60)])
        step = step_arrays(memory._tables(["a", "b"]), [7, 60], [1, 55], 4)
        shape = Shape(3 + 64, 64, 3)
        inputs = Inputs(memory, shape, 100, torch.device("cpu"))
        inputs.fill(np.arange(56), step, np.array([0, 55]), shape)
        tokens, positions, (metadata,), wanted = inputs.of(shape)
        assert tokens.tolist() == [*range(56), *[0] * 8] and positions.tolist() == [6, *range(5, 60), *[0] * 8]
        assert metadata.seq_lens.tolist() == [7, 60, *[1] * 8, *[0] * 57]
        assert metadata.query_start_loc.tolist() == [0, 1, 56, *range(57, 65), *[64] * 57]
        assert metadata.slot_mapping.tolist() == [*step.slots[0], *[-1] * 8] and wanted.tolist() == [0, 55, 0]
        assert metadata.max_query_len == 64 and metadata.shares
        (decode,) = inputs.of(Shape(2, 2))[2]
        assert decode.max_query_len == 1 and decode.max_seq_len >= 100 and not decode.shares
        assert metadata.block_tables[2:10, 0].tolist() == [memory.manager.block_table("a")[-1]] * 8
        for seq in ("a", "b"):
            memory.free(seq)


@pytest.mark.usefixtures("mixed")
def test_which_steps_with_prompts_are_replayed() -> None:
    """Those in which the host would be slower than the device."""
    costs = StepCosts()
    assert [costs.mixed_tokens(*sizes) for sizes in ((16, 10**9), (32, 8 * 10**9), (80, 7 * 10**10))] == [512, 256, 64]
    assert StepCosts(launch_seconds=1e-7).mixed_tokens(32, 8 * 10**9) == 0
    assert mixed_shape(1, 256) == Shape(128, 64, 64) and mixed_shape(300, 256) == Shape(320, 320, 256)
    for count in range(1, 513):
        shape = mixed_shape(count, 100)
        padding = shape.num_tokens - count
        assert min(count, 100) + padding <= shape.num_seqs and shape.num_rows >= min(count, 100) and padding < 64
    with opened(models.shared("llama")) as engine:
        steps, row = graphs_of(engine), np.zeros(1, dtype=np.int64)
        assert steps.mixed_tokens > 0 and steps.shape_of(steps.mixed_tokens, row, shares=False) is not None
        assert steps.shape_of(steps.mixed_tokens + 1, row, shares=False) is None


@pytest.mark.usefixtures("trusted_code")
def test_a_hook_is_called_in_every_step_while_it_is_there() -> None:
    model, prompts, calls = models.build("llama"), models.prompts(5, 9), [0]

    def hook(*_: Any) -> None:
        calls[0] += 1

    with opened(model) as engine:
        for prompt in prompts:
            engine.add_request(prompt, config("greedy", max_new_tokens=30, eos_token_id=NEVER))
        for _ in range(10):
            engine.step()
        replays = engine.stats().graph_replays
        assert replays == 9
        for register in (
            model.model.layers[1].mlp.register_forward_hook,
            model.lm_head.register_forward_pre_hook,
            nn.modules.module.register_module_forward_pre_hook,
        ):
            calls[0] = 0
            handle = register(hook)
            try:
                with pytest.warns(RuntimeWarning, match="without CUDA graphs: .* forward hook"):
                    engine.step()
                engine.step()  # the warning is not repeated
            finally:
                handle.remove()
            assert calls[0] >= 2 and engine.stats().graph_replays == replays
            engine.step()
            replays += 1
            assert engine.stats().graph_replays == replays
        outputs = {o.request_id: o for _ in range(20) for o in engine.step()}
    assert [o.outputs[0].token_ids for o in outputs.values()] == plain(model, prompts, max_new_tokens=30)


def replace_weight(model: Any) -> None:
    layer = model.model.layers[0].mlp
    layer.down_proj.weight = nn.Parameter(layer.down_proj.weight.detach() * -1.5)


def replace_data(model: Any) -> None:
    weight = model.lm_head.weight
    weight.data = weight.data.flip(0).contiguous()


def replace_module(model: Any) -> None:
    model.model.layers[1] = models.build("llama", seed=5).model.layers[0]
    model.model.layers[1].self_attn.layer_idx = 1
    model.model.layers[1].self_attn.config = model.config


def replace_class(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    own = type(mlp)
    mlp.__class__ = type("Other", (own,), {"forward": lambda self, x: -own.forward(self, x)})


def patch_class(model: Any) -> Callable[[], None]:
    patch, owner = pytest.MonkeyPatch(), type(model.model.layers[0].mlp)
    own = owner.forward
    patch.setattr(owner, "forward", lambda self, x: -own(self, x))
    return patch.undo


@pytest.mark.parametrize("change", [replace_weight, replace_data, replace_module, replace_class, patch_class])
@pytest.mark.usefixtures("trusted_code")
def test_a_changed_model_is_captured_anew(change: Callable[[Any], Any], request: pytest.FixtureRequest) -> None:
    model = models.build("llama")
    prompts = models.prompts(5, 9)
    with opened(model, scheduler=NO_PREFIXES) as engine:
        before = generated(engine, prompts)
        undo = change(model)
        request.addfinalizer(undo or (lambda: None))
        after = generated(engine, prompts)
        assert after == plain(model, prompts) != before
        assert TapedGraphs.captures == 2 and engine.stats().graph_replays == 18


def test_another_precision_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a setting of all models, which a graph would keep as it was."""
    with opened(models.shared("llama"), scheduler=NO_PREFIXES) as engine:
        generated(engine, models.prompts(5))
        assert TapedGraphs.captures == 1
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        generated(engine, models.prompts(5))
        assert TapedGraphs.captures == 2


def test_weights_changed_in_place_are_the_same_weights() -> None:
    model = models.build("llama")
    prompts = models.prompts(5, 9)
    with opened(model) as engine:
        before = generated(engine, prompts)
        model.train()  # and back, between two steps
        with torch.no_grad():
            for parameter in model.model.layers[0].parameters():
                parameter.mul_(-1.5)
        model.eval()
        assert generated(engine, prompts) == plain(model, prompts) != before
        assert TapedGraphs.captures == 1


def adapted(*names: str) -> tuple[Any, Any]:
    """A model with adapters beside "default", and their options."""
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj", "down_proj"], lora_alpha=64, init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), options)
    for name in names:
        model.add_adapter(name, options)
    return model.eval(), options


def test_the_active_adapter_is_the_one_that_computes() -> None:
    model, _ = adapted("other")
    prompts = models.prompts(5, 9)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    seen = []
    with opened(model, scheduler=NO_PREFIXES) as engine:

        def compare() -> None:
            seen.append(generated(engine, prompts))
            assert seen[-1] == plain(model, prompts)

        compare()
        model.set_adapter("other")
        compare()
        layer.scaling["other"] *= -1.0
        compare()
        with model.disable_adapter():
            compare()
        model.merge_adapter()
        compare()
        replays = engine.stats().graph_replays
    assert len({str(tokens) for tokens in seen}) == 4  # a merged adapter gives the same tokens as before
    assert replays == 5 * 9 and TapedGraphs.captures == 5


def test_every_adapter_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, options), prompts = adapted("other"), models.prompts(5, 9, 7)
    expected = []
    for name, prompt in zip(["default", "other"], prompts, strict=False):
        model.set_adapter(name)
        expected += plain(model, [prompt])
    with model.disable_adapter():
        expected += plain(model, [prompts[2]])
    chosen = ["default", "other", "__base__"]
    made = config("greedy", eos_token_id=NEVER)

    def run(engine: Engine) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in engine.generate(prompts, made, adapter=chosen)]

    with opened(model, scheduler=SchedulerConfig(prefix_caching=False, max_num_seqs=4)) as engine:
        # All three in every step: the results of one replay must survive the next one.
        assert run(engine) == run(engine) == expected
        assert TapedGraphs.captures == 3 and engine.stats().graph_replays == 2 * 9 * 3
        # An adapter that comes outdates all graphs, and no request waits for theirs after a warm-up.
        model.add_adapter("third", options)
        model.eval()
        engine.warm_up()
        captures = TapedGraphs.captures
        assert run(engine) == expected and TapedGraphs.captures == captures > 3
        assert engine.stats().graph_replays == 3 * 9 * 3
    monkeypatch.setattr(graphs, "MAX_VARIANTS", 2)
    with opened(model, scheduler=NO_PREFIXES) as engine:
        with pytest.warns(RuntimeWarning, match="without CUDA graphs: there are graphs for 2 sets of adapters"):
            assert run(engine) == expected
        assert engine.stats().graph_replays == 9 * 2


def test_adapters_that_come_and_go_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = adapted()
    monkeypatch.setattr(graphs, "MAX_VARIANTS", 1)
    prompt, made = models.prompts(5), config("greedy", max_new_tokens=3, eos_token_id=NEVER)
    with opened(model, scheduler=NO_PREFIXES) as engine:
        for number in range(2):
            model.add_adapter(f"adapter {number}", options)
            model.eval()
            engine.generate(prompt, made, adapter=f"adapter {number}")
            model.delete_adapter(f"adapter {number}")
        assert engine.stats().graph_replays == 2 * 2


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_caller_see_every_operation() -> None:
    """But its autocast is none of the engine's, which computes under its own."""
    model = models.shared("llama")
    with opened(model) as engine:
        engine.add_request(models.prompts(5)[0], config("greedy", eos_token_id=NEVER))
        for _ in range(3):
            engine.step()
        with Watching():
            engine.step()
        assert engine.stats().graph_replays == 2
        with torch.autocast("cpu", torch.bfloat16):
            engine.step()
        assert engine.stats().graph_replays == 3 and TapedGraphs.captures == 1


def test_training_mode_is_no_graphs() -> None:
    model = models.build("llama").train()
    prompts = models.prompts(5, 9)
    with opened(model) as engine, pytest.warns(RuntimeWarning, match="training mode"):
        assert generated(engine, prompts) == plain(model, prompts)
        assert engine.stats().graph_replays == TapedGraphs.captures == 0


def test_sequences_longer_than_the_tables() -> None:
    model = models.shared("llama")
    (prompt,) = models.prompts(50)
    with opened(model) as engine, pytest.warns(RuntimeWarning, match="longer than the 64 tokens"):
        graphs_of(engine)._max_len = 50
        assert generated(engine, [prompt], max_new_tokens=40) == plain(model, [prompt], max_new_tokens=40)
        assert engine.stats().graph_replays == 14


class Replacing(nn.Module):
    """Keeps its last input in a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x[0, 0].clone()
        return self.inner(x)


@pytest.mark.parametrize("wrapper, reason", [(Asking, "_local_scalar_dense"), (Replacing, "replaces tensors")])
def test_what_cannot_be_captured_is_computed_eagerly_and_said(wrapper: type[nn.Module], reason: str) -> None:
    model = models.build("llama")
    model.model.layers[0].mlp = wrapper(model.model.layers[0].mlp).eval()
    prompts = models.prompts(5, 9)
    with opened(model) as engine:
        with pytest.warns(RuntimeWarning, match=f"LlamaForCausalLM .*{reason}") as warned:
            tokens = generated(engine, prompts)
        assert len(warned) == 1
        assert generated(engine, prompts) == tokens
        assert engine.stats().graph_replays == 0
    assert tokens == plain(model, prompts)
    with pytest.raises(UnsupportedModelError, match=f"cuda_graphs=True: .*{reason}.*leave it out"):
        opened(model, cuda_graphs=True)


def test_true_means_every_decode_step() -> None:
    model = models.build("llama")
    prompts = models.prompts(5, 9)
    with opened(model, cuda_graphs=True) as engine:
        assert TapedGraphs.captures == 1 and engine.stats().graph_replays == 0
        assert all(tensor.isnan().all() for tensor in tensors_of(engine))
        assert generated(engine, prompts) == plain(model, prompts)
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        (output,) = engine.generate(prompts[:1], config("greedy"), raise_on_error=False)
        assert output.error is not None and "cuda_graphs=True: a Linear has a forward hook" in output.error
        handle.remove()
        assert generated(engine, prompts) == plain(model, prompts)
    model.train()
    with pytest.raises(UnsupportedModelError, match="cuda_graphs=True: the model is in training mode"):
        opened(model, cuda_graphs=True)


def test_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TapedGraphs, "device_type", "cuda")
    model = models.shared("llama")
    with pytest.raises(ValueError, match=r"cuda_graphs=True: the model is on cpu.*leave it out"):
        Engine(model, cuda_graphs=True)
    with opened(model) as engine:
        generated(engine, models.prompts(5))
        assert engine.stats().graph_replays == 0


def test_a_model_computed_row_by_row_has_none() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=models.VOCAB, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(ValueError, match="cuda_graphs=True: the model does not run packed"):
        Engine(model, cuda_graphs=True)
    Engine(model).close()


def test_an_interrupt_in_a_capture_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.shared("llama")
    prompts = models.prompts(5, 9)
    capture = TapedGraphs.capture
    done = []

    def interrupted(self: TapedGraphs, compute: Callable[[], None]) -> Callable[[], None]:
        if not done:
            done.append(True)
            compute()
            raise KeyboardInterrupt
        return capture(self, compute)

    monkeypatch.setattr(TapedGraphs, "capture", interrupted)
    with opened(model) as engine:
        for index, prompt in enumerate(prompts):
            engine.add_request(prompt, config("greedy", eos_token_id=NEVER), request_id=str(index))
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                engine.step()
        outputs = {o.request_id: o for _ in range(12) for o in engine.step()}
        assert engine.stats().graph_replays == 9
    assert [outputs[str(i)].outputs[0].token_ids for i in range(2)] == plain(model, prompts)


def test_a_later_engine_takes_over_graphs_whose_memory_is_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    prompts = models.prompts(5, 9)
    expected = plain(model, prompts)
    monkeypatch.setattr(KVPool, "release", lambda self: None)
    with opened(model) as first:
        assert generated(first, prompts) == expected
    with opened(model) as second:  # K/V elsewhere
        assert generated(second, prompts) == expected and TapedGraphs.captures == 2

    def settle(engine: Engine) -> None:
        """Free the memory that the second engine used for its K/V."""
        engine._memory.pool.layers = second._memory.pool.layers

    with opened(model) as third:
        settle(third)
        assert generated(third, prompts) == expected
        assert (TapedGraphs.captures, third.stats().graph_replays) == (2, 9)
        with opened(model) as fourth:  # beside the third: what that uses is its own
            settle(fourth)
            assert generated(fourth, prompts) == expected and TapedGraphs.captures == 3
    assert graphs._parked.get(model) is not None
    hf_paged.release_memory(model)
    assert graphs._parked.get(model) is None


def test_graphs_that_wait_do_not_keep_their_model() -> None:
    model = models.build("llama")
    with opened(model) as engine:
        generated(engine, models.prompts(5))
        captured_of(engine).replays = {
            Shape(1, 1): lambda: None
        }  # a tape has its model's tensors, a CUDA graph has not
    gone = weakref.ref(model)
    assert graphs._parked.get(model) is not None
    del model, engine
    gc.collect()
    assert gone() is None


WAITS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x[x > 0], lambda x: x.nonzero(),
    lambda x: x.to("meta"), lambda x: torch.zeros(2, 3, device="meta").copy_(x),
    lambda x: x.index_put_((x > 0,), torch.ones(6)), lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
    lambda x: torch.equal(x, x), lambda x: x.unique(),
]  # fmt: skip


def test_waiting_is_refused_before_it_is_done() -> None:
    for work, context in itertools.product(WAITS, (torch.no_grad(), torch.inference_mode())):
        x = torch.ones(2, 3)
        with context, NoHostValues(), pytest.raises(RuntimeError, match="makes the host wait"):
            work(x)


def test_what_does_not_wait_is_not_refused() -> None:
    x, index = torch.randn(4, 6), torch.tensor([2, 0])
    expected = (x.double()[index] @ torch.ones(6, 2).double(), torch.where(x > 0, x, 0), x.masked_fill(x > 0, 1.0))
    with torch.inference_mode(), NoHostValues():
        y = x.clone()
        y[x > 0] = 1.0
        actual = (x.to(torch.float64)[index] @ torch.ones(6, 2).double(), torch.where(x > 0, x, 0), y)
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_tables_are_as_long_as_a_sequence_can_be(family: str) -> None:
    """Positions that no layer attends to take no block, so the pool does not bound a sequence with windows."""
    with opened(models.shared(family), num_blocks=24) as engine:
        assert graphs_of(engine)._max_len == (96 if family == "llama" else models.MAX_POSITIONS)
