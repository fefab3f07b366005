"""Operations on rows of logits: greedy and sampled tokens, log-probabilities. Knows neither requests nor sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.kernels import buffers, ops
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.native import ops as native_ops
from hf_paged.kernels.native import sampling as native_sampling

ToFp32 = Callable[[torch.Tensor], torch.Tensor]
"""Makes an fp32 copy that may be overwritten."""


def greedy(
    logits: torch.Tensor, to_fp32: ToFp32 = lambda logits: logits.float().clone()
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] -> the most likely tokens int64 [num_rows], their log-probabilities fp32 [num_rows].

    A log-probability is NaN where the logits are. to_fp32: makes an fp32 copy that may be overwritten, if needed.
    """
    if _reads_natively(logits):
        return native_sampling.greedy(logits)
    if _reads_by_triton(logits):
        return triton_greedy(logits)
    wide = to_fp32(logits)
    scores, tokens = row_max(wide)
    # score - logsumexp(logits), without a temporary as large as the logits.
    return tokens, -wide.sub_(scores[:, None]).exp_().sum(dim=-1).log_()


def row_max(scores: torch.Tensor, *, run: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """scores fp32 [num_rows, vocab] -> the largest of each row and its (first) index int64, both [num_rows].

    On a CPU `max` is 30 times faster than `argmax`, and finding the run that holds the maximum first halves that again.
    """
    if scores.device.type != "cpu" or scores.shape[1] % run:
        return scores.max(dim=-1)
    runs = scores.view(len(scores), -1, run)
    best = runs.amax(dim=-1).max(dim=-1)[1]
    values, index = runs[torch.arange(len(scores), dtype=torch.int64, device="cpu"), best].max(dim=-1)
    return values, best * run + index


class ToHost:
    """A transfer of tokens int64 [n] and fp32 [n] values of theirs to the host.

    Starting it does not wait. `lists` waits, but only for work that was launched before the transfer.
    """

    def __init__(self, tokens: torch.Tensor, *values: torch.Tensor) -> None:
        self._rows = (tokens, *values)
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            return
        rows = _in_one(tokens, *values)  # transfer
        if rows.is_cuda:
            host = buffers.empty(rows.shape, rows.dtype, pinned=True)
            self._rows = tuple(host.copy_(rows, non_blocking=True))
            self._arrived = torch.cuda.current_stream(rows.device).record_event()
        else:
            self._rows = tuple(rows.cpu())

    def lists(self) -> tuple[list[Any], ...]:
        """The tokens, as int, and each row of values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, *values = (row.tolist() for row in self._rows)
        # In a transfer with values they are floats.
        return list(map(int, tokens)) if self._rows[0].is_floating_point() else tokens, *values


def _in_one(*rows: torch.Tensor) -> torch.Tensor:
    """All rows as one fp64 tensor, which represents every fp32 value and every id up to 2**53 exactly."""
    return torch.stack([row.double() for row in rows])


def to_host(tokens: torch.Tensor, *values: torch.Tensor) -> tuple[list[Any], ...]:
    """Tokens int64 [n] and fp32 [n] values of theirs, as lists."""
    return ToHost(tokens, *values).lists()


Generators = Sequence[torch.Generator | None] | torch.Generator | None
"""One generator for each row, or one for all rows in turn; None is torch's default generator."""


def sample_tokens(scores: torch.Tensor, generators: Generators, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """scores fp32 [num_rows, vocab] after all processors -> tokens int64 [num_rows, count] drawn without replacement,
    and fp32 [num_rows] with NaN for each row whose scores give no distribution, 0 for the others.

    Draws the tokens that `torch.multinomial` would draw, and uses up the same random numbers. The host does not wait
    for the device. The tokens of a row without a distribution are arbitrary.
    """
    probs = torch.softmax(scores, dim=-1)
    # A single NaN makes the whole row NaN, so one element tells.
    invalid = probs[:, 0] * 0
    return draw(probs, generators, count), invalid


def draw(probs: torch.Tensor, generators: Generators, count: int = 1) -> torch.Tensor:
    """probs fp32 [num_rows, vocab], overwritten -> tokens int64 [num_rows, count], as `torch.multinomial` draws them.

    Like torch, this divides each probability by an exponential random number and takes the largest quotients. It
    leaves out torch's check of the probabilities, which makes the host wait for the device and, on a GPU, ends the
    process when it fails.
    """
    # The kernel draws one token from rows that lie in memory as they are.
    if count == 1 and probs.dtype == torch.float32 and probs.stride(1) == 1 and draws_natively(probs.device):
        each = generators if isinstance(generators, Sequence) else [generators] * len(probs)
        tokens = native_sampling.draw(probs, [torch.default_generator if g is None else g for g in each])
        return tokens[:, None]
    if isinstance(generators, Sequence):
        numbers = exponentials(probs, generators, at_once=probs.device.type != "cpu")
    else:
        numbers = torch.empty_like(probs).exponential_(1, generator=generators)
    quotients = probs.div_(numbers)
    return row_max(quotients)[1][:, None] if count == 1 else torch.topk(quotients, count)[1]


def exponentials(like: torch.Tensor, generators: Sequence[torch.Generator | None], *, at_once: bool) -> torch.Tensor:
    """Draw exponential random numbers [num_rows, vocab], like `like`. A row with a generator gets the numbers that it
    would get alone. at_once: draw all other rows in one launch; else row by row, which gives on a CPU the numbers of
    one `torch.multinomial` after the other."""
    numbers = torch.empty_like(like)
    unseeded = [row for row, generator in enumerate(generators) if generator is None] if at_once else []
    if len(unseeded) == len(generators):
        return numbers.exponential_(1)
    if unseeded:
        drawn = torch.empty_like(like[: len(unseeded)]).exponential_(1)
        numbers.index_copy_(0, to_device(np.array(unseeded, dtype=np.int64), like.device), drawn)
    for row, generator in zip(numbers.split(1), generators, strict=True):
        if generator is not None or not at_once:
            row.exponential_(1, generator=generator)
    return numbers


def draws_natively(device: torch.device) -> bool:
    """Return True if the native kernel draws. It skips random numbers, slow on a CPU, of tokens that cannot win."""
    return ops.default_impl(device) == "native" and native_sampling.draws_like_torch()


def removes_unsorted(device: torch.device) -> bool:
    """Return True if top-p needs no sort there. For rows without a seed, whose tokens no other program draws."""
    return ops.default_impl(device) == "triton"


def keep_nucleus_unsorted(scores: torch.Tensor, top_p: Sequence[float]) -> None:
    """scores fp32 [num_rows, vocab] on a GPU: what top-p removes from row i becomes -inf, apart from rounding."""
    from hf_paged.kernels.triton import nucleus  # without a GPU there may be no triton

    removed = to_device(1 - np.array(top_p, dtype=np.float32), scores.device)
    nucleus.keep_nucleus_unsorted(scores, removed)


def rehearse(logits: torch.Tensor) -> None:
    """Run the kernels that a step of an engine may need for logits [num_rows, vocab], so that they are compiled."""
    greedy(logits)
    greedy(logits.float())  # requests that fork keep them so
    if removes_unsorted(logits.device):
        keep_nucleus_unsorted(logits.float(), [0.5] * len(logits))


def sample_top_p(
    scores: torch.Tensor, warpers: Sequence[Any], generators: Sequence[torch.Generator | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `sample_tokens` (one token a row, int64 [num_rows]) after a top-p warper of transformers for each row, where
    `draws_natively`. A row for which that is not certain without sorting it, one in hundreds, goes the warper's way.

    Where `removes_unsorted`, no row is sorted, and `scores` are changed in place. Sums of probabilities are rounded
    otherwise than the warper's.
    """
    if removes_unsorted(scores.device):
        keep_nucleus_unsorted(scores, [warper.top_p for warper in warpers])
        tokens, invalid = sample_tokens(scores, generators)
        return tokens.squeeze(1), invalid
    each = [torch.default_generator if g is None else g for g in generators]
    tokens, undecided = native_sampling.draw_top_p(scores, [warper.top_p for warper in warpers], each)
    invalid = scores.new_zeros(len(scores))
    for i, generator in undecided.items():
        row = slice(i, i + 1)
        chosen, invalid[row] = sample_tokens(warpers[i](None, scores[row]), [generator])
        tokens[row] = chosen[0]
    return tokens, invalid


def largest(
    scores: torch.Tensor, offsets: torch.Tensor, count: int, *, run: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of scores fp32 [num_rows, vocab] + offsets [num_rows], in descending order.

    Returns their indices in the flattened scores, int64 [count], and their values [count]. They lie in the `count`
    runs with the largest maxima; searching those alone takes a fifth of the time of `topk` over all scores.
    """
    num_rows, vocab = scores.shape
    offsets = offsets[:, None]
    # Searching runs spares nothing if they hold half of all scores.
    if vocab % run or scores.numel() < 2 * count * run:
        values, index = torch.topk((scores + offsets).view(-1), count)
        return index, values
    runs = scores.view(num_rows, -1, run)
    # Rounding is monotonic: the maximum plus the offset equals the maximum of the sums.
    maxima = runs.amax(dim=2) + offsets
    # Runs in ascending order, so that ties are resolved as in one topk over everything.
    best = torch.topk(maxima.view(-1), count)[1].sort()[0]
    rows = best // maxima.shape[1]
    values, chosen = torch.topk((runs[rows, best % maxima.shape[1]] + offsets[rows]).view(-1), count)
    return best[chosen // run] * run + chosen % run, values


def keep_largest(scores: torch.Tensor, counts: Sequence[int], fill: float) -> torch.Tensor:
    """scores fp32 [num_rows, vocab] -> the same, changed in place: scores of row i below its counts[i]-th largest are
    `fill`; 1 <= counts[i] <= vocab. NaN is larger than all numbers, as for `topk`."""
    is_native = fill == -torch.inf and ops.default_impl(scores.device) == "native" and scores.stride(1) == 1
    if is_native and not native_sampling.keep_largest(scores, counts):  # no row has NaN
        return scores
    largest = torch.topk(scores, max(counts))[0]
    least = largest.gather(1, to_device(np.array(counts, dtype=np.int64)[:, None] - 1, scores.device))
    return scores.masked_fill_(scores < least, fill)


def by_row(values: Sequence[float], device: torch.device) -> float | torch.Tensor:
    """The number that all rows have, or fp32 [num_rows, 1] on the device."""
    if values.count(values[0]) == len(values):
        return values[0]
    return to_device(np.array(values, dtype=np.float32)[:, None], device)


def divide_(x: torch.Tensor, divisor: float | torch.Tensor) -> torch.Tensor:
    """x fp32, divided in place with the bits that torch gives for a divisor that is a number: CUDA multiplies by its
    reciprocal."""
    if x.is_cuda and isinstance(divisor, torch.Tensor):
        return x.mul_(divisor.reciprocal())
    return x.div_(divisor)


def keep_top_p(scores: torch.Tensor, top_p: Sequence[float], count: int, fill: float) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], changed in place -> those that transformers' top-p warper with top_p[i] and
    min_tokens_to_keep=count removes from row i are `fill`."""
    ascending, tokens = torch.sort(scores, descending=False)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= by_row([1 - each for each in top_p], scores.device)
    removed[:, -count:] = False
    return scores.masked_fill_(removed.scatter(1, tokens, removed), fill)


def keep_nucleus(scores: torch.Tensor, counts: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], changed in place -> what transformers' warpers keep, the others -inf: top-k with
    counts[i] for row i, then top-p with top_p[i]. The same scores bit for bit where torch.sort is stable, as it is
    on GPUs.

    No row is sorted: after top-k, all but the last scores of a sorted row are -inf, then come those equal to the least
    one that is kept, and the few larger ones. Their sums are left to torch, so that they are rounded alike.
    """
    vocab, width = scores.shape[1], max(counts)
    values, tokens = torch.topk(scores, width)
    least = values.gather(1, to_device(np.array(counts, dtype=np.int64)[:, None] - 1, scores.device))
    larger, tied = values > least, scores == least
    num_larger = larger.sum(dim=1, keepdim=True)
    first_tied = vocab - num_larger - tied.sum(dim=1, keepdim=True)  # place in the sorted row
    places = torch.arange(vocab, dtype=torch.int64, device=scores.device)
    ascending = torch.where(places >= first_tied, least, -torch.inf)
    ascending[:, -width:] = torch.where(larger.flip(1), values.flip(1), ascending[:, -width:])
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= by_row([1 - each for each in top_p], scores.device)
    removed[:, -1] = False
    removed &= ~values[:, :1].isnan()  # of a row with NaN, no sum is less than anything
    ranks = (first_tied + tied.cumsum(dim=1) - 1).clamp_(0, vocab - 1)
    drop = (scores < least) | (tied & removed.gather(1, ranks))
    # `topk` returns equal scores in any order.
    tokens = tokens.sort(dim=1)[0]
    values, order = scores.gather(1, tokens).sort(dim=1, stable=True)
    tokens = tokens.gather(1, order)
    drop.scatter_(1, tokens, torch.where(values > least, removed[:, -width:], drop.gather(1, tokens)))
    return scores.masked_fill_(drop, -torch.inf)


def raw_logprobs(logits: torch.Tensor, tokens: torch.Tensor, to_fp32: ToFp32) -> torch.Tensor:
    """`logprobs_of` for logits of the model's dtype, without a copy where native code reads them.

    to_fp32: as for `greedy`.
    """
    if _reads_natively(logits):
        best, logprobs = native_sampling.greedy(logits)
        both = logits.gather(1, torch.stack([tokens, best], dim=1)).float()
        logprobs += both[:, 0] - both[:, 1]
        unknown = logprobs.isnan()  # of infinite logits, `greedy` does not tell which
        if unknown.any():
            logprobs[unknown] = logprobs_of(logits[unknown].float(), tokens[unknown])  # and the other rows keep theirs
        return logprobs
    if _reads_by_triton(logits):
        best, logprobs = triton_greedy(logits)
        both = logits.gather(1, torch.stack([tokens, best], dim=1)).float()
        return logprobs + (both[:, 0] - both[:, 1])
    return logprobs_of(to_fp32(logits), tokens)


def _reads_by_triton(logits: torch.Tensor) -> bool:
    return ops.default_impl(logits.device) == "triton" and logits.stride(1) == 1


def triton_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy` on a GPU, without an fp32 copy."""
    from hf_paged.kernels.triton.sampling import greedy as one_pass  # without a GPU there may be no triton

    return one_pass(logits)


def _reads_natively(logits: torch.Tensor) -> bool:
    return ops.default_impl(logits.device) == "native" and native_ops.supports(logits.dtype) and logits.stride(1) == 1


def top_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] -> the `count` most likely tokens of each row, best first, int64 [num_rows, count], and
    their log-probabilities, fp32 [num_rows, count]. With native code these are `raw_logprobs` to the last bit."""
    scores = logits.float()
    values, tokens = torch.topk(scores, count)
    if count and _reads_natively(logits):  # `logsumexp` rounds a row by its place among the rows
        best = raw_logprobs(logits, tokens[:, 0], torch.Tensor.float)[:, None]
        return tokens, best + (values - values[:, :1])
    return tokens, values - torch.logsumexp(scores, dim=-1, keepdim=True)


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [num_rows] of tokens int64 [num_rows] under the distributions of scores [num_rows, vocab]."""
    return scores.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
