"""One packed forward of a transformers model: ragged sequences in one row `[1, num_tokens]`, K/V in blocks.

Knows models, metadata and sequences by id; never requests or sampling.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.integration.attention import configs_of
from hf_paged.integration.names import CACHE
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays, StepArrays, step_arrays, to_device
from hf_paged.model.devices import device_of, is_spread
from hf_paged.model.hidden import HiddenStates, hidden_states, no_hidden
from hf_paged.model.overrides import Override
from hf_paged.model.packed_step import Entrance, PackedCache, PackedStep, latent_overrides, uncompiled
from hf_paged.model.state import state_of
from hf_paged.sockets import Executor, Parts, Results


def _parameters_of(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward."""
    # Signatures of classes are remembered, because reading one takes a tenth of a millisecond.
    own = "forward" in vars(model)
    return inspect.signature(model.forward).parameters if own else _parameters(type(model).forward)


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _takes_positions(model: Model) -> bool:
    """Return True if the model, or a transformers model in it, has a parameter `position_ids`."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return any("position_ids" in _parameters_of(module) for module in models)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One packed forward as arrays.

    tokens: int64 [num_tokens]. step: their positions, slots and block tables. wanted: int64 [num_rows], indices of the
    tokens whose logits are wanted; None: all, in a pure decode step. adapters: the description of an `AdapterChoice`;
    None for a model that has never had adapters.
    """

    tokens: np.ndarray
    step: StepArrays
    wanted: np.ndarray | None
    adapters: bytes | None = None


def decode_step(arrays: DecodeArrays, memory: PagedMemory, seq_ids: list[int], starts: list[int]) -> StepArrays:
    """Make the arrays of a step of one token for each sequence, from those of the last one if possible."""
    manager = memory.manager
    if (step := arrays.follow(seq_ids, starts, manager.rewrites)) is not None:
        return step
    tables = [partial(manager.block_table, group=group) for group in range(len(manager.groups))]
    return arrays.step(seq_ids, starts, tables, manager.rewrites, [group.kind.bounds for group in manager.groups])


class LateTokens:
    """Tokens of a step that only the device knows yet (see `Parts.late`)."""

    def __init__(self, known: torch.Tensor, where: list[tuple[int, int]] | None) -> None:
        self._known = known
        self._where = None if where is None else np.array(where, dtype=np.int64).T.copy()

    def __call__(self, ids: torch.Tensor) -> None:
        """Write them into ids int64 [at least num_tokens] without waiting for the device."""
        if self._where is None:
            ids[: len(self._known)].copy_(self._known)
        else:
            places, rows = to_device(self._where, ids.device)
            ids.index_copy_(0, places, self._known.index_select(0, rows))


class Beside(NamedTuple):
    """Arguments and overrides of a step besides its tokens.

    arguments: makes further arguments of the step's forward from its token ids [1, num_tokens]. reach: int32
    [num_tokens], the last position that each token attends to (None: its own). overrides: for this step.
    """

    arguments: Callable[[torch.Tensor], Mapping[str, Any]]
    reach: np.ndarray | None = None
    overrides: Sequence[Override] = ()


