"""Find how hf_paged can run a model, by running the model on a few tokens, never by its name.

`check(model)` is the public function; `generate` and the engine use the same result before they allocate memory.
"""

from __future__ import annotations

import itertools
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer

from hf_paged.annotations import Model
from hf_paged.cache.layers import FULL, Kind, kind_of
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer, PagedStateLayer
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.watching import bare_copy, foreign_code
from hf_paged.integration.attention import configs_of, own_implementation
from hf_paged.integration.names import CACHE, OTHER_NAMES, cache_argument, forward_parameters, has_old_name
from hf_paged.kernels.arguments import LayerKV
from hf_paged.kernels.bounds import Bounds
from hf_paged.model import inputs
from hf_paged.model.devices import device_of, is_offloaded
from hf_paged.model.heads import HeadModel
from hf_paged.model.packed import PackedModel, uncompiled
from hf_paged.model.state import Slot, state_of, unwrapped
from hf_paged.model.trial import Refusal, Trial, as_itself, attempt, trying
from hf_paged.model.version_trial import require_known_version
from hf_paged.registry import ENCODER, REPORTS
from hf_paged.versions import describe

Mode = Literal["native", "dense view", "state", "none"]


class Positions(NamedTuple):
    """The most tokens of the decoder and of the encoder's text; None: no limit is known."""

    decoder: int | None = None
    text: int | None = None


NO_LIMITS = Positions()


@dataclass(frozen=True, slots=True)
class LayerSupport:
    """The way in which one layer's cache is kept, why, and where.

    Sizes and device are None if the layer keeps no K/V of its own. bytes_per_token: of its K/V.
    """

    index: int
    mode: Mode
    reason: str
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    device: torch.device | None = None
    chunk_size: int | None = None
    bytes_per_token: int = 0

    @property
    def kind(self) -> Kind:
        """The kind of the layer by the tokens whose K/V it keeps, if it keeps any."""
        return kind_of(Bounds(self.sliding_window, self.chunk_size))

    @property
    def kv_values_per_token(self) -> int:
        """Elements (not bytes) of K and V of one token."""
        return (self.num_kv_heads or 0) * ((self.head_dim or 0) + (self.v_head_dim or 0))


@dataclass(frozen=True, slots=True)
class KindOfMemory:
    """Memory that the layers of one kind take.

    name: "full" (K/V of all tokens), "window" or "chunk" (of the last ones), "state" (of a fixed size, or growing with
    the tokens). size: of a window or chunk in tokens. bytes_per_token: of each token that is kept.
    bytes_per_sequence: what a sequence takes besides, or at most in a window or chunk.
    """

    name: Literal["full", "window", "chunk", "state"]
    size: int | None
    bytes_per_token: int
    bytes_per_sequence: int

    def __str__(self) -> str:
        name = self.name if self.size is None else f"{self.name} of {self.size} tokens"
        parts = [f"{self.bytes_per_token:,} bytes a token"] if self.bytes_per_token else []
        most = "at most " if self.size is not None else ""
        parts += [f"{most}{self.bytes_per_sequence:,} bytes a sequence"] if self.bytes_per_sequence else []
        return f"{name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, repr=False)
