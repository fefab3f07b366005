"""SingleRequest: greedy decoding or sampling of one sequence, sampled on the device together with its neighbours."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.generation.engine.outputs import CompletionOutput
from hf_paged.generation.engine.sequence import FinishReason, SequenceGroup
from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.sampling.processors import Chain, chain_of, checked_scores
from hf_paged.generation.sampling.request import Request, Sample


class SingleRequest(Request):
    """One sequence. `batch.sample_batch` chooses its tokens; `accept` follows when the host knows one, which may be a
    step later."""

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        super().__init__(group, prepared, generator)
        self.do_sample = bool(self.config.do_sample)
        self.sample = Sample(0, group.sequences[0])
        self._own_processors = prepared.own_processors
        self._chain: Chain | None = None
        self._num_streamed = 0

    def chain(self, width: int) -> Chain:
        """Its processors for rows of `width` scores, which are known with the first row only."""
        if self._chain is None:
            self._chain = chain_of(
                self.processors, width, self.do_sample, self.keeps_processed, callers=self._own_processors
            )
            if not self._chain.own and not self.criteria:
                self.history = None
        return self._chain

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """Run the processors of its own on scores fp32 [1, vocab], which may be changed; the shared warpers follow."""
        assert self._chain is not None
        return checked_scores(self._chain.own(self._rows(), scores), scores)

    def extend_history(self, token: torch.Tensor, stopped: torch.Tensor) -> None:
        """token int64 [1], on the device; sets stopped fp32 [1] to 1 if a criterion ends the request after it."""
        self._extend_history(token)
        if self.criteria:
            stopped.copy_(self.criteria(self._rows(), None), non_blocking=True)

    def accept(self, token: int, logprob: float, processed: float, is_stopped: bool) -> FinishReason | None:
        """Record the next token; returns why it ends the request, or None."""
        self.sample.add(logprob, processed if self.keeps_processed else None)
        reason = self._reason(token) or (FinishReason.STOP if is_stopped else None)
        self.length += 1
        if reason is not None:
            assert self.sample.seq is not None
            self.sample.finish([*self.sample.seq.output_token_ids, token], reason)
        return reason

    def completions(self) -> list[CompletionOutput]:
        return [self.sample.completion(self.keeps_processed)]

    def stop_all(self, reason: FinishReason) -> None:
        if self.sample.seq is not None:
            self.sample.finish(self.sample.seq.output_token_ids, reason)

    # -- streamers ----------------------------------------------------------------------------------------------

    def stream_to(self, streamer: Any) -> None:
        """Give the prompt to a streamer of transformers now, and each token when it is known."""
        streamer.put(torch.tensor([self.prompt_token_ids]))
        self.streamer = streamer

    def tell_streamer(self) -> None:
        sample = self.sample
        tokens, skipped = (sample.token_ids, 0) if sample.seq is None else (sample.seq.token_ids, self.prompt_length)
        while self.streamer is not None and self._num_streamed < len(tokens) - skipped:
            self._num_streamed += 1  # first, so that Ctrl-C in the streamer does not repeat the token
            try:
                self.streamer.put(torch.tensor([tokens[skipped + self._num_streamed - 1]]))
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