class PackedModel(Executor):
    """A model bound to a PagedMemory. `forward` runs one step and restores the model afterwards.

    `overrides` are applied in order during each forward. A forward notices changed weights, and follows replaced
    modules. With `is_fixed`, it does neither: the caller has to, and a forward raises LayersChanged if modules were
    replaced since the last `follow_structure`. `stand_in` makes the executor that takes over while third-party code is
    in the model.
    """

    model: Model
    memory: PagedMemory
    is_packed = True

    def __init__(self, model: Model, memory: PagedMemory, overrides: Sequence[Override] = ()) -> None:
        self.model = model
        self._overrides = overrides
        self.weights = state_of(model).weights
        self.memory = memory
        self._device = device_of(model)
        self._decode_arrays = DecodeArrays(memory.block_size)
        config = model.config.get_text_config(decoder=True)
        self.cache = PackedCache(memory, config.num_hidden_layers)
        self.is_fixed = False
        self.follow_structure()

    def follow_structure(self) -> None:
        """Derive again what depends on the model's modules."""
        model = self.model
        self._structure = self.weights.structure
        self._stand_in: Executor | None = None
        self._configs = configs_of(model)
        self._hooks = (Entrance(model), *latent_overrides(model))
        parameters = _parameters_of(model)
        self.no_hidden = no_hidden(model)
        self._keeps_logits = "logits_to_keep" in parameters
        self._is_spread = is_spread(model)
        self.cache.takes_positions = _takes_positions(model)
        # A composite model may take `position_ids` by **kwargs, for its language model.
        if "position_ids" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__}.forward takes no position_ids, so sequences cannot be packed in one row"
            )

    @property
    def verifies(self) -> bool:
        return True

    def drop_overrides(self) -> None:
        """Free packed weights. torch computes later steps."""
        self._overrides = ()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        if self._stand_in is not None:
            self._stand_in.close()

    def beside(self, reason: str | None) -> Executor:
        if reason is None:
            return self
        if self._stand_in is None:
            self._stand_in = self.stand_in(self, reason)
        return self._stand_in.beside(reason)

    def measure(self, tried: Model, num_tokens: int) -> None:
        memory = self.memory
        memory.hold(num_tokens)
        memory.append([(-1, num_tokens)])
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        metadata, positions = memory.step_metadata([-1], [num_tokens], self._device)
        packed = self if tried is self.model else PackedModel(tried, memory)
        packed.forward(ids, positions, metadata, ids[:1] + num_tokens - 1)
        memory.free(-1)

    # -- runs ---------------------------------------------------------------------------------------------------

    def pack(self, parts: Parts) -> Forward:
        manager, counts = self.memory.manager, parts.counts
        groups = range(len(manager.groups))
        if counts is None:
            # Most steps are decode steps, whose arrays are made from those of the step before.
            step = decode_step(self._decode_arrays, self.memory, parts.seq_ids, parts.starts)
        else:
            step = step_arrays(
                [[manager.block_table(seq_id, group) for seq_id in parts.seq_ids] for group in groups],
                [start + count for start, count in zip(parts.starts, counts)],
                counts,
                self.memory.block_size,
            )
        if any(deltas := parts.extra.get("delta", ())):
            moved = np.repeat(np.array(deltas, dtype=np.int64), np.diff(step.query_start_loc))
            step = replace(step, positions=step.positions + moved)
        wanted = None if parts.wanted is None else np.array(parts.wanted, dtype=np.int64)
        is_late = parts.late is not None and parts.late[1] is None  # the device knows all tokens, the host none
        tokens = np.zeros(len(parts.tokens), np.int64) if is_late else np.array(parts.tokens, np.int64)
        packed = parts.packed = Forward(tokens, step, wanted, parts.adapters)
        return packed

    def run(self, parts: Parts) -> Results:
        forward = parts.packed or self.pack(parts)
        hidden = hidden_states(self.model) if parts.hidden else None
        logits = self._run(parts, forward, hidden)
        if hidden is not None and (states := hidden.take()) is not None:
            places = to_device(np.array(parts.hidden, dtype=np.int64), states.device)
            parts.hidden_rows = states[0, places].to(logits.device)
        return logits, {}

    def _run(self, parts: Parts, forward: Forward, hidden: HiddenStates | None) -> torch.Tensor:
        late = None if parts.late is None else LateTokens(*parts.late)
        if (compute_with := parts.extra.get("beside")) is not None:
            computed: torch.Tensor = compute_with(self.model, partial(self.compute, forward, late, hidden=hidden))
            return computed
        return self.compute(forward, late, hidden=hidden)

    def compute(
        self,
        forward: Forward,
        late: LateTokens | None = None,
        beside: Beside | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Return the logits [num_rows, vocab] of the wanted tokens. beside, hidden: see `forward`."""
        # Graphs are captured without further arguments and without hidden states.
        if self.graphs is not None and beside is None and hidden is None:
            replayed: torch.Tensor | None = self.graphs.forward(
                forward.tokens, forward.step, forward.adapters, late, forward.wanted
            )
            if replayed is not None:
                return replayed
        if beside is not None:
            forward = replace(forward, step=replace(forward.step, reach=beside.reach))
        ids, positions = (to_device(x, self._device) for x in (forward.tokens, forward.step.positions))
        if late is not None:
            late(ids)
        wanted = None if forward.wanted is None else to_device(forward.wanted, self._device)
        if self.one_order is None:
            metadata = self._decode_arrays.metadata(forward.step, self._device)
            return self.forward(ids, positions, metadata, wanted, beside, hidden)
        with self.one_order:
            metadata = self._decode_arrays.metadata(forward.step, self._device, one_order=True)
            return self.forward(ids, positions, metadata, wanted, beside, hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        metadata: list[AttentionMetadata],
        logits_indices: torch.Tensor | None = None,
        beside: Beside | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Compute tokens whose slots have been appended, and write their K/V to the blocks.

        input_ids, position_ids: int64 [num_tokens]. logits_indices: int64 [num_rows], the tokens whose logits are
        wanted; None: all. beside: further arguments of the model's forward; `position_ids` in them replace those given
        here, and its `reach` is in the metadata. hidden: takes the hidden states of all tokens. Returns logits
        [num_rows, vocab_size].
        """
        self.cache.begin_step(metadata, position_ids)
        kwargs: dict[str, Any] = {}
        if self._keeps_logits:
            # A model that gets a number of last rows may drop the others early. So it gets indices, even for all rows.
            wanted = logits_indices
            if wanted is None:
                wanted = torch.arange(len(input_ids), dtype=torch.int64, device=input_ids.device)
            # accelerate moves a tensor to a spread model's first device, but the last hidden states may be on another
            # one. It leaves a list as it is, and a list can index a tensor on any device.
            kwargs["logits_to_keep"] = wanted.tolist() if self._is_spread else wanted
        # Without a mask, a model that takes no positions would make one of the cache's length.
        if not self.cache.takes_positions:
            kwargs["attention_mask"] = torch.ones_like(input_ids)[None]
        if not self.is_fixed:
            # Before overrides are applied, because `look` would take them for changes of the model.
            self.weights.look()
        if self.weights.structure != self._structure:
            if self.is_fixed:
                raise LayersChanged(f"the modules of {type(self.model).__name__} have changed")
            self.follow_structure()
        given: Mapping[str, Any] = {} if beside is None else beside.arguments(input_ids.unsqueeze(0))
        of_step = (*(() if beside is None else beside.overrides), *(() if hidden is None else (hidden,)))
        output = PackedStep(self.cache, self._configs, (*self._hooks, *self._overrides, *of_step)).run(
            partial(
                uncompiled(self.model),
                input_ids=input_ids.unsqueeze(0),
                use_cache=True,
                return_dict=True,
                **{CACHE: self.cache, "position_ids": position_ids.unsqueeze(0), **kwargs, **given},
            )
        )
        # After the forward, because only then it is known whether every layer used our attention.
        self.cache.refuse_unread(self.model)
        logits: torch.Tensor = output.logits[0].to(input_ids.device)
        if logits_indices is not None and not self._keeps_logits:
            logits = logits[logits_indices]
        return logits
