"""Samples the next tokens of all requests with one sequence, on the device, in as few operations as possible.

The host may learn the tokens later: the next step can be computed from a SampledTokens on the device. Knows requests
and rows of logits; never queues or block tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.generation.requests.outputs import TopLogprobs
from hf_paged.generation.requests.request import SingleRequest
from hf_paged.generation.requests.sequence import Sequence
from hf_paged.generation.requests.top_tokens import TopTokens
from hf_paged.generation.sampling.edits import Edit
from hf_paged.generation.sampling.processors import Chain, process_together
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import (
    ToFp32,
    ToHost,
    greedy,
    raw_logprobs,
    row_max,
    sample_tokens,
    sample_top_p,
)

Failures = list[tuple[SingleRequest, Exception]]

# Bytes of logits processed at once, which bounds temporaries. On a CPU fewer bytes would stay in a core's cache, but
# for so few rows calling the operations takes longer than reading the scores again.
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 28


class DueRow(NamedTuple):
    """A request whose next token is due, its sequence, and the row of its logits."""

    request: SingleRequest
    seq: Sequence
    row: int


class DueRows:
    """The rows of a step, for `sample_batch`. Give it the same object as long as they are the same: what does not
    change from step to step is found once."""

    def __init__(self, rows: list[DueRow]) -> None:
        self.rows = rows
        self.seqs = [each.seq for each in rows]
        self.with_top = [each for each in rows if each.request.options.logprobs is not None]
        """Rows whose requests want log-probabilities (of the most likely tokens, if any)."""
        self.alike: dict[object, list[_Edited]] | None = None  # see `_alike`; None: it may differ from step to step
        self.keeps_histories = True
        """True if some request may have a history. Its processors, known with `alike`, decide."""


class _Edited(NamedTuple):
    """A due row and the edits of its scores (see `Chain.edits`; empty if it has no editors).

    is_plain_greedy: this step takes the argmax of the model's own logits.
    """

    due: DueRow
    edits: list[list[Edit]]
    is_plain_greedy: bool


class _Columns(NamedTuple):
    """Columns of some rows on the device: tokens int64 [n], the rest fp32 [n], so that one transfer takes all.

    logprobs: NaN where the logits are. processed: the log-probability after the processors, for requests that keep it.
    invalid: NaN if the processors left no distribution. None: 0 for each of the rows.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    processed: torch.Tensor | None = None
    invalid: torch.Tensor | None = None


def _joined(parts: list[_Columns]) -> _Columns:
    if len(parts) == 1:
        return parts[0]
    columns: list[Any] = []
    for column in zip(*parts):
        # Columns that one part has are sent for all rows, because one transfer takes them.
        filled = (torch.zeros_like(own.logprobs) if part is None else part for own, part in zip(parts, column))
        columns.append(None if all(part is None for part in column) else torch.cat(list(filled)))
    return _Columns(*columns)


class TokenColumns(NamedTuple):
    """Values of `_Columns` on the host, for each row in `due`; `stopped`: 1.0 if a criterion ends the request."""

    due: list[DueRow]
    tokens: list[int]
    logprobs: list[float]
    processed: Iterable[float]
    invalid: Iterable[float]
    stopped: Iterable[float]


class SampledTokens:
    """The tokens sampled in one step, int64 [n], on the device: of these sequences, in this order."""

    def __init__(self, due: DueRows, columns: _Columns, stopped: torch.Tensor | None) -> None:
        self.tokens = columns.tokens
        self.seqs = due.seqs
        self._due = due
        self._top: tuple[list[DueRow], TopTokens] | None = None
        others = (*columns[1:], stopped)
        self._is_sent = [values is not None for values in others]
        self._numbers = ToHost(columns.tokens, *(values for values in others if values is not None))

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """The index of each sequence in `tokens`."""
        return {seq: row for row, seq in enumerate(self.seqs)}

    def add_top(self, logits: torch.Tensor) -> None:
        """Also compute the most likely tokens, for the requests that want them. logits [*, vocab]: the model's own."""
        due = self._due.with_top
        if due:
            rows = logits[to_device(np.array([each.row for each in due]), logits.device)]
            self._top = due, TopTokens(rows, [each.request.options.logprobs or 0 for each in due])

    def read_top(self) -> dict[Sequence, TopLogprobs]:
        """Wait for the most likely tokens, and return those of the sequences whose requests want them."""
        if self._top is None:
            return {}
        due, tokens = self._top
        return dict(zip([each.seq for each in due], tokens.read()))

    def read(self) -> TokenColumns:
        """Wait for the tokens and return them."""
        tokens, *sent = self._numbers.lists()
        values = iter(sent)
        columns: list[Any] = [next(values) if is_sent else repeat(0.0) for is_sent in self._is_sent]
        return TokenColumns(self._due.rows, tokens, *columns)


