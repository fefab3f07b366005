"""Stepper: one step after the other: schedule, run, choose, accept (SOSP'23 section 5).

Who runs is the scheduler's, what the device does the runner's, which token comes next the requests'; here they meet,
and here a failure is confined to the requests concerned. Knows neither callers nor outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isnan

import torch

from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler, SchedulerOutput
from hf_paged.generation.engine.sequence import FinishReason, SeqStatus, Sequence, SequenceGroup
from hf_paged.generation.sampling.batch import Choice, Pick, choose_next
from hf_paged.generation.sampling.request import NOT_FINITE, NOTHING_LEFT, Fork, Reorder, Request, SampleRequest

# What may fail in a step, as the requests that it concerns are told.
_SCHEDULING = "scheduling failed"
_MOVING = "moving blocks failed"
_FORWARD = "the forward failed"
_REST = "the step was broken off"


def _described(error: BaseException, doing: str | None = None) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if doing is None else f"{doing}: {text}"


class Stepper:
    """Steps over `requests`, which the caller adds to and takes from between them.

    `fail` ends a request with the error and the exception that it is given, and tells the scheduler.

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
        fail: Callable[[Request, str, BaseException | None], None],
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
        self._doing, self._may_repeat = _SCHEDULING, False
        self.steps = 0
        self.generated_tokens = 0

    def step(self, changed: dict[Request, None]) -> None:
        """One iteration over the batch. Requests that got tokens are added to `changed`, also if it is broken off.

        A failure ends the requests concerned, with its cause. Interrupts are raised on, and errors in scheduling too.
        """
        output: SchedulerOutput | None = None
        self._begin(_SCHEDULING, may_repeat=False)
        try:
            if not self._is_async:
                self._accept(changed)  # what an interrupt has left
            output = self._schedule(changed)
            self._begin(_MOVING, may_repeat=not output.moves_blocks)
            self._runner.prepare(output)
            self._begin(_FORWARD, may_repeat=self._runner.can_repeat)
            result = self._runner.run(output, self._choice)
            self._begin(_REST, may_repeat=False)
            # The device is busy with this step while the host learns what was chosen in the last one.
            self._accept(changed)
            for seqs, error in result.failed:
                self._fail_all((seq.group for seq in seqs), _described(error, _FORWARD), error)
            self._scheduler.update(output)
            if result.logits is not None:
                self._choose(result.seqs, result.logits, changed)
                if not self._is_async:
                    self._accept(changed)
        except BaseException as error:
            self._break_off(output, error, changed)
            if self._doing == _SCHEDULING or not isinstance(error, Exception):
                raise

    def _begin(self, doing: str, *, may_repeat: bool) -> None:
        """may_repeat: an interrupt in what comes now leaves nothing behind but appended slots."""
        self._doing, self._may_repeat = doing, may_repeat

    def _break_off(self, output: SchedulerOutput | None, error: BaseException, changed: dict[Request, None]) -> None:
        if output is not None:
            self._scheduler.rollback(output)
        if self._may_repeat and not isinstance(error, Exception):
            return
        cause = _described(error, self._doing)
        if self._doing == _FORWARD and output is not None:
            # Nobody can tell whose tokens the forward stumbled over: all of the step fail.
            try:
                self._accept(changed)
            finally:
                self._fail_all((seq.group for seq, _ in output.scheduled), cause, error)
            return
        # Nor who has got a token, or which blocks hold what they should: all that have blocks fail.
        self._choice = None
        for request in list(self._requests.values()):
            if request.group.status is not SeqStatus.WAITING and request not in changed:
                self._fail(request, request.group.error or cause, error)
        self._fail_all((request.group for request in changed), cause, error)

    def _fail_all(self, groups: Iterable[SequenceGroup], cause: str, error: BaseException) -> None:
        """These requests end with an error, unless they have ended."""
        for group in dict.fromkeys(groups):
            if not group.is_finished:
                self._fail(self._requests[group.request_id], cause, error)

    def _schedule(self, changed: dict[Request, None]) -> SchedulerOutput:
        output = None if self._choice is None else self._scheduler.schedule_in_peace()
        if output is None:
            self._accept(changed)
            output = self._scheduler.schedule()
        self.steps += bool(output.scheduled)
        for group in output.failed:
            self._fail(self._requests[group.request_id], group.error or "", None)
        return output

    def close(self) -> None:
        """Forget what was chosen in the last step."""
        self._choice = None

    def settle(self, changed: dict[Request, None]) -> None:
        """Between steps: let the host learn what was chosen in the last one, and the device be done with it."""
        self._accept(changed)
        self._runner.wait()

    def _choose(self, seqs: list[Sequence], logits: torch.Tensor, changed: dict[Request, None]) -> None:
        """logits [num_seqs, vocab] of the sequences whose next tokens are due, neighbours of one request in a run."""
        picks: list[Pick] = []
        others: dict[Request, list[int]] = {}
        for row, seq in enumerate(seqs):
            if seq.finish_reason is not None:
                continue  # with the token before
            request = self._requests[seq.group.request_id]
            if isinstance(request, SampleRequest) and request.is_single:
                picks.append(Pick(request, seq, row))
            else:
                others.setdefault(request, []).append(row)
        for request, rows in others.items():
            own = slice(rows[0], rows[-1] + 1)
            self._decide(request, seqs[own], self._in_fp32(logits[own]), changed)
        if not picks:
            return
        self._choice, failed = choose_next(picks, logits, self._in_fp32)
        for request, error in failed:
            self._fail_all([request.group], _described(error), error)
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
        if self._choice is None:
            return
        doing, may_repeat = self._doing, self._may_repeat
        self._begin(_REST, may_repeat=True)
        chosen = list(self._choice.read())
        self._begin(doing, may_repeat=may_repeat)
        self._choice = None
        for (request, seq, _), token, logprob, processed, invalid, stopped in chosen:
            if seq.finish_reason is not None:
                continue  # aborted, or failed
            seq.num_pending = 0
            if isnan(logprob) or isnan(invalid):
                self._fail(request, NOT_FINITE if isnan(logprob) else NOTHING_LEFT, None)
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
            self._fail(request, _described(error), error)
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