class SupportReport:
    """The way in which a model runs with a paged cache, and why. `hf_paged.check` makes it; print it to read it.

    Attributes:
        model: Name of the model's class.
        supported: Whether it runs, with the results of plain `generate`.
        native: Whether it runs with packed sequences in our kernels. Otherwise it runs through the dense view (K/V in
            blocks, gathered for the model's own attention), which is exact but slower.
        reason: Why it runs so, or why it is refused.
        layers: How each layer's cache is kept, why, and where.
        kernels: The implementation that computes its attention; "" where none of ours does.
        native_length: Maximum length in tokens of sequences that run natively. None = no limit.
        counts_padding: Whether the positions of a left-padded batch include the padding, which packed rows do not have.
            Of a model with an encoder: whether such a decoder prompt has other logits on packed rows.
        fused: On a GPU, what lies between products and attention that our kernels compute; "" elsewhere.
        int8_layers: On a CPU, how many linear layers native kernels compute with weights in eight bits.
        int4_layers: The same, with weights in four bits.
        engine_only: Whether it keeps states of a fixed size and no K/V: the engine computes it, `generate` has nothing
            to page.
        has_encoder: Whether it is an encoder-decoder model: requests of the engine have `inputs`.
        encodes: Whether each token attends to its whole prompt: the engine computes prompts whole and without K/V.
        gathers: Of a model with an encoder that is not native: whether its rows are computed like packed ones, but
            layers gather their K/V for attention of their own.
        positions: Of a model with an encoder whose rows are computed: how many it has, of the decoder and of the text.
        together: How the engine computes it where it is not native, or "refused: " and why the engine does not.
        state_bytes: Bytes of a sequence's states in the engine, and by how many they grow with each token.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        report = hf_paged.check(AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base"))
        for kind in report.memory:
            print(kind.name, kind.bytes_per_token, "bytes a token")
        ```
    """

    model: str
    supported: bool
    native: bool
    reason: str
    layers: tuple[LayerSupport, ...]
    kernels: str = ""
    native_length: int | None = None
    counts_padding: bool = False
    fused: str = ""
    int8_layers: int = 0
    int4_layers: int = 0
    engine_only: bool = False
    has_encoder: bool = False
    encodes: bool = False
    gathers: bool = False
    positions: Positions = NO_LIMITS
    together: str = ""
    state_bytes: tuple[int, int] = (0, 0)

    @property
    def memory(self) -> tuple[KindOfMemory, ...]:
        """The memory that a sequence takes in an engine, by kind. (Only packed models keep just their windows.)"""
        sizes: dict[tuple[Any, int | None], int] = {}
        for layer in self.layers:
            if layer.bytes_per_token:
                window, chunk = (layer.kind if self.native else FULL).bounds
                kind = ("window", window) if window else ("chunk", chunk) if chunk else ("full", None)
                sizes[kind] = sizes.get(kind, 0) + layer.bytes_per_token
        kinds = [KindOfMemory(name, size, each, (size or 0) * each) for (name, size), each in sizes.items()]
        fixed, growth = self.state_bytes
        return (*kinds, *([KindOfMemory("state", None, growth, fixed)] if fixed or growth else []))

    @property
    def kv_values_per_token(self) -> int:
        """Elements (not bytes) of K and V that the cache keeps for one token, over all layers."""
        return sum(self.kv_values_by_device.values())

    @property
    def kv_values_by_device(self) -> dict[torch.device, int]:
        """Elements of K and V for one token on each device; a `device_map` places K/V beside its layer."""
        values: dict[torch.device, int] = {}
        for layer in self.layers:
            if layer.device is not None:
                values[layer.device] = values.get(layer.device, 0) + layer.kv_values_per_token
        return values

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def __str__(self) -> str:
        verdict = "native" if self.native else "dense view" if self.supported else "refused"
        verdict = "engine only" if self.engine_only else verdict
        lines = [f"{self.model}: {verdict}: {self.reason}"]
        for first, last in _runs(self.layers):
            layer = self.layers[first]
            where = f"layer {first}" if first == last else f"layers {first}-{last}"
            sizes = ""
            if layer.num_kv_heads is not None:
                dims = f"{layer.head_dim}" + (f"/{layer.v_head_dim}" if layer.v_head_dim != layer.head_dim else "")
                sizes = f", {layer.num_kv_heads} KV heads of size {dims}"
            window = f", sliding window {layer.sliding_window}" if layer.sliding_window is not None else ""
            window += f", chunks of {layer.chunk_size}" if layer.chunk_size is not None else ""
            # On one device each line would say the same.
            device = f", on {layer.device}" if len(self.kv_values_by_device) > 1 and layer.device is not None else ""
            lines.append(f"  {where}: {layer.mode}{sizes}{window}{device}: {layer.reason}")
        if self.native_length is not None:
            lines.append(
                f"  beyond {self.native_length} tokens: dense view: the rotary embedding changes with the length there"
            )
        if self.together:
            lines.append(f"  engine: {self.together}")
        lines += [f"  memory: {kind}" for kind in self.memory]
        if self.kernels:
            lines.append(f"  kernels: {self.kernels}")
        for count, dtype in ((self.int8_layers, "int8"), (self.int4_layers, "int4")):
            if count:
                lines.append(f"  weights: {count} linear layers in {dtype}, in native kernels")
        if self.fused:
            lines.append(f"  between attentions: {self.fused}")
        lines.append(f"  versions: {describe()}")
        return "\n".join(lines)


