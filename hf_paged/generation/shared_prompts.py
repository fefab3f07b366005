"""Find prompts of a batch that are equal or begin alike, so that equal tokens are computed and stored once.

Knows token ids; never block tables or the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

# Bytes of an int64 token id, because prompts are compared as bytes.
_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of the distinct prompts of a batch, `tokens` int64 [length].

    source: index of the earlier prompt that has the same first `shared` tokens, whole blocks of them; None if there is
    none. `shared` is always less than the length: the end of each prompt is computed, because its logits are needed.
    """

    tokens: torch.Tensor
    source: int | None = None
    shared: int = 0

    @property
    def own_length(self) -> int:
        """Tokens that it does not share."""
        return len(self.tokens) - self.shared


def share_prompts(
    batch: Sequence[torch.Tensor], block_size: int, histories: Sequence[bytes] = ()
) -> tuple[list[Prompt], list[int]]:
    """The distinct prompts of `batch`, and for each prompt of the batch the index of the distinct one that it equals.

    batch: int64 [length] each, on the CPU if there are several. histories: what precedes each prompt in the cache, in
    any form that is equal for equal histories. Prompts after different histories are different, and a prompt after a
    history shares nothing but with its equals.
    """
    if len(batch) == 1:
        return [Prompt(batch[0])], [0]
    contents = [tokens.numpy().tobytes() for tokens in batch]
    histories = histories or [b""] * len(batch)
    # Reversed, so that of equal prompts the first one counts.
    first = {key: i for i, key in reversed(list(enumerate(zip(histories, contents))))}
    # In this order the beginning that a prompt shares with any earlier one is shared with the one just before it.
    ordered = sorted(first)
    prompts = [Prompt(batch[first[ordered[0]]])]
    for i, ((history, content), following) in enumerate(pairwise(ordered)):
        shared = 0 if history or following[0] else _common_blocks(content, following[1], block_size) * block_size
        prompts.append(Prompt(batch[first[following]], i if shared else None, shared))
    positions = {key: i for i, key in enumerate(ordered)}
    return prompts, [positions[key] for key in zip(histories, contents)]


def _common_blocks(content: bytes, following: bytes, block_size: int) -> int:
    """Full blocks of tokens with which both prompts begin, leaving at least one token of each."""
    size = block_size * _TOKEN_BYTES
    # At least one token of each is left, because its logits are needed.
    limit = (min(len(content), len(following)) - 1) // size
    if not limit or content[:size] != following[:size]:
        return 0
    same = np.frombuffer(content, np.int64, limit * block_size) == np.frombuffer(
        following, np.int64, limit * block_size
    )
    return (limit * block_size if same.all() else int(same.argmin())) // block_size
