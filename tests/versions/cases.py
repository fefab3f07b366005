"""Compare with plain `generate` of the transformers that is installed: `python -m tests.versions.cases`.

Six families x 12 sets of options x 3 doors: paged `generate` of a batch with left padding, plain `generate` with a
given PagedKVCache, and the engine, whose requests are compared with plain `generate` of each prompt alone. Then the
route of seven models, and 200 seeds of beam sampling. Prints one JSON record.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import hf_paged
from hf_paged.integration.names import CACHE, ENCODES_MEDIA
from tests import encoder_models, models
from tests.architectures.multimodal import llava
from tests.architectures.tiny import tiny_model
from tests.generation.solo import OPTIONS, config, solo

LENGTHS = (5, 19, 12)
SEEDS = 200


def same_as_plain(model: Any, inputs: dict[str, Any], **paged: Any) -> bool:
    tokens = []
    for given in ({}, paged):
        torch.manual_seed(7)
        tokens.append(model.generate(**inputs, **given))
    return torch.equal(*tokens)


def by_generate(model: Any, options: Any) -> bool:
    inputs = {**models.batch(*LENGTHS), "generation_config": options}
    return same_as_plain(model, inputs, cache_implementation="paged")


def by_cache(model: Any, options: Any) -> bool:
    inputs = {**models.batch(*LENGTHS), "generation_config": options}
    return same_as_plain(model, inputs, **{CACHE: hf_paged.PagedKVCache(model.config)})


def by_engine(model: Any, options: Any) -> bool:
    prompts = models.prompts(*LENGTHS)
    with hf_paged.Engine(model, {"num_blocks": 64}) as engine:
        outputs = engine.generate([prompt.tolist() for prompt in prompts], options)
    return all(
        [list(each.token_ids) for each in output.outputs] == solo(model, prompt, options)[0]
        for prompt, output in zip(prompts, outputs)
    )


DOORS: dict[str, Callable[[Any, Any], bool]] = {"generate": by_generate, "cache": by_cache, "engine": by_engine}


def option_cases() -> Iterator[tuple[str, bool | str]]:
    for family in models.FAMILIES:
        for name in OPTIONS:
            for door, same in DOORS.items():
                try:
                    found: bool | str = same(models.shared(family), config(name))
                except Exception as error:  # a case that fails must not hide the others
                    found = f"{type(error).__name__}: {error}"
                yield f"{family}, {name}, {door}", found


def _text(model: Any) -> dict[str, Any]:
    return {**models.batch(*LENGTHS, padding=0), "max_new_tokens": 8, "do_sample": False}


def _picture(model: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    size = model.config.vision_config.image_size
    ids = torch.tensor([[4, 5, *[model.config.image_token_id] * 16, 6, 7]])
    pixels = torch.randn(1, 3, size, size, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}


def _encoded(name: str) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {**encoder_models.inputs(name), "max_new_tokens": 8, "do_sample": False}


ROUTES: dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]] = {
    **{family: (lambda family=family: models.shared(family), _text) for family in ("llama", "gemma3", "qwen3")},
    "hybrid (lfm2)": (lambda: tiny_model("lfm2"), _text), "T5": (lambda: encoder_models.model("t5"), _encoded("t5")),
    "Whisper": (lambda: encoder_models.model("whisper"), _encoded("whisper")), "LLaVA": (llava, _picture),
}  # fmt: skip


def routes() -> dict[str, str]:
    """Return the route of a paged call of each model, or what is wrong with it."""
    found = {}
    for name, (make, inputs_of) in ROUTES.items():
        try:
            model = make()
            with hf_paged.record_calls() as records:
                same = same_as_plain(model, inputs_of(model), cache_implementation="paged")
            record = records[-1]
            found[name] = "other tokens" if not same else record.route + (f": {record.reason}" if record.reason else "")
        except Exception as error:  # as above
            found[name] = f"{type(error).__name__}: {error}"
    return found


def beam_sampling(seeds: int) -> dict[str, int]:
    """Return how many seeds give plain `generate`'s tokens in paged `generate` and in the engine."""
    model, prompt = models.shared("llama"), models.prompts(9)[0]
    equal = {"generate": 0, "engine": 0}
    with hf_paged.Engine(model, {"num_blocks": 64}) as engine:
        for seed in range(seeds):
            options = config("beam sampling", eos_token_id=list(range(3, 20)), seed=seed)
            wanted = solo(model, prompt, options)[0]
            (output,) = engine.generate([prompt.tolist()], options)
            equal["engine"] += [list(each.token_ids) for each in output.outputs] == wanted
            equal["generate"] += solo(model, prompt, options, cache_implementation="paged")[0] == wanted
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of beam sampling")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    cases = dict(option_cases())
    wrong = {name: found for name, found in cases.items() if found is not True}
    found = routes()
    seeds = beam_sampling(arguments.seeds)
    record = {
        "transformers": transformers.__version__, "torch": torch.__version__, "python": sys.version.split()[0],
        "identical": len(cases) - len(wrong), "cases": len(cases), "wrong": wrong, "routes": found,
        "beam sampling": seeds, "seeds": arguments.seeds,
    }  # fmt: skip
    print(json.dumps(record))
    expected = dict.fromkeys(found, "packed")
    if not ENCODES_MEDIA:  # each forward encodes its own images
        expected["LLaVA"] = "hf_loop: the model is given pixel_values"
    passed = not wrong and found == expected and set(seeds.values()) == {arguments.seeds}
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
