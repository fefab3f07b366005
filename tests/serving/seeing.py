"""Tiny models that take images, sound or videos, with processors for them, and files to send."""

from __future__ import annotations

import base64
import io
import wave
import zlib
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer

from tests.architectures.media import CASES, config_of
from tests.architectures.tiny import redraw, tiny_config
from tests.serving.harness import QA

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = "What is this?"
RATE = 16_000


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(QA)
    tokens = ["<image>", "<audio>", "<video>"]
    made.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
    return made


def token(kind: str) -> int:
    return int(tokenizer().convert_tokens_to_ids(f"<{kind}>"))


def ended(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model


@cache
def processor() -> Any:
    size = {"height": 16, "width": 16}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    return transformers.LlavaProcessor(
        images, tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )  # fmt: skip


@cache
def model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = transformers.LlamaConfig(
            vocab_size=len(tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
            pad_token_id=0,
        )  # fmt: skip
        vision = transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16,
            patch_size=8,
        )  # fmt: skip
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_id=token("image"))
        return ended(transformers.LlavaForConditionalGeneration(config).eval())


def picture(
    shade: int = 0, kind: str = "PNG", size: tuple[int, int] = (40, 30), mode: str = "RGB", **more: Any
) -> bytes:
    made = Image.new("RGB", size)
    made.putdata([((7 * place + shade) % 256, (place * place) % 256, shade) for place in range(size[0] * size[1])])
    file = io.BytesIO()
    made.convert(mode).save(file, kind, **more)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def messages(*urls: str, text: str = QUESTION) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": each, "detail": "auto"}} for each in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def expected(*pictures: bytes, text: str = QUESTION, new: int = 12) -> tuple[str, int]:
    """The answer of `generate`, and the tokens of the prompt."""
    return answer_of(
        model(), processor(), f"<|user|>{'<image>' * len(pictures)}{text}<|assistant|>", new,
        images=[Image.open(io.BytesIO(data)).convert("RGB") for data in pictures],
    )  # fmt: skip


def answer_of(model: Any, processor: Any, prompt: str, new: int = 12, **media: Any) -> tuple[str, int]:
    inputs = processor(text=[prompt], return_tensors="pt", add_special_tokens=False, **media)
    tokens = model.generate(**inputs, max_new_tokens=new, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer().decode(tokens, skip_special_tokens=True), inputs["input_ids"].shape[1]


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    head = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@cache
def hearing_processor() -> Any:
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    return transformers.AudioFlamingo3Processor(extractor, tokenizer(), chat_template=TEMPLATE, audio_token="<audio>")


@cache
def hearing_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        config = tiny_config("audioflamingo3")
        config.audio_token_id, config.text_config.vocab_size = token("audio"), len(tokenizer())
        config.audio_config.num_mel_bins, config.audio_config.max_source_positions = 80, 100
        made = transformers.AudioFlamingo3ForConditionalGeneration(config).float().eval()
        redraw(made, 0)
        made.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=2)
        return made


def noise(seconds: float, rate: int = RATE) -> Any:
    return np.random.default_rng(1).integers(-9000, 9000, int(seconds * rate)).astype(np.int16)


def sound(seconds: float = 1.0, rate: int = RATE) -> bytes:
    """A WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(noise(seconds, rate).tobytes())
    return file.getvalue()


def spoken(data: bytes, kind: str = "wav", text: str = QUESTION) -> list[Any]:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


class FrameChooser:
    """As transformers' video processors, which need torchvision: two frames, the first and the last."""

    do_sample_frames = True

    def sample_frames(self, metadata: Any, **_: Any) -> Any:
        return np.array([0, metadata.total_num_frames - 1])


class VideoProcessor:
    """Puts frames of 32 x 32 pixels and a placeholder for each of their features into a prompt."""

    chat_template = TEMPLATE
    image_processor = None
    tokenizer = property(lambda self: tokenizer())
    video_processor = FrameChooser()

    def __call__(self, text: Any, videos: Any, videos_kwargs: Any = None, **_: Any) -> Any:
        given = list(videos_kwargs["video_metadata"])
        assert not videos_kwargs["do_sample_frames"] and len(given) == len(videos)
        values = torch.tensor(np.stack(videos)).permute(0, 1, 4, 2, 3).float() / 128 - 1
        whole = text[0].replace("<video>", "<video>" * 17 * values.shape[1])
        ids = tokenizer()([whole], return_tensors="pt", add_special_tokens=False)
        return {**ids, "pixel_values_videos": values}


@cache
def watching_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        case = CASES["video_llava-video"]
        config = config_of(case)
        config.video_token_id = config.video_token_index = token("video")
        config.image_token_id = config.image_token_index = token("image")
        config.text_config.vocab_size = len(tokenizer())
        made = transformers.VideoLlavaForConditionalGeneration(config).float().eval()
        redraw(made, 0)
        made.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=2)
        return made


def video(frames: int = 10, codec: str = "libx264", container: str = "mp4", size: int = 32) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as written:
        stream = written.add_stream(codec, rate=5)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(frames):
            shown = np.full((size, size, 3), 20 * index % 256, np.uint8)
            shown[: size // 2, : 2 * index + 2] = 250 - 9 * index
            written.mux(stream.encode(av.VideoFrame.from_ndarray(shown, format="rgb24")))
        written.mux(stream.encode())
    return file.getvalue()


def frames_of(data: bytes) -> Any:
    """All frames: uint8 [frames, height, width, 3]."""
    import av

    with av.open(io.BytesIO(data)) as opened:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])
