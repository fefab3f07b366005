"""Models in unusual states: offloaded by accelerate, compiled, quantised, changed while an engine uses them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hf_paged
from hf_paged.features.rows.row_trial import way_of
from tests.architectures.tiny import tiny_config, tiny_model
from tests.fused.int8_layers import Int8Tensor, quantise
from tests.models import ragged

NEW = 8
CONFIG = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def generate(model: Any, **options: Any) -> torch.Tensor:
    ids, mask = ragged()
    result: torch.Tensor = model.generate(ids, attention_mask=mask, generation_config=CONFIG, **options)
    return result


def engine_tokens(model: Any) -> list[list[int]]:
    """Tokens of the two prompts as requests of one engine."""
    requests = [row[keep.bool()].tolist() for row, keep in zip(*ragged())]
    with hf_paged.Engine(model, hf_paged.CacheConfig(block_size=4)) as engine:
        outputs = engine.generate(requests, CONFIG)
    assert not any(output.error for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_both_entry_points(model: Any, plain: torch.Tensor) -> hf_paged.CallRecord:
    with hf_paged.record_calls() as records:
        assert torch.equal(generate(model, cache_implementation="paged"), plain)
    assert engine_tokens(model) == plain[:, -NEW:].tolist()
    return records[0]


@pytest.mark.quick_cases("[False-llama]")
@pytest.mark.covering(1)
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
@pytest.mark.parametrize("to_disk", [False, True])
def test_offloaded_by_accelerate(model_type: str, to_disk: bool, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(model_type)
    plain = generate(model)
    assert hf_paged.check(model).native == (model_type == "llama")  # the offload comes after a look at the model
    where = torch.device("cpu")
    if to_disk:
        accelerate.disk_offload(model, str(tmp_path), execution_device=where)
    else:
        accelerate.cpu_offload(model, execution_device=where)
    assert model.device.type == "meta"
    assert torch.equal(generate(model), plain)
    record = assert_both_entry_points(model, plain)
    assert (record.route, record.peak_blocks_used > 0) == ("hf_loop", True)


def test_partly_offloaded(tmp_path: Path) -> None:
    """Only the first weights are on their device, so `model.device` does not show that others are offloaded."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    plain = generate(model)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert model.device.type == "cpu"
    report = hf_paged.check(model)
    assert report.supported and not report.native and "offloaded" in report.reason
    assert_both_entry_points(model, plain)


def test_weights_without_data_are_refused() -> None:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama")).eval()
    with pytest.raises(hf_paged.UnsupportedModelError, match="meta device, which holds no data; load them"):
        generate(model, cache_implementation="paged")
    with pytest.raises(hf_paged.UnsupportedModelError, match="meta device, which holds no data; load them"):
        hf_paged.Engine(model)


def test_compiled_in_place() -> None:
    model = tiny_model("llama")
    plain = generate(model)
    solo = engine_tokens(model)
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model.compile(backend=backend)
    assert torch.equal(generate(model, cache_implementation="paged"), plain)
    assert not compiled  # else once for every length
    torch._dynamo.reset()
    hf_paged.check(model)
    assert engine_tokens(model) == solo


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "lfm2"])
def test_a_compiled_forward_runs_uncompiled(model_type: str, caplog: pytest.LogCaptureFixture) -> None:
    """A packed step, or one sequence at a time: nothing is compiled, and one line says so."""
    model = tiny_model(model_type)
    plain, solo = generate(model), engine_tokens(model)
    calls: list[int] = []
    model.lm_head.register_forward_hook(hf_paged.tokenwise(lambda *_: calls.append(1)))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, backend="eager")
    assert engine_tokens(model) == solo
    if model_type == "llama":
        assert torch.equal(generate(model, cache_implementation="paged"), plain)
    assert calls and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert [record.message for record in caplog.records if record.name == "hf_paged"] == [
        f"the compiled forward of {type(model).__name__} runs uncompiled in paged steps"
    ]


class Int8ByBatch(Int8Tensor):
    """With one scale for all rows of the activations, as some libraries have."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        rows, *others = args
        scale = rows.abs().amax() / 15
        return super().__torch_function__(func, types, ((rows / scale).round() * scale, *others))


def test_the_report_of_quantised_products_that_round_by_the_batch() -> None:
    """It says what the difference is."""
    model = tiny_model("llama")
    quantise(model, Int8ByBatch)
    report = hf_paged.check(model)
    assert report.supported and not report.native
    assert "its weights are quantised, and their products round differently" in report.reason
    assert "no fault" in report.reason and "depends on the batch layout" not in report.reason


def _by_layout(model: Any, share: float, masked: int) -> Any:
    """A logit depends on how many tokens a forward has. masked: logits with the least number, as Chameleon's images."""
    own = type(model).forward

    @functools.wraps(own)
    def forward(self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        output = own(self, input_ids, *args, **kwargs)
        output.logits[..., 7] += share * input_ids.numel()
        output.logits[..., :masked] = torch.finfo(output.logits.dtype).min
        return output

    model.__class__ = type("ByLayout", (type(model),), {"forward": forward})
    return model


@pytest.mark.covering(1)
@pytest.mark.parametrize("masked", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_masked_logits_are_not_what_others_are_measured_by(share: float, dtype: torch.dtype, masked: int) -> None:
    """Beside them, nothing would be large."""
    assert hf_paged.check(_by_layout(tiny_model("llama").to(dtype), share, masked)).native == (not share)
    rows = _by_layout(tiny_model("lfm2").to(dtype), share, masked)
    assert way_of(rows).decodes == ("one" if share else "any")


def test_half_under_a_living_engine() -> None:
    model = tiny_model("llama")
    ids = ragged()[0][0].tolist()
    with hf_paged.Engine(model) as engine:
        engine.add_request(ids, CONFIG)
        engine.step()
        model.to(torch.bfloat16)
        with pytest.raises(hf_paged.UnsupportedModelError, match=r"torch\.float32.*torch\.bfloat16.*make a new one"):
            engine.add_request(ids, CONFIG)
        finals = [output for _ in range(3) for output in engine.step() if output.finished]
        assert len(finals) == 1 and "make a new one" in finals[0].error
        assert not engine.has_unfinished_requests()
        engine.check_integrity()
    assert torch.equal(generate(model.float(), cache_implementation="paged"), generate(model))
