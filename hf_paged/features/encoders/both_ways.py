"""Encoders, whose tokens attend to all of their prompt: whole prompts as one packed row, without K/V.

The model's own forward gets padded rows, which its head expects. Within it, the base model gets the tokens of all rows
as one row without padding, and its output goes back to rows. Attention goes through transformers' AttentionInterface:
each prompt attends by the model's own implementation, to itself alone, with the mask that the model asks for.

Knows models and the ids of sequences; never requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import nn

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import OWN_MASK, configs_of, own_attention, own_implementation
from hf_paged.model.devices import device_of
from hf_paged.model.heads import HeadModel
from hf_paged.model.overrides import ABSENT, Overrides, Patch, mark
from hf_paged.model.packed import PackedStep
from hf_paged.model.state import state_of
from hf_paged.model.support import SupportReport, refused_report, rotary_limit
from hf_paged.model.trial import Trial, attempt
from hf_paged.sockets import Executor, Output, Parts, Plan, Results, SideMemory

_OF_TOKENS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")
"""Arguments of a base model that have a column for each token."""

# Each has a hidden state: 8,192 of 768 elements in fp32 take 25 MB.
_PADDED = 8192
"""Places of a forward's padded output, of which any number may be padding. In a larger one, at most half are."""

_CALL_IT = "call the model itself, with padded batches"

_TRIED = [[5, 6, 7, 8, 9], [9, 8], [5, 6], [7]]
"""Prompts of a trial: two of them have the same length, and so share a call of attention."""


class _Mask:
    """A mask that a model has asked for, in place of a tensor. function: (batch, head, query, key) -> whether the query
    sees the key, of places in a prompt."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._made: dict[int, torch.Tensor | None] = {}

    def of_length(self, length: int, query: torch.Tensor) -> torch.Tensor | None:
        """Return the mask bool [1, 1, length, length] of a prompt; None: everything is seen."""
        if length not in self._made:
            places = torch.arange(length, dtype=torch.int64, device=query.device)
            found = self._function(0, 0, places[:, None], places[None])
            seen = torch.as_tensor(found, dtype=torch.bool, device=query.device).expand(length, length)
            self._made[length] = None if seen.all() else seen[None, None]
        return self._made[length]


class PackedPrompts:
    """The attention of a forward of prompts of these lengths, one after the other in one row.

    It is the `packed_cache` of that forward. reads: how often a layer has attended.
    """

    step = ()

    def __init__(self, lengths: Sequence[int]) -> None:
        # Neighbours of one length are rows of one call.
        self._runs = [(length, len([*same])) for length, same in groupby(lengths)]
        self.reads = 0

    def mask(self, function: Callable[..., Any]) -> _Mask:
        return _Mask(function)

    def attend(
        self, module: nn.Module, states: Sequence[torch.Tensor], mask: object, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend within each prompt. states: query, keys and values [1, num_heads, num_tokens, head_dim]. Returns
        [1, num_tokens, num_heads, head_dim]."""
        if mask is not None and not isinstance(mask, _Mask):
            raise UnsupportedModelError(f"{type(module).__name__} {OWN_MASK}")
        self.reads += 1
        start, parts = 0, []
        for length, count in self._runs:
            stop = start + length * count
            own = [each[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1) for each in states]
            seen = None if mask is None else mask.of_length(length, own[0])
            if seen is not None and own_implementation(getattr(module, "config", None)) == "eager":
                seen = torch.zeros_like(seen, dtype=own[0].dtype).masked_fill(~seen, torch.finfo(own[0].dtype).min)
            parts.append(own_attention(module, *own, seen, **kwargs)[0].flatten(0, 1))
            start = stop
        return torch.cat(parts)[None], None


