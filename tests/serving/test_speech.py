"""Windows, their questions and what is put together from the answers: equal to transformers' pipeline."""

from __future__ import annotations

import io
import shutil
import subprocess
from typing import Any

import pytest
import transformers
from transformers import GenerationMixin

from hf_paged.serving.audio import decoded
from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits
from hf_paged.serving.speech import Question, Speech, Wish
from tests.serving.hearing import RATE, extractor, model, noise, tokenizer

GREEDY = {"do_sample": False, "num_beams": 1}


def answered(own: Any, question: Question) -> list[int]:
    """The tokens that transformers' loop generates, without what Whisper's own `generate` does around it."""
    made = GenerationMixin.generate(
        own,
        question.inputs["input_features"],
        decoder_input_ids=question.inputs["decoder_input_ids"],
        generation_config=question.generation_config,
        logits_processor=transformers.LogitsProcessorList(question.logits_processor),
    )
    return list(made[0, question.inputs["decoder_input_ids"].shape[1] :].tolist())


def ours(own: Any, wave: Any, wish: Wish) -> tuple[list[list[int]], list[Any]]:
    speech = Speech(own, tokenizer(), extractor())
    windows = list(speech.windows(wave))
    assert len(windows) == speech.count(len(wave))
    tokens: list[list[int]] = []
    languages: list[str | None] = []
    for window in windows:
        language = wish.language
        if language is None:
            language = speech.language(answered(own, speech.asks_language(window))[0])
        languages.append(language if wish.language is None else None)
        asked = Wish(
            task=wish.task, language=language, prompt=wish.prompt, has_times=wish.has_times, options=wish.options
        )
        tokens.append(answered(own, speech.asks_text(window, asked)))
    strides = [window.stride for window in windows]
    assert speech.seconds(strides) == pytest.approx(len(wave) / RATE)
    return tokens, speech.heard(strides, tokens, languages, has_times=wish.has_times)


def theirs(own: Any, wave: Any, wish: Wish) -> Any:
    run = transformers.pipeline(
        "automatic-speech-recognition", model=own, tokenizer=tokenizer(), feature_extractor=extractor()
    )
    options = {"task": wish.task, "force_unique_generate_call": True, "max_new_tokens": None, **wish.options}
    if wish.language is not None:
        options["language"] = wish.language
    if wish.prompt is not None:
        options["prompt_ids"] = tokenizer().get_prompt_ids(wish.prompt, return_tensors="pt")
    return run(wave.copy(), chunk_length_s=1, return_timestamps=wish.has_times, generate_kwargs=options)


WISHES = {
    "language": Wish(language="de", options=GREEDY),
    "detected": Wish(options=GREEDY),
    "translation": Wish(task="translate", language="en", options=GREEDY),
    "times": Wish(language="en", has_times=True, options=GREEDY),
    "beams": Wish(language="en", options={"do_sample": False, "num_beams": 3}),
    "prompt": Wish(language="en", prompt="ABAC", options=GREEDY),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("seconds", [0.4, 1.0, 3.5])
@pytest.mark.parametrize("name", WISHES)
def test_the_pipeline(name: str, seconds: float) -> None:
    own, wave, wish = model(), noise(seconds), WISHES[name]
    tokens, segments = ours(own, wave, wish)
    expected = theirs(own, wave, wish)
    assert "".join(each.text for each in segments) == expected["text"]
    assert len({token for some in tokens for token in some}) > 2
    if wish.has_times:
        ends = [chunk["timestamp"] for chunk in expected["chunks"]]
        assert [(each.start, each.end) for each in segments] == [
            (start or 0.0, seconds if end is None else end) for start, end in ends
        ]


def test_languages() -> None:
    speech = Speech(model(), tokenizer(), extractor())
    window = next(speech.windows(noise(0.3)))
    for language in ("de", "German", "<|de|>"):
        ids = speech.asks_text(window, Wish(language=language, options=GREEDY)).inputs["decoder_input_ids"]
        assert ids.tolist() == [[51, 53, 55, 60]]
    for language in ("fr", "klingon", ""):
        with pytest.raises(Problem, match="language=") as caught:
            speech.asks_text(window, Wish(language=language, options=GREEDY))
        assert (caught.value.status, caught.value.param) == (400, "language")


def test_english_only() -> None:
    own = model(is_multilingual=False)
    del own.generation_config.lang_to_id
    speech = Speech(own, tokenizer(), extractor())
    window = next(speech.windows(noise(0.3)))
    for language in (None, "en"):
        ids = speech.asks_text(window, Wish(language=language, options=GREEDY)).inputs["decoder_input_ids"]
        assert ids.tolist() == [[51, 60]]
    with pytest.raises(Problem, match="knows English only; leave it out"):
        speech.asks_text(window, Wish(language="de", options=GREEDY))
    with pytest.raises(Problem, match="does not translate"):
        speech.asks_text(window, Wish(task="translate", options=GREEDY))


def test_long_prompts() -> None:
    """The end of a prompt counts, as in OpenAI's API."""
    speech = Speech(model(), tokenizer(), extractor())
    window = next(speech.windows(noise(0.3)))
    question = speech.asks_text(window, Wish(language="en", prompt="ABC" * 99, options=GREEDY))
    ids = question.inputs["decoder_input_ids"][0].tolist()
    assert ids[0] == 57 and len(ids) == 64 // 2 - 1 + 4
    assert question.generation_config.max_length == min(24 + len(ids), 64)
    with pytest.raises(Problem, match="disallowed special token"):
        speech.asks_text(window, Wish(language="en", prompt="<|endoftext|>", options=GREEDY))


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs Debian's espeak-ng")
def test_a_spoken_file() -> None:
    said = subprocess.run(["espeak-ng", "--stdout", "The first line of the file"], capture_output=True, check=True)
    wave = decoded(io.BytesIO(said.stdout), RATE, Limits())
    own, wish = model(), WISHES["detected"]
    segments = ours(own, wave, wish)[1]
    assert 1 < len(wave) / RATE < 5
    assert "".join(each.text for each in segments) == theirs(own, wave, wish)["text"]
