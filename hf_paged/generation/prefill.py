"""Computes the prompts of a paged call, packed and in chunks. Knows prompts and sequences; never rows or options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.generation.shared_prompts import Prompt
from hf_paged.kernels.metadata import to_device
from hf_paged.model.media import Media, check_heard, reach_of_step, step_arguments
from hf_paged.model.packed import PackedModel

# As in a step of an engine on a GPU. Chosen without a measurement.
MAX_PREFILL_TOKENS = 8192
"""Tokens of prompts computed in one forward: bounds the activations, not the prompts."""


def is_one_step(prompts: Sequence[Prompt], chunk: int | None) -> bool:
    """Return True if one forward computes all prompts. chunk: limit of tokens of each prompt in a forward, or None."""
    lengths = [prompt.own_length for prompt in prompts]
    return sum(lengths) <= MAX_PREFILL_TOKENS and max(lengths) <= (chunk or MAX_PREFILL_TOKENS)


def compute_prompts(
    packed: PackedModel,
    seq_ids: Sequence[int],
    prompts: Sequence[Prompt],
    chunk: int | None,
    media: Sequence[Media] | None = None,
) -> torch.Tensor:
    """Append prompt i to the sequence `seq_ids[i]` and compute it; logits [num_prompts, vocab] after the last tokens.

    A prompt that shares a beginning must have a sequence that does not exist yet. media: what each prompt shows. Raises
    ValueError if tokens that attend to one another both ways are more than a forward computes.
    """
    # Refused before any block is taken.
    longest = chunk or MAX_PREFILL_TOKENS
    for shown in media or ():
        if shown.encoded is not None and (run := shown.encoded.longest_run) > longest:
            raise ValueError(
                f"{run} tokens of a prompt attend to one another both ways, and a forward computes "
                f"{longest} tokens of a prompt at most; raise prefill_chunk_size, or leave out cache_implementation"
            )
    memory, device = packed.memory, packed.model.device
    done = [0] * len(prompts)
    logits: list[torch.Tensor | None] = [None] * len(prompts)
    while any(row is None for row in logits):
        chunks = _append_chunks(memory, seq_ids, prompts, done, longest, media)
        ids = [seq_ids[i] for i, _ in chunks]
        metadata, positions = memory.step_metadata(ids, [count for _, count in chunks], device)
        tokens = torch.cat([prompts[i].tokens[done[i] : done[i] + count] for i, count in chunks]).to(device)
        last = metadata[0].query_start_loc[1:].long() - 1
        beside: dict[str, Any] | None = None
        if media is not None:
            parts = [media[i].part(done[i], done[i] + count) for i, count in chunks]
            beside, reach = step_arguments(parts), reach_of_step(parts)
            if reach is not None:
                metadata = [replace(each, reach=to_device(reach, device)) for each in metadata]
        rows = packed.forward(tokens, positions, metadata, last, beside)
        check_heard(packed.model, beside or {})
        # Rows of prompts with further chunks are computed too; nobody uses them.
        for (i, count), row in zip(chunks, rows):
            done[i] += count
            if done[i] == len(prompts[i].tokens):
                logits[i] = row
        memory.step_done(ids)
    return torch.stack([row for row in logits if row is not None])


def _append_chunks(
    memory: PagedMemory,
    seq_ids: Sequence[int],
    prompts: Sequence[Prompt],
    done: list[int],
    chunk: int,
    media: Sequence[Media] | None,
) -> list[tuple[int, int]]:
    """Append the next step's tokens; returns (index of the prompt, number of tokens). Notes what is shared as done.

    A prompt starts with the blocks of its source as soon as these are written, which may be in the same step: each
    layer writes the K/V of the whole step before it attends.
    """
    budget = MAX_PREFILL_TOKENS
    chunks: list[tuple[int, int]] = []
    appends: list[tuple[int, int]] = []
    appended = list(done)
    for i, prompt in enumerate(prompts):
        count = min(len(prompt.tokens) - max(done[i], prompt.shared), chunk, budget)
        if media is not None:
            count = media[i].undivided(max(done[i], prompt.shared), count)
        if count <= 0 or (prompt.source is not None and appended[prompt.source] < prompt.shared):
            continue
        if prompt.source is not None and not done[i]:
            # The beginning must be in its source's table before this is forked.
            memory.append(appends)
            appends = []
            memory.fork(seq_ids[prompt.source], seq_ids[i])
            # The source may have more tokens by now than both have in common.
            memory.crop(seq_ids[i], prompt.shared)
            done[i] = appended[i] = prompt.shared
        appends.append((seq_ids[i], count))
        chunks.append((i, count))
        appended[i] += count
        budget -= count
    memory.append(appends)
    return chunks
