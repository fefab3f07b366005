"""Requests in the engine: what all have in common, and the plain kind, SingleRequest, of one sequence.

group.py and `features/beams/` have the kinds with several sequences. A request turns the logits of its live sequences
into their next tokens and returns that decision as data. Block tables, queues and forwards belong to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers.generation.stopping_criteria import MaxTimeCriteria, StopStringCriteria

from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import (
    CompletionOutput,
    Lists,
    RequestMetrics,
    RequestOutput,
    TopLogprobs,
)
from hf_paged.generation.requests.sequence import FinishReason, Sequence, SequenceGroup
from hf_paged.generation.sampling.editors import read_settings
from hf_paged.generation.sampling.processors import Chain, chain_of, checked_scores, of_one_request
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import draws_natively, removes_unsorted
from hf_paged.sockets import Task

NOT_FINITE = "the model's logits are NaN"
NOTHING_LEFT = "after the logits processors no token has a probability"


class Fork(NamedTuple):
    """`seq` continues with each of `tokens`: one token is appended, several make it fork, none finishes it."""

    seq: Sequence
    tokens: list[int]


class Reorder(NamedTuple):
    """Beam search: the group's sequences become continuations of sequences `parents` with `tokens`; none: finished."""

    parents: list[int]
    tokens: list[int]


Delivered = tuple[int, ...]
"""Numbers of tokens that a reader has got, of each sample or beam."""


@dataclass(slots=True)
class Sample:
    """One completion in the making. `token_ids` is set when it is finished; until then the sequence has them."""

    index: int
    seq: Sequence | None
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    _lists: Lists | None = None  # for the outputs; made when one is wanted

    def add(self, logprob: float, processed: float | None) -> None:
        """The log-probability of a new token, and the one after the processors if the request keeps it."""
        self.logprobs.append(logprob)
        self.cumulative_logprob += logprob
        if processed is not None:
            self.processed_logprobs.append(processed)

    def move_to(self, seq: Sequence) -> None:
        """Another sequence, which begins with the same tokens, has its tokens from now on."""
        self.seq, self._lists = seq, None

    def finish(self, token_ids: list[int], reason: FinishReason) -> None:
        self.token_ids, self.finish_reason, self.seq, self._lists = token_ids, reason, None, None

    def completion(self, request: Request, num_delivered: int) -> CompletionOutput:
        """It as it stands now. num_delivered: how many of its tokens the reader has got before."""
        lists, reason = self._lists, self.finish_reason
        if lists is None:
            lists = self._lists = self._shown(request)
        stop = len(lists.token_ids) - lists.first
        ended = None if reason is None else str(reason)
        return CompletionOutput(self.index, lists, stop, self.cumulative_logprob, None, ended, num_delivered)

    def _shown(self, request: Request) -> Lists:
        return Lists(
            self.token_ids if self.seq is None else self.seq.token_ids,
            0 if self.seq is None else self.seq.num_prompt_tokens,
            self.logprobs,
            self.processed_logprobs if request.keeps_processed else None,
            self.top_logprobs if request.options.logprobs is not None else None,
        )


