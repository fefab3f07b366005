"""A request in the engine: from the logits of its live sequences to the next tokens.

Two kinds, one interface: SampleRequest (greedy and sampling, n samples) and BeamRequest. `advance` decides and returns
the decision as data; block tables, queues and forwards are the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan
from typing import Any, NamedTuple

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from hf_paged.generation.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from hf_paged.generation.engine.sequence import FinishReason, Sequence, SequenceGroup
from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.sampling.beams import BeamSearch, Candidate
from hf_paged.generation.sampling.ops import choose, largest, logprobs_of, recipe_of, to_host

NOT_FINITE = "the model's logits are NaN"
NOTHING_LEFT = "after the logits processors no token has a probability"


class Fork(NamedTuple):
    """`seq` goes on with each of `tokens`: with one, itself; with several, forked; with none, it is finished."""

    seq: Sequence
    tokens: list[int]


class Reorder(NamedTuple):
    """Beam search: the group's sequences become continuations of sequences `parents` with `tokens`; none: finished."""

    parents: list[int]
    tokens: list[int]


@dataclass(slots=True)
class Sample:
    """One completion in the making. `token_ids` is set when it is finished; until then the sequence has them."""

    index: int
    seq: Sequence | None
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def add(self, logprob: float) -> None:
        self.logprobs.append(logprob)
        self.cumulative_logprob += logprob

    def finish(self, token_ids: list[int], reason: FinishReason) -> None:
        self.token_ids, self.finish_reason, self.seq = token_ids, reason, None


