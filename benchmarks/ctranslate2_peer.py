"""CTranslate2 as a process beside a benchmark, with jobs and answers of `vllm_peer`.

`Vllm` there starts this file with the interpreter of an environment that has `ctranslate2`, `torch` and `transformers`.
The model is converted first, in the dtype of the job, and needs no tokenizer: tokens are called by their numbers. On a
CPU CTranslate2 computes in fp32 or with int8 weights; it has no bf16 there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

START, NO_TIMES = 5, 6
"""With these tokens a decoder prompt of Whisper's begins; CTranslate2 knows them by name."""


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


def load(job: dict[str, Any]) -> Any:
    import ctranslate2
    import transformers

    config = transformers.AutoConfig.from_pretrained(job["model"])
    special = {"bos": 0, "pad": 1, "eos": config.eos_token_id, "unk": 3}

    class Converter(ctranslate2.converters.TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Any:
            return Numbers(config.vocab_size, special, hears=config.model_type == "whisper")

    folder = tempfile.mkdtemp()
    Converter(job["model"]).convert(folder, force=True, quantization=job["dtype"])
    made = ctranslate2.models.Whisper if config.model_type == "whisper" else ctranslate2.Translator
    threads = int(os.environ["OMP_NUM_THREADS"])
    return made(folder, device="cpu", compute_type=job["dtype"], intra_threads=threads, inter_threads=1), config


def run(loaded: Any, job: dict[str, Any]) -> list[int]:
    """The number of tokens of each row's best output. params: of all rows, the first one's."""
    import ctranslate2
    import numpy

    model, config = loaded
    params, rows = job["params"][0], len(job["prompts"])
    count = params["new_tokens"]
    if config.model_type == "whisper":
        features = numpy.random.default_rng(0).standard_normal((rows, config.num_mel_bins, 3000)).astype(numpy.float32)
        results = model.generate(
            ctranslate2.StorageView.from_array(features), [[START, NO_TIMES]] * rows, beam_size=params["beams"],
            max_length=2 * count, suppress_blank=False, suppress_tokens=[config.eos_token_id],
        )  # fmt: skip
        return [len(result.sequences_ids[0]) for result in results]
    results = model.translate_batch(
        [[str(token) for token in prompt] for prompt in job["prompts"]], beam_size=params["beams"], length_penalty=1,
        min_decoding_length=count, max_decoding_length=count, max_batch_size=rows, batch_type="examples",
    )  # fmt: skip
    return [len(result.hypotheses[0]) for result in results]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output

    import ctranslate2

    loaded = None
    for line in sys.stdin:
        job, begin = json.loads(line), time.perf_counter()
        if loaded is None:
            loaded = load(job)
            answer: dict[str, Any] = {"version": ctranslate2.__version__}
        else:
            answer = {"tokens": run(loaded, job)}
        answers.write(json.dumps({"seconds": time.perf_counter() - begin, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