def _runs(layers: tuple[LayerSupport, ...]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive layers with equal descriptions."""
    alike = attrgetter("mode", "reason", "kind", "num_kv_heads", "head_dim", "v_head_dim", "device")
    runs = [[index for index, _ in run] for _, run in itertools.groupby(enumerate(layers), lambda own: alike(own[1]))]
    return [(run[0], run[-1]) for run in runs]


@dataclass(frozen=True, slots=True)
class Examined:
    """The reports of a model for one state of it, which is `stamp`.

    bare: of the model without hooks and `forward`s of others. present: as it is. is_final: not to be tried again for
    this state.
    """

    stamp: tuple[object, ...]
    bare: SupportReport
    present: SupportReport
    is_final: bool


_reports: Slot[Examined] = Slot("support report", is_released=False)


def check(model: Model) -> SupportReport:
    """The report without what our kernels compute between attentions; see `hf_paged.check`."""
    return examine(model).present


def encoder_decoder_positions(model: Model) -> Positions:
    """Return the model's numbers of positions as of its last trial, without a new look at its modules."""
    known = _reports.get(unwrapped(model))
    return (examine(model) if known is None else known).bare.positions


def examine(model: Model) -> Examined:
    """The reports of the model as it is now. Tries it on a few tokens, if it has changed; no third-party code is tried.

    A model that is refused for an error of a trial is tried again at the next call, one that runs in spite of it once.
    Raises TypeError if it is no transformers model, UnsupportedVersionError if hf_paged does not run with transformers.
    """
    from transformers import PreTrainedModel

    model = unwrapped(model)
    if not isinstance(model, PreTrainedModel):
        hint = "; compile it in place, with model.compile()" if hasattr(model, "_orig_mod") else ""
        raise TypeError(f"a transformers model is needed, not {type(model).__name__}{hint}")
    require_version()
    foreign = foreign_code(model)
    reason = foreign.look()
    where, attention = (model.device, is_offloaded(model)), [*map(own_implementation, configs_of(model))]
    # Everything by which a trial may come out otherwise.
    bare_stamp = (model.dtype, where, attention, drops_cache(model), state_of(model).weights.structure, foreign.around)
    stamp = (*bare_stamp, reason)
    known = _reports.get(model)
    if known is None or known.stamp != stamp or not known.is_final:
        tried = model if foreign.inside is None else bare_copy(model)
        with as_itself(model), trying(device_of(model)) as errors:
            is_known = known is not None and known.is_final and known.stamp[:-1] == bare_stamp
            # If only third-party code has come or gone, the report without it still holds.
            bare = known.bare if known is not None and is_known else _examine(tried)
            present = _with_foreign_code(model, tried, bare, reason)
        is_second = known is not None and known.stamp == stamp
        # An error may have been want of memory. A model that runs in spite of it is tried once more only.
        known = Examined(stamp, bare, present, not errors or (present.supported and is_second))
        _reports.put(model, known)
    return known


def require_version() -> None:
    """Raise UnsupportedVersionError if hf_paged does not run with this transformers."""
    require_known_version(lambda model: _examine(model).native)


def _with_foreign_code(model: Model, tried: Model, bare: SupportReport, reason: str | None) -> SupportReport:
    """The report of the model as it is. tried, bare: the model without what others put into its modules, and its
    report."""
    if reason is None:
        return bare
    if bare.native:
        return _examine_dense(tried, reason)
    # What others put in may be what makes it run.
    return bare if bare.supported or tried is model else _examine(model)


def drops_cache(model: nn.Module) -> bool:
    """Return True if gradient checkpointing in training mode may make this model drop its cache.

    From transformers 5.24 on, many models keep it where there are no gradients.
    """
    return model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def draws_dropout(model: Model) -> bool:
    """In training mode, such a model's results are random and depend on the layout of the batch.

    Some models draw by a function, with a probability that only their config has. Those of parts that do not generate
    (of a classifier, a summary) do not count.
    """
    layers = (module for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd))
    config = vars(model.config.get_text_config(decoder=True))
    drawn = (
        value
        for name, value in config.items()
        if ("drop" in name or "jitter" in name) and not name.startswith(("classif", "summary", "seq_classif"))
    )
    return any(layer.p > 0 for layer in layers) or any(isinstance(p, float) and p > 0 for p in drawn)