class Request:
    """What both kinds share. `history` is int64 [num_rows, capacity]: prompt and generated tokens, one row a sample or
    beam, as transformers' processors and criteria want to see them; kept only if somebody looks at it.
    """

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        config = prepared.generation_config
        self.group = group
        self.request_id = group.request_id
        self.config = config
        self.generator = generator
        self.processors = prepared.logits_processor
        self.prompt_token_ids = group.sequences[0].token_ids[:]
        self.prompt_length = len(self.prompt_token_ids)
        self.max_length: int = config.max_length
        self.eos: frozenset[int] = frozenset()
        others = []
        for criterion in prepared.stopping_criteria:
            if type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                self.eos |= frozenset(criterion.eos_token_id.reshape(-1).tolist())
            else:
                others.append(criterion)
        self.criteria = StoppingCriteriaList(others)
        self.keeps_processed = bool(config.output_scores)
        self.pad_token_id = 0 if config.pad_token_id is None else int(config.pad_token_id)
        self.num_rows = prepared.input_ids.shape[0]
        self.device = prepared.input_ids.device
        self.history: torch.Tensor | None = None
        if self.processors or self.criteria:
            self.history = prepared.input_ids.clone()
        self.length = self.prompt_length  # of what the host knows; the history may have one token more
        self._history_length = self.length
        self.metrics = RequestMetrics(group.arrival)
        self.error: str | None = None
        self.exception: BaseException | None = None
        self.streamer: Any = None
        self._num_streamed = 0

    @property
    def num_unfinished(self) -> int:
        """Samples or beams that go on: tokens that a step of this request generates."""
        raise NotImplementedError

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Fork] | Reorder:
        """seqs: the live sequences; logits fp32 [num_seqs, vocab] of them."""
        raise NotImplementedError

    def completions(self) -> list[CompletionOutput]:
        raise NotImplementedError

    def stop_all(self, reason: FinishReason) -> None:
        """The request was aborted or has failed: what is unfinished ends here."""
        raise NotImplementedError

    def stream_to(self, streamer: Any) -> None:
        """Hand the prompt to a streamer of transformers, and from now on each token. The request has one row."""
        streamer.put(torch.tensor([self.prompt_token_ids]))
        self.streamer = streamer

    def tell_streamer(self) -> None:
        """The tokens that it has not got yet, each as int64 [1]; an error is the request's."""
        raise NotImplementedError

    def end_stream(self) -> None:
        """No token will come any more, whatever the reason."""
        streamer, self.streamer = self.streamer, None
        try:
            if streamer is not None:
                streamer.end()
        except Exception as error:
            self._streamer_failed(error)

    def _streamer_failed(self, error: Exception) -> None:
        self.streamer = None
        self.error = self.error or f"the streamer failed: {type(error).__name__}: {error}"
        self.exception = self.exception or error

    def output(self) -> RequestOutput:
        """The request as it stands now."""
        return RequestOutput(
            self.request_id,
            self.prompt_token_ids,
            self.completions(),
            self.metrics.finish_time is not None,
            self.metrics,
            self.error,
            self.exception,
        )

    def _rows(self) -> torch.Tensor:
        """History so far, int64 [num_rows, length]."""
        assert self.history is not None
        return self.history[:, : self._history_length]

    def _extend_history(self, tokens: Iterable[int] | torch.Tensor, parents: torch.Tensor | None = None) -> None:
        if self.history is None:
            return
        if parents is not None:
            self.history = self.history.index_select(0, parents)
        if self._history_length == self.history.shape[1]:
            room = max(64, self._history_length // 2)
            self.history = torch.cat([self.history, self.history.new_zeros(self.history.shape[0], room)], dim=1)
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.tensor(list(tokens), device=self.device)
        self.history[:, self._history_length] = tokens
        self._history_length += 1

    def _reason(self, token: int) -> FinishReason | None:
        """Why a sequence ends with this token, as far as the token and the length tell."""
        if token in self.eos:
            return FinishReason.EOS
        return FinishReason.LENGTH if self.length + 1 >= self.max_length else None


class SampleRequest(Request):
    """Greedy decoding and multinomial sampling of `num_return_sequences` samples.

    Samples with the same tokens so far share one sequence: they fork at their first differing token. One sample alone
    (`is_single`) is chosen for together with others, on the device (`choosing.py`): `process` and `extend_history`
    take part in that; `accept` follows when the host knows the token, maybe a step later.
    """

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        super().__init__(group, prepared, generator)
        self.do_sample = bool(self.config.do_sample)
        self.samples = [Sample(index, group.sequences[0]) for index in range(self.num_rows)]
        self._samples_of: dict[int, list[Sample]] = {group.sequences[0].seq_id: list(self.samples)}
        self._pending: dict[int, dict[int, list[Sample]]] = {}
        self.is_single = self.num_rows == 1
        self.recipe = recipe_of(self.processors, self.do_sample, self.keeps_processed, callers=prepared.own_processors)
        if self.is_single and not self.recipe.own and not self.criteria:
            self.history = None
        self.is_plain_greedy = not (self.processors or self.do_sample or self.keeps_processed)

    # -- one sample alone ---------------------------------------------------------------------------------------

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """scores fp32 [1, vocab], which may be changed, after the processors that may look at the tokens."""
        processed: torch.Tensor = self.recipe.own(self._rows(), scores)
        return processed

    def extend_history(self, token: torch.Tensor, stopped: torch.Tensor) -> None:
        """token int64 [1], on the device; sets stopped [1] if the criteria want to stop after it."""
        self._extend_history(token)
        if self.criteria:
            stopped.copy_(self.criteria(self._rows(), None), non_blocking=True)

    def accept(self, token: int, logprob: float, processed: float, is_stopped: bool) -> FinishReason | None:
        """What was chosen; returns why it ends the request, if it does."""
        (sample,) = self.samples
        sample.add(logprob)
        if self.keeps_processed:
            sample.processed_logprobs.append(processed)
        reason = self._reason(token) or (FinishReason.STOP if is_stopped else None)
        self.length += 1
        if reason is not None:
            assert sample.seq is not None
            sample.finish([*sample.seq.output_token_ids, token], reason)
        return reason

    def tell_streamer(self) -> None:
        (sample,) = self.samples
        tokens, skipped = (sample.token_ids, 0) if sample.seq is None else (sample.seq.token_ids, self.prompt_length)
        while self.streamer is not None and self._num_streamed < len(tokens) - skipped:
            self._num_streamed += 1  # before it is interrupted
            try:
                self.streamer.put(torch.tensor([tokens[skipped + self._num_streamed - 1]]))
            except Exception as error:
                self._streamer_failed(error)

    # -- several ------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        return sum(sample.seq is not None for sample in self.samples)

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Fork] | Reorder:
        row_of = {seq.seq_id: row for row, seq in enumerate(seqs)}
        # Finished samples take part in the arithmetic (with the first row's logits): the random numbers they use up in
        # transformers' loop are used up here too.
        rows = [0 if s.seq is None else row_of[s.seq.seq_id] for s in self.samples]
        spread = logits[torch.tensor(rows, device=logits.device)]
        scores = spread
        if self.processors:
            scores = self.processors(self._rows(), spread.clone())
        tokens = choose(scores, do_sample=self.do_sample, generator=self.generator)
        others = [logprobs_of(scores, tokens)] if self.keeps_processed else []
        chosen, raw, *processed = to_host(tokens, logprobs_of(spread, tokens), *others)
        if any(map(isnan, raw)):
            raise ArithmeticError(NOT_FINITE)
        return self._fork(chosen, raw, *processed)

    def _fork(self, tokens: list[int], logprobs: list[float], processed: list[float] | None = None) -> list[Fork]:
        """One token for each sample, finished ones included (theirs are dropped)."""
        stopped = self._stopped_by_criteria(tokens)
        going_on: dict[int, dict[int, list[Sample]]] = {seq_id: {} for seq_id in self._samples_of}
        seqs: dict[int, Sequence] = {}
        for sample, token in zip(self.samples, tokens):
            seq = sample.seq
            if seq is None:
                continue
            seqs[seq.seq_id] = seq
            sample.add(logprobs[sample.index])
            if processed is not None:
                sample.processed_logprobs.append(processed[sample.index])
            reason = self._reason(token)
            if reason is None and stopped is not None and stopped[sample.index]:
                reason = FinishReason.STOP
            if reason is None:
                going_on[seq.seq_id].setdefault(token, []).append(sample)
            else:
                sample.finish([*seq.output_token_ids, token], reason)
        self.length += 1
        self._pending = going_on
        return [Fork(seq, list(going_on[seq_id])) for seq_id, seq in seqs.items()]

    def forked(self, seq: Sequence, family: list[Sequence]) -> None:
        """The engine has done a Fork: `family` are the sequences, in the order of its tokens."""
        branches = self._pending.pop(seq.seq_id)
        del self._samples_of[seq.seq_id]
        for child, samples in zip(family, branches.values()):
            self._samples_of[child.seq_id] = samples
            for sample in samples:
                sample.seq = child

    def _stopped_by_criteria(self, tokens: list[int]) -> list[bool] | None:
        if self.history is None:
            return None
        row_tokens = [self.pad_token_id if s.seq is None else token for s, token in zip(self.samples, tokens)]
        self._extend_history(row_tokens)
        if not self.criteria:
            return None
        stopped: list[bool] = self.criteria(self._rows(), None).tolist()
        return stopped

    def completions(self) -> list[CompletionOutput]:
        return [
            CompletionOutput(
                index=s.index,
                token_ids=s.token_ids if s.seq is None else s.seq.output_token_ids,
                logprobs=s.logprobs[:],
                cumulative_logprob=s.cumulative_logprob,
                finish_reason=None if s.finish_reason is None else str(s.finish_reason),
                processed_logprobs=s.processed_logprobs[:] if self.keeps_processed else None,
            )
            for s in self.samples
        ]

    def stop_all(self, reason: FinishReason) -> None:
        for sample in self.samples:
            if sample.seq is not None:
                sample.finish(sample.seq.output_token_ids, reason)


