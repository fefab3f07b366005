"""Images in messages: OpenAI's client, answers like those of `generate`, and images that must be refused."""

from __future__ import annotations

import base64
import copy
import io
import zlib
from typing import Any

import openai
import pytest
import torch

from hf_paged.cli import generate
from hf_paged.features.media import media_store
from hf_paged.features.media.media_memory import MediaError
from hf_paged.serving import service, templates
from hf_paged.serving.served import row_of
from hf_paged.serving.settings import Limits
from tests.serving.harness import NAME, Running, serving
from tests.serving.seeing import (
    QUESTION,
    TEMPLATE,
    answer_of,
    chunk,
    expected,
    messages,
    model,
    picture,
    png,
    processor,
    tokenizer,
    url,
)

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def server() -> Any:
    limits = Limits(images=3, image_pixels=10_000, media_pixels=10_000)
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor(), limits=limits) as running:
        yield running


def ask(server: Running, *urls: str, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12, "messages": messages(*urls), **options}
    return server.client.chat.completions.create(**fields)


def test_openais_client_sends_an_image(server: Running) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = picture(5, kind)
        answer = ask(server, url(data, f"image/{kind.lower()}"))
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected(data)


def test_base64_as_programs_write_it(server: Running) -> None:
    data = picture(5, size=(40, 31))
    head, text = url(data).split(",")
    named = head.replace(";", ';name="a b%20.png";charset=utf-8;')
    assert text.endswith("=")
    lines, spaces = base64.encodebytes(base64.b64decode(text)).decode(), text.replace("A", " A\r\n\t")
    for start, written in ((head, lines), (named, spaces), (head, text.rstrip("="))):
        assert ask(server, f"{start},{written}").choices[0].message.content == expected(data)[0]


def test_several_images_and_streams(server: Running) -> None:
    data = [picture(shade) for shade in (1, 90)]
    text, _ = expected(*data)
    assert ask(server, *map(url, data)).choices[0].message.content == text != expected(data[0], data[0])[0]
    stream = ask(server, *map(url, data), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_images_of_several_turns_hit_the_cache(server: Running) -> None:
    data = picture(33)
    first = messages(url(data))
    answer = ask(server, url(data)).choices[0].message.content
    turns = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    before = server.call(lambda engine: engine.stats())
    again = ask(server, messages=turns)
    after = server.call(lambda engine: engine.stats())
    assert again.choices[0].message.content and after.encoder_inputs == before.encoder_inputs


def test_responses(server: Running) -> None:
    data = picture(8)
    content = [{"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": "What is this?"}]
    answer = server.client.responses.create(
        model=NAME, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert answer.output_text == expected(data)[0]
    source = {"type": "base64", "media_type": "image/png", "data": url(data).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, content[1] | {"type": "text"}]
    made = server.post("/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=12, temperature=0)
    assert made.json()["content"][0]["text"] == answer.output_text


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
EXIF = b"II*\0\x08\0\0\0\x02\0" + b"\x12\1\3\0\1\0\0\0\6\0\0\0" + b"\0\1\2\0\4\0\0\0abc\0" + bytes(4)
"""Turned by 90 degrees, with a width that is a text."""
HOSTILE = {
    "metadata of a wrong type": url(picture()[:33] + chunk(b"eXIf", EXIF) + picture()[33:]),
    "a header of 10^5 x 10^5": url(png(100_000, 100_000)), "a header of 2^31 x 1": url(png(2**31 - 1, 1)),
    "a line, which a processor would make as wide as others are high": url(picture(1, size=(9000, 1))),
    "no size": url(png(0, 0)), "too many pixels": url(picture(1, size=(101, 100))),
    "a text that inflates": url(png(9, 9)[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000)))),
    "cut off": url(picture()[:200]), "nothing": url(b""), "svg as png": url(SVG),
    "eps": url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", "image/eps"),
    "base64 cut off": "data:image/png;base64,iVBORw0KGgo",
    "http": "http://127.0.0.1:1/x.png", "file": "file:///etc/passwd", "path": "/etc/passwd", "empty": "",
    "no ascii": "data:image/png;base64,日本", "data of nothing": "data:",
    "a gif whose first frame is larger than its screen": url(
        b"GIF89a" + bytes([9, 0, 9, 0, 0x80, 0, 0]) + bytes(6) + b"," + bytes(4)
        + b"\xff\xff\xff\xff\0\x02\x02L\x01\0;", "image/gif",
    ),
    "an animation of webp with a canvas of 2^24": url(
        b"RIFF\x32\0\0\0WEBPVP8X\n\0\0\0\x02\0\0\0\xff\xff\xff\xff\xff\xffANIM\x06\0\0\0" + bytes(20), "image/webp"
    ),
    "rows that are missing": url(png(90, 90, bytes(300))),
    "a profile that inflates": url(png(9, 9)[:33] + chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(40_000_000)))),
    "a jpeg of 65535 x 65535": url(
        picture(1, "JPEG").replace(b"\xff\xc0\0\x11\x08\0\x1e\0\x28", b"\xff\xc0\0\x11\x08\xff\xff\xff\xff"),
        "image/jpeg",
    ),
    "a data URL of a sound": url(picture(), "audio/png"),
}  # fmt: skip