def refuse_unsupported(model: Model, *, by_engine: bool = False) -> SupportReport:
    """The report of a model that `generate`, or the engine, runs; raises UnsupportedModelError otherwise."""
    report = check(model)
    if by_engine and report.has_encoder and report.supported and not (report.native or report.gathers):
        raise UnsupportedModelError(
            f"the engine computes rows of encoder-decoder models with its own loop, but of {report.model} "
            f"{report.reason}; use model.generate(..., cache_implementation='paged')"
        )
    if not report.supported and not (by_engine and report.engine_only):
        raise UnsupportedModelError(f"{report.model} cannot use a paged cache: {report.reason}")
    if by_engine:
        foreign_code(unwrapped(model)).refuse_choice()
    return report


REMEDY = "call generate without cache_implementation"
BY_INTERFACE = "attends through AttentionInterface"
GATHERED = "K/V in blocks, gathered for the model's own attention"
NOT_PAGED = "it does not run over a paged cache ({})"
_OTHERWISE = (
    "its {what} logits differ from its own by {{error:.2g}} (largest logit {{scale:.2g}}): something in its forward "
    "depends on the batch layout"
)
_ROUNDED = (
    "its weights are quantised, and their products round differently with other tokens beside them (packed logits by "
    "{error:.2g}, largest logit {scale:.2g}): no fault, but packed rows could not repeat its tokens"
)


def run_trial(
    model: Model, what: Literal["packed", "paged"], candidate: Any, reference: Any, failed: str
) -> Refusal | None:
    """Why logits over blocks are not the model's own; None if they are. In training mode it need only compute them."""
    differs = _ROUNDED if what == "packed" and _is_quantised(model) else _OTHERWISE.format(what=what)
    return Trial(model, candidate, reference, failed, what, differs, math.inf if model.training else 0.0).refusal()


def refused_report(model: Model, reason: str, *, has_encoder: bool = False, engine_only: bool = False) -> SupportReport:
    name = type(model).__name__
    return SupportReport(name, False, False, reason, (), has_encoder=has_encoder, engine_only=engine_only)


def _report_of_another(model: Model, why: str | None) -> SupportReport:
    """The report of a model that is not tried here. why: the reason not to try packed rows."""
    place = next(place for flag, place in REPORTS.items() if getattr(model.config, flag))
    made: SupportReport = pkgutil.resolve_name(place)(model, why)
    return made


def _examine(model: Model) -> SupportReport:
    encoder: SupportReport | None = pkgutil.resolve_name(ENCODER)(model) if isinstance(model, HeadModel) else None
    return encoder or _examine_decoder(model)


