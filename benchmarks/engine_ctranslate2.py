"""CTranslate2 for engines.py: causal models, Whisper, and translation models.

The model is converted first, and needs no tokenizer: tokens are called by their numbers. On a CPU CTranslate2 computes
in fp32 or with int8 weights; it has no bf16 there.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from engines import Job, Refused, Tokens

START, NO_TIMES = 5, 6
"""With these tokens a decoder prompt of Whisper's begins; CTranslate2 knows them by name."""
TYPES = {"fp32": "float32", "int8": "int8_float32"}


class Numbers:
    """A tokenizer as far as the converter asks for one."""

    def __init__(self, size: int, special: dict[str, int], *, hears: bool) -> None:
        self._size, self._hears = size, hears
        for name, token in special.items():
            setattr(self, f"{name}_token", str(token))
            setattr(self, f"{name}_token_id", token)
        self.special_tokens_map: dict[str, Any] = {}
        self.additional_special_tokens: list[str] = []

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)

    def get_vocab(self) -> dict[str, int]:
        names = (
            {2: "<|endoftext|>", START: "<|startoftranscript|>", NO_TIMES: "<|notimestamps|>"} if self._hears else {}
        )
        return {names.get(token, str(token)): token for token in range(self._size)}


def _loaded(folder: str, form: str, threads: int) -> Any:
    """The model and its configuration."""
    import ctranslate2
    import transformers

    if os.environ.get("HF_PAGED_ISA") == "avx2":
        os.environ["CT2_FORCE_CPU_ISA"] = "AVX2"
    if form not in TYPES:
        raise Refused("on a CPU CTranslate2 has fp32 and int8 only")
    config = transformers.AutoConfig.from_pretrained(folder)
    special = {"bos": 0, "pad": 1, "eos": config.eos_token_id, "unk": 3}
    kind, models = config.model_type, ctranslate2.models
    made = ctranslate2.Translator if config.is_encoder_decoder else ctranslate2.Generator
    made = models.Whisper if kind == "whisper" else made

    class Converter(ctranslate2.converters.TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            return Numbers(config.vocab_size, special, hears=kind == "whisper")

    with tempfile.TemporaryDirectory() as target:
        Converter(folder).convert(target, force=True, quantization=TYPES[form])
        kinds = {"device": "cpu", "compute_type": TYPES[form], "intra_threads": threads, "inter_threads": 1}
        return made(target, **kinds), config


def _texts(rows: list[list[int]]) -> list[list[str]]:
    return [[str(token) for token in row] for row in rows]


class Generator:
    """A causal model. Several prompts are one batch, which ends with its longest answer."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        import ctranslate2

        self._model, _ = _loaded(folder, form, threads)
        self.version, self.extra = ctranslate2.__version__, {}

    def run(self, job: Job) -> Tokens:
        if job.options:
            raise Refused("CTranslate2 has no drafts")
        count = max(job.counts)
        named: dict[str, Any] = {"sampling_topk": 0, "num_hypotheses": job.samples} if job.samples > 1 else {}
        results = self._model.generate_batch(
            _texts(job.prompts), beam_size=job.beams, max_length=count, min_length=count, end_token=[],
            include_prompt_in_result=False, max_batch_size=len(job.prompts), **named,
        )  # fmt: skip
        return [[ids[:count] for ids in each.sequences_ids] for each, count in zip(results, job.counts)]


class Translator:
    """An encoder-decoder model. Whisper hears noise: the prompts only say how many rows there are."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        import ctranslate2

        self._model, self._config = _loaded(folder, form, threads)
        self.version, self.extra = ctranslate2.__version__, {}

    def run(self, job: Job) -> Tokens:
        import ctranslate2
        import numpy

        rows, count = len(job.prompts), job.counts[0]
        if self._config.model_type == "whisper":
            noise = numpy.random.default_rng(0).standard_normal((rows, self._config.num_mel_bins, 3000))
            results = self._model.generate(
                ctranslate2.StorageView.from_array(noise.astype(numpy.float32)), [[START, NO_TIMES]] * rows,
                beam_size=job.beams, max_length=2 * count, suppress_blank=False,
                suppress_tokens=[self._config.eos_token_id],
            )  # fmt: skip
            return [[list(each.sequences_ids[0])] for each in results]
        results = self._model.translate_batch(
            _texts(job.prompts), beam_size=job.beams, length_penalty=1, min_decoding_length=count,
            max_decoding_length=count, max_batch_size=rows, batch_type="examples",
        )  # fmt: skip
        return [[[int(token) for token in each.hypotheses[0] if token.isdecimal()]] for each in results]
