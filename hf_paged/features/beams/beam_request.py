"""BeamRequest: beam search and beam sampling; the bookkeeping of hypotheses is in beams.py."""

from __future__ import annotations

from math import inf, isnan

import numpy as np
import torch

from hf_paged.features.beams.beams import BeamSearch, Candidate
from hf_paged.generation.prepare import PreparedRequest
from hf_paged.generation.requests.outputs import CompletionOutput, Lists
from hf_paged.generation.requests.request import NOT_FINITE, NOTHING_LEFT, Delivered, ForkingRequest, Reorder
from hf_paged.generation.requests.sequence import FinishReason, Sequence, SequenceGroup
from hf_paged.generation.sampling.processors import process_together
from hf_paged.integration.names import SORTS_DRAWS
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import largest, raw_logprobs, sample_tokens, to_host


class BeamRequest(ForkingRequest):
    """One sequence for each beam, once the prompt has been computed."""

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
        # If each EOS token of each beam is among them, as many candidates are left as there are beams.
        self.num_candidates = max(2, 1 + num_eos) * config.num_beams
        self.num_return_sequences: int = config.num_return_sequences
        self._logprobs: list[list[float]] = [[] for _ in range(config.num_beams)]
        self._final: list[CompletionOutput] = []

    @property
    def num_unfinished(self) -> int:
        return self.search.num_beams

    def advance(self, seqs: list[Sequence], logits: torch.Tensor) -> Reorder:
        num_beams, num_seqs = self.search.num_beams, len(seqs)
        assert num_seqs in (1, num_beams), "between its steps a beam group has one sequence for each beam"
        # Until the first fork all beams are the prompt.
        seq_of = seqs if num_seqs > 1 else seqs * num_beams
        raw = torch.log_softmax(logits, dim=-1).expand(num_beams, -1)
        scores = self._processed(seqs, raw) if self.processors else raw
        candidates, logprobs = self._candidates(logits, scores)
        criteria = self._stopped_by_criteria(candidates)
        reasons = [self._reason(c.token, each) for c, each in zip(candidates, criteria)]
        stopped = [reason is not None for reason in reasons]
        payloads = {}
        # Only for those that end, because their tokens are copied.
        for i in self.search.finishing(stopped):
            parent, token, _ = candidates[i]
            payloads[i] = [*seq_of[parent].output_token_ids, token], [*self._logprobs[parent], logprobs[i]], reasons[i]
        logprob_of = {(c.parent, c.token): value for c, value in zip(candidates, logprobs)}
        running = self.search.step(candidates, stopped, payloads)
        if running is None:
            self._final = self._hypotheses(None)
            return Reorder([], [])
        self._logprobs = [[*self._logprobs[c.parent], logprob_of[c.parent, c.token]] for c in running]
        if self.keeps_history:
            parents = to_device(np.array([c.parent for c in running], dtype=np.int64), self.device)
            self._extend_history((c.token for c in running), parents)
        if self._chains is not None:
            self._fork_chains(c.parent for c in running)
        self.length += 1
        return Reorder([c.parent if num_seqs > 1 else 0 for c in running], [c.token for c in running])

    def _processed(self, seqs: list[Sequence], raw: torch.Tensor) -> torch.Tensor:
        """raw fp32 [num_beams, vocab], not changed -> the scores after all processors."""
        chains = self.chains(raw.shape[1])
        if chains[0].own:
            return self.process(raw.clone())
        edits = [chain.edits(seq.token_ids) for seq, chain in zip(seqs, chains)]
        return process_together(chains, raw.clone(), edits if len(seqs) > 1 else edits * len(chains))

    def _candidates(self, logits: torch.Tensor, scores: torch.Tensor) -> tuple[list[Candidate], list[float]]:
        """The best or the drawn continuations, with the log-probabilities of their tokens before the processors."""
        running_scores = to_device(np.array(self.search.running_scores, dtype=np.float32), scores.device)
        width = scores.shape[1]
        invalid = scores.new_zeros(1)
        if self.config.do_sample:
            flat = (scores + running_scores[:, None]).view(1, -1)
            chosen, invalid = sample_tokens(flat, self.generator, self.num_candidates)
            chosen = chosen[0]
            totals = flat[0, chosen]
            # Candidates are taken in this order, which is that of the installed version.
            if SORTS_DRAWS:
                totals, order = totals.sort(descending=True)
                chosen = chosen[order]
        else:
            chosen, totals = largest(scores, running_scores, self.num_candidates)
        # As for other requests, to the last bit.
        parents = chosen // width if len(logits) > 1 else torch.zeros_like(chosen)
        logprobs = raw_logprobs(logits[parents], chosen % width, torch.Tensor.float)
        indices, sums, values, invalids = to_host(chosen, totals, logprobs, invalid.expand(len(chosen)))
        if any(map(isnan, values)):
            raise ArithmeticError(NOT_FINITE)
        if isnan(invalids[0]) or max(sums) == -inf:
            raise ArithmeticError(NOTHING_LEFT)
        return [Candidate(index // width, index % width, total) for index, total in zip(indices, sums)], values

    def _stopped_by_criteria(self, candidates: list[Candidate]) -> list[bool]:
        if not self.criteria:
            return [False] * len(candidates)
        chosen = np.array([(c.parent, c.token) for c in candidates], dtype=np.int64).T
        parents, tokens = to_device(np.ascontiguousarray(chosen), self.device)
        rows = torch.cat([self._rows().index_select(0, parents), tokens[:, None]], dim=1)
        stopped: list[bool] = self.criteria(rows, None).tolist()
        return stopped

    def _hypotheses(self, reason: FinishReason | None) -> list[CompletionOutput]:
        outputs: list[CompletionOutput] = []
        for hypothesis in self.search.finished[: self.num_return_sequences]:
            tokens, logprobs, own_reason = hypothesis.payload
            outputs.append(
                CompletionOutput(
                    len(outputs),
                    Lists(tokens, 0, logprobs),
                    len(tokens),
                    sum(logprobs),
                    hypothesis.score,
                    str(reason or own_reason),
                )
            )
        return outputs

    def completions(self, delivered: Delivered = ()) -> list[CompletionOutput]:
        return self._final

    def stop_all(self, reason: FinishReason) -> None:
        outputs = self._hypotheses(reason)
        # The scheduler may have released them already, with the same reason.
        beams = self.group.live or [seq for seq in self.group.sequences if seq.finish_reason is reason]
        for seq, logprobs in zip(beams, self._logprobs):
            if len(outputs) == self.num_return_sequences:
                break
            lists = Lists(seq.output_token_ids, 0, logprobs)
            stop, total = len(lists.token_ids), sum(logprobs)
            outputs.append(CompletionOutput(len(outputs), lists, stop, total, None, str(reason)))
        self._final = outputs
