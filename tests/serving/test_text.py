"""Detokenizing piece by piece, stop strings, and the processor and the criterion that the server brings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hf_paged.serving.processors import OccurrencePenalty, StopText
from hf_paged.serving.text import Detokenizer, StopSearch, token_bytes
from tests.serving.harness import tokenizer

TEXTS = st.lists(
    st.sampled_from(["the list ", "é", "日本語", "🙂", "👩‍👩‍👧", "\n\n", "def f(x):", "ß", " ", "<|user|>", "\ufffd"]),
    max_size=12,
).map("".join)


def byte_fallback() -> Any:
    """A tokenizer in the manner of sentencepiece: words with a mark for the space before, and single bytes."""
    pieces = ["<unk>", "<s>", "</s>", "▁the", "▁list", "list", "▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.WordLevel({piece: place for place, piece in enumerate(pieces)}, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def pieces(kind: Any, ids: list[int], sizes: list[int], skip: bool) -> list[str]:
    stream, shown, start = Detokenizer(kind, skip_special_tokens=skip), [], 0
    while start < len(ids):
        size = sizes[len(shown) % len(sizes)]
        shown.append(stream.push(ids[start : start + size]))
        start += size
    return [*shown, stream.finish()]


@settings(max_examples=60)
@given(TEXTS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_pieces_are_the_text(text: str, sizes: list[int], skip: bool) -> None:
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(tokenizer(), ids, sizes, skip)) == tokenizer().decode(ids, skip_special_tokens=skip)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 2047), max_size=40), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_tokens_of_a_byte_level_tokenizer(ids: list[int], sizes: list[int]) -> None:
    """Tokens in any order: most of them break characters."""
    assert "".join(pieces(tokenizer(), ids, sizes, True)) == tokenizer().decode(ids, skip_special_tokens=True)


KIND = byte_fallback()


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["▁the", "▁list", "list", "▁", "é", "日", "🙂", "\n", "<s>"]), max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_characters_in_single_bytes(parts: list[str], sizes: list[int]) -> None:
    """In text that is UTF-8: such a tokenizer shows a whole run of bytes as broken if one of them is."""
    names = [[part] if part in KIND.get_vocab() else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    ids = KIND.convert_tokens_to_ids([name for some in names for name in some])
    assert "".join(pieces(KIND, ids, sizes, True)) == KIND.decode(ids, skip_special_tokens=True)


def test_no_piece_has_half_a_character() -> None:
    ids = tokenizer()("日本語 🙂 é", add_special_tokens=False)["input_ids"]
    shown = pieces(tokenizer(), ids, [1], True)
    assert len(shown) > 5 and not any("\ufffd" in piece for piece in shown)


def test_a_run_of_broken_bytes_is_shown_before_its_end() -> None:
    broken = tokenizer()("日", add_special_tokens=False)["input_ids"][:1] * 50
    shown = pieces(tokenizer(), broken, [1], True)
    assert "".join(shown) == tokenizer().decode(broken)
    assert sum(map(len, shown[:-1])) > 20


class Counting:
    """A tokenizer that says how many tokens it has decoded at once."""

    def __init__(self, kind: Any) -> None:
        self._kind, self.most = kind, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.most = max(self.most, len(ids))
        return str(self._kind.decode(ids, **options))


@pytest.mark.covering(1)
@pytest.mark.parametrize("text", ["<|end|>", "日"])
@pytest.mark.parametrize("skip", [True, False])
def test_a_long_run_without_text_costs_no_more_for_each_token(text: str, skip: bool) -> None:
    """Tokens that are skipped, and tokens that are no characters."""
    counting = Counting(tokenizer())
    first = 2 if text == "<|end|>" else tokenizer()(text, add_special_tokens=False)["input_ids"][0]
    ids = [*tokenizer()("a list", add_special_tokens=False)["input_ids"], *[first] * 500]
    ids += tokenizer()(" of日 words", add_special_tokens=False)["input_ids"]
    assert "".join(pieces(counting, ids, [1, 3], skip)) == tokenizer().decode(ids, skip_special_tokens=skip)
    assert counting.most < 150


@settings(max_examples=150)
@given(
    st.text("ab\n", max_size=24),
    st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_strings_are_found_where_a_reader_of_characters_finds_them(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    end = next((end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)), None)
    search, shown, start, number = StopSearch(stops, include=include), "", 0, 0
    while start < len(text):
        size = sizes[number % len(sizes)]
        shown += search.push(text[start : start + size])
        # What is shown is never taken back: it is a beginning of the final text.
        assert text.startswith(shown)
        start, number = start + size, number + 1
    shown += search.finish()
    if end is None:
        assert shown == text and search.found is None
        return
    longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert search.found == longest
    assert shown == (text[:end] if include else text[: end - len(longest)])


def test_a_stop_string_that_may_not_stop_is_text() -> None:
    search = StopSearch(["ab"], include=False)
    shown = search.push("xa", may_stop=False) + search.push("b", may_stop=False) + search.push("yab")
    assert shown == "xaby" and search.found == "ab"


def test_bytes_of_tokens() -> None:
    text = "日本語 é🙂 the"
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert bytes(byte for token in ids for byte in token_bytes(tokenizer(), token) or []).decode() == text
    assert token_bytes(KIND, KIND.convert_tokens_to_ids("<0xE6>")) == [0xE6]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), max_size=20), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties_are_openais_formula(answer: list[int], presence: float, frequency: float) -> None:
    prompt = [1, 1, 2]
    processor = OccurrencePenalty(len(prompt), presence_penalty=presence, frequency_penalty=frequency)
    scores = torch.linspace(-3, 3, 10)[None].repeat(2, 1)
    found = processor(torch.tensor([prompt + answer, prompt + answer[::-1]]), scores.clone())
    for row in found:
        for token in range(10):
            count = answer.count(token)
            wanted = float(scores[0, token]) - count * frequency - (count > 0) * presence
            assert float(row[token]) == pytest.approx(wanted, abs=1e-5)


@settings(max_examples=50)
@given(TEXTS, st.integers(0, 30), st.integers(1, 6))
def test_the_criterion_stops_where_the_text_does(text: str, start: int, length: int) -> None:
    """It ends a request after the very token in which the reader's search finds the stop string."""
    stop = text[start : start + length]
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    if not stop or "\ufffd" in stop:
        return
    criterion = StopText(tokenizer(), [stop, "never seen"], 2, skip_special_tokens=False)
    ended = next((n for n in range(1, len(ids) + 1) if bool(criterion(torch.tensor([[5, 6, *ids[:n]]]), None))), None)
    stream, search, found = Detokenizer(tokenizer(), skip_special_tokens=False), StopSearch([stop], include=False), None
    for number, token in enumerate(ids, 1):
        search.push(stream.push([token]))
        if search.found:
            found = number
            break
    assert ended == found, json.dumps([text, stop])


def test_the_criterion_reads_the_answer_only() -> None:
    ids = tokenizer()("a list", add_special_tokens=False)["input_ids"]
    criterion = StopText(tokenizer(), ["list"], len(ids), min_tokens=3)
    assert not bool(criterion(torch.tensor([ids]), None))
    rows = torch.tensor([[*ids, *ids]])
    assert bool(criterion(rows, None)) is (len(ids) >= 3)
