"""What hf_paged can do with a model, found by mechanism: by running it on a handful of tokens, never by its name.

`check(model)` is the public answer; the generate hook and the engine ask the same function before they allocate.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.forward import PackedModel

Mode = Literal["native", "dense view", "state", "none"]


@dataclass(frozen=True, slots=True)
class LayerSupport:
    """One layer: how its cache is kept, and why. Sizes are None where the layer keeps no K/V of its own."""

    index: int
    mode: Mode
    reason: str
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class SupportReport:
    """What will happen when this model is asked for a paged cache.

    `supported`: it will run, with the results of plain generate. `native`: in our kernels, sequences packed;
    otherwise through the dense view (K/V in blocks, gathered for the model's own attention: exact, slower).
    """

    model: str
    supported: bool
    native: bool
    reason: str
    layers: tuple[LayerSupport, ...]
    kernels: str = ""

    def __str__(self) -> str:
        verdict = "native" if self.native else "dense view" if self.supported else "refused"
        lines = [f"{self.model}: {verdict}: {self.reason}"]
        for first, last in _runs(self.layers):
            layer = self.layers[first]
            where = f"layer {first}" if first == last else f"layers {first}-{last}"
            sizes = ""
            if layer.num_kv_heads is not None:
                dims = f"{layer.head_dim}" + (f"/{layer.v_head_dim}" if layer.v_head_dim != layer.head_dim else "")
                sizes = f", {layer.num_kv_heads} KV heads of size {dims}"
            window = f", sliding window {layer.sliding_window}" if layer.sliding_window is not None else ""
            lines.append(f"  {where}: {layer.mode}{sizes}{window}: {layer.reason}")
        if self.kernels:
            lines.append(f"  kernels: {self.kernels}")
        return "\n".join(lines)


def _runs(layers: tuple[LayerSupport, ...]) -> list[tuple[int, int]]:
    """(first, last) of consecutive layers that say the same."""
    runs: list[tuple[int, int]] = []
    for index, layer in enumerate(layers):
        if runs and _same(layers[runs[-1][0]], layer):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _same(a: LayerSupport, b: LayerSupport) -> bool:
    names = ("mode", "reason", "sliding_window", "num_kv_heads", "head_dim", "v_head_dim")
    return all(getattr(a, name) == getattr(b, name) for name in names)


_reports: weakref.WeakKeyDictionary[nn.Module, tuple[object, SupportReport]] = weakref.WeakKeyDictionary()


def check(model: Any) -> SupportReport:
    """Say, layer by layer, what `cache_implementation="paged"` and the engine will do with `model`, and why.

    Runs the model on a few tokens the first time (no gradient, no change to the model or the random state) and
    remembers the answer. Raises TypeError for something that is not a transformers model.
    """
    from transformers import PreTrainedModel

    # A PEFT wrapper generates through the model it wraps.
    if not isinstance(model, PreTrainedModel):
        base = getattr(model, "get_base_model", None)
        if base is not None:
            model = base()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"check() takes a transformers model, not {type(model).__name__}")
    stamp = (model.dtype, model.device, model.config._attn_implementation_internal, drops_cache(model))
    known = _reports.get(model)
    if known is None or known[0] != stamp:
        known = (stamp, _examine(model))
        _reports[model] = known
    return known[1]


def drops_cache(model: nn.Module) -> bool:
    """Whether transformers runs this model without its cache: gradient checkpointing in training mode."""
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def refuse_unsupported(model: Any) -> SupportReport:
    """The report of a supported model; raises UnsupportedModelError otherwise."""
    report = check(model)
    if not report.supported:
        raise UnsupportedModelError(f"{report.model} cannot use a paged cache: {report.reason}")
    return report


def _examine(model: Any) -> SupportReport:
    name = type(model).__name__
    config = model.config

    def refused(reason: str) -> SupportReport:
        return SupportReport(name, False, False, reason, ())

    if config.is_encoder_decoder:
        return refused(
            "it is an encoder-decoder model, whose cross-attention cache does not grow; "
            "call generate without cache_implementation"
        )
    if not model.can_generate():
        return refused("it has no language-modelling head; load it with AutoModelForCausalLM")
    if not model._supports_default_dynamic_cache():
        return refused(
            "it keeps no K/V cache that grows with the tokens (its state has a fixed size); "
            "call generate without cache_implementation"
        )
    try:
        layers = _probe(model)
    except UnsupportedModelError as error:
        return _dense(model, str(error))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        # A model that cannot even run packed is not an error of ours to raise: the dense view is there for it.
        return _dense(model, f"it does not run on a packed row ({type(error).__name__}: {_first_line(error)})")
    return SupportReport(
        name, True, True, "every layer attends through AttentionInterface", layers, _kernels(model.device)
    )


def _dense(model: Any, reason: str) -> SupportReport:
    from hf_paged.cache.paged_cache import PagedKVCache, PagedLayer

    name = type(model).__name__
    layers = []
    for index, layer in enumerate(PagedKVCache(model.config).layers):
        if isinstance(layer, PagedLayer):
            layers.append(LayerSupport(index, "dense view", "K/V in blocks, gathered for the model's own attention"))
        elif type(layer).__name__ == "DummyLayer":
            layers.append(LayerSupport(index, "none", "this layer keeps no cache"))
        else:
            layers.append(LayerSupport(index, "state", f"kept per row by transformers' {type(layer).__name__}"))
    return SupportReport(name, True, False, reason, tuple(layers))


def _kernels(device: torch.device) -> str:
    from hf_paged.kernels import cpu_native, ops

    impl = ops.default_impl(device)
    status = getattr(cpu_native, "status", None)
    return f"{impl} ({status()})" if device.type == "cpu" and status is not None else impl


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


@torch.no_grad()
def _probe(model: Any) -> tuple[LayerSupport, ...]:
    """Run two sequences packed, prefill and one decode step, and compare with the model's own forward."""
    device = model.device
    memory = PagedMemory(2, growable=True)
    packed = PackedModel(model, memory)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[3, 1, 2, 5, 4], [7, 6, 1, 3, 2]], device=device) % vocab
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        got = []
        for start, stop in ((0, 4), (4, 5)):
            count = stop - start
            memory.append([(0, count), (1, count)])
            metadata, positions = memory.step_metadata([0, 1], [count, count], device)
            logits = packed.forward(ids[:, start:stop].flatten(), positions, metadata)
            got.append(logits.view(2, count, -1))
        actual = torch.cat(got, dim=1).float()
        expected = model(input_ids=ids, use_cache=False, return_dict=True).logits.float()
    if not model.training:
        _compare(actual, expected, model.dtype)
    handles = {handle.layer_idx: handle for handle in packed.cache.handles}
    layers = []
    for index in range(len(packed.cache.layers)):
        handle = handles.get(index)
        if handle is None:
            layers.append(LayerSupport(index, "none", "reads another layer's K/V, or keeps no cache"))
            continue
        key, value = handle.kv
        layers.append(
            LayerSupport(
                index,
                "native",
                "attends through AttentionInterface",
                sliding_window=handle.sliding_window,
                num_kv_heads=key.shape[2],
                head_dim=key.shape[3],
                v_head_dim=value.shape[3],
            )
        )
    return tuple(layers)


def _compare(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    if actual.shape != expected.shape:
        raise UnsupportedModelError(f"its logits have shape {tuple(expected.shape)}, packed {tuple(actual.shape)}")
    error = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    tolerance = 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2
    if not error <= tolerance * max(scale, 1e-6):
        raise UnsupportedModelError(
            f"its packed logits differ from its own by {error:.2g} (largest logit {scale:.2g}): "
            "something in its forward depends on the batch layout"
        )