class BeamRequest(Request):
    """Beam search and beam sampling."""

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        super().__init__(group, prepared, generator)
        config = self.config
        self.search = BeamSearch(
            num_beams=config.num_beams,
            max_new_tokens=config.max_length - self.prompt_length,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )
        # transformers counts the configured EOS ids, also where a criterion has more.
        eos = config._eos_token_tensor
        num_eos = 0 if eos is None else eos.numel()
        self.num_candidates = max(2, 1 + num_eos) * config.num_beams
        self.num_return_sequences: int = config.num_return_sequences
        self._logprobs: list[list[float]] = [[] for _ in range(config.num_beams)]
        self._final: list[CompletionOutput] = []

    @property
    def num_unfinished(self) -> int:
        return self.search.num_beams

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Fork] | Reorder:
        num_beams = self.search.num_beams
        raw = torch.log_softmax(logits, dim=-1)
        if len(seqs) != num_beams:
            assert len(seqs) == 1, "between its steps a beam group has one sequence a beam"
            raw = raw.expand(num_beams, -1)
        scores = raw
        if self.processors:
            scores = self.processors(self._rows(), raw.clone())
        running_scores = torch.tensor(self.search.running_scores, device=scores.device)
        vocab_size = scores.shape[1]
        if self.config.do_sample:
            flat = (scores + running_scores[:, None]).view(-1)
            chosen = torch.multinomial(torch.softmax(flat, dim=0), self.num_candidates, generator=self.generator)
            totals = flat[chosen]
        else:
            chosen, totals = largest(scores, running_scores, self.num_candidates)
        indices, sums, raws = to_host(chosen, totals, raw.reshape(-1)[chosen])
        candidates = [Candidate(index // vocab_size, index % vocab_size, score) for index, score in zip(indices, sums)]
        if any(map(isnan, raws)):
            raise ArithmeticError(NOT_FINITE)
        stopped = self._stopped(candidates)
        payloads = {}
        for i in self.search.finishing(stopped):
            parent, token, _ = candidates[i]
            tokens = [*seqs[parent if len(seqs) > 1 else 0].output_token_ids, token]
            payloads[i] = (tokens, [*self._logprobs[parent], raws[i]], self._reason(token) or FinishReason.STOP)
        logprob_of = {(c.parent, c.token): value for c, value in zip(candidates, raws)}
        running = self.search.step(candidates, stopped, payloads)
        if running is None:
            self._final = self._hypotheses(None)
            return Reorder([], [])
        self._logprobs = [[*self._logprobs[c.parent], logprob_of[c.parent, c.token]] for c in running]
        if self.history is not None:
            parents = torch.tensor([c.parent for c in running], device=self.device)
            self._extend_history((c.token for c in running), parents)
        self.length += 1
        return Reorder([c.parent if len(seqs) > 1 else 0 for c in running], [c.token for c in running])

    def _stopped(self, candidates: list[Candidate]) -> list[bool]:
        stopped = [self._reason(candidate.token) is not None for candidate in candidates]
        if self.criteria:
            parents = torch.tensor([c.parent for c in candidates], device=self.device)
            tokens = torch.tensor([[c.token] for c in candidates], device=self.device)
            rows = torch.cat([self._rows().index_select(0, parents), tokens], dim=1)
            stopped = [a or b for a, b in zip(stopped, self.criteria(rows, None).tolist())]
        return stopped

    def _hypotheses(self, reason: FinishReason | None) -> list[CompletionOutput]:
        outputs = []
        for hypothesis in self.search.finished[: self.num_return_sequences]:
            tokens, logprobs, own_reason = hypothesis.payload
            outputs.append(
                CompletionOutput(
                    index=len(outputs),
                    token_ids=tokens,
                    logprobs=logprobs,
                    cumulative_logprob=sum(logprobs),
                    score=hypothesis.score,
                    finish_reason=str(reason or own_reason),
                )
            )
        return outputs

    def completions(self) -> list[CompletionOutput]:
        return self._final

    def stop_all(self, reason: FinishReason) -> None:
        outputs = self._hypotheses(reason)
        # The scheduler may have released them already, with the same reason.
        beams = self.group.live or [seq for seq in self.group.sequences if seq.finish_reason is reason]
        for seq, logprobs in zip(beams, self._logprobs):
            if len(outputs) == self.num_return_sequences:
                break
            total = sum(logprobs)
            outputs.append(
                CompletionOutput(len(outputs), seq.output_token_ids, logprobs, total, None, str(reason), None)
            )
        self._final = outputs


def new_request(
    prepared: PreparedRequest,
    request_id: str,
    *,
    priority: int,
    cache_root: bytes | None,
    adapters: object,
    generator: torch.Generator | None,
) -> Request:
    """A request of the kind that `prepared` asks for, with its `group` for the scheduler."""
    config = prepared.generation_config
    group = SequenceGroup(
        request_id,
        prepared.input_ids[0].tolist(),
        width=config.num_beams if prepared.uses_beams else prepared.input_ids.shape[0],
        priority=priority,
        arrival=time.monotonic(),
        cache_root=cache_root,
        adapters=adapters,
    )
    return (BeamRequest if prepared.uses_beams else SampleRequest)(group, prepared, generator)
