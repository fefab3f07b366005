"""Greedy and random sampling on a CPU, in C: the tokens that torch would sample."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.kernels import buffers
from hf_paged.kernels.buffers import as_plain
from hf_paged.kernels.native.ops import DTYPES, c_library
from hf_paged.locks import usable_after_fork

_drawing = usable_after_fork(threading.Lock())


def _checked(scores: torch.Tensor, *dtypes: torch.dtype, **lists: Sequence[Any]) -> torch.Tensor:
    """Rows of scores as the kernels below read them. Raises ValueError if they are others, or if one of the lists has
    not one item for each row."""
    scores = as_plain(scores)
    if scores.ndim != 2 or scores.dtype not in dtypes or not scores.is_cpu or scores.stride(1) != 1:
        raise ValueError(
            f"scores {tuple(scores.shape)} of {scores.dtype} on {scores.device}, strides {scores.stride()}: contiguous "
            f"rows [num_rows, vocab] of {' or '.join(map(str, dtypes))} on a CPU are needed"
        )
    for name, items in lists.items():
        if len(items) != len(scores):
            raise ValueError(f"{len(items)} {name} for {len(scores)} rows")
    return scores


def _states(generators: Sequence[torch.Generator]) -> dict[torch.Generator, torch.Tensor]:
    """The state of each generator. Raises ValueError for one of another device, whose state is laid out otherwise."""
    for generator in generators:
        if generator.device.type != "cpu":
            raise ValueError(f"a generator on {generator.device} cannot draw on a CPU")
    return {generator: generator.get_state() for generator in generators}


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, the first of equal ones, and its log-probability, in two passes over the row.

    logits [num_rows, vocab] of a supported dtype, last dimension contiguous -> tokens int64 [num_rows],
    log-probabilities fp32 [num_rows], NaN for rows with NaN.
    """
    logits = _checked(logits, *DTYPES)
    rows, vocab = logits.shape
    tokens, logprobs = buffers.empty((rows,), torch.int64), buffers.empty((rows,), torch.float32)
    c_library().hfp_greedy(
        logits.data_ptr(), DTYPES[logits.dtype], logits.stride(0), rows, vocab, tokens.data_ptr(),
        logprobs.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logprobs


def draw(probs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Sample one token per row, each with its row's generator: the tokens that `torch.multinomial` would sample row by
    row. The generators end in the same state.

    probs fp32 [num_rows, vocab], last dimension contiguous -> tokens int64 [num_rows]. Concurrent calls are serialised.
    A thread that uses one of the generators through torch's own functions meanwhile may get the same random numbers.
    """
    probs = _checked(probs, torch.float32, generators=generators)
    rows, vocab = probs.shape
    tokens = buffers.empty((rows,), torch.int64)
    # From the reading of the states to their writing: another draw in between would repeat random numbers.
    with _drawing:
        states = _states(generators)
        addresses = (ctypes.c_void_p * rows)(*(states[generator].data_ptr() for generator in generators))
        c_library().hfp_draw(
            probs.data_ptr(), probs.stride(0), rows, vocab, addresses, len(states) == rows, tokens.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        for generator, state in states.items():
            generator.set_state(state)
    return tokens


def draw_top_p(
    scores: torch.Tensor, top_ps: Sequence[float], generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, dict[int, torch.Generator]]:
    """scores fp32 [num_rows, vocab], last dimension contiguous, top_p and a generator for each row -> tokens int64
    [num_rows], drawn from what transformers' TopPLogitsWarper keeps (at least one token).

    Also returns the rows whose token is arbitrary, because it depends on how torch orders equal scores and rounds: each
    with a generator that is what the row's own was before it. As for the rest, see `draw`.
    """
    scores = _checked(scores, torch.float32, top_ps=top_ps, generators=generators)
    rows, vocab = scores.shape
    tokens = buffers.empty((rows,), torch.int64)
    removed = np.array([1 - top_p for top_p in top_ps], dtype=np.float32)
    threads = torch.get_num_threads()
    weights = buffers.empty((threads, vocab), torch.float32)
    # From the reading of the states to their writing: another draw in between would repeat random numbers.
    with _drawing:
        states = _states(generators)
        addresses = (ctypes.c_void_p * rows)(*(states[generator].data_ptr() for generator in generators))
        before = buffers.empty((rows, c_library().hfp_generator_bytes()), torch.uint8)
        c_library().hfp_draw_top_p(
            scores.data_ptr(), scores.stride(0), rows, vocab, removed.ctypes.data, weights.data_ptr(), addresses,
            before.data_ptr(), len(states) == rows, tokens.data_ptr(), threads,
        )  # fmt: skip
        for generator, state in states.items():
            generator.set_state(state)
    undecided = {}
    for row in (tokens < 0).nonzero().flatten().tolist():
        state = states[generators[row]].clone()
        state[: before.shape[1]] = before[row]
        undecided[row] = torch.Generator()
        undecided[row].set_state(state)
    return tokens, undecided


def keep_largest(scores: torch.Tensor, counts: Sequence[int]) -> int:
    """Set all scores of row i below its counts[i]-th largest to -inf, in place; 1 <= counts[i] <= vocab.

    scores fp32 [num_rows, vocab], last dimension contiguous. Returns the number of rows with NaN, which stay as they
    are.
    """
    scores = _checked(scores, torch.float32, counts=counts)
    if not all(1 <= count <= scores.shape[1] for count in counts):
        raise ValueError(f"counts={list(counts)}: 1 to {scores.shape[1]} are possible")
    rows, vocab = scores.shape
    ks, threads = np.array(counts, dtype=np.int64), torch.get_num_threads()
    scratch = buffers.empty((threads, c_library().hfp_keep_largest_scratch(vocab)), torch.float32)
    bad: int = c_library().hfp_keep_largest(
        scores.data_ptr(), scores.stride(0), rows, vocab, ks.ctypes.data, scratch.data_ptr(), threads
    )
    return bad


@functools.cache
def draws_like_torch() -> bool:
    """Return True if `draw` samples what `torch.multinomial` samples and leaves the generator in the same state.

    Both are torch internals, so a self-test decides once per process.
    """
    # A seed of its own, so that the random numbers of the program stay as they are.
    scores = buffers.empty((3, 1000), torch.float32).normal_(generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(scores, dim=-1)
    mine, theirs = (torch.Generator().manual_seed(1) for _ in range(2))
    for generator in (mine, theirs):
        # An odd number of words, so that a number's two words may lie on both sides of a refill.
        buffers.empty((5,), torch.float32).uniform_(generator=generator)
    tokens = draw(probs, [mine] * len(probs))
    expected = [torch.multinomial(row, 1, generator=theirs).item() for row in probs]
    return tokens.tolist() == expected and mine.get_state().equal(theirs.get_state())
