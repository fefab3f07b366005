"""Text from tokens, as they come: pieces that stay what they are, and stop strings.

Knows tokens and text; neither HTTP nor the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_paged.annotations import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# Bytes of a character, which may be as many tokens.
_MAX_UTF8 = 4
# Tokens of a run of broken characters after which the window moves: each further token decodes all of the window again.
_LONG_RUN = 64  # tokens


class Detokenizer:
    """The text of a growing list of tokens. The pieces together are what decoding all tokens at once gives.

    A token may end within a character of UTF-8. Such text is buffered until the character is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ignored = _skipped_ids(tokenizer) if skip_special_tokens else frozenset()
        self._lengths = _lengths(tokenizer, skip_special_tokens)
        self._ids: list[int] = []
        # Tokens of the window: those before `_read` are context, whose text, `_context` characters, has been returned.
        self._start = self._read = self._context = 0
        self._emitted = 0  # characters after the context that have been returned already

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these further tokens add, as far as no later token can change it."""
        shown = ""
        for token in token_ids:  # one by one: after each whole character there is less to buffer
            if token not in self._ignored:
                self._ids.append(token)
                shown += self._advance()
        return shown

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The rest, with these last tokens; no more follow."""
        self._ids += (token for token in token_ids if token not in self._ignored)
        if self._read == len(self._ids):
            return ""
        return self._decode(self._start, len(self._ids))[self._context + self._emitted :]

    def _advance(self) -> str:
        text = self._decode(self._start, len(self._ids))
        begin, end = self._context + self._emitted, len(text)
        if text.endswith(_UNKNOWN):
            # The beginning of a character, or no character at all. A long run is the latter, but for its end.
            is_long = len(self._ids) - self._read > 2 * _MAX_UTF8
            end = max(begin, end - _MAX_UTF8) if is_long else begin
        if end <= begin:
            return ""
        if end < len(text):
            self._emitted += end - begin
            if (len(self._ids) - self._read) % _LONG_RUN == 0:
                self._shorten(text)
        else:
            # What was shown last becomes context, because some tokenizers write a token otherwise at the beginning of a
            # text.
            self._start, self._read, self._emitted = self._read, len(self._ids), 0
            self._context = self._length_of_context()
        return text[begin:end]

    def _length_of_context(self) -> int:
        """Characters of the text of the context alone. Most are single tokens, which were decoded before."""
        if self._read - self._start > 1:
            return len(self._decode(self._start, self._read))
        token = self._ids[self._start]
        length = self._lengths.get(token)
        if length is None:
            length = self._lengths[token] = len(self._decode(self._start, self._read))
        return length

    def _shorten(self, text: str) -> None:
        """Move the window, whose text this is, within a long run of broken characters: to where no character is."""
        end = len(self._ids)
        # Some places near the end: a cut must not lie within a character.
        for read in range(end - 2 * _MAX_UTF8, end - 3 * _MAX_UTF8, -1):
            start = read - 2 * _MAX_UTF8
            parts = [self._decode(*each) for each in ((self._start, start), (start, read), (read, end))]
            emitted = self._context + self._emitted - len(parts[0]) - len(parts[1])
            if "".join(parts) == text and emitted >= 0:
                self._start, self._read, self._context, self._emitted = start, read, len(parts[1]), emitted
                break

    def _decode(self, start: int, end: int) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[start:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
            )
        )


# Two: a tokenizer with and without its special tokens.
@lru_cache(maxsize=2)
def _lengths(tokenizer: Tokenizer, skip_special_tokens: bool) -> dict[int, int]:
    """Characters of the text of single tokens, filled in by those who decode them."""
    return {}


@lru_cache(maxsize=1)
def _skipped_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that decoding skips as if they were not there."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(special if tokenizer.is_fast else special & set(tokenizer.all_special_ids))


class StopSearch:
    """Finds the first stop string in a growing text, and buffers text that may be its beginning."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """include: the stop string stays in the text."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that may be shown after this piece. may_stop: a stop string that ends within the piece counts.

        After a stop string was found, nothing more is shown.
        """
        if self.found is not None:
            return ""
        whole = self._held + text
        if may_stop:
            first = min((place for stop in self._stops if (place := self._place(whole, stop, len(text)))), default=None)
            if first is not None:
                end, _, self.found = first
                self._held = ""
                return whole[: end if self._include else end - len(self.found)]
        # The longest beginning of any of them: shown, it could not be taken back.
        hold = max((_overlap(whole, stop) for stop in self._stops), default=0)
        self._held = whole[len(whole) - hold :]
        return whole[: len(whole) - hold]

    def _place(self, whole: str, stop: str, new: int) -> tuple[int, int, str] | None:
        """(end, -length, stop) of its first occurrence in `whole` that ends within the last `new` characters."""
        begin = whole.find(stop, max(0, len(whole) - new - len(stop) + 1))
        return None if begin < 0 else (begin + len(stop), -len(stop), stop)

    def finish(self) -> str:
        """Return what was buffered; no text follows."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    """The bytes that the letters of byte-level tokenizers stand for."""
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a single token; special tokens by name."""
    return str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def token_bytes(tokenizer: Tokenizer, token_id: int) -> list[int] | None:
    """The bytes of a token's text, also if they are a part of a character. None if the tokenizer does not tell."""
    text = token_text(tokenizer, token_id)
    if _UNKNOWN not in text:
        return list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(piece, str):
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:5], 16)]
        letters = _byte_of_letter()
        if all(letter in letters for letter in piece):
            return [letters[letter] for letter in piece]
    return None