def _examine_decoder(model: Model) -> SupportReport:
    # What is visible without running the model comes first, because a trial's error would say less.
    refusal = _refusal(model)
    if refusal is not None:
        return refused_report(model, refusal, engine_only=_keeps_only_states(model))
    if model.config.is_encoder_decoder:
        return _report_of_another(model, None)
    layers_beside = (layer for layer in PagedKVCache(model.config).layers if type(layer) is not PagedLayer)
    states = sorted({_kind(layer) for layer in layers_beside} - {"DummyLayer"})
    if states:
        return _examine_dense(model, f"it keeps a state per row besides K/V ({', '.join(states)})")
    if is_offloaded(model):
        return _examine_dense(model, "its weights are offloaded, and each forward loads them")
    trial = _PackedTrial(model)
    refused = run_trial(model, "packed", trial.candidate, trial.reference, "it does not run on a packed row ({})")
    layers = attempt(trial.layers) if refused is None else refused
    if isinstance(layers, Refusal):
        report = _examine_dense(model, layers.reason)
        # Why the model cannot run packed may be why it cannot run at all.
        told = report.supported or layers.passing is not None
        return report if told else replace(report, reason=f"{report.reason}; packed: {layers.reason}")
    return SupportReport(
        type(model).__name__,
        True,
        True,
        "every layer attends through AttentionInterface",
        layers,
        kernels_of(model.device),
        rotary_limit(model),
        trial.packed.cache.numbers_tokens,
    )


def _refusal(model: Model) -> str | None:
    """Why no paged cache can serve the model, as far as that is visible without running it; None if nothing is."""
    if not model.can_generate():
        return "it has no language-modelling head; load it with AutoModelForCausalLM"
    if not hasattr(model, "_supports_default_dynamic_cache"):
        return f"its generate is a method of its own, not that of transformers' GenerationMixin; {REMEDY}"
    if has_old_name(model):
        return f"its forward takes no {CACHE}, the name by which this transformers passes it its cache; {REMEDY}"
    if CACHE not in (parameters := forward_parameters(model)):
        state = sorted(OTHER_NAMES & parameters.keys())
        why = f"it keeps a state of its own ({state[0]})" if state else "it computes the whole sequence at every step"
        return f"its forward takes no {CACHE}: {why}, so there is no K/V cache to page; {REMEDY}"
    if not model._supports_default_dynamic_cache():
        return f"it keeps its state in a cache class of its own, not in layers of K/V; {REMEDY}"
    if device_of(model).type == "meta":
        return "its weights are on the meta device, which holds no data; load them before you generate"
    if model.config.is_encoder_decoder:
        # Its config may describe the encoder's layers.
        return None
    layers = PagedKVCache(model.config).layers
    if any(isinstance(layer, PagedLayer) for layer in layers):
        return None
    own = sorted({_kind(layer) for layer in layers if isinstance(layer, DynamicLayer)})
    if own:
        kinds = ", ".join(own)
        return f"its cache layers ({kinds}) hold something other than the K/V of the last tokens in order; {REMEDY}"
    return "it is attention-free: its recurrent state has a fixed size and no K/V grows with the tokens; " + REMEDY


def _keeps_only_states(model: Model) -> bool:
    """Return True if the model generates with recurrent states of a fixed size, and without K/V."""
    if model.config.is_encoder_decoder or not model.can_generate() or device_of(model).type == "meta":
        return False
    if not model._supports_default_dynamic_cache():
        return inputs.makes_own_state(model)
    layers = PagedKVCache(model.config).layers
    return cache_argument(model) is not None and not any(
        isinstance(layer, PagedLayer | DynamicLayer) for layer in layers
    )


def _kind(layer: Any) -> str:
    """The name of the transformers class of a cache layer, or of the class from which it was made."""
    return str(getattr(layer, "kind", type(layer).__name__))


def layers_in(memory: PagedMemory, mode: Mode, reason: str) -> tuple[LayerSupport, ...]:
    """All layers of a pool, kept in one way."""
    layers = sorted(memory.pool.layers.items())
    return tuple(LayerSupport(index, mode, reason, **_sizes(kv)) for index, kv in layers)


