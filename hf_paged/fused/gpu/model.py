"""FusedParts: all parts of one model that our kernels compute in fewer launches, found by one recorded forward."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.features.watch.foreign import foreign_code
from hf_paged.fused.gpu.attention import AttentionPart, attention_part, written
from hf_paged.fused.gpu.experts_part import experts_part
from hf_paged.fused.gpu.layers import LayerPart, layer_part
from hf_paged.fused.gpu.norms import NormPart, norm_of
from hf_paged.fused.gpu.parts import ChainPart, Part, activation_part, chain_part, gated_part
from hf_paged.fused.gpu.rotary import names_of, rotary_functions
from hf_paged.fused.gpu.router import router_part
from hf_paged.fused.gpu.trace import Call, Trace
from hf_paged.fused.rows import are_close
from hf_paged.locks import usable_after_fork
from hf_paged.model.devices import device_of
from hf_paged.model.overrides import Overrides, Patch
from hf_paged.model.packed import PackedModel
from hf_paged.model.state import Slot, state_of
from hf_paged.model.support import rotary_limit
from hf_paged.model.trial import Refusal, attempt, first_line

# The type of the devices whose layers are computed so; tests set another one.
DEVICE_TYPE = "cuda"
# Enough for positions near and far (`_positions`), at little cost.
TRIAL_TOKENS = 8

log = logging.getLogger("hf_paged")

_known: Slot[tuple[int, FusedParts]] = Slot("fused parts")


def fused_parts(model: Model) -> FusedParts | None:
    """The parts of a model that runs packed, found once; None if `obstacle` names a reason.

    After `weights_changed` they are found again, because attributes of the modules may have changed too.
    """
    if obstacle(model) is not None:
        return None
    reported = state_of(model).weights.all_moved
    known = _known.get(model)
    if known is None or known[0] != reported:
        known = reported, FusedParts(model)
        _known.put(model, known)
    return known[1]


def is_on_gpu(model: Model) -> bool:
    """Return True if the model is on a device whose layers are computed so."""
    return device_of(model).type == DEVICE_TYPE


def obstacle(model: Model) -> str | None:
    """Say why no part of the model is looked for; None if nothing prevents it."""
    device, mesh = device_of(model), getattr(model, "_device_mesh", None)
    if not is_on_gpu(model):
        return f"the model is on {device}"
    if mesh is not None and mesh.size() > 1:
        return f"the model is on {mesh.size()} ranks"
    if model.training:
        return "the model is in training mode"
    return "autocast is on" if torch.is_autocast_enabled(device.type) else foreign_code(model).look()


class FusedParts:
    """An override of all parts of a model that were recognised and have not been changed since."""

    def __init__(self, model: Model) -> None:
        found = _Finder(model)
        self._parts = found.parts
        self._summary = found.summary()
        self._weights = state_of(model).weights
        self._model = weakref.ref(model)
        self._lock = usable_after_fork(threading.RLock())  # held while the parts in force are chosen and applied
        self._seen: list[Any] = []  # when they were chosen
        self._overrides = Overrides()
        self._rotary = rotary_functions(model)
        log.log(logging.WARNING if found.errors else logging.INFO, "%s: %s", type(model).__name__, self)

    def __str__(self) -> str:
        return self._summary

    def __bool__(self) -> bool:
        return bool(self._parts)

    def counts(self) -> Counter[str]:
        """The number of parts of each kind."""
        return Counter(part.kind for part in self._parts)

    def pack(self) -> int:
        """Place weights of layers that read the same rows side by side, part by part. Returns the number of parts with
        one product instead of several.

        No other thread may compute with the model meanwhile.
        """
        model = self._model()
        assert model is not None
        # Views that were kept to notice changes would count as users of the memory.
        self._weights.release_views()
        groups = [part.group for part in self._parts if part.group is not None]
        packed, moved = 0, 0
        try:
            for group in groups:
                group.look()
                was_one = group.is_one
                packed += group.pack()
                moved += group.is_one and not was_one
                if moved and device_of(model).type == "cuda":
                    # torch would keep the memory of the weights before.
                    torch.cuda.empty_cache()
        # Of memory, or of what torch does on a device: the weights are whole at any time.
        except Exception as error:
            log.warning("%s: other weights stay where they are (%s)", type(model).__name__, first_line(error))
        if moved:
            log.info("%s: weights of %d parts were placed side by side, for one product", type(model).__name__, moved)
        return packed

    def apply(self, user: object) -> None:
        """Until `undo`, our kernels compute these parts in packed steps of this thread."""
        model = self._model()
        if model is None or model.training or torch.is_grad_enabled() or torch.is_autocast_enabled(DEVICE_TYPE):
            return
        if _module._global_forward_hooks or _module._global_forward_pre_hooks:
            # Such hooks must see all calls.
            return
        with self._lock:
            if self._state() != self._seen:
                self._choose(model)
            self._overrides.apply(user)
        for function in self._rotary.values():
            function.override.apply(user)

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        self._overrides.undo(user)
        for function in self._rotary.values():
            function.override.undo(user)

    def _state(self) -> list[Any]:
        """Return everything that decides which parts are ready."""
        modules = [module for part in self._parts for module in part.modules]
        classes = list(map(type, modules))
        # A module may be gone: PEFT gives experts a module for the time of a call.
        forwards = [getattr(owner, "forward", None) for owner in dict.fromkeys([*classes, nn.Linear])]
        rotary = [function.is_own() for function in self._rotary.values()]
        seen = self._weights.layout, self._weights.all_moved
        return [seen, classes, forwards, [getattr(m, "training", None) for m in modules], rotary]

    def _choose(self, model: Model) -> None:
        """Set the overrides of the parts that are ready."""
        self._overrides.withdraw()
        present = set(model.modules())
        # Parts of modules that are gone never hold again.
        self._parts = [part for part in self._parts if None not in part.modules]
        ready = [each for each in self._parts if each.module in present and each.is_ready()]
        ready = [part for part in ready if self._has_own_rotary(part)]
        for part in ready:
            if part.group is not None:
                part.group.look()
        self._overrides = Overrides(Patch(vars(part.module), "forward", part.forward) for part in ready)
        self._seen = self._state()

    def _has_own_rotary(self, part: Part) -> bool:
        if not isinstance(part, AttentionPart):
            return True
        functions = map(self._rotary.get, names_of(part.module))
        return all(function is None or function.is_own() for function in functions)


class _Finder:
    """Runs a model on a few tokens, and finds the parts in what it computes."""

    def __init__(self, model: Model) -> None:
        self._found: dict[nn.Module, Part] = {}
        self._calls: Counter[nn.Module] = Counter()
        self._attentions: set[nn.Module] = set()
        self.errors: list[str] = []
        memory = PagedMemory(TRIAL_TOKENS, 1)
        self._cache = PackedModel(model, memory).cache
        trace = self._trace = Trace(model, self._cache, self._finished)
        packed = PackedModel(model, memory, [trace])
        packed.cache = self._cache
        memory.append([(0, TRIAL_TOKENS)])
        device = device_of(model)
        metadata, _ = memory.step_metadata([0], [TRIAL_TOKENS], device)
        config: Any = model.config
        vocab = config.get_text_config(decoder=True).vocab_size
        # Different tokens, because equal rows would hide what depends on the place.
        ids = (torch.arange(TRIAL_TOKENS, dtype=torch.int64, device=device) * 7 + 5) % vocab
        with torch.no_grad(), trace:
            done = attempt(lambda: packed.forward(ids, _positions(model).to(device), metadata))
        if isinstance(done, Refusal):  # it need not run on so many tokens
            self.errors.append(done.reason)

    @property
    def parts(self) -> list[Part]:
        """Return the parts in use: a chain of modules only if a layer adds its last product to the residual."""
        used = {part.mlp for part in self._found.values() if isinstance(part, LayerPart)}
        return [part for module, part in self._found.items() if module in used or not isinstance(part, ChainPart)]

    def summary(self) -> str:
        """One line: what is computed by our kernels, and for how many of the attentions."""
        counts = Counter(part.kind for part in self.parts)
        text = ", ".join(f"{count} {kind}s" for kind, count in counts.items()) or "nothing"
        error = f"; {self.errors[0]}" if self.errors else ""
        return f"computed in fewer launches: {text} (of {len(self._attentions)} attentions){error}"

    def _finished(self, call: Call) -> None:
        handles = len(self._cache.handles)
        part = attempt(lambda: self._part_of(call))
        if isinstance(part, Refusal):  # a foreign module that fails when it is tried stays as it is
            self.errors.append(f"{type(call.module).__name__}: {part.reason}")
            part = None
        # The trial of a part attends too, and later layers must not see its calls.
        del self._cache.handles[handles:]
        before = self._found.pop(call.module, None)
        self._calls[call.module] += 1
        # One that is called several times must give the right results, and hold the same, in all calls.
        if part is not None and (self._calls[call.module] == 1 or (before is not None and before.held == part.held)):
            self._found[call.module] = part

    def _part_of(self, call: Call) -> Part | None:
        part = self._likely_part(call)
        return part if part is not None and self._is_right(part, call) else None

    def _likely_part(self, call: Call) -> Part | None:
        rows = call.input
        if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
            return None
        if call.reads:
            if call.key is None:
                return layer_part(call, self._found)
            self._attentions.add(call.module)
            return attention_part(call, self._cache)
        norm = norm_of(call.module, rows.shape[-1], rows.dtype)
        if norm is None:
            found = (gated_part(call) if call.children else activation_part(call)) or router_part(call)
            return found or experts_part(call) or chain_part(call)
        # torch computes its own norms in one launch already.
        is_called = len(call.args) == 1 and not call.kwargs and type(call.module) not in (nn.LayerNorm, nn.RMSNorm)
        return NormPart(norm) if is_called else None

    def _is_right(self, part: Part, call: Call) -> bool:
        """Return True if the part gives what its module gave, on the same arguments within the recorded step.

        Needed, because what was recognised may hold for another module: kinds of norms are kept by class, whose
        instances may differ (by a flag).
        """
        attends = isinstance(part, AttentionPart)
        expected = [*part.compared(call.output), *(self._attended() if attends else ())]
        for output in part.trials(call):
            actual = [*part.compared(output), *(self._attended() if attends else ())]
            # Wider than for what is recognised: here several rounded operations follow one another.
            if not all(are_close(*both, 1e-4 if both[1].dtype == torch.float32 else 0.04)
                       for both in zip(actual, expected, strict=True)):  # fmt: skip
                return False
        return True

    def _attended(self) -> list[torch.Tensor]:
        """The query of the last attention, and copies of the K and V that were written for it."""
        assert self._trace.query is not None
        return [self._trace.query, *written(self._cache)]


def _positions(model: Model) -> torch.Tensor:
    """Positions near and far, int64 [TRIAL_TOKENS]: some models scale their queries from some position on.

    Those of a model with a table of positions may start above 0, so not all of the table is used.
    """
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None), rotary_limit(model)]
    last = min([limit // 2 for limit in limits if limit] or [TRIAL_TOKENS])
    near = torch.arange(TRIAL_TOKENS, dtype=torch.int64, device="cpu")
    # Cubes, so that positions lie close together at first and far apart later.
    return near if last < TRIAL_TOKENS else near + (last - TRIAL_TOKENS) * near**3 // (TRIAL_TOKENS - 1) ** 3
