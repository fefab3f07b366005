"""Stepper: runs steps (SOSP'23 section 5): schedule, move blocks, forward, accept, sample.

The scheduler decides which requests run, the runner operates the device, and the requests sample tokens. The stepper
connects them and confines a failure to the requests concerned. It knows neither callers nor outputs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from enum import Enum
from math import isnan

import torch

from hf_paged.errors import LayersChanged, described
from hf_paged.generation.engine.runner import Runner, StepResult, TaskRows
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import Drafts, SchedulerOutput
from hf_paged.generation.requests.batch import DueRow, DueRows, SampledTokens, sample_batch
from hf_paged.generation.requests.request import (
    NOT_FINITE,
    NOTHING_LEFT,
    Fork,
    ForkingRequest,
    Reorder,
    Request,
    SingleRequest,
)
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, Sequence, SequenceGroup
from hf_paged.registry import Drafting
from hf_paged.sockets import SideMemory


class _Stage(Enum):
    """The part of a step that is in progress; the value begins the error message of requests if it fails."""

    ENCODE = "the encoder failed"
    DRAFT = "drafting failed"
    SCHEDULE = "scheduling failed"
    MOVE_BLOCKS = "moving blocks failed"
    FORWARD = "the forward failed"
    READ = "reading the sampled tokens failed"
    UPDATE = "the step was broken off"


def _described(error: BaseException, stage: _Stage | None = None) -> str:
    text = described(error)
    return text if stage is None else f"{stage.value}: {text}"


Changed = dict[Request, None]
"""Requests that have got tokens or ended, in the order of change."""


class Stepper:
    """Runs steps over `requests`, which the caller adds to and removes from between steps.

    `step` returns the requests that have got tokens or failed: a request that fails has its error, and is finished in
    the scheduler. A step that is broken off leaves them in `changed` as well; the caller empties it.

    With `is_async` (which may change between steps) a step is scheduled and launched before the host knows the tokens
    of the last one. Requests with one sequence get each token a step later; if it turns out to be their last, the row
    computed for the next token is dropped. All other requests are decided on the host, step by step. No request is
    preempted for a token that may never be generated: when blocks are short, the host waits for the tokens first. While
    a request may get drafts, the host knows the tokens of each step before the next one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        requests: Mapping[str, Request],
        speculation: Drafting,
        *,
        is_async: bool,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._requests = requests
        self.speculation = speculation
        self.changed: Changed = {}
        self._tasks: dict[SequenceGroup, None] = {}  # that began, with a task that may want more
        self.is_async = is_async
        self._is_retried = False  # whether the last step met other modules than the model had
        self._sampled: SampledTokens | None = None  # in the last step; the host has not read them yet
        self._due = DueRows([])  # of the last step, if all of its sequences were due
        self._logits: torch.Tensor | None = None  # workspace, fp32 [max_rows so far, vocab]
        self._stage = _Stage.SCHEDULE
        self.output: SchedulerOutput | None = None  # of the step in progress, or else of the last one
        self.steps = 0
        self.generated_tokens = 0

    def step(self) -> None:
        """Run one step. A failure ends the requests concerned; interrupts and errors in scheduling are raised too."""
        self._stage, self.output = _Stage.SCHEDULE, None
        started = time.perf_counter()
        try:
            # Before the next step is chosen, because it depends on them.
            if self._is_waiting:
                self._accept()  # tokens that an interrupted step has left
            output = self.output = self._schedule()
            self._move_blocks(output)
            result = self._forward(output)
            self._accept()  # of the last step, while the device computes this one
            self._is_retried = False
            self._sample(output, result)
            # No later step may be chosen before the host knows these tokens.
            if self._is_waiting:
                self._accept()
                self._verify(output, result, started)
        except BaseException as error:
            stage = self._stage
            self._recover(stage, error)
            # A plan that could not be made belongs to no request, so that the caller must hear of it.
            if stage is _Stage.SCHEDULE or not isinstance(error, Exception):
                raise

    @property
    def _is_waiting(self) -> bool:
        """Return True if the host waits for the tokens of a step before the next one."""
        return not self.is_async or bool(self.speculation.requests)

    def settle(self) -> None:
        """Between steps: read what was sampled in the last one, and wait until the device has done all steps."""
        self._accept()
        self._runner.wait()

    def close(self) -> None:
        """Discard the tokens that were sampled in the last step."""
        self._sampled = None
        self._due = DueRows([])

    # -- the parts of a step ------------------------------------------------------------------------------------

    def _schedule(self) -> SchedulerOutput:
        self._stage = _Stage.ENCODE
        due = [(side, groups) for side in self._scheduler.side_memories if (groups := side.unready())]
        self._stage = _Stage.SCHEDULE
        # As long as tokens are unread nobody is preempted: one of them may be the last, whose blocks become free.
        output = None if self._sampled is None or due else self._scheduler.schedule_without_preempting()
        if output is None:
            self._accept()
            self._stage = _Stage.ENCODE
            for side, groups in due:
                self._compute_beside(side, groups)
            self._stage = _Stage.DRAFT
            # After the last tokens are known, which drafts follow, and after encoding, which may end requests.
            drafts = self.speculation.draft(verifies=self._runner.verifies) if self.speculation.requests else None
            self._stage = _Stage.SCHEDULE
            output = self._scheduler.schedule(drafts)
        self.steps += bool(output.scheduled)
        for group in output.admitted:
            request = self._requests[group.request_id]
            request.begin()
            if request.draft_length:
                self.speculation.begin(request)
            if group.task is not None:
                self._tasks[group] = None
        if self._tasks:
            self._tasks = {group: None for group in self._tasks if group.task is not None and not group.is_finished}
            output.tasks = self._tasks
        for group in output.failed:
            self._fail(self._requests[group.request_id], group.error or "", None)
        return output

    def _compute_beside(self, side: SideMemory, groups: list[SequenceGroup]) -> None:
        """Have a side memory compute what these groups need before they can start, such as features of images."""
        try:
            failed = self._runner.compute_beside(side, groups)
        except Exception as error:  # the model has been changed so that no step can run
            if isinstance(error, LayersChanged) and not self._is_retried:
                raise
            failed = [(group, error) for group in groups]
        for group, cause in failed:
            self._fail_all([group], _described(cause, _Stage.ENCODE), cause)

    def _move_blocks(self, output: SchedulerOutput) -> None:
        self._stage = _Stage.MOVE_BLOCKS
        self._runner.prepare(output)

    def _forward(self, output: SchedulerOutput) -> StepResult:
        self._stage = _Stage.FORWARD
        return self._runner.run(output, self._sampled)

    def _accept(self) -> None:
        """Read the tokens that were sampled in the last step, and give them to their requests."""
        if self._sampled is None:
            return
        self._stage = _Stage.READ
        # Forgotten only after they were read: an interrupt while the device computes leaves them for the next step.
        tokens, top = self._sampled.read(), self._sampled.read_top()
        self._stage = _Stage.UPDATE
        self._sampled = None
        changed, num_tokens = self.changed, 0  # names of their own: hundreds of rows use them in a step
        for (request, seq, _), token, logprob, processed, invalid, stopped in zip(*tokens):
            if seq.finish_reason is not None:
                continue  # aborted, or failed
            seq.num_pending = 0
            # One test of the sum, because nearly all rows have neither.
            if isnan(logprob + invalid):
                self._fail(request, NOT_FINITE if isnan(logprob) else NOTHING_LEFT, None)
                continue
            changed[request] = None
            num_tokens += 1
            if top and seq in top:
                request.sample.top_logprobs.append(top[seq])
            reason = request.accept(token, logprob, processed, stopped)
            if reason is None:
                seq.token_ids.append(token)
            else:
                self._scheduler.finish(seq, reason)
        self.generated_tokens += num_tokens

    def _sample(self, output: SchedulerOutput, result: StepResult) -> None:
        """Sample from the logits: requests with one sequence together on the device, the others one by one."""
        self._stage = _Stage.UPDATE
        # Before `update`, which skips sequences that have ended.
        for seqs, error in result.failed:
            self._fail_all((seq.group for seq in seqs), _described(error, _Stage.FORWARD), error)
        ended = [part.seq for part in result.kept if self._is_done_with(part)]
        self._scheduler.update(output)
        # After `update`, which enters their blocks in the prefix cache.
        for seq in ended:
            self.changed[self._request_of(seq)] = None
            self._request_of(seq).stop_all(FinishReason.STOP)
            self._scheduler.finish(seq, FinishReason.STOP)
        # Their rows come with the prompt or never, and nothing else would end a request without tokens.
        for group in output.tasks:
            if (task := group.task) is None or group.is_finished:
                continue
            if group.live[0].num_computed_tokens >= group.num_prompt_tokens:
                error = RuntimeError(
                    f"the prompt has ended without the rows of positions {task.start} to {task.stop - 1}; wanted() "
                    "has left some out, or the model has computed its logits without the forward of its base model"
                )
                self._fail_all([group], f"the task failed: {described(error)}", error)
        if result.logits is None:
            return
        # The tokens of these rows come later, where the host does not wait for them; forks need theirs now.
        due, others = self._rows_of(result.seqs)
        for request, rows in others.items():
            own = slice(rows[0], rows[-1] + 1)
            self._advance(request, result.seqs[own], self._in_fp32(result.logits[own]))
        if due.rows:
            self._sample_together(due, result.logits)

    def _rows_of(self, seqs: list[Sequence]) -> tuple[DueRows, dict[ForkingRequest, list[int]]]:
        """The rows of requests with one sequence, and those of each other request. Row i belongs to seqs[i]."""
        if seqs == self._due.seqs and [seq.finish_reason for seq in seqs].count(None) == len(seqs):  # most steps
            return self._due, {}
        due: list[DueRow] = []
        others: dict[ForkingRequest, list[int]] = {}  # rows of one request are neighbours
        for row, seq in enumerate(seqs):
            if seq.finish_reason is not None:
                continue  # ended with the token before
            request = self._request_of(seq)
            if isinstance(request, SingleRequest):
                due.append(DueRow(request, seq, row))
            else:
                assert isinstance(request, ForkingRequest)
                others.setdefault(request, []).append(row)
        rows = DueRows(due)
        self._due = rows if len(due) == len(seqs) else DueRows([])
        return rows, others

    def _verify(self, output: SchedulerOutput, result: StepResult, started: float) -> None:
        """Sample further tokens of the sequences with drafts, as long as each is the drafted one: the next token of all
        of them, then the one after it. So processors, criteria and random numbers are used as by single steps."""
        if not self.speculation.requests:
            return
        drafts, first_rows, logits = output.drafts, result.draft_rows, result.logits
        num_right = dict.fromkeys(drafts, 0)
        before = {seq: seq.num_computed_tokens - 1 for seq in drafts}  # this step
        # Samples of a request share random numbers, so all of them take a drafted token or none does.
        forking = {request: None for seq in first_rows if isinstance(request := self._request_of(seq), ForkingRequest)}
        if logits is not None:
            for request in forking:
                self._verify_together(request, drafts, first_rows, logits, num_right)
        going = [(self._single(seq), seq) for seq in first_rows if self._request_of(seq) not in forking]
        # One batch for each position, so that processors see all tokens before it, and random numbers come in their
        # order.
        while going and logits is not None:
            due = []
            for request, seq in going:
                position = num_right[seq]
                if request.error is not None or position == len(drafts[seq]):
                    continue
                if request.last_token != drafts[seq][position]:
                    continue
                num_right[seq] += 1
                if seq.finish_reason is None:
                    self._scheduler.accept_draft(seq)
                    due.append(DueRow(request, seq, first_rows[seq] + position))
            if due:
                self._sample_together(DueRows(due), logits)
                self._accept()
            going = [(request, seq) for request, seq, _ in due]
        # The slots of tokens that were wrong are free before the next step is chosen.
        for seq, draft in drafts.items():
            is_right = num_right[seq] == len(draft)
            num_tokens = seq.num_computed_tokens
            if seq.finish_reason is None:
                for side in self._scheduler.side_memories:
                    if side.take_back(seq, before[seq], is_right=is_right):
                        num_tokens = before[seq]
            self._scheduler.drop_drafts(seq, num_tokens)
            self.speculation.verified(seq, num_right[seq], len(draft))
        for request in forking:
            for seq in request.group.live:
                if seq not in drafts:  # it has forked from one of these
                    self._scheduler.drop_drafts(seq, seq.num_computed_tokens)
        # A step that computes prompts says nothing of the cost of drafts.
        counts = [count for _, count in output.scheduled]
        if counts.count(1) == len(counts) > 0:
            self.speculation.took(len(counts) + sum(map(len, drafts.values())), time.perf_counter() - started)

    def _verify_together(
        self,
        request: ForkingRequest,
        drafts: Drafts,
        first_rows: Mapping[Sequence, int],
        logits: torch.Tensor,
        num_right: dict[Sequence, int],
    ) -> None:
        """The same for several samples, which share random numbers: as long as the next tokens of all of them are the
        drafted ones."""
        for position in itertools.count():
            live = request.group.live[:]
            for seq in live:
                draft = drafts.get(seq, ())
                if position >= len(draft) or seq.token_ids[-1] != draft[position]:
                    return
            if not live:
                return
            for seq in live:
                num_right[seq] += 1
                self._scheduler.accept_draft(seq)
            rows = torch.tensor([first_rows[seq] + position for seq in live], dtype=torch.int64, device="cpu")
            self._advance(request, live, self._in_fp32(logits[rows.to(logits.device)]))

    def _single(self, seq: Sequence) -> SingleRequest:
        request = self._request_of(seq)
        assert isinstance(request, SingleRequest)
        return request

    def _request_of(self, seq: Sequence) -> Request:
        return self._requests[seq.group.request_id]

    def _is_done_with(self, part: TaskRows) -> bool:
        """Give these rows to their task. Returns True if its request ends with them."""
        group = part.seq.group
        if part.seq.finish_reason is not None or (task := group.task) is None:
            return False
        try:
            task.consume(part.first, part.rows)
        except Exception as error:  # of the task, which may be the caller's code: the other requests continue
            self._fail_all([group], f"the task failed: {described(error)}", error)
            return False
        task.start = part.first + len(part.rows)
        if task.start >= task.stop:
            group.task = None
        return group.task is None and not task.generates

    # -- sampling -----------------------------------------------------------------------------------------------

    def _sample_together(self, due: DueRows, logits: torch.Tensor) -> None:
        self._sampled, failed = sample_batch(due, logits, self._in_fp32)
        if self._sampled is not None:
            self._sampled.add_top(logits)
        for request, error in failed:
            self._fail_all([request.group], _described(error), error)
        for request, seq, _ in due.rows:
            # A token that reaches the length limit is not computed.
            seq.num_pending = 1 if request.length + 1 < request.max_length else 0

    def _in_fp32(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy that this step may change, in reused memory: fresh pages cost more than the copying.

        The copy is an ordinary tensor, also where the forward ran in inference mode.
        """
        rows, vocab = logits.shape
        buffer = self._logits
        if buffer is None or buffer.shape[0] < rows or buffer.shape[1] != vocab:
            buffer = self._logits = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
        return buffer[:rows].copy_(logits)

    def _advance(self, request: ForkingRequest, seqs: list[Sequence], logits: torch.Tensor) -> None:
        """The next tokens of beams or several samples, on the host, because they may fork."""
        # Counted before: those that end now get a token too.
        num_tokens = request.num_unfinished
        try:
            decision = request.advance(seqs, logits)
        except Exception as error:  # NaN, or a processor or criterion of the caller; other requests continue
            self._fail(request, _described(error), error)
            return
        self.changed[request] = None
        self._apply(request, decision)
        self.generated_tokens += num_tokens

    def _apply(self, request: ForkingRequest, decision: list[Fork] | Reorder) -> None:
        scheduler = self._scheduler
        if isinstance(decision, Reorder):
            if decision.tokens:
                scheduler.reorder(request.group, decision.parents, decision.tokens)
            else:
                scheduler.finish_group(request.group, FinishReason.STOP)
            return
        for seq, tokens in decision:
            if len(tokens) == 1:
                seq.token_ids.append(tokens[0])
                children = [seq]
            elif tokens:
                children = scheduler.fork(seq, tokens)
            else:
                scheduler.finish(seq, FinishReason.STOP)
                children = []
            request.forked(seq, children)
        # Samples with the same tokens share a sequence, which may still fork into as many.
        request.group.width = request.num_unfinished

    # -- failures and interrupts --------------------------------------------------------------------------------

    def _recover(self, stage: _Stage, error: BaseException) -> None:
        """Leave a state from which the next step can start. An interrupted step is retried if nothing but appended
        slots and states is lost; otherwise the requests that it may have damaged end with an error."""
        output = self.output
        if output is not None:
            self._scheduler.rollback(output)
        if isinstance(error, LayersChanged) and not self._is_retried:
            self._is_retried = True  # the engine looks at the model before the next step
            return
        if not isinstance(error, Exception) and self._can_retry(stage):
            if stage is _Stage.FORWARD or (output is not None and output.drafts):
                # States change in place, so that these cannot be computed from the same ones.
                for side in self._scheduler.side_memories:
                    self._scheduler.recompute(side.lost(self._scheduler.running))
            return
        cause = _described(error, stage)
        if stage is _Stage.FORWARD and output is not None:
            # Any of the tokens may have caused it, so all requests of the step fail.
            try:
                self._accept()
            finally:
                self._fail_all((seq.group for seq, _ in output.scheduled), cause, error)
            return
        # It is unknown which requests got their tokens and which blocks are intact: all that hold blocks fail.
        self._sampled = None
        for request in list(self._requests.values()):
            if request.group.status is not SeqStatus.WAITING and request not in self.changed:
                self._fail(request, request.group.error or cause, error)
        self._fail_all((request.group for request in self.changed), cause, error)
        self._scheduler.discard_plan()

    def _can_retry(self, stage: _Stage) -> bool:
        if stage is _Stage.MOVE_BLOCKS:
            return self.output is not None and self._runner.can_prepare_again(self.output)
        return stage in (_Stage.ENCODE, _Stage.DRAFT, _Stage.READ) or (
            stage is _Stage.FORWARD and self._runner.can_repeat
        )

    def _fail(self, request: Request, error: str, exception: BaseException | None) -> None:
        request.error, request.exception = error, exception
        self.changed[request] = None
        request.stop_all(FinishReason.ERROR)
        self._scheduler.finish_group(request.group, FinishReason.ERROR)

    def _fail_all(self, groups: Iterable[SequenceGroup], cause: str, error: BaseException) -> None:
        """End these requests with an error, unless they have ended already."""
        for group in dict.fromkeys(groups):
            if not group.is_finished:
                self._fail(self._requests[group.request_id], cause, error)
