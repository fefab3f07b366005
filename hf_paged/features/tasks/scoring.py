"""The log-probabilities of given completions: what `Engine.score` computes, as requests of the engine."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence, Sized
from math import isnan
from typing import Any, NamedTuple

import torch

from hf_paged.annotations import Model
from hf_paged.features.tasks.prompt_scores import PromptScores
from hf_paged.features.tasks.results import results_of
from hf_paged.generation.prompts import as_prompts, token_ids
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import NOT_FINITE
from hf_paged.model.devices import device_of
from hf_paged.model.inputs import step_positions


class CompletionScores(PromptScores):
    """The log-probabilities of a completion, whose last token the request does not have."""

    generates = False

    def __init__(self, row: Scored) -> None:
        super().__init__(0, len(row.prompt))
        self._last = row.completion[-1]

    def begin(self, prompt: Sequence[int]) -> None:
        self._of([*prompt, self._last])

    def consume(self, first: int, rows: torch.Tensor) -> None:
        tokens = self._tokens[first + 1 : first + 1 + len(rows)]
        if (token := max(tokens)) >= rows.shape[1]:
            raise ValueError(f"completions: token {token} is not in the vocabulary of {rows.shape[1]}")
        super().consume(first, rows)
        if any(isnan(value) for value in self.logprobs[first + 1 : self.stop + 1] if value is not None):
            raise ValueError(NOT_FINITE)

    def fill(self, output: Any) -> None:
        output.result = self.logprobs[self._known_from :]


class Scored(NamedTuple):
    """A completion and the place of its result."""

    place: int
    prompt: list[int]
    completion: list[int]

    @property
    def request(self) -> list[int]:
        """The prompt of the request: its logits, and those after it, are those of the completion's tokens."""
        return [*self.prompt, *self.completion[:-1]]


def rows_of(model: Model, prompts: Any, completions: Any) -> list[Scored]:
    """prompts, completions: token ids, as for `Engine.score`. Raises ValueError if they are none."""
    asked, given = lists_of(model, prompts, "prompts"), lists_of(model, completions, "completions", may_be_empty=True)
    if len(asked) != len(given):
        raise ValueError(f"{len(given)} completions for {len(asked)} prompts; give one for each")
    return [Scored(place, *row) for place, row in enumerate(zip(asked, given))]


def lists_of(model: Model, given: Any, name: str, *, may_be_empty: bool = False) -> list[list[int]]:
    """Return all token ids of each row of an argument: a row may end with what is else the padding token."""
    rows = [ids for ids, _ in as_prompts(given, None)]
    if not all(isinstance(row, Sized) for row in rows):
        raise ValueError(f"{name}: a list of token ids is needed for each row")
    return [[] if may_be_empty and not len(row) else _ids(model, row, name) for row in rows]


def _ids(model: Model, given: Any, name: str) -> list[int]:
    count = given.numel() if isinstance(given, torch.Tensor) else len(given)
    try:
        # Placeholders of images are refused with the request, which knows whether it has some.
        return token_ids(model, given, [1] * count, None)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def one_for_each(name: str, value: Any, count: int) -> list[Any]:
    """value: None, a string, or a list with one for each row."""
    values = [value] * count if value is None or isinstance(value, str) else list(value)
    if len(values) != count:
        raise ValueError(f"{name}={value!r}: {len(values)} for {count} prompts; give one, or one for each")
    return values


def score(
    generate: Callable[..., list[RequestOutput]], rows: Sequence[Scored], options: dict[str, list[Any]]
) -> list[torch.Tensor]:
    """The log-probabilities fp32 [length of the completion] of each row, on the CPU.

    generate: `Engine.generate`. options: of requests, a list with one for each row. Of rows with equal prompts one runs
    first, and the others find its blocks in the cache.
    """
    results = [torch.zeros(0, dtype=torch.float32, device="cpu") for _ in rows]
    firsts: dict[tuple[int, ...], Scored] = {}
    rest = []
    for row in rows:
        # An empty completion needs no forward.
        if row.completion and firsts.setdefault(tuple(row.prompt), row) is not row:
            rest.append(row)
    for wave in (list(firsts.values()), rest):
        if not wave:
            continue
        own = {name: [values[row.place] for row in wave] for name, values in options.items()}
        names = [f"completion {row.place + 1} was not scored" for row in wave]
        tasks = [CompletionScores(row) for row in wave]
        found = results_of(generate, [row.request for row in wave], tasks, own, names)
        for row, logprobs in zip(wave, found):
            results[row.place] = torch.tensor(logprobs, dtype=torch.float32, device="cpu")
    return results


class _WithGraph(torch.autograd.Function):
    """The values of one tensor, with the gradient of another that is equal but for rounding."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradients[0]


def with_values(values: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
    """`values`, with the graph of a tensor that is equal but for rounding."""
    result: torch.Tensor = _WithGraph.apply(values, graph)  # type: ignore[no-untyped-call]
    return result


class _Noted(threading.local):
    is_recomputed = False
    """True while backward computes a part of a forward again in this thread."""


_noted = _Noted()


@functools.cache
def _note_recomputation() -> None:
    """From now on notice torch's checkpointing, which everyone's checkpointing ends in, whoever calls it."""
    from torch.utils import checkpoint

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            _noted.is_recomputed = True
            return function(*args, **kwargs)

        return call

    # Both kinds of checkpointing end in these, also for those that imported `checkpoint` before.
    ours: Any = checkpoint
    ours._checkpoint_without_reentrant_generator = noting(ours._checkpoint_without_reentrant_generator)
    ours.CheckpointFunction.apply = noting(ours.CheckpointFunction.apply)


def with_graph_of(adapter: str | None, model: Model, row: Scored, values: torch.Tensor) -> torch.Tensor:
    """`with_graph`, with an adapter that is switched on for this forward alone. Raises ValueError if backward would
    run a part of the forward again, with the adapters that are active then."""
    _note_recomputation()
    _noted.is_recomputed = False
    result = with_graph(model, row, values)
    if _noted.is_recomputed:
        raise ValueError(
            f"grad=True with adapter={adapter!r}: a part of the {type(model).__name__} is checkpointed, and computed "
            "again in backward, with the adapters that are active then; activate this one with set_adapter until "
            "backward has run, or take the checkpointing out"
        )
    return result


def with_graph(model: Model, row: Scored, values: torch.Tensor) -> torch.Tensor:
    """The log-probabilities `values` of a row, on the model's device, with the graph of the model's own forward."""
    device, count = device_of(model), len(row.completion)
    ids = torch.tensor([row.request], dtype=torch.int64, device=device)
    parameters = inspect.signature(model.forward).parameters
    given: dict[str, Any] = {"logits_to_keep": count} if "logits_to_keep" in parameters else {}
    # As a step does: some models would count from another start.
    positions = torch.arange(ids.shape[1], dtype=torch.int64, device=device)[None]
    if (own_positions := step_positions(model, ids, positions, is_first=True)) is not None:
        given["position_ids"] = own_positions
    with torch.enable_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits[0, -count:]
        tokens = torch.tensor(row.completion, dtype=torch.int64, device=logits.device)
        # In fp32, as the engine's own log-probabilities are.
        own = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None]).squeeze(1)
        return with_values(values.to(own.device), own)