def _examine_dense(model: Model, why: str) -> SupportReport:
    """Run prefill and one decode step over a PagedKVCache, and compare with the same over the model's own cache."""
    if model.config.is_encoder_decoder:
        return _report_of_another(model, why)
    # Any attention can read the dense view, so this trial decides whether the model runs at all.
    cache = PagedKVCache(model.config)

    def steps() -> list[torch.Tensor]:
        logits = inputs.own_steps(model, past=cache)
        # With gradient checkpointing in training mode, transformers drops the cache.
        if not cache.num_rows and not drops_cache(model):
            raise UnsupportedModelError(f"its forward writes no K/V into the cache it is given; {REMEDY}")
        return [logits]

    failed = f"it cannot be tried on a few tokens of text alone ({{}}); {REMEDY}"
    expected = attempt(partial(inputs.own_steps, model), failed)
    refusal = (
        expected
        if isinstance(expected, Refusal)
        else run_trial(model, "paged", steps, [expected], f"{NOT_PAGED}; {REMEDY}")
    )
    if refusal is not None:
        return refused_report(model, refusal.reason)
    layers, pool = [], cache.memory.pool
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, PagedLayer):
            reason = GATHERED
            if isinstance(layer, PagedStateLayer):
                reason += f"; the rest as {_kind(layer)} keeps it"
            sizes = _sizes(pool[index]) if index in pool else {}
            layers.append(LayerSupport(index, "dense view", reason, layer.sliding_window, **sizes))
        elif _kind(layer) == "DummyLayer":
            layers.append(LayerSupport(index, "none", "this layer keeps no cache"))
        else:
            layers.append(LayerSupport(index, "state", f"kept per row by transformers' {_kind(layer)}"))
    return SupportReport(type(model).__name__, True, False, why, tuple(layers))


def rotary_limit(model: Model, wanted: Sequence[str] = ("longrope", "dynamic")) -> int | None:
    """The length up to which rotary frequencies of the `wanted` kinds do not depend on the longest sequence of the
    batch, or, if "dynamic", on longer sequences before."""
    limits = []
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds is None:
            continue
        kinds = kinds if isinstance(kinds, dict) else {None: kinds}
        parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        for layer_type, kind in kinds.items():
            if kind == "longrope" and kind in wanted:
                own = parameters if layer_type is None else parameters[layer_type]
                limits.append(int(own["original_max_position_embeddings"]))
            elif "dynamic" in kind and "dynamic" in wanted:
                limits.append(int(module.original_max_seq_len))
    return min(limits, default=None)


def kernels_of(device: torch.device) -> str:
    from hf_paged.kernels import ops
    from hf_paged.kernels.native import ops as native_ops

    impl = ops.default_impl(device)
    return f"{impl} ({native_ops.status()})" if device.type == "cpu" else impl


# -- trying it out -----------------------------------------------------------------------------------------------


def trial_logits(model: Model) -> torch.Tensor:
    """The logits of the model's own forward for a few tokens."""
    with trying(device_of(model)):
        if model.config.is_encoder_decoder:
            return inputs.own_steps(model)
        logits: torch.Tensor = uncompiled(model)(**inputs.padded_batch(model), use_cache=False, return_dict=True).logits
        return logits