def sample_batch(due: DueRows, logits: torch.Tensor, to_fp32: ToFp32) -> tuple[SampledTokens | None, Failures]:
    """logits [*, vocab] -> the sampled tokens, and the requests whose own processors or criteria raised.

    to_fp32: makes an fp32 copy that may be overwritten. The failed requests must be ended.
    """
    failed: Failures = []
    max_rows = max(1, (_CPU_BYTES if logits.device.type == "cpu" else _GPU_BYTES) // (4 * logits.shape[1]))
    done: list[DueRow] = []
    parts: list[_Columns] = []
    for key, rows in _alike(due, logits.shape[1], failed).items():
        # Greedy rows may need no copy of their logits; the others have temporaries of that size.
        count = len(rows) if key is _PLAIN_GREEDY else max_rows
        for part in (rows[start : start + count] for start in range(0, len(rows), count)):
            try:
                parts.append(_sample_alike(part, logits, to_fp32, failed))
            except Exception as error:  # a custom processor may raise anything, or return unusable scores
                # Rows with code of the caller are alone, so that an error of several is no request's own.
                if len(part) > 1:
                    raise
                failed.append((part[0].due.request, error))
            else:
                done += [each.due for each in part]
    if not parts:
        return None, failed
    columns = _joined(parts)
    stopped = _extend_histories(done, columns.tokens, failed) if due.keeps_histories else None
    return SampledTokens(due if done == due.rows else DueRows(done), columns, stopped), failed


def _extend_histories(done: list[DueRow], tokens: torch.Tensor, failed: Failures) -> torch.Tensor | None:
    """Append each token to the history of its request; returns fp32 [n], 1 where a criterion ends the request. None:
    no request has a history."""
    if not any(request.keeps_history for request, _, _ in done):
        return None
    stopped = torch.zeros(len(tokens), dtype=torch.float32, device=tokens.device)
    ended = {request for request, _ in failed}
    for row, (request, _, _) in enumerate(done):
        if request.keeps_history and request not in ended:
            try:
                request.extend_history(tokens[row : row + 1], stopped[row : row + 1])
            except Exception as error:  # a criterion is the caller's code
                failed.append((request, error))
    return stopped


_PLAIN_GREEDY = object()
_NO_EDITS: list[list[Edit]] = []


def _alike(due: DueRows, width: int, failed: Failures) -> dict[object, list[_Edited]]:
    """The rows that can be sampled together, by what they have in common. width: number of scores in a row."""
    if due.alike is not None:
        return due.alike
    alike: dict[object, list[_Edited]] = {}
    has_editors = False
    for each in due.rows:
        request = each.request
        if request.is_plain_greedy:
            alike.setdefault(_PLAIN_GREEDY, []).append(_Edited(each, _NO_EDITS, True))
            continue
        try:
            chain = request.chain(width)
            has_editors |= chain.has_editors
            edits = chain.edits(each.seq.token_ids) if chain.has_editors else _NO_EDITS
            unprocessed = not (request.do_sample or request.keeps_processed or chain.own or chain.warpers)
            edited = _Edited(each, edits, unprocessed and not any(edits))
        except Exception as error:  # an option of a type or size that transformers does not check
            failed.append((request, error))
            continue
        key = _PLAIN_GREEDY if edited.is_plain_greedy else chain.sampling_key
        alike.setdefault(key, []).append(edited)
    # Edits depend on the tokens so far, and a request that has failed will be missing in the next step.
    if not has_editors and not failed:
        due.alike = alike
        due.keeps_histories = any(each.request.keeps_history for each in due.rows)
    return alike


def _sample_alike(rows: list[_Edited], logits: torch.Tensor, to_fp32: ToFp32, failed: Failures) -> _Columns:
    """Sample for requests of one sampling key. Requests that fail get an arbitrary token."""
    if len(rows) < len(logits):
        logits = logits[to_device(np.array([each.due.row for each in rows]), logits.device)]
    if rows[0].is_plain_greedy:
        return _Columns(*greedy(logits, to_fp32))
    request = rows[0].due.request
    chains = [each.due.request.chain(logits.shape[1]) for each in rows]
    scores = _processed(rows, chains, to_fp32(logits), failed)
    zeros = scores.new_zeros(len(rows))
    generators = [each.due.request.generator for each in rows]
    if not request.do_sample:
        # No scores are above minus infinity where processors have forbidden every token.
        best, tokens = row_max(scores)
        invalid = zeros.masked_fill(best == -torch.inf, torch.nan)
    elif chains[0].top_p is not None:
        tokens, invalid = sample_top_p(scores, [chain.top_p for chain in chains], generators)
    else:
        tokens, invalid = sample_tokens(scores, generators)
        tokens = tokens.squeeze(1)
    processed = raw_logprobs(scores, tokens, torch.Tensor.float) if request.keeps_processed else None
    return _Columns(tokens, raw_logprobs(logits, tokens, to_fp32), processed, invalid)


def _processed(rows: list[_Edited], chains: list[Chain], scores: torch.Tensor, failed: Failures) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], which may be changed -> the scores after all processors."""
    if chains[0].is_custom:
        return rows[0].due.request.process(scores.clone())  # which the processor may keep
    if chains[0].own:
        scores = torch.cat([_alone(each.due.request, scores[i : i + 1], failed) for i, each in enumerate(rows)])
    return process_together(chains, scores, [each.edits for each in rows])


def _alone(request: SingleRequest, row: torch.Tensor, failed: Failures) -> torch.Tensor:
    """row fp32 [1, vocab] after the request's own processors; unchanged if they raise."""
    try:
        # A copy, because a processor may raise when it has changed some scores.
        scores = request.process(row.clone())
        if scores.shape != row.shape or scores.dtype != row.dtype:
            raise ValueError(f"the logits processors returned {scores.dtype} of shape {tuple(scores.shape)}")
        return scores
    except Exception as error:  # a processor's failure ends its request alone
        failed.append((request, error))
        return row
