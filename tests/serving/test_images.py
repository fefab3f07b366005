"""Images in messages: OpenAI's client, answers like those of `generate`, and images that must be refused."""

from __future__ import annotations

import base64
import io
import zlib
from functools import cache
from typing import Any

import openai
import pytest
import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from hf_paged.serving.settings import Limits
from tests.serving.harness import NAME, QA, Running, serving

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(QA)
    made.add_special_tokens({"additional_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    return made


@cache
def processor() -> Any:
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    return LlavaProcessor(
        images, tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip


@cache
def model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = LlamaConfig(
            vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )  # fmt: skip
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        )
        image = tokenizer().convert_tokens_to_ids("<image>")
        made = LlavaForConditionalGeneration(
            LlavaConfig(text_config=text, vision_config=vision, image_token_id=image)
        ).eval()
        for parameter in made.parameters():
            parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = 2, 0
    return made


def picture(shade: int = 0, kind: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    made = Image.new("RGB", size)
    made.putdata([((7 * place + shade) % 256, (place * place) % 256, shade) for place in range(size[0] * size[1])])
    file = io.BytesIO()
    made.save(file, kind)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def messages(*urls: str, text: str = "What is this?") -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": each, "detail": "auto"}} for each in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def expected(*pictures: bytes, text: str = "What is this?", new: int = 12) -> tuple[str, int]:
    """The answer of `generate`, and the tokens of the prompt."""
    images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
    prompt = f"<|user|>{'<image>' * len(images)}{text}<|assistant|>"
    inputs = processor()(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
    tokens = model().generate(**inputs, max_new_tokens=new, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer().decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[1]


@pytest.fixture(scope="module")
def server() -> Any:
    limits = Limits(images=3, image_pixels=10_000)
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor(), limits=limits) as running:
        yield running


def ask(server: Running, *urls: str, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 12, "messages": messages(*urls), **options}
    return server.client.chat.completions.create(**fields)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_openais_client_sends_an_image(kind: str, server: Running) -> None:
    data = picture(5, kind)
    answer = ask(server, url(data, kind.lower()))
    text, num_tokens = expected(data)
    assert answer.choices[0].message.content == text
    assert answer.usage.prompt_tokens == num_tokens


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


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    head = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
EXIF = b"II*\0\x08\0\0\0\x02\0" + b"\x12\1\3\0\1\0\0\0\6\0\0\0" + b"\0\1\2\0\4\0\0\0abc\0" + bytes(4)
"""Turned by 90 degrees, with a width that is a text."""
HOSTILE = {
    "metadata of a wrong type": url(picture()[:33] + chunk(b"eXIf", EXIF) + picture()[33:]),
    "a header of 10^5 x 10^5": url(png(100_000, 100_000)),
    "a header of 2^31 x 1": url(png(2**31 - 1, 1)),
    "no size": url(png(0, 0)),
    "too many pixels": url(picture(1, size=(101, 100))),
    "a text that inflates": url(png(9, 9)[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000)))),
    "cut off": url(picture()[:200]),
    "head alone": url(picture()[:20]),
    "nothing": url(b""),
    "zeros": url(bytes(1000)),
    "svg": url(SVG, "svg+xml"),
    "svg as png": url(SVG),
    "html": url(b"<html><script>alert(1)</script></html>"),
    "pdf": url(b"%PDF-1.4\n1 0 obj"),
    "tiff": url(b"II*\x00" + bytes(100), "tiff"),
    "eps": url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", "eps"),
    "bmp": url(b"BM" + bytes(200), "bmp"),
    "no base64": "data:image/png;base64,!!!!",
    "base64 cut off": "data:image/png;base64,iVBORw0KGgo",
    "no base64 at all": "data:image/png,abc",
    "text": "data:text/plain;base64,aGVsbG8=",
    "http": "http://127.0.0.1:1/x.png",
    "https": "https://example.com/x.png",
    "metadata of a cloud": "http://169.254.169.254/latest/meta-data/",
    "file": "file:///etc/passwd",
    "ftp": "ftp://127.0.0.1/x.png",
    "path": "/etc/passwd",
    "empty": "",
    "no ascii": "data:image/png;base64,日本",
    "gopher": "gopher://127.0.0.1/x",
    "data of nothing": "data:",
    "a redirect to a private address": "http://127.0.0.1:1/redirect?to=http://10.0.0.1/x.png",
    "a name that resolves here": "http://localhost:1/x.png",
    "an address of IPv6": "http://[::1]:1/x.png",
    "a slow host": "http://10.255.255.1/x.png",
    "another scheme's case": "HTTP://127.0.0.1:1/x.png",
    "a password": "https://user:password@127.0.0.1/x.png",
    "a blob": "blob:http://127.0.0.1/1",
    "a script": "javascript:alert(1)",
    "an ico": url(b"\0\0\1\0\1\0" + bytes(100), "x-icon"),
    "a video": url(b"\0\0\0\x18ftypmp42" + bytes(100), "png"),
    "an image of two kinds": url(picture()[:60] + picture(1, "JPEG")[:60]),
    "a jpeg that is cut off": url(picture(1, "JPEG")[:100], "jpeg"),
    "a gif's head": url(b"GIF89a" + bytes([255] * 4), "gif"),
    "a webp's head": url(b"RIFF\xff\xff\xff\xffWEBPVP8 " + bytes(20), "webp"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_image_is_refused(case: str, server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, HOSTILE[case])
    assert "messages[0]" in str(caught.value) and "Traceback" not in str(caught.value)


def test_the_rest_goes_on_beside_them(server: Running) -> None:
    data = picture(60)
    good = [server.beside(ask, server, url(data)) for _ in range(3)]
    bad = [server.beside(ask, server, each) for each in HOSTILE.values()]
    assert {answer.result(120).choices[0].message.content for answer in good} == {expected(data)[0]}
    assert all(isinstance(each.exception(120), openai.BadRequestError) for each in bad)
    server.assert_idle()


def test_limits_and_placeholders(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="4 images, and a request may have 3"):
        ask(server, *[url(picture())] * 4)
    with pytest.raises(openai.BadRequestError):  # a client's own placeholder has no image
        ask(server, url(picture()), messages=messages(url(picture()), text="<image>"))
    with pytest.raises(openai.BadRequestError):
        ask(server, messages=[{"role": "user", "content": "<image>"}])
    with pytest.raises(openai.BadRequestError, match="a part of type 'input_audio'"):
        ask(server, messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])


def test_tokenize(server: Running) -> None:
    data = picture(8)
    answer = server.post("/tokenize", model=NAME, messages=messages(url(data)), add_special_tokens=False)
    assert answer.json()["count"] == expected(data)[1]


def test_a_model_without_images(any_server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="this model takes no images; leave them out"):
        ask(any_server, url(picture()))


@pytest.fixture
def any_server() -> Any:
    with serving(chat_template=TEMPLATE) as running:
        yield running
