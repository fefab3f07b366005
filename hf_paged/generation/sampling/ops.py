"""Logits to tokens and log-probabilities. Knows rows of logits; never requests or sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from hf_paged.kernels import ops
from hf_paged.kernels.native import ops as native_ops

# These look at each row of the scores alone, and never at tokens: rows of several requests are one call.
_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.LogitNormalization,
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a request does with its scores: its `own` processors, which may look at its tokens, then `warpers`.

    Requests with the same `key` have like warpers, and all or none of them processors of their own. One that `is_alone`
    has processors from elsewhere, of which nothing is known: all of them are its own, and nobody else's scores go with
    its.
    """

    own: LogitsProcessorList
    warpers: tuple[Any, ...]
    is_alone: bool
    key: object


def recipe_of(processors: LogitsProcessorList, *options: object, callers: Sequence[Any] = ()) -> Recipe:
    """options: what else must be the same for two requests to be treated alike. callers: of the processors, those that
    the caller may change at any time."""
    if any(not type(processor).__module__.startswith("transformers.") for processor in processors):
        return Recipe(processors, (), True, object())
    first = len(processors)
    keys: list[object] = []
    while first > 0 and (key := _key_of(processors[first - 1])) is not None:
        if any(processors[first - 1] is processor for processor in callers):
            break
        keys.append(key)
        first -= 1
    own = LogitsProcessorList(processors[:first])
    return Recipe(own, tuple(processors[first:]), False, (*options, bool(own), *keys))


def _key_of(processor: Any) -> object:
    """Equal for warpers that do the same; None for what is not known to be one."""
    settings = vars(processor)
    if type(processor) not in _WARPERS or not all(isinstance(x, (int, float)) for x in settings.values()):
        return None
    return type(processor), *sorted(settings.items())


def greedy(
    logits: torch.Tensor, to_fp32: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.float().clone()
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] -> the most likely tokens int64 [num_rows], their log-probabilities fp32 [num_rows].

    A log-probability is NaN where the logits are. to_fp32: makes a copy to use up, where one is needed.
    """
    if ops.default_impl(logits.device) == "native" and native_ops.supports(logits.dtype) and logits.stride(1) == 1:
        return native_ops.greedy(logits)
    wide = to_fp32(logits)
    scores, tokens = most_likely(wide)
    # score - logsumexp(logits), without a temporary as large as the logits.
    return tokens, -wide.sub_(scores[:, None]).exp_().sum(dim=-1).log_()


def most_likely(scores: torch.Tensor, *, run: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """scores fp32 [num_rows, vocab] -> the largest of each row and its (first) index int64, both [num_rows].

    On a CPU max is 30 times faster than argmax, and looking for the run with the maximum first halves that again.
    """
    if scores.device.type != "cpu" or scores.shape[1] % run:
        return scores.max(dim=-1)
    runs = scores.view(len(scores), -1, run)
    best = runs.amax(dim=-1).max(dim=-1)[1]
    values, index = runs[torch.arange(len(scores)), best].max(dim=-1)
    return values, best * run + index


class ToHost:
    """Tokens int64 [n] and some fp32 [n] of theirs, on their way to the host.

    Nobody waits before `lists`, and then only for what was asked of the device until now, not for what came later.
    """

    def __init__(self, tokens: torch.Tensor, *values: torch.Tensor) -> None:
        self._rows = (tokens, *values)
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            return
        rows = _in_one(tokens, *values)  # transfer
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=True)
            self._rows = tuple(host.copy_(rows, non_blocking=True))
            self._arrived = torch.cuda.current_stream(rows.device).record_event()
        else:
            self._rows = tuple(rows.cpu())

    def lists(self) -> tuple[list[int], *tuple[list[float], ...]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *values = (row.tolist() for row in self._rows)
        return list(map(int, tokens)), *values


def _in_one(*rows: torch.Tensor) -> torch.Tensor:
    """fp64 holds ids up to 2**53 and every fp32 as they are."""
    return torch.stack([row.double() for row in rows])


def to_host(tokens: torch.Tensor, *values: torch.Tensor) -> tuple[list[int], *tuple[list[float], ...]]:
    """Tokens int64 [n] and some fp32 [n] of theirs, as lists."""
    return ToHost(tokens, *values).lists()


def choose(scores: torch.Tensor, *, do_sample: bool, generator: torch.Generator | None) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], after all processors -> tokens int64 [num_rows].

    Uses up random numbers exactly as transformers' sampling loop does. Raises RuntimeError where a row has NaN.
    """
    if not do_sample:
        return most_likely(scores)[1]
    probs = torch.softmax(scores, dim=-1)
    if _draws_natively(probs) and not torch.isnan(probs[:, 0]).any():  # one NaN in a row makes all of it NaN
        return _draw_natively(probs, [generator] * len(probs))
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    """One token int64 for each row of probs fp32 [num_rows, vocab] (used up), with the random numbers of its generator.

    The tokens of `torch.multinomial(probs[i : i + 1], 1, generator=generators[i])`, which lets exponential clocks race:
    all rows at once, and without its look at the probabilities, for which the host waits. NaN gives any token.
    """
    if _draws_natively(probs):
        return _draw_natively(probs, generators)
    clocks = torch.empty_like(probs)
    for row, generator in zip(clocks.split(1), generators, strict=True):
        row.exponential_(1, generator=generator)
    return most_likely(probs.div_(clocks))[1]


def _draws_natively(probs: torch.Tensor) -> bool:
    """On a CPU the clocks of all tokens take most of a sampling step, and hardly any of them matters."""
    if probs.dtype != torch.float32 or probs.stride(1) != 1 or ops.default_impl(probs.device) != "native":
        return False
    return native_ops.draws_like_torch()


def _draw_natively(probs: torch.Tensor, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    return native_ops.draw(probs, [torch.default_generator if g is None else g for g in generators])


def largest(
    scores: torch.Tensor, offsets: torch.Tensor, count: int, *, run: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of scores fp32 [num_rows, vocab] + offsets [num_rows], in descending order: their indices in the
    flattened scores int64 [count], and their values [count].

    They lie in the `count` runs with the largest maxima; looking only there takes a fifth of a topk over everything.
    """
    num_rows, vocab = scores.shape
    offsets = offsets[:, None]
    if vocab % run or scores.numel() < 2 * count * run:
        values, index = torch.topk((scores + offsets).view(-1), count)
        return index, values
    runs = scores.view(num_rows, -1, run)
    # Rounding keeps the order: the maximum plus the offset is the maximum of what the sums would be.
    maxima = runs.amax(dim=2) + offsets
    # Runs in ascending order, so that ties are met in the order of the whole.
    best = torch.topk(maxima.view(-1), count)[1].sort()[0]
    rows = best // maxima.shape[1]
    values, chosen = torch.topk((runs[rows, best % maxima.shape[1]] + offsets[rows]).view(-1), count)
    return best[chosen // run] * run + chosen % run, values


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [num_rows] of tokens int64 [num_rows] under the distributions of scores [num_rows, vocab]."""
    return scores.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
