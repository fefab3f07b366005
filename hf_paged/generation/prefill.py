"""Divides the prompts of a paged call into chunks, and has them computed. Knows prompts and sequences; never models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.generation.shared_prompts import Prompt

# As in a step of an engine on a GPU. Chosen without a measurement.
MAX_PREFILL_TOKENS = 8192
"""Tokens of prompts computed in one forward: bounds the activations, not the prompts."""

Chunk = tuple[int, int, int]
"""The index of a prompt, and the places of the first token of a chunk and of the one after its last."""


def is_one_step(prompts: Sequence[Prompt], chunk: int | None) -> bool:
    """Return True if one forward computes all prompts. chunk: limit of tokens of each prompt in a forward, or None."""
    lengths = [prompt.own_length for prompt in prompts]
    return sum(lengths) <= MAX_PREFILL_TOKENS and max(lengths) <= (chunk or MAX_PREFILL_TOKENS)


def compute_prompts(
    memory: PagedMemory,
    seq_ids: Sequence[int],
    prompts: Sequence[Prompt],
    compute: Callable[[list[Chunk]], torch.Tensor],
    undivided: Callable[[int, int, int], int],
    longest: int,
    budget: int,
) -> torch.Tensor:
    """Append prompt i to the sequence `seq_ids[i]` and compute it; logits [num_prompts, vocab] after the last tokens.

    A prompt that shares a beginning must have a sequence that does not exist yet. compute: returns logits [num_chunks,
    vocab] after chunks, which are of different prompts. undivided(seq_id, start, count): how many of so many tokens can
    be computed without the next ones. longest, budget: tokens of a chunk, and of all chunks of a step.
    """
    done = [0] * len(prompts)
    logits: list[torch.Tensor | None] = [None] * len(prompts)
    while any(row is None for row in logits):
        chunks = _append_chunks(memory, seq_ids, prompts, done, undivided, longest, budget)
        # Rows of prompts with further chunks are computed too; nobody uses them.
        for (i, _, stop), row in zip(chunks, compute(chunks)):
            done[i] = stop
            if stop == len(prompts[i].tokens):
                logits[i] = row
        memory.step_done([seq_ids[i] for i, _, _ in chunks])
    return torch.stack([row for row in logits if row is not None])


def _append_chunks(
    memory: PagedMemory,
    seq_ids: Sequence[int],
    prompts: Sequence[Prompt],
    done: list[int],
    undivided: Callable[[int, int, int], int],
    longest: int,
    budget: int,
) -> list[Chunk]:
    """Append the tokens of the next step, and return them as chunks. Notes what is shared as done.

    A prompt starts with the blocks of its source as soon as these are written, which may be in the same step: each
    layer writes the K/V of the whole step before it attends.
    """
    chunks: list[Chunk] = []
    appends: list[tuple[int, int]] = []
    appended = list(done)
    for i, prompt in enumerate(prompts):
        start = max(done[i], prompt.shared)
        count = undivided(seq_ids[i], start, min(len(prompt.tokens) - start, longest, budget))
        if count <= 0 or (prompt.source is not None and appended[prompt.source] < prompt.shared):
            continue
        if prompt.source is not None and not done[i]:
            # The beginning must be in its source's table before this is forked.
            memory.append(appends)
            appends = []
            memory.fork(seq_ids[prompt.source], seq_ids[i])
            # The source may have more tokens by now than both have in common.
            memory.crop(seq_ids[i], prompt.shared)
            done[i] = prompt.shared
        appends.append((seq_ids[i], count))
        chunks.append((i, start, start + count))
        appended[i] = start + count
        budget -= count
    memory.append(appends)
    return chunks