class Request:
    """A request in the engine.

    `group` is what the scheduler sees of it. They are two objects because scheduler, block tables and the simulator of
    the paper know neither tensors nor transformers.

    `history` is int64 [num_rows, capacity]: prompt and generated tokens, one row for each sample or beam, as the
    processors and criteria of transformers expect them. It is kept only if a processor or criterion reads it, and made
    when it is read first: a copy to the device may wait for the step in progress.
    """

    streamer: Any = None  # of transformers; only a SingleRequest can have one
    options = RequestOptions()  # those it was added with
    draft_length = 0
    """Tokens of a draft, at most; 0: it has none."""
    lookup_ngram: int | None = None
    """Last tokens that are looked for in its own, at most. None: the engine's drafter makes its drafts."""
    drafts_always = False
    """True if drafts have that length, whatever they cost."""

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        config = prepared.generation_config
        self.group = group
        self.request_id = group.request_id
        self.config = config
        self.generator = generator
        self._own_processors = prepared.own_processors
        self.criteria = prepared.stopping_criteria
        self.prompt_token_ids = prepared.prompt_token_ids
        self.prompt_length = len(self.prompt_token_ids)
        processors = prepared.logits_processor
        self.processors = of_one_request(processors, self.prompt_length) if processors else processors
        self._shown_prompt: list[int] | None = None  # a copy for the outputs, whose reader may change it
        self.max_length = prepared.max_length
        self.eos = prepared.eos
        self.keeps_processed = bool(config.output_scores)
        self.keeps_history = bool(self.processors or self.criteria)
        self.num_rows = prepared.num_rows
        self.device = prepared.device
        # Now, because the host waits for them, and it must not in a step.
        if self.device.type != "cpu":
            read_settings(self.processors)
        self.length = self.prompt_length  # tokens the host knows; the history may have one more
        self._history: torch.Tensor | None = None
        self._history_length = self.length
        self.time_limits: list[tuple[float, FinishReason]] = [
            (each.max_time, FinishReason.STOP) for each in self.criteria if type(each) is MaxTimeCriteria
        ]
        """Seconds after its arrival, and the reason with which a request that is not running ends then."""
        self.task: Task | None = None
        self.metrics = RequestMetrics(group.arrival)
        self.error: str | None = None
        self.exception: BaseException | None = None  # that caused the error

    def begin(self) -> None:
        """The scheduler admits the request (again after a preemption)."""
        if self.metrics.start_time is None:
            self.metrics = replace(self.metrics, start_time=time.monotonic())

    def completions(self, delivered: Delivered = ()) -> list[CompletionOutput]:
        """delivered: how many tokens of each completion the reader has got before."""
        raise NotImplementedError

    def stop_all(self, reason: FinishReason) -> None:
        """End what is unfinished: the request was aborted or has failed."""
        raise NotImplementedError

    def begin_stream(self) -> None:
        """Give the prompt to the streamer."""

    def tell_streamer(self) -> None:
        """Give the streamer the tokens that it has not got yet."""

    def end_stream(self) -> None:
        """Tell the streamer that no more tokens will come."""

    def output(self, delivered: dict[Request, Delivered] | None = None) -> RequestOutput:
        """The request as it stands now. delivered: how many tokens of each request the reader has; updated here."""
        completions = self.completions(() if delivered is None else delivered.get(self, ()))
        if delivered is not None:
            is_one = len(completions) == 1
            delivered[self] = (completions[0].num_tokens,) if is_one else tuple([c.num_tokens for c in completions])
        if self._shown_prompt is None:
            self._shown_prompt = self.prompt_token_ids[:]
        metrics = self.metrics
        is_finished = metrics.finish_time is not None
        output = RequestOutput(
            self.request_id, self._shown_prompt, completions, is_finished, metrics, self.error, self.exception
        )
        if self.task is not None:
            try:
                self.task.fill(output)
            except Exception as error:  # of the task, which may be the caller's code: its request ends in the next step
                if self.error is None:
                    self.error, self.exception = f"the task failed: {type(error).__name__}: {error}", error
                output.error, output.exception = self.error, self.exception
        return output

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Run all processors on scores fp32 [num_rows, vocab], which may be changed. Raises ValueError if tokens cannot
        be chosen from what they return."""
        return checked_scores(self.processors(self._rows(), scores), scores)  # type: ignore[arg-type]

    def _new_chain(self, width: int, *options: object, draws: bool) -> Chain:
        """The processors for rows of `width` scores. draws: `sample_top_p` draws a token from each row, if it can."""
        chain = chain_of(
            self.processors,
            width,
            *options,
            self.keeps_processed,
            callers=self._own_processors,
            is_drawn=draws and not self.keeps_processed,
        )
        # Only processors that run alone and criteria read rows of tokens; editors read the sequence.
        if not chain.own and not self.criteria:
            self.keeps_history, self._history = False, None
        return chain

    def _rows(self) -> torch.Tensor:
        """The history so far, int64 [num_rows, length]."""
        assert self.keeps_history
        if self._history is None:
            prompt = np.array([self.prompt_token_ids] * self.num_rows, dtype=np.int64)
            self._history = to_device(prompt, self.device)
        return self._history[:, : self._history_length]

    def _extend_history(self, tokens: Iterable[int] | torch.Tensor, parents: torch.Tensor | None = None) -> None:
        if not self.keeps_history:
            return
        history = self._rows() if self._history is None else self._history
        if parents is not None:
            history = history.index_select(0, parents)
        # By half of its length, so that each token is copied a constant number of times.
        if self._history_length == history.shape[1]:
            room = max(64, self._history_length // 2)
            history = torch.cat([history, history.new_zeros(history.shape[0], room)], dim=1)
        if not isinstance(tokens, torch.Tensor):
            tokens = to_device(np.fromiter(tokens, dtype=np.int64), self.device)
        history[:, self._history_length] = tokens
        self._history = history
        self._history_length += 1

    def _reason(self, token: int, is_stopped: float) -> FinishReason | None:
        """Why a sequence ends with `token` as its next one. is_stopped: a criterion says so."""
        # In this order, so that an EOS token in the last place counts as EOS.
        if token in self.eos:
            return FinishReason.EOS
        if self.length + 1 >= self.max_length:
            return FinishReason.LENGTH
        return FinishReason.STOP if is_stopped else None


class SingleRequest(Request):
    """One sequence. `batch.sample_batch` chooses its tokens; `accept` follows when the host knows one, which may be a
    step later."""

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        super().__init__(group, prepared, generator)
        self.do_sample = bool(self.config.do_sample)
        self.sample = Sample(0, group.sequences[0])
        self._chain: Chain | None = None
        self.is_plain_greedy = not (self.do_sample or self.keeps_processed or self.processors)
        """Its tokens are the argmax of the model's own logits, and nothing else is wanted."""
        # For each criterion; empty: the criteria must always be called.
        self._endings: list[frozenset[int]] | None = None
        self._num_streamed = 0

    def chain(self, width: int) -> Chain:
        """Its processors for rows of `width` scores, which are known with the first row only."""
        if self._chain is None:
            unsorted = draws_natively(self.device) or (self.generator is None and removes_unsorted(self.device))
            self._chain = self._new_chain(width, self.do_sample, draws=self.do_sample and unsorted)
        return self._chain

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Run the processors of its own on scores fp32 [1, vocab], which may be changed; the shared warpers follow."""
        assert self._chain is not None
        return checked_scores(self._chain.own(self._rows(), scores), scores)  # type: ignore[arg-type]

    def extend_history(self, token: torch.Tensor, stopped: torch.Tensor) -> None:
        """token int64 [1], on the device; sets stopped fp32 [1] to 1 if a criterion ends the request after it."""
        self._extend_history(token)
        if self.criteria and self._may_stop(token):
            # The host reads it later, with the tokens.
            stopped.copy_(self.criteria(self._rows(), None), non_blocking=True)

    def _may_stop(self, token: torch.Tensor) -> bool:
        """Return True if the criteria must run. On a CPU, the token alone may show that no stop string ends here."""
        if self._endings is None:
            known = [ending_tokens(criterion) for criterion in self.criteria if self.device.type == "cpu"]
            found = [endings for endings in known if endings is not None]
            self._endings = found if len(found) == len(self.criteria) else []
        last = int(token) if self._endings else 0
        return not self._endings or any(last in endings for endings in self._endings)

    def accept(self, token: int, logprob: float, processed: float, stopped: float) -> FinishReason | None:
        """Record the next token; returns why it ends the request, or None. stopped: 1 where a criterion ends it."""
        sample = self.sample
        sample.logprobs.append(logprob)  # `sample.add`, hundreds of times in a step
        sample.cumulative_logprob += logprob
        if self.keeps_processed:
            sample.processed_logprobs.append(processed)
        seq = sample.seq
        assert seq is not None
        # `_reason` is called for a last token only, of hundreds in a step.
        ends = token in self.eos or self.length + 1 >= self.max_length or stopped
        reason = self._reason(token, stopped) if ends else None
        self.length += 1
        if reason is not None:
            sample.finish([*seq.output_token_ids, token], reason)
        return reason

    @property
    def last_token(self) -> int:
        """The last token that it has accepted."""
        seq = self.sample.seq
        return self.sample.token_ids[-1] if seq is None else seq.token_ids[-1]

    def completions(self, delivered: Delivered = ()) -> list[CompletionOutput]:
        return [self.sample.completion(self, delivered[0] if delivered else 0)]

    def stop_all(self, reason: FinishReason) -> None:
        if self.sample.seq is not None:
            self.sample.finish(self.sample.seq.output_token_ids, reason)

    # -- streamers ----------------------------------------------------------------------------------------------

    def begin_stream(self) -> None:
        streamer, self.streamer = self.streamer, None  # nothing more for it, if it fails
        if streamer is not None:
            streamer.put(torch.tensor([self.prompt_token_ids], dtype=torch.int64, device="cpu"))
            self.streamer = streamer

    def tell_streamer(self) -> None:
        sample = self.sample
        tokens, skipped = (sample.token_ids, 0) if sample.seq is None else (sample.seq.token_ids, self.prompt_length)
        while self.streamer is not None and self._num_streamed < len(tokens) - skipped:
            self._num_streamed += 1  # first, so that Ctrl-C in the streamer does not repeat the token
            try:
                token = tokens[skipped + self._num_streamed - 1]
                self.streamer.put(torch.tensor([token], dtype=torch.int64, device="cpu"))
            except Exception as error:  # the streamer is the caller's code: its failure ends this request alone
                self._streamer_failed(error)

    def end_stream(self) -> None:
        streamer, self.streamer = self.streamer, None
        try:
            if streamer is not None:
                streamer.end()
        except Exception as error:  # as in tell_streamer
            self._streamer_failed(error)

    def _streamer_failed(self, error: Exception) -> None:
        self.streamer = None
        self.error = self.error or f"the streamer failed: {type(error).__name__}: {error}"
        self.exception = self.exception or error


_ENDINGS: WeakKeyDictionary[StopStringCriteria, frozenset[int]] = WeakKeyDictionary()  # requests share criteria


def ending_tokens(criterion: Any) -> frozenset[int] | None:
    """The tokens after which the criterion may be met, as the table of stop strings has them; None for others."""
    if type(criterion) is not StopStringCriteria or not (criterion.target_lens > 0).all():
        return None
    if criterion not in _ENDINGS:
        # transformers' table has all places of each string first, then the ends that a token may share with it, and the
        # token's length.
        first = criterion.max_valid_positions * criterion.num_stop_strings
        overlaps = (criterion.embedding_vec[:, first:-1] > 0).any(dim=1)
        _ENDINGS[criterion] = frozenset(overlaps.nonzero().flatten().tolist())
    return _ENDINGS[criterion]


class ForkingRequest(Request):
    """A request of several samples or beams. Its sequences may fork, so the host decides each of its steps before the
    next one is scheduled."""

    _chains: list[Chain] | None = None  # of the rows; known with the first scores

    def chains(self, width: int, *, draws: bool = False) -> list[Chain]:
        """The processors of each sample or beam. They know its tokens so far."""
        if self._chains is None:
            draws = draws and draws_natively(self.device)
            self._chains = [self._new_chain(width, draws=draws)] * self.num_rows
        return self._chains

    def _fork_chains(self, parents: Iterable[int]) -> None:
        """Row i continues from row parents[i]."""
        assert self._chains is not None
        taken: set[int] = set()
        chains = []
        for chain in (self._chains[parent] for parent in parents):
            chains.append(chain.fork() if id(chain) in taken else chain)
            taken.add(id(chain))
        self._chains = chains

    @property
    def num_unfinished(self) -> int:
        """Unfinished samples or beams: the number of tokens that a step of this request generates."""
        raise NotImplementedError

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Fork] | Reorder:
        """Choose the next tokens. seqs: the live sequences; logits fp32 [num_seqs, vocab] of them."""
        raise NotImplementedError

    def forked(self, seq: Sequence, children: list[Sequence]) -> None:
        """The engine has carried out a Fork of `seq`: `children` has one sequence for each token, in their order."""
        raise NotImplementedError