class _PackedTrial:
    """Prefill and one decode step of two packed sequences, beside the model's own padded forward, and its own prefill
    and step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._memory = PagedMemory(2, growable=True)

    def candidate(self) -> list[torch.Tensor]:
        self._batch = inputs.padded_batch(self._model)
        self.packed = PackedModel(self._model, self._memory)
        rows = [ids[-length:] for ids, length in zip(self._batch["input_ids"], inputs.LENGTHS)]
        got: list[list[torch.Tensor]] = [[], []]
        # A prompt and a decode step: some models compute them in different ways.
        for counts in ([length - 1 for length in inputs.LENGTHS], [1, 1]):
            starts = [sum(map(len, row)) for row in got]
            self._memory.append(list(enumerate(counts)))
            metadata, positions = self._memory.step_metadata([0, 1], counts, self._model.device)
            step = torch.cat([row[start : start + n] for row, start, n in zip(rows, starts, counts)])
            logits = self.packed.forward(step, positions, metadata)
            for parts, part in zip(got, torch.split(logits, counts)):
                parts.append(part)
        _refuse_shared_layers(self.packed)
        inputs.refuse_own_inputs(self._model, self._batch)
        # In a decode step a row of one sequence has one token, a packed row of two sequences has two.
        ends = [torch.stack([parts[step][-1] for parts in got]) for step in (0, 1)]
        return [*map(torch.cat, got), torch.stack(ends)]

    def reference(self) -> list[torch.Tensor]:
        model = self._model
        # With padding, a model that numbers tokens by the length of its cache gives other logits.
        batches = [self._batch] if self.packed.cache.takes_positions else inputs.without_padding(self._batch)
        steps, expected = [], []
        for batch in batches:
            if not model.training:
                steps.append(inputs.own_steps(model, batch).unflatten(0, (2, -1)))
            given = inputs.step_positions(model, batch["input_ids"], batch.pop("position_ids", None), is_first=True)
            positions = {} if given is None else {"position_ids": given}
            expected += uncompiled(model)(**batch, **positions, use_cache=False, return_dict=True).logits
        ends = [torch.cat(steps, 1)] if steps else []
        return [*(own[-length:] for own, length in zip(expected, inputs.LENGTHS)), *ends]

    def layers(self) -> tuple[LayerSupport, ...]:
        return _native_layers(self._model, self.packed)


def _refuse_shared_layers(packed: PackedModel) -> None:
    written = [handle.layer_idx for handle in packed.cache.handles]
    for index in set(written):
        if written.count(index) > 1:
            raise UnsupportedModelError(
                f"{written.count(index)} of its layers keep their K/V as layer {index}; give each attention a "
                "layer_idx of its own"
            )


def _native_layers(model: Model, packed: PackedModel) -> tuple[LayerSupport, ...]:
    handles = {handle.layer_idx: handle for handle in packed.cache.handles}
    layers = []
    configured = PagedKVCache(model.config).layers
    for index in range(max(len(configured), max(handles, default=-1) + 1)):
        layer, handle = configured[index] if index < len(configured) else None, handles.get(index)
        if handle is None:
            layers.append(LayerSupport(index, "none", "reads another layer's K/V, or keeps no cache"))
            continue
        seen, kept = handle.bounds.most, getattr(layer, "sliding_window", None)
        if kept is not None and kept != seen:
            raise UnsupportedModelError(
                f"layer {index} keeps a window of {kept} tokens but attends to {seen or 'all'}, so what it sees "
                "depends on when it computes; this model needs the dense view"
            )
        bounds, sizes = handle.bounds._asdict(), _sizes(handle.kv)
        layers.append(LayerSupport(index, "native", BY_INTERFACE, **bounds, **sizes))
    return tuple(layers)


def _sizes(kv: LayerKV) -> dict[str, Any]:
    """The fields of a LayerSupport that describe a layer's K/V."""
    return {
        "num_kv_heads": kv.key.shape[2],
        "head_dim": kv.key.shape[3],
        "v_head_dim": kv.value.shape[3],
        "device": kv.key.device,
        "bytes_per_token": kv.bytes_per_token,
    }


def _is_quantised(model: nn.Module) -> bool:
    """Return True if a quantiser loaded the model or some weight is in integers, 8-bit floats or a class of its own."""
    small = (torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
    weights = [*model.parameters(), *model.buffers()]
    return hasattr(model, "hf_quantizer") or any(
        type(weight) not in (torch.Tensor, nn.Parameter) or (weight.ndim == 2 and weight.dtype in small)
        for weight in weights
    )
