"""Drafters whose drafts are right as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hf_paged.features.speculation.drafts import Wanted


class Oracle:
    """Drafts what the requests are known to generate, each token of it with a probability, else another one."""

    def __init__(self, texts: Sequence[Sequence[int]], share: float = 1.0, seed: int = 0) -> None:
        self.texts, self.share, self.random, self.calls = texts, share, random.Random(seed), 0

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        self.calls += 1
        drafts = []
        for each in wanted:
            known, count = list(each.token_ids), len(each.token_ids)
            text = next((text for text in self.texts if list(text[:count]) == known), known)
            right = text[count : count + each.most]
            drafts.append([token if self.random.random() < self.share else (token + 1) % 90 for token in right])
        return drafts
