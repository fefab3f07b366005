"""Drafts: guesses of a request's next tokens, which one forward verifies together (speculative decoding).

A draft changes no result: a token of it is accepted if it is the one that the request samples. Standard library only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, overload, runtime_checkable

from hf_paged.config import DRAFT_LENGTH, LOOKUP_NGRAM


class TokenView(Sequence[int]):
    """Tokens that their owner extends and a reader cannot change. Slices are lists of their own."""

    __slots__ = ("_ids",)

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)


class Wanted(NamedTuple):
    """A sequence that could take a draft. seq_id: the same for each draft of it, never used for another sequence.
    token_ids: its tokens so far, prompt included, read-only. most: tokens of a draft, at most; >= 1."""

    seq_id: int
    token_ids: Sequence[int]
    most: int


@runtime_checkable
class Drafter(Protocol):
    """The protocol of objects that guess the next tokens of requests: `Engine(model, assistant_model=...)` takes one.

    A draft changes no result, because a drafted token is accepted only if the request chooses it. The attribute
    `num_assistant_tokens`, 8 if it is missing, is the longest draft for requests that give no length.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Drafter, Engine


        class RepeatLastToken:
            num_assistant_tokens = 3

            def draft(self, wanted):
                return [[each.token_ids[-1]] * each.most for each in wanted]


        assert isinstance(RepeatLastToken(), Drafter)
        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}, assistant_model=RepeatLastToken()) as engine:
            engine.generate([[1, 5, 6]], GenerationConfig(max_new_tokens=8))
            print(engine.stats().num_drafts)
        ```
    """

    def draft(self, wanted: Sequence[Wanted]) -> Sequence[Sequence[int]]:
        """Guess what comes next for each of some sequences.

        Called by one thread, before each step that may verify drafts. A sequence that is not among `wanted` may come
        again later: it may have been preempted, or too few of its drafts were right.

        Args:
            wanted: The sequences, each with `seq_id` (the same for each draft of it, never used for another sequence),
                `token_ids` (its tokens so far, prompt included, read-only) and `most` (tokens of a draft, at most; >=
                1).

        Returns:
            For each of them at most `most` token ids that may come next; none if there is no guess.
        """


class PromptLookup:
    """Drafts for one sequence from its own tokens: those that followed its last tokens when they stood there before.

    The longest run of at most `ngram` last tokens counts that has occurred before, and of its occurrences the latest.
    A draft that reaches the end of the tokens repeats itself, so that a repetition is drafted at any length. A new
    token costs about a microsecond.
    """

    def __init__(self, ngram: int = LOOKUP_NGRAM, least: int = 1) -> None:
        """ngram, least: tokens of the longest and of the shortest run."""
        self._sizes = range(ngram, least - 1, -1)
        self._follows: dict[tuple[int, ...], int] = {}  # where the token after the latest occurrence of a run is
        self._num_known = 0  # the runs that end before this position are in `_follows`

    def draft(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens; [] if no run of the last tokens has occurred before. The next call has the same
        tokens, and any number of others after them."""
        stop = len(token_ids)
        follows, sizes = self._follows, self._sizes
        # Each run is entered once; the last token's runs wait until a token follows them.
        for end in range(self._num_known + 1, stop):
            for size in sizes:
                if size <= end:
                    follows[tuple(token_ids[end - size : end])] = end
        self._num_known = max(self._num_known, stop - 1)
        for size in sizes:
            # Longer runs first: what followed one of them is more likely to follow again.
            start = follows.get(tuple(token_ids[stop - size :])) if size <= stop else None
            if start is not None:
                found = list(token_ids[start : start + most])
                while len(found) < most:
                    found += found[: most - len(found)]
                return found
        return []


class Lookup:
    """A Drafter: `PromptLookup` for every request of an engine."""

    MAX_KEPT = 1024
    """Sequences whose runs are remembered. Others are read again."""

    def __init__(self, num_assistant_tokens: int = DRAFT_LENGTH, ngram: int = LOOKUP_NGRAM, least: int = 1) -> None:
        """num_assistant_tokens: of a draft, at most. ngram, least: as for `PromptLookup`."""
        self.num_assistant_tokens = num_assistant_tokens
        self._ngram, self._least = ngram, least
        self._kept: OrderedDict[int, PromptLookup] = OrderedDict()  # by last use

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        drafts = []
        for seq_id, token_ids, most in wanted:
            lookup = self._kept.pop(seq_id, None) or PromptLookup(self._ngram, self._least)
            # At the end again: those that were asked for longest ago are forgotten first.
            self._kept[seq_id] = lookup
            drafts.append(lookup.draft(token_ids, most))
        while len(self._kept) > self.MAX_KEPT:
            self._kept.popitem(last=False)
        return drafts