def test_what_is_no_image_is_refused(server: Running) -> None:
    shown = picture(60)
    good = [server.beside(ask, server, url(shown)) for _ in range(3)]
    bad = {name: server.beside(ask, server, each) for name, each in HOSTILE.items()}
    assert {answer.result(120).choices[0].message.content for answer in good} == {expected(shown)[0]}
    for name, each in bad.items():
        error = each.exception(120)
        assert isinstance(error, openai.BadRequestError) and "messages[0]" in str(error), name
        assert "Traceback" not in str(error), name
    # Named as the client has sent it, not as a chat's messages are counted.
    kind, data = HOSTILE["cut off"].split(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": kind[5:], "data": data}}
    turns = [{"role": "user", "content": [image]}]
    error = server.post("/v1/messages", system="a", messages=turns, max_tokens=2).json()["error"]
    assert error["message"].startswith("messages[0]: ")
    turns[0]["content"] = [{"type": "input_image", "image_url": HOSTILE["cut off"]}]
    error = server.post("/v1/responses", instructions="a", input=turns).json()["error"]
    assert error["param"] == "input" and error["message"].startswith("input[0]: ")
    server.assert_idle()


def test_limits_and_placeholders(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="4 images, and a request may have 3"):
        ask(server, *[url(picture())] * 4)
    with pytest.raises(openai.BadRequestError):  # a client's own placeholder has no image
        ask(server, url(picture()), messages=messages(url(picture()), text="<image>"))
    with pytest.raises(openai.BadRequestError):
        ask(server, messages=[{"role": "user", "content": "<image>"}])
    for part in (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ):
        with pytest.raises(openai.BadRequestError, match=r"this model takes no (recordings|videos); leave them out"):
            ask(server, messages=[{"role": "user", "content": [part]}])
    with pytest.raises(openai.BadRequestError, match="a part of type 'file'"):
        ask(server, messages=[{"role": "user", "content": [{"type": "file", "file": {}}]}])


def test_pixels_of_a_request(server: Running) -> None:
    large = [url(picture(size=(70, 60)))]
    assert ask(server, *large * 2).usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="have 12600 pixels, and one may have 10000"):
        ask(server, *large * 3)


def sixteen_bits() -> tuple[bytes, Any]:
    """A PNG, and its pixels in eight bits. Pillow alone takes all that is not nearly black for white."""
    shown = Image.effect_noise((40, 30), 80)
    deep = Image.new("I;16", shown.size)
    deep.putdata([value * 257 for value in shown.tobytes()])
    file = io.BytesIO()
    deep.save(file, "PNG")
    return file.getvalue(), shown.convert("RGB")


