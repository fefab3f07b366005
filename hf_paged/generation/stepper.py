"""Stepper: one step after the other: schedule, run, choose, accept (SOSP'23 section 5).

Who runs is the scheduler's, what the device does the runner's, which token comes next the requests'; here they meet,
and here a failure is confined to the requests concerned. Knows neither callers nor outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import isnan

import torch

from hf_paged.generation.choosing import Choice, Pick, choose_next
from hf_paged.generation.request import (
    NOT_FINITE,
    NOTHING_LEFT,
    Fork,
    Reorder,
    Request,
    SampleRequest,
)
from hf_paged.generation.runner import Runner, StepResult
from hf_paged.generation.scheduler import Scheduler, SchedulerOutput
from hf_paged.generation.sequence import FinishReason, SeqStatus, Sequence


class Stepper:
    """Steps over `requests`, which the caller adds to and takes from between them.

    `fail` ends a request with the error that it is given, and tells the scheduler.

    With `is_async`, a step is prepared and sent to the device before the host knows the tokens of the one before:
    requests with one sequence get theirs a step later, and where one of these turns out to be the last, the row that
    was computed for the next is dropped. All others are decided by the host, step by step. No request loses its blocks
    for a token that may not come: when they are short, the host waits first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        requests: Mapping[str, Request],
        fail: Callable[[Request, str], None],
        *,
        is_async: bool,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._requests = requests
        self._fail = fail
        self._is_async = is_async
        self._choice: Choice | None = None  # of the last step, not on the host yet
        self._logits: torch.Tensor | None = None  # workspace, fp32 [most rows so far, vocab]
        self.steps = 0
        self.generated_tokens = 0

    def step(self, changed: dict[Request, None]) -> None:
        """One iteration over the batch. Requests that got tokens are added to `changed`, also if it is broken off."""
        output = self._scheduler.schedule_in_peace()
        if output is None:
            self._accept(changed)
            output = self._scheduler.schedule()
        self.steps += bool(output.scheduled)
        for group in output.failed:
            self._fail(self._requests[group.request_id], group.error or "")
        result = self._run(output, changed)
        # From here on the device is busy with this step while the host learns what the last one has chosen.
        self._accept(changed)
        for seqs, error in result.failed:
            self._fail_all(seqs, f"the forward failed: {type(error).__name__}: {error}")
        self._scheduler.update(output)
        if result.logits is None:
            return
        with self._failing(result.seqs):
            self._choose(result.seqs, result.logits, changed)
        if not self._is_async:
            self._accept(changed)

    def _run(self, output: SchedulerOutput, changed: dict[Request, None]) -> StepResult:
        is_prepared = False
        try:
            self._runner.prepare(output)
            is_prepared = True
            return self._runner.run(output, self._choice)
        except BaseException as error:
            self._scheduler.rollback(output)
            interrupted = not isinstance(error, Exception)
            if is_prepared and interrupted and self._runner.can_repeat:
                raise
            self._accept(changed)
            cause = f"{type(error).__name__}: {error}"
            if is_prepared:
                # Nobody can tell whose tokens the forward stumbled over: all of the step fail.
                self._fail_all((seq for seq, _ in output.scheduled), f"the forward failed: {cause}")
            else:
                # Nor which blocks hold what they should, on the device or the host: all that have any fail.
                holders = [r.group for r in self._requests.values() if r.group.status is not SeqStatus.WAITING]
                self._fail_all((seq for group in holders for seq in group.live), f"moving blocks failed: {cause}")
            if interrupted:
                raise
            return StepResult([], None)

    def _fail_all(self, seqs: Iterable[Sequence], cause: str) -> None:
        """The requests of these sequences end with an error, unless they have ended."""
        for group in dict.fromkeys(seq.group for seq in seqs):
            if not group.is_finished:
                self._fail(self._requests[group.request_id], cause)

    @contextmanager
    def _failing(self, seqs: Iterable[Sequence]) -> Iterator[None]:
        """Who has got a token and who has not is unknown after an error, and without one a request would wait for ever:
        all of these fail."""
        try:
            yield
        except BaseException as error:
            self._fail_all(seqs, f"the step was broken off: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise

    def _choose(self, seqs: list[Sequence], logits: torch.Tensor, changed: dict[Request, None]) -> None:
        """logits [num_seqs, vocab] of the sequences whose next tokens are due, neighbours of one request in a run."""
        picks: list[Pick] = []
        others: dict[Request, list[Sequence]] = {}
        first_row: dict[Request, int] = {}
        for row, seq in enumerate(seqs):
            if seq.finish_reason is not None:
                continue  # with the token before
            request = self._requests[seq.group.request_id]
            if isinstance(request, SampleRequest) and request.is_single:
                picks.append(Pick(request, seq, row))
            else:
                first_row.setdefault(request, row)
                others.setdefault(request, []).append(seq)
        for request, own in others.items():
            start = first_row[request]
            self._decide(request, own, self._in_fp32(logits[start : start + len(own)]), changed)
        if not picks:
            return
        self._choice, failed = choose_next(picks, logits, self._in_fp32)
        for request, error in failed:
            self._fail_all(request.group.live, f"{type(error).__name__}: {error}")
        for request, seq, _ in picks:
            # A token that ends its request, whatever it is, will not be computed.
            seq.num_pending = int(request.length + 1 < request.max_length)

    def _in_fp32(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy that is this step's to change, in memory that is reused: fresh pages cost more than the copying."""
        rows, vocab = logits.shape
        buffer = self._logits
        if buffer is None or buffer.shape[0] < rows or buffer.shape[1] != vocab:
            buffer = self._logits = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
        return buffer[:rows].copy_(logits)

    def _accept(self, changed: dict[Request, None]) -> None:
        """The host learns what was chosen in the last step."""
        choice, self._choice = self._choice, None
        if choice is None:
            return
        with self._failing(choice.rows):
            for (request, seq, _), token, logprob, processed, invalid, stopped in choice.read():
                if seq.finish_reason is not None:
                    continue  # aborted, or failed
                seq.num_pending = 0
                if isnan(logprob) or isnan(invalid):
                    self._fail(request, NOT_FINITE if isnan(logprob) else NOTHING_LEFT)
                    continue
                changed[request] = None
                self.generated_tokens += 1
                if request.accept(token, logprob, processed, bool(stopped)) is None:
                    seq.token_ids.append(token)
                else:
                    self._scheduler.finish(seq, FinishReason.STOP)

    def _decide(
        self, request: Request, seqs: list[Sequence], logits: torch.Tensor, changed: dict[Request, None]
    ) -> None:
        """The next tokens of beams or several samples: the host must know, for they may fork."""
        num_tokens = request.num_unfinished
        try:
            decision = request.advance(seqs, logits)
        except Exception as error:  # NaN, or a processor or criterion of the caller's: the others go on
            self._fail(request, f"{type(error).__name__}: {error}")
            return
        changed[request] = None
        self._apply(request, decision)
        self.generated_tokens += num_tokens

    def _apply(self, request: Request, decision: list[Fork] | Reorder) -> None:
        scheduler = self._scheduler
        if isinstance(decision, Reorder):
            if decision.tokens:
                scheduler.reorder(request.group, decision.parents, decision.tokens)
            else:
                scheduler.finish_group(request.group, FinishReason.STOP)
            return
        assert isinstance(request, SampleRequest)
        for seq, tokens in decision:
            if len(tokens) == 1:
                seq.token_ids.append(tokens[0])
                family = [seq]
            elif tokens:
                family = scheduler.fork(seq, tokens)
            else:
                scheduler.finish(seq, FinishReason.STOP)
                family = []
            request.forked(seq, family)
        # Samples that agree share a sequence, which may fork into as many.
        request.group.width = request.num_unfinished
