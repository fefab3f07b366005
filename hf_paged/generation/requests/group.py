"""GroupRequest: several samples of one prompt (`num_return_sequences`)."""

from __future__ import annotations

from math import isnan

import numpy as np
import torch

from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.requests.outputs import CompletionOutput
from hf_paged.generation.requests.request import NOT_FINITE, NOTHING_LEFT, Delivered, Fork, ForkingRequest, Sample
from hf_paged.generation.requests.sequence import FinishReason, Sequence, SequenceGroup
from hf_paged.generation.requests.top_tokens import TopTokens
from hf_paged.generation.sampling.processors import Chain, process_together
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import raw_logprobs, sample_tokens, sample_top_p, to_host


class GroupRequest(ForkingRequest):
    """Samples with the same tokens so far share one sequence, which forks at the first token in which they differ."""

    def __init__(self, group: SequenceGroup, prepared: PreparedRequest, generator: torch.Generator | None) -> None:
        super().__init__(group, prepared, generator)
        pad = self.config.pad_token_id
        self._pad_token_id = 0 if pad is None else int(pad)
        self.samples = [Sample(index, group.sequences[0]) for index in range(self.num_rows)]
        self._samples_of: dict[int, list[Sample]] = {group.sequences[0].seq_id: list(self.samples)}
        self._branches: dict[int, dict[int, list[Sample]]] = {}  # of forks decided, not yet carried out

    @property
    def num_unfinished(self) -> int:
        return sum(sample.seq is not None for sample in self.samples)

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> list[Fork]:
        row_of = {seq.seq_id: row for row, seq in enumerate(seqs)}
        # Finished samples are drawn for too (with the first row's logits), because transformers' loop uses up random
        # numbers for them.
        rows = [0 if s.seq is None else row_of[s.seq.seq_id] for s in self.samples]
        raw = logits[to_device(np.array(rows, dtype=np.int64), logits.device)]
        chains = self.chains(raw.shape[1], draws=True)
        scores = self._processed(chains, raw) if self.processors else raw
        if chains[0].top_p is not None and not chains[0].own:
            warpers = [chain.top_p for chain in chains]
            tokens, invalid = sample_top_p(scores, warpers, [self.generator] * self.num_rows)
        else:
            tokens, invalid = sample_tokens(scores, self.generator)
            tokens = tokens.squeeze(1)
        kept = [raw_logprobs(scores, tokens, torch.Tensor.float)] if self.keeps_processed else []
        chosen, logprobs, invalids, *processed = to_host(
            tokens, raw_logprobs(raw, tokens, torch.Tensor.float), invalid, *kept
        )
        # First, because processors make no distribution of NaN either, and the cause is the model.
        if any(map(isnan, logprobs)):
            raise ArithmeticError(NOT_FINITE)
        if any(map(isnan, invalids)):
            raise ArithmeticError(NOTHING_LEFT)
        if self.options.logprobs is not None:
            # Once for each sequence, because samples that share it have the same logits.
            top = TopTokens(logits, [self.options.logprobs] * len(logits)).read()
            for sample, row in zip(self.samples, rows):
                if sample.seq is not None:
                    sample.top_logprobs.append(top[row])
        return self._fork(chosen, logprobs, *processed)

    def _processed(self, chains: list[Chain], raw: torch.Tensor) -> torch.Tensor:
        """raw fp32 [num_samples, vocab], not changed -> the scores after all processors but a final top-p."""
        if chains[0].own:
            return self.process(raw.clone())
        if len(chains) > 1 and chains[0] is chains[1]:  # no tokens processed yet
            self._fork_chains(range(self.num_rows))
            chains = self.chains(raw.shape[1])
        # The tokens that finished samples get are dropped.
        edits = [[] if s.seq is None else chain.edits(s.seq.token_ids) for s, chain in zip(self.samples, chains)]
        return process_together(chains, raw.clone(), edits)

    def _fork(self, tokens: list[int], logprobs: list[float], processed: list[float] | None = None) -> list[Fork]:
        """One token for each sample; those of finished samples are dropped."""
        stopped = self._stopped_by_criteria(tokens)
        branches: dict[int, dict[int, list[Sample]]] = {seq_id: {} for seq_id in self._samples_of}
        seqs: dict[int, Sequence] = {}
        for sample, token in zip(self.samples, tokens):
            seq = sample.seq
            if seq is None:
                continue
            seqs[seq.seq_id] = seq
            sample.add(logprobs[sample.index], None if processed is None else processed[sample.index])
            reason = self._reason(token, stopped[sample.index])
            if reason is None:
                branches[seq.seq_id].setdefault(token, []).append(sample)
            else:
                sample.finish([*seq.output_token_ids, token], reason)
        # After the reasons, which compare the length before this token.
        self.length += 1
        self._branches = branches
        return [Fork(seq, list(branches[seq_id])) for seq_id, seq in seqs.items()]

    def forked(self, seq: Sequence, children: list[Sequence]) -> None:
        branches = self._branches.pop(seq.seq_id)
        del self._samples_of[seq.seq_id]
        for child, samples in zip(children, branches.values()):
            self._samples_of[child.seq_id] = samples
            for sample in samples:
                sample.move_to(child)

    def _stopped_by_criteria(self, tokens: list[int]) -> list[bool]:
        if self.keeps_history:
            given = (self._pad_token_id if s.seq is None else token for s, token in zip(self.samples, tokens))
            self._extend_history(given)
        if not self.criteria:
            return [False] * len(tokens)
        stopped: list[bool] = self.criteria(self._rows(), None).tolist()
        return stopped

    def completions(self, delivered: Delivered = ()) -> list[CompletionOutput]:
        delivered = delivered or (0,) * len(self.samples)
        return [sample.completion(self, num_delivered) for sample, num_delivered in zip(self.samples, delivered)]

    def stop_all(self, reason: FinishReason) -> None:
        for sample in self.samples:
            if sample.seq is not None:
                sample.finish(sample.seq.output_token_ids, reason)
