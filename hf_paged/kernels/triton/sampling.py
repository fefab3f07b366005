"""Greedy tokens and their log-probabilities in one pass over the logits of the model's dtype.

A row is cut into pieces, so that a single row keeps many cores busy; a second kernel combines their results. Knows
logits; never requests.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import Launch, Ready, is_current, next_power_of_2

# Scores of a program: 32 for each of its 256 threads. Not measured.
PIECE = 8192


@triton.jit
def pieces_kernel(logits, peaks, totals, places, row_stride, VOCAB: tl.constexpr, PIECE: tl.constexpr):
    """Program (r, i): the largest score of piece i of row r, its first place in the row, and the sum of
    exp(score - largest)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    scores = tl.load(logits + row * row_stride + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
    peak, place = tl.max(scores, 0, return_indices=True)
    # Without a finite score, -inf - -inf would be NaN, although another piece may have one.
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    slot = row * tl.num_programs(1) + piece
    tl.store(peaks + slot, peak)
    tl.store(totals + slot, tl.sum(tl.exp(scores - shift), 0))
    # On a device the largest of NaN and of the padding's -inf is one of the padding's: a place beyond the row.
    tl.store(places + slot, tl.minimum(piece * PIECE + place, VOCAB - 1))


@triton.jit
def best_kernel(peaks, totals, places, best, logprobs, PIECES: tl.constexpr, PIECES_2: tl.constexpr):
    """Program r: the token and its log-probability from the pieces of row r. NaN in any piece makes it NaN."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES_2)
    inside = pieces < PIECES
    slots = row * PIECES + pieces
    peak = tl.load(peaks + slots, mask=inside, other=float("-inf"))
    total = tl.load(totals + slots, mask=inside, other=0.0)
    place = tl.load(places + slots, mask=inside, other=0)
    largest = tl.max(peak, 0)
    # The first of equal scores. (If all scores are NaN, none is equal, and the token is 0.)
    first = tl.min(tl.where(inside & (peak == largest), place, 2147483647), 0)
    tl.store(best + row, tl.where(first == 2147483647, 0, first).to(tl.int64))
    # A row of -inf has no distribution: -inf - -inf is NaN, as in torch.
    decay = tl.where(inside, tl.exp(peak - largest), 0.0)
    tl.store(logprobs + row, -tl.log(tl.sum(tl.where(inside, total * decay, 0.0), 0)))


def greedy_launches(
    logits: torch.Tensor, best: torch.Tensor, logprobs: torch.Tensor, scratch: list[torch.Tensor]
) -> list[Launch]:
    """Shapes as in `greedy`; scratch: fp32, fp32 and int32, each [num_rows * number of pieces]."""
    num_rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    peaks, totals, places = scratch
    parts = {"peaks": peaks, "totals": totals, "places": places}
    args = {"logits": logits, "row_stride": logits.stride(0), "VOCAB": vocab, "PIECE": PIECE} | parts
    combined = parts | {"best": best, "logprobs": logprobs, "PIECES": pieces, "PIECES_2": next_power_of_2(pieces)}
    return [
        Launch(pieces_kernel, (num_rows, pieces), args, {"num_warps": 8}),
        Launch(best_kernel, (num_rows,), combined, {"num_warps": 1}),
    ]


_prepared: dict[tuple[Any, ...], list[Ready]] = {}  # launches by all that they depend on but addresses
# Keys have the number of rows, so a server may bring many; Triton finds the kernels of further ones.
_MAX_PREPARED = 1024


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] of any floating dtype, contiguous in its last dimension -> the most likely tokens (the
    first of equal ones) int64 [num_rows] and their log-probabilities fp32 [num_rows], NaN where the logits are."""
    num_rows, device = logits.shape[0], logits.device
    best = buffers.empty((num_rows,), torch.int64, device)
    logprobs = buffers.empty((num_rows,), torch.float32, device)
    size = num_rows * triton.cdiv(logits.shape[1], PIECE)
    scratch = [buffers.empty((size,), dtype, device) for dtype in (torch.float32, torch.float32, torch.int32)]
    if not num_rows:
        return best, logprobs
    key = logits.shape, logits.stride(0), logits.dtype, device, logits.data_ptr() % 16 == 0
    prepared = _prepared.get(key)
    if prepared is not None and is_current(device):
        tensors = dict(zip(("peaks", "totals", "places"), scratch), logits=logits, best=best, logprobs=logprobs)
        for ready in prepared:
            ready.run_on(tensors)
        return best, logprobs
    launches = greedy_launches(logits, best, logprobs, scratch)
    compiled = [launch.run(device) for launch in launches]
    if None not in compiled and len(_prepared) < _MAX_PREPARED:
        _prepared[key] = [Ready.of(*each) for each in zip(launches, compiled)]
    return best, logprobs
