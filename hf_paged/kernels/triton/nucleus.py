"""Top-p without sorting: scores below a cut are removed from each row, after a search that tries several cuts at once.

A row is cut into pieces, so that a single row keeps many cores busy. Each launch tries cuts in the interval that the
one before has left: every program sums the weights of its piece, and the next launch adds the sums of all pieces. Knows
scores; never requests. Sums are rounded otherwise than transformers' warper rounds them, so that a token whose sum is
within rounding of the limit may be kept here and removed there, or the other way round.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import Launch, Ready, is_current, next_power_of_2
from hf_paged.kernels.triton.sampling import pieces_kernel

# Scores of a program, not measured: a row of 128k scores has 16 programs.
PIECE = 8192
# Scores of a program at once: CUTS times as many sums are 64 registers for each of its 256 threads.
BLOCK = 1024
# Cuts of a pass, not measured: more cuts need fewer passes but more registers.
CUTS = 16
# Each pass leaves a CUTS-th of the interval, and fp32 has 2^32 = CUTS^PASSES numbers.
PASSES = 8


@triton.jit
def _ordered(x):
    """int32 numbers in the order of the fp32 numbers x; its own inverse on their bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _cuts(low, high, CUTS: tl.constexpr):
    """Return ascending cuts, and True for each that lies in (low, high)."""
    cuts = low + tl.maximum((high - low) // CUTS, 1) * (tl.arange(0, CUTS) + 1).to(tl.int64)
    return cuts, cuts < high


@triton.jit
def _found(
    row, removed, peaks, totals, state, sums, PIECES: tl.constexpr, PIECES_2: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Return a row's largest score, the sum of all weights, the weight to be removed, and what is known of the cut.

    It is in (low, high]: the weights up to `low`, of the sum `below`, are within the limit, those up to `high` are not.
    state, sums: of the last pass, if there was one."""
    pieces = tl.arange(0, PIECES_2)
    inside = pieces < PIECES
    own = tl.load(peaks + row * PIECES + pieces, mask=inside, other=float("-inf"))
    weights = tl.load(totals + row * PIECES + pieces, mask=inside, other=0.0)
    peak = tl.max(own, 0)
    total = tl.sum(tl.where(inside, weights * tl.exp(own - peak), 0.0), 0)
    limit = tl.load(removed + row) * total
    if state is None:
        # Scores that are smaller by 104 have no weight in fp32.
        low, high = _ordered(peak - 104.0).to(tl.int64) - 1, _ordered(peak).to(tl.int64)
        below = 0.0
    else:
        low, high = tl.load(state + row * 4), tl.load(state + row * 4 + 1)
        below = tl.load(state + row * 4 + 2).to(tl.int32).to(tl.float32, bitcast=True)
        cuts, tried = _cuts(low, high, CUTS)
        places = (row * PIECES + pieces)[:, None] * CUTS + tl.arange(0, CUTS)[None, :]
        found = tl.sum(tl.load(sums + places, mask=inside[:, None], other=0.0), 0)
        over, under = tried & (found > limit), tried & (found <= limit)
        high = tl.min(tl.where(over, cuts, high))
        low = tl.max(tl.where(under, cuts, low))
        below = tl.maximum(below, tl.max(tl.where(under, found, 0.0)))
    return peak, total, limit, low, high, below


@triton.jit
def cuts_kernel(
    scores, removed, peaks, totals, last_state, last_sums, state, sums, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PIECES_2: tl.constexpr, BLOCK: tl.constexpr,
    CUTS: tl.constexpr,
):  # fmt: skip
    """Program (r, i): sums[r, i] are the weights exp(score - largest) of piece i of row r up to each cut of this pass.
    state int64 [num_rows, 4]: low, high and below (its bits) before this pass."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, _, _, low, high, below = _found(row, removed, peaks, totals, last_state, last_sums, PIECES, PIECES_2, CUTS)
    if piece == 0:
        tl.store(state + row * 4, low)
        tl.store(state + row * 4 + 1, high)
        tl.store(state + row * 4 + 2, tl.cast(below, tl.float32).to(tl.int32, bitcast=True).to(tl.int64))
    if high - low > 1:
        cuts, tried = _cuts(low, high, CUTS)
        keys = tl.where(tried, cuts, high).to(tl.int32)
        weights = tl.zeros([CUTS, BLOCK], tl.float32)
        for start in tl.range(0, PIECE, BLOCK):
            columns = piece * PIECE + start + tl.arange(0, BLOCK)
            x = tl.load(scores + row * row_stride + columns, mask=columns < VOCAB, other=float("-inf"))
            weights += tl.where(_ordered(x)[None, :] <= keys[:, None], tl.exp(x - peak)[None, :], 0.0)
        tl.store(sums + (row * PIECES + piece) * CUTS + tl.arange(0, CUTS), tl.sum(weights, 1))


@triton.jit
def ties_kernel(
    scores, removed, peaks, totals, last_state, last_sums, ties, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PIECES_2: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Program (r, i): how many scores of piece i of row r are equal to the cut."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, _, high, _ = _found(row, removed, peaks, totals, last_state, last_sums, PIECES, PIECES_2, CUTS)
    columns = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(scores + row * row_stride + columns, mask=columns < VOCAB, other=float("-inf"))
    equal = (_ordered(x) == high.to(tl.int32)) & (columns < VOCAB)
    tl.store(ties + row * PIECES + piece, tl.sum(equal.to(tl.int32), 0))


@triton.jit
def remove_kernel(
    scores, removed, peaks, totals, last_state, last_sums, ties, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PIECES_2: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Program (r, i): in piece i of row r, the smallest scores whose weights make up at most a share removed[r] of all
    become -inf, of equal ones the first; at least one score of a row stays. A row with NaN or without a finite largest
    score stays as it is."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, total, limit, _, high, below = _found(
        row, removed, peaks, totals, last_state, last_sums, PIECES, PIECES_2, CUTS
    )
    if total == total:  # not NaN
        cut = high.to(tl.int32)
        pieces = tl.arange(0, PIECES_2)
        equal = tl.load(ties + row * PIECES + pieces, mask=pieces < PIECES, other=0)
        weight = tl.exp(tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut).to(tl.float32, bitcast=True) - peak)
        # One score at the cut stays, so that no row loses all of its own.
        most = (tl.sum(equal, 0) - 1).to(tl.float32)
        num_removed = tl.minimum(tl.floor((limit - below) / weight), most).to(tl.int32)
        before = tl.sum(tl.where(pieces < piece, equal, 0), 0)
        columns = piece * PIECE + tl.arange(0, PIECE)
        inside = columns < VOCAB
        key = _ordered(tl.load(scores + row * row_stride + columns, mask=inside, other=float("-inf")))
        tied = ((key == cut) & inside).to(tl.int32)
        is_early = (tied > 0) & (before + tl.cumsum(tied, 0) <= num_removed)
        tl.store(scores + row * row_stride + columns, float("-inf"), mask=inside & ((key < cut) | is_early))


def nucleus_launches(scores: torch.Tensor, removed: torch.Tensor, scratch: dict[str, torch.Tensor]) -> list[Launch]:
    """See `keep_nucleus_unsorted`; scratch: what `scratch_of` gives."""
    num_rows, vocab = scores.shape
    pieces = triton.cdiv(vocab, PIECE)
    grid, sizes = (num_rows, pieces), {"row_stride": scores.stride(0), "VOCAB": vocab, "PIECE": PIECE}
    found: dict[str, Any] = {name: scratch[name] for name in ("peaks", "totals")}
    launches = [
        Launch(pieces_kernel, grid, {"logits": scores, "places": scratch["places"]} | found | sizes, {"num_warps": 8})
    ]
    common = {"scores": scores, "removed": removed, "PIECES": pieces, "PIECES_2": next_power_of_2(pieces), "CUTS": CUTS}
    common |= found | sizes
    last: dict[str, Any] = {"last_state": None, "last_sums": None}
    for state, sums in zip(scratch["states"], scratch["sums"]):
        args = common | last | {"state": state, "sums": sums, "BLOCK": min(BLOCK, PIECE)}
        launches.append(Launch(cuts_kernel, grid, args, {"num_warps": 8}))
        last = {"last_state": state, "last_sums": sums}
    for kernel in (ties_kernel, remove_kernel):
        launches.append(Launch(kernel, grid, common | last | {"ties": scratch["ties"]}, {"num_warps": 8}))
    return launches


def scratch_of(num_rows: int, vocab: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate the memory by which programs pass values to later launches."""
    size, pieces = num_rows * triton.cdiv(vocab, PIECE), triton.cdiv(vocab, PIECE)
    found = {name: buffers.empty((size,), torch.float32, device) for name in ("peaks", "totals")}
    found |= {name: buffers.empty((size,), torch.int32, device) for name in ("places", "ties")}
    found["states"] = buffers.empty((PASSES, num_rows, 4), torch.int64, device)
    found["sums"] = buffers.empty((PASSES, num_rows, pieces, CUTS), torch.float32, device)
    return found


_prepared: dict[tuple[Any, ...], list[Ready]] = {}  # launches by all that they depend on but addresses
# Keys have the number of rows, so a server may bring many; Triton finds the kernels of further ones.
_MAX_PREPARED = 256


def keep_nucleus_unsorted(scores: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], contiguous in its last dimension, changed in place: of row i, the least likely
    tokens with a probability of removed[i] together (fp32 [num_rows], 1 - top_p) become -inf."""
    if not len(scores):
        return scores
    device = scores.device
    launches = nucleus_launches(scores, removed, scratch_of(len(scores), scores.shape[1], device))
    aligned = (scores.data_ptr() | removed.data_ptr()) % 16 == 0
    key = scores.shape, scores.stride(0), device, aligned
    prepared = _prepared.get(key)
    if prepared is not None and is_current(device):
        for ready, launch in zip(prepared, launches):
            ready.run_on({name: launch.args[name] for _, name in ready.tensors})
        return scores
    compiled = [launch.run(device) for launch in launches]
    if None not in compiled and len(_prepared) < _MAX_PREPARED:
        _prepared[key] = [Ready.of(*each) for each in zip(launches, compiled)]
    return scores