def rotated() -> tuple[bytes, Any]:
    """A JPEG whose pixels are to be turned, and what is to be seen."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = picture(3, "JPEG", exif=exif)
    return data, Image.open(io.BytesIO(data)).convert("RGB").transpose(Image.Transpose.ROTATE_270)


def animated() -> tuple[bytes, Any]:
    first, *rest = (Image.effect_noise((40, 30), 80 + index) for index in range(40))
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=rest)
    return file.getvalue(), Image.open(io.BytesIO(file.getvalue())).convert("RGB")


def plainly(kind: str, mode: str) -> tuple[bytes, Any]:
    data = picture(11, kind, mode=mode)
    return data, Image.open(io.BytesIO(data)).convert("RGB")


def test_unusual_images(server: Running) -> None:
    modes = (("JPEG", "CMYK"), ("PNG", "1"), ("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("GIF", "P"))
    for data, shown in (sixteen_bits(), rotated(), animated(), *(plainly(*each) for each in modes)):
        text, _ = answer_of(model(), processor(), f"<|user|><image>{QUESTION}<|assistant|>", images=[shown])
        assert ask(server, url(data)).choices[0].message.content == text


PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that finds no text in a message that is not a list of parts."""


def test_texts_of_templates_that_read_parts() -> None:
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    text, _ = answer_of(model(), processor(), f"<|system|>Be brief.<|user|>{QUESTION}<|assistant|>")
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor(), chat_template=PARTS) as server:
        assert ask(server, messages=asked).choices[0].message.content == text
        assert ask(server, url(picture(8))).choices[0].message.content == expected(picture(8))[0]


def test_texts_on_the_command_line() -> None:
    own = copy.deepcopy(tokenizer())
    for template, in_parts in ((PARTS, True), (TEMPLATE, False)):
        own.chat_template = template
        assert templates.reads_parts(own, None) is in_parts
        ids = generate._encode(own, QUESTION, chat=True, in_parts=in_parts)
        assert own.decode(ids) == f"<|user|>{QUESTION}<|assistant|>"


def test_features_that_do_not_fit_are_the_clients_mistake(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds out when it has encoded them."""

    def fail(*_: Any) -> None:
        raise MediaError("the prompt has 4 placeholders of the image token, but the image has 3 features")

    monkeypatch.setattr(media_store, "_check_counts", fail)
    with pytest.raises(openai.BadRequestError, match="the image has 3 features"):
        ask(server, url(picture(77)))


def test_what_a_processor_returns() -> None:
    """Pixels have the model's dtype, and seconds stay exact."""
    made = {"input_ids": torch.tensor([[3, 4]]), "pixel_values": torch.ones(2, 3), "seconds": torch.tensor([0.99915])}
    ids, inputs = row_of(made, torch.bfloat16)
    assert ids == [3, 4] and inputs["pixel_values"].dtype is torch.bfloat16
    assert inputs["seconds"].tolist() == made["seconds"].tolist()
    with pytest.raises(ValueError, match="patches is list"):
        row_of({**made, "patches": [torch.ones(1)]}, torch.bfloat16)


def test_a_model_without_images() -> None:
    with serving(chat_template=TEMPLATE) as running:
        with pytest.raises(openai.BadRequestError, match="this model takes no images; leave them out"):
            ask(running, url(picture()))
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
            answer = running.http.post(path, files={"file": ("a.wav", b"x")}, data={"model": NAME})
            assert answer.status_code == 501 and "needs a speech model" in answer.text


def test_several_ranks_take_texts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "num_ranks", lambda model: 2)
    running = serving(model=model(), made_tokenizer=tokenizer(), processor=processor())
    with running as server, pytest.raises(openai.BadRequestError, match="this model takes no images"):
        ask(server, url(picture()))