class _Forward:
    """An override of the base model's forward, for one forward of padded rows [num_rows, length].

    lengths: tokens of each row. padding: the token, and the position, from which RoBERTa counts; None: positions begin
    at 0. kind: the class whose forward it is, unless the object has one. states: what it has returned, [num_rows,
    length, size].
    """

    def __init__(self, base: Any, rows: torch.Tensor, lengths: Sequence[int], padding: int | None, kind: Any) -> None:
        replaced = vars(base).get("forward")
        self._base, self._rows, self._padding = base, rows, padding
        self._own: Callable[..., Any] = partial(kind.forward, base) if replaced is None else replaced
        places = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
        self._places = torch.tensor(places, dtype=torch.int64, device=rows.device).T
        self.states: Any = None
        patch = mark(partial(_Forward.call, self))
        self.overrides = Overrides([Patch(vars(base), "forward", patch, ABSENT if replaced is None else replaced)])

    def call(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own
        given = dict(inspect.signature(own).bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        types = given.get("token_type_ids")
        given = {name: value for name, value in given.items() if name not in _OF_TOKENS}
        row, place = self._places
        if types is not None:
            given["token_type_ids"] = types[row, place][None]
        positions = place
        if self._padding is not None:
            counts = self._rows != self._padding
            positions = (counts.cumsum(1) * counts + self._padding)[row, place]
        output = own(input_ids=self._rows[row, place][None], position_ids=positions[None], **given)
        states = output[0][0]
        self.states = states.new_zeros(*self._rows.shape, states.shape[-1]).index_put_((row, place), states)
        output["last_hidden_state"] = self.states
        if output.get("pooler_output") is not None:
            output["pooler_output"] = self._base.pooler(self.states)
        return output


class PromptRows(Executor):
    """An encoder, whose prompts are computed whole. It may have a head for labels. Its memory has no blocks.

    `Parts.extra["types"]`, if any, has the token types of each part; None: all are 0.
    """

    no_hidden = ""

    def __init__(self, model: Model, memory: PagedMemory) -> None:
        self.model, self.memory = model, memory
        self.weights = state_of(model).weights
        self.no_prefixes = f"each token of {type(model).__name__} attends to its whole prompt"
        self.kind: Any = type(model.made_of[0])
        self._configs = configs_of(model)
        self._is_alone = False
        # ESM scales a whole row by its share of these: such prompts are computed alone.
        self._mask_token: int | None = getattr(model.config, "mask_token_id", None)
        # Longer prompts have other rotary frequencies, which a forward takes for all of its tokens.
        self._rotated_alike = rotary_limit(model, ["longrope"])
        table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
        self._padding: int | None = getattr(table, "padding_idx", None)
        limit = getattr(model.config, "max_position_embeddings", None)
        self.max_length = None if limit is None else limit - (-1 if self._padding is None else self._padding) - 1

    @property
    def splits_prompts(self) -> bool:
        return False

    @property
    def order_obstacle(self) -> str:
        return f"{type(self.model).__name__} is an encoder, whose sums are the model's own"

    def beside(self, reason: str | None) -> Executor:
        self._is_alone = reason is not None
        return self

    def run(self, parts: Parts) -> Results:
        stops = [0, *accumulate(parts.lengths)]
        rows = [parts.tokens[start:stop] for start, stop in pairwise(stops)]
        types = parts.extra.get("types") or [None] * len(rows)
        # Prompts of one length are neighbours, and the longest are not padded much.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        found, failed = self._computed([(row, rows[row], types[row]) for row in order])
        of_token = [row for row, own in enumerate(rows) for _ in own]

        def taken(wanted: Sequence[int], which: int) -> torch.Tensor | None:
            own = [(row, at - stops[row]) for at in wanted if (row := of_token[at]) not in failed]
            return torch.stack([_row(found[row][which], place) for row, place in own]) if own else None

        parts.hidden_rows = taken(parts.hidden, 1)
        return taken(range(len(of_token)) if parts.wanted is None else parts.wanted, 0), failed

    def _computed(self, rows: list[Any]) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Return logits and hidden states by row, and the errors of rows. rows: (number, tokens, token types)."""
        batches = self._divided(rows)
        found, failed = dict[int, Any](), dict[int, Exception]()
        while batches:
            batch = batches.pop()
            try:
                results = self.forward([own for _, own, _ in batch], [types for _, _, types in batch])
                found.update(zip([row for row, _, _ in batch], results))
            except Exception as error:  # of the model's code, with these prompts; each other one is computed alone
                if len(batch) == 1:
                    failed[batch[0][0]] = error
                else:
                    batches += [[row] for row in batch]
        return found, failed

    def _divided(self, rows: list[Any]) -> list[list[Any]]:
        """Divide rows, which are sorted by length, so that none depends on others in its forward."""
        alone, shorter, longer = list[Any](), list[Any](), list[Any]()
        for row in rows:
            if self._is_alone or self._mask_token in row[1]:
                alone.append([row])
            elif self._rotated_alike is None or len(row[1]) <= self._rotated_alike:
                shorter.append(row)
            else:
                longer.append(row)
        return [*alone, *_batches(shorter), *_batches(longer)]

    def forward(
        self, rows: Sequence[list[int]], types: Sequence[list[int] | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute prompts in one forward. Returns logits [num_labels] or [num_tokens, size] of each, and hidden states.
        types: of each token."""
        model, device, width = self.model, device_of(self.model), max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device=device)
        seen = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        given: dict[str, Any] = {"attention_mask": torch.tensor(seen, dtype=torch.int64, device=device)}
        if any(own is not None for own in types):
            padded = [(own or [0] * len(row)) + [0] * (width - len(row)) for own, row in zip(types, rows)]
            given["token_type_ids"] = torch.tensor(padded, dtype=torch.int64, device=device)
        lengths = [*map(len, rows)]
        base = model.base_model
        # What `with_head` has made has a forward of its own, which is the model's without its head.
        kind = self.kind if base is model else type(base)
        prompts, packed = PackedPrompts(lengths), _Forward(base, ids, lengths, self._padding, kind)
        given |= {"input_ids": ids, "return_dict": True}
        if base is model:
            output = PackedStep(prompts, self._configs).run(partial(packed.call, **given))
        else:
            forward = partial(self.kind.forward, model, **given)
            output = PackedStep(prompts, self._configs, [packed.overrides]).run(forward)
        if not prompts.reads or packed.states is None:
            raise UnsupportedModelError(
                "it computes attention with code of its own, so that prompts in one row would see one another"
            )
        logits = output[0]
        cut = logits.ndim == 3
        pairs = zip(logits, packed.states, lengths)
        return [(own[:length] if cut else own, states[:length]) for own, states, length in pairs]


def _batches(rows: Sequence[Any]) -> list[list[Any]]:
    """Divide rows, which are sorted by length, so that the padded output of no forward is far larger than its tokens.
    Steps that compute the last token of no prompt have no rows."""
    batches: list[list[Any]] = []
    total = 0
    for row in rows:
        length = len(row[1])
        total += length
        if not batches or (len(batches[-1]) + 1) * length > max(2 * total, _PADDED):
            batches.append([])
            total = length
        batches[-1].append(row)
    return batches


class TokenTypes(SideMemory):
    """Passes on the types of a prompt's tokens, which its task may have."""

    def extend(self, parts: Parts, plan: Plan, output: Output) -> None:
        parts.extra["types"] = [getattr(seq.group.task, "types", None) for seq, _ in plan]


def _row(rows: torch.Tensor, place: int) -> torch.Tensor:
    return rows[place] if rows.ndim == 2 else rows


def looks_ahead(model: Any) -> bool:
    """Return True if what the base model gives for a token depends on later ones. If it cannot be run: False."""
    executor = PromptRows(model, PagedMemory(1))
    base = partial(executor.kind.forward, model) if model.base_model is model else model.base_model
    ids = torch.tensor([[5, 6, 7], [5, 6, 8]], dtype=torch.int64, device=device_of(model))

    def first(row: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = base(input_ids=row[None], return_dict=True)[0][0, 0]
        return states

    ahead = attempt(lambda: not torch.equal(first(ids[0]), first(ids[1])))
    return ahead is True


def refusal_of(model: HeadModel) -> str | None:
    """Return why whole prompts in one packed row are not what the model computes of each alone; None: they are."""
    executor = PromptRows(model, PagedMemory(1))  # type: ignore[arg-type]

    def alone(ids: list[int]) -> torch.Tensor:
        given = torch.tensor([ids], dtype=torch.int64, device=device_of(executor.model))
        logits: torch.Tensor = executor.kind.forward(executor.model, input_ids=given, return_dict=True)[0][0]
        return logits

    trial = Trial(
        executor.model,
        lambda: [logits for logits, _ in executor.forward(_TRIED, [None] * len(_TRIED))],
        lambda: [alone(ids) for ids in _TRIED],
        "its prompts do not run packed: {}",
        differs="its packed logits differ from its own by {error:.2g} (largest logit {scale:.2g})",
    )
    refusal = trial.refusal()
    return None if refusal is None else refusal.reason


def report(model: HeadModel) -> SupportReport | None:
    """Return how an encoder runs, or None for a model whose tokens attend to former ones only."""
    if not looks_ahead(model):
        return None
    reason, refusal = "its tokens attend to their whole prompt", refusal_of(model)
    if refusal is not None:
        return refused_report(model, f"{reason}, and {refusal}; {_CALL_IT}")  # type: ignore[arg-type]
    return replace(refused_report(model, reason, engine_only=True), encodes=True)  # type: ignore[arg-type]
