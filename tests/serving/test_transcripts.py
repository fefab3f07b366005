"""The formats of transcriptions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.audio import TranscriptionVerbose
from transformers.models.whisper.tokenization_whisper import _find_longest_common_sequence

from hf_paged.serving.speech import Merged, Segment
from hf_paged.serving.transcripts import plain, verbose

SEGMENTS = [Segment(0.0, 1.999, " Good morning."), Segment(3599.9996, 3661.25, " a --> b\n\nc")]


def test_text() -> None:
    assert plain([Segment(0, 1, " One"), Segment(1, 2, " two.")], "text") == "One two.\n"


def test_subtitles() -> None:
    """A text cannot begin another cue."""
    srt = "1\n00:00:00,000 --> 00:00:01,999\nGood morning.\n\n2\n01:00:00,000 --> 01:01:01,250\na -> b c\n"
    assert plain(SEGMENTS, "srt") == srt
    vtt = "WEBVTT\n\n00:00:00.000 --> 00:00:01.999\nGood morning.\n\n01:00:00.000 --> 01:01:01.250\na -> b c\n"
    assert plain(SEGMENTS, "vtt") == vtt
    assert plain([SEGMENTS[0], Segment(2.0, 3.0, " ")], "srt") == plain(SEGMENTS[:1], "srt")
    assert (plain([], "srt"), plain([], "vtt")) == ("", "WEBVTT\n")


def test_verbose() -> None:
    made = verbose(SEGMENTS[:1], task="transcribe", language="english", seconds=2.0, temperature=0.0)
    read = TranscriptionVerbose.construct(**made)
    assert read.text == "Good morning." and read.duration == 2.0
    assert read.segments is not None and read.segments[0].end == 1.999
    assert set(made["segments"][0]) | {"tokens"} == set(type(read.segments[0]).model_fields)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=5))
def test_what_is_settled_is_what_the_pipeline_merges(windows: list[list[int]]) -> None:
    merged, settled = Merged(), []
    for words in windows:
        before = list(settled)
        settled += merged.add(words)
        assert settled[: len(before)] == before
    given_words = [words for words in windows if words]
    whole = _find_longest_common_sequence(given_words) if given_words else []
    assert settled == whole[: len(settled)]
    if len(given_words) > 1 and all(len(words) > 6 for words in given_words):
        assert len(whole) - len(settled) <= len(given_words[-1])
