"""Translation: drafts by a model with another tokenizer. Its tokens and those of the request are of the same text.

Knows tokenizers; never models. A wrong translation costs a draft, never a result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from hf_paged.features.speculation.drafts import Drafter, Wanted

# Chosen without a measurement.
WINDOW = 16
"""Last tokens that are translated again with new ones, which may change how their text is divided."""
# Four times the sequences of a step by default. Chosen without a measurement.
MAX_KEPT = 1024
"""Sequences whose translations are remembered. Others are translated again."""
_HALF = "\N{REPLACEMENT CHARACTER}"  # what tokens of half a character are shown as


class Revisable(Drafter, Protocol):
    """A drafter that is told if a sequence has got other tokens."""

    def go_back(self, seq_id: int, num_tokens: int) -> None:
        """Only so many of the sequence's tokens are still those of the last draft."""


class Translator:
    """From tokens of one tokenizer to those of another, by their text. Special tokens that the other one does not have
    are left out."""

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        starts = target("")["input_ids"]  # what the tokenizer begins texts with
        self._start = [target.bos_token_id] if target.bos_token_id in starts else []
        special = {str(token): index for index, token in source.added_tokens_decoder.items() if token.special}
        self._left_out = {index for token, index in special.items() if token not in target.get_vocab()}
        self._left_out.add(source.bos_token_id)

    def text(self, ids: Sequence[int]) -> str:
        kept = [token for token in ids if token not in self._left_out]
        text: str = self._source.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _tokens(self, text: str) -> list[int]:
        # The second half may still come; by itself, the first one would be the tokens of another character.
        ids: list[int] = self._target(text.rstrip(_HALF), add_special_tokens=False)["input_ids"]
        return ids

    def all(self, ids: Sequence[int]) -> list[int]:
        """The translation of a whole text."""
        return self._start + self._tokens(self.text(ids))

    def changes(self, before: Sequence[int], new: Sequence[int]) -> tuple[list[int], list[int]]:
        """If `new` tokens come after these: the last tokens of the translation that go, and those that come."""
        window = before[-WINDOW:]
        old, now = self._tokens(self.text(window)), self._tokens(self.text([*window, *new]))
        same = _num_same(old, now)
        return old[same:], now[same:]


class TranslatedDrafter:
    """Asks a drafter whose tokens are another tokenizer's."""

    def __init__(self, drafter: Revisable, tokenizer: Any, own_tokenizer: Any) -> None:
        """tokenizer: of the requests. own_tokenizer: of the drafter."""
        self.drafter = drafter
        self._there, self._back = Translator(tokenizer, own_tokenizer), Translator(own_tokenizer, tokenizer)
        self._kept: OrderedDict[int, tuple[int, list[int]]] = OrderedDict()  # tokens translated; by last use

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """See `Drafter`."""
        drafts: list[list[int]] = [[] for _ in wanted]
        asked = {}
        for index, each in enumerate(wanted):
            own = self._follow(each)
            # A draft cannot complete a character of which the drafter knows no half.
            if own and not self._there.text(each.token_ids[-WINDOW:]).endswith(_HALF):
                asked[index] = each._replace(token_ids=own)
        made = self.drafter.draft(list(asked.values())) if asked else []
        for (index, each), draft in zip(asked.items(), made):
            gone, came = self._back.changes(each.token_ids, draft)
            drafts[index] = [] if gone else came[: each.most]  # the request's tokens do not change
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return drafts

    def _follow(self, wanted: Wanted) -> list[int]:
        """The sequence in the drafter's tokens."""
        seq_id, ids, _ = wanted
        count, own = self._kept.pop(seq_id, (0, []))
        num_same = len(own)
        if count:
            gone, came = self._there.changes(ids[:count], ids[count:])
            num_same -= len(gone)
            # The window may be divided otherwise than within the whole text, which is translated again then.
            is_known = own[num_same:] == gone
        if count and is_known:
            own = own[:num_same] + came
        else:
            former, own = own, self._there.all(ids)
            num_same = _num_same(former, own)
        # Told before the next draft, because the drafter keeps K/V of its tokens.
        self.drafter.go_back(seq_id, num_same)
        self._kept[seq_id] = len(ids), own
        return own


def number_alike(tokenizer: Any, other: Any) -> bool:
    """Return True if each token id that both tokenizers have stands for the same token."""
    tokens = {index: token for token, index in other.get_vocab().items()}
    return all(tokens.get(index, token) == token for token, index in tokenizer.get_vocab().items())


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of first tokens in which both agree."""
    most = min(len(one), len(other))
    return next((index for index in range(most) if one[index] != other[index]), most)
