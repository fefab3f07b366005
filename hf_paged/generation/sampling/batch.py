"""The next tokens of all requests with one sequence, chosen on the device in as few operations as it takes.

The host may learn them later: the next step can be computed with a Choice. Knows requests and rows of logits; never
queues or block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.cache.kv_pool import to_device
from hf_paged.generation.engine.sequence import Sequence
from hf_paged.generation.sampling.ops import ToHost, draw, greedy, logprobs_of, most_likely
from hf_paged.generation.sampling.request import SampleRequest

ToFp32 = Callable[[torch.Tensor], torch.Tensor]
Failures = list[tuple[SampleRequest, Exception]]

# Logits that are processed at once: what stays in a core's cache; on a GPU, what bounds the temporary tensors.
_CPU_BYTES, _BYTES = 1 << 20, 1 << 28


class Pick(NamedTuple):
    """A request whose next token is due, its sequence, and the row of its logits."""

    request: SampleRequest
    seq: Sequence
    row: int


class _Columns(NamedTuple):
    """Of some picks, on the device: tokens int64 [n], the others fp32 [n], flags too: they go to the host together.

    logprobs: NaN where the logits are. processed: after the processors, for requests that keep it, else 0.
    invalid: NaN where the processors left nothing to choose from, else 0.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    processed: torch.Tensor
    invalid: torch.Tensor


class Choice:
    """The tokens chosen in one step, int64 [n], on the device; `rows` says whose they are."""

    def __init__(self, picks: list[Pick], columns: _Columns, stopped: torch.Tensor) -> None:
        self.tokens = columns.tokens
        self.rows = {pick.seq: row for row, pick in enumerate(picks)}
        self._picks = picks
        self._numbers = ToHost(*columns, stopped)

    def read(self) -> Iterable[tuple[Pick, int, float, float, float, float]]:
        """Waits for what was chosen: for each its token, log-probability, that after the processors, NaN if there was
        no distribution, and 1.0 if a criterion stops it."""
        return zip(self._picks, *self._numbers.lists(), strict=True)


def choose_next(picks: list[Pick], logits: torch.Tensor, to_fp32: ToFp32) -> tuple[Choice | None, Failures]:
    """logits [*, vocab] -> the choice, and the requests whose own processors or criteria raised, to be ended.

    to_fp32: makes a copy to use up.
    """
    groups: dict[object, list[Pick]] = {}
    for pick in picks:
        groups.setdefault(pick.request.recipe.key, []).append(pick)
    cut = max(1, (_CPU_BYTES if logits.device.type == "cpu" else _BYTES) // (4 * logits.shape[1]))
    chosen: list[Pick] = []
    parts: list[_Columns] = []
    failed: Failures = []
    for group in groups.values():
        most = len(group) if group[0].request.is_plain_greedy else cut
        for some in (group[start : start + most] for start in range(0, len(group), most)):
            try:
                parts.append(_choose_alike(some, logits, to_fp32, failed))
            except Exception as error:
                if len(some) > 1:
                    raise
                failed.append((some[0].request, error))  # over what its own processors returned
            else:
                chosen += some
    if not parts:
        return None, failed
    columns = parts[0] if len(parts) == 1 else _Columns(*map(torch.cat, zip(*parts)))
    stopped = torch.zeros_like(columns.logprobs)
    out = {request for request, _ in failed}
    for row, (request, _, _) in enumerate(chosen):
        if request.history is not None and request not in out:
            try:
                request.extend_history(columns.tokens[row : row + 1], stopped[row : row + 1])
            except Exception as error:  # of a criterion
                failed.append((request, error))
    return Choice(chosen, columns, stopped), failed


def _choose_alike(group: list[Pick], logits: torch.Tensor, to_fp32: ToFp32, failed: Failures) -> _Columns:
    """For requests of one recipe. Those that failed get some token too."""
    if len(group) < len(logits):
        logits = logits[to_device(np.array([row for _, _, row in group]), logits.device)]
    request = group[0].request
    if request.is_plain_greedy:
        tokens, logprobs = greedy(logits, to_fp32)
        nothing = torch.zeros_like(logprobs)
        return _Columns(tokens, logprobs, nothing, nothing)
    recipe, raw = request.recipe, to_fp32(logits)
    if recipe.is_alone:
        scores = request.process(raw.clone())
    elif recipe.own:
        scores = torch.cat([_processed(pick.request, raw[i : i + 1], failed) for i, pick in enumerate(group)])
    else:
        scores = raw  # which warpers leave alone
    if scores.ndim != 2 or len(scores) != len(raw):
        raise ValueError(f"the logits processors returned scores of shape {tuple(scores.shape)} for {tuple(raw.shape)}")
    for warper in recipe.warpers:
        scores = warper(_NO_IDS, scores)
    nothing = raw.new_zeros(len(group))
    if request.do_sample:
        probs = torch.softmax(scores, dim=-1)
        invalid = probs[:, 0] * 0  # one NaN in a row makes all of it NaN
        tokens = draw(probs, [pick.request.generator for pick in group])
    else:
        invalid, tokens = nothing, most_likely(scores)[1]
    processed = logprobs_of(scores, tokens) if request.keeps_processed else nothing
    return _Columns(tokens, logprobs_of(raw, tokens), processed, invalid)


_NO_IDS = torch.zeros(0, 0, dtype=torch.int64)  # warpers do not look at tokens


def _processed(request: SampleRequest, row: torch.Tensor, failed: Failures) -> torch.Tensor:
    """row fp32 [1, vocab] after the request's own processors; as it is, if they raise."""
    try:
        scores = request.process(row.clone())
        if scores.shape != row.shape or scores.dtype != row.dtype:
            raise ValueError(f"the logits processors returned {scores.dtype} of shape {tuple(scores.shape)}")
        return scores
    except Exception as error:
        failed.append((request, error))
        return row
