"""Decoding with weights in eight or four bits beside bf16: tokens/s of one or few requests, in turns, on a CPU.

    python benchmarks/int8_weights.py --shape 1b --threads 1 --out benchmarks/results/int8-weights.json

Forms of one model with random weights: bf16; torchao's and optimum-quanto's int8, where they are installed; bf16 with
`prepack(model, dtype="int8")`, and with codes of eight or four bits in groups of 32; torchao's layers left to torch.
Each turn decodes with every form once; the figures are medians of the turns. Seconds are the process's CPU time, so use
one thread.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged.kernels.native import build as native_build

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
    },
    "1b, 4 layers": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def torchao(model: Any) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model, Int8WeightOnlyConfig())  # as transformers does: without the head
    return model


def quanto(model: Any) -> Any:
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8, exclude="lm_head")
    freeze(model)
    return model


def prepacked(model: Any) -> Any:
    hf_paged.prepack(model, dtype="int8")
    return model


def in_groups(dtype: str) -> Callable[[Any], Any]:
    def changed(model: Any) -> Any:
        hf_paged.prepack(model, dtype=dtype, group_size=32)
        return model

    return changed


def left_to_torch(model: Any) -> Any:
    """torchao's layers of another type, which the kernels do not know."""
    from torch import nn

    class Linear(nn.Linear):
        pass

    for layer in torchao(model).modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
    return model


FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bf16": ("torch", lambda model: model),
    "torchao int8": ("torchao", torchao),
    "quanto int8": ("optimum.quanto", quanto),
    "prepack int8": ("torch", prepacked),
    "int8 in groups": ("torch", in_groups("int8")),
    "int4 in groups": ("torch", in_groups("int4")),
    "torchao int8 by torch": ("torchao", left_to_torch),
}


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def speeds(engine: Any, requests: int, prompt: int, tokens: int, vocab: int) -> tuple[float, float]:
    """Tokens a second: of the prompts, in one step, and of the answers."""
    generator = torch.Generator().manual_seed(0)
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    for _ in range(requests):
        engine.add_request(torch.randint(3, vocab, (prompt,), generator=generator).tolist(), config)
    begin = time.process_time()
    engine.step()  # the prompts
    start, steps = time.process_time(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return requests * prompt / (start - begin), requests * steps / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--forms", default=",".join(FORMS), help="some of them, with commas between")
    parser.add_argument("--requests", default="1,8,32", help="requests at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each request")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=False)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    forms = [form for form in options.forms.split(",") if is_installed(FORMS[form][0])]
    engines = {}
    for form in forms:
        model = FORMS[form][1](copy.deepcopy(base))
        engines[form] = hf_paged.Engine(model, {"num_blocks": 256})
    counts = [int(count) for count in options.requests.split(",")]
    found: dict[str, dict[int, list[tuple[float, float]]]] = {form: {count: [] for count in counts} for form in forms}
    for turn in range(-1, options.turns):  # the first one warms up
        for count in counts:
            for form, engine in engines.items():
                both = speeds(engine, count, options.prompt, options.tokens, config.vocab_size)
                if turn >= 0:
                    found[form][count].append(both)
    for engine in engines.values():
        engine.close()

    figures = {
        form: {
            count: {
                "prompt_tokens_per_second": round(statistics.median(prompts), 1),
                "tokens_per_second": round(statistics.median(answers), 2),
                "of_turns": [round(each, 2) for each in answers],
            }
            for count, (prompts, answers) in ((count, zip(*turns)) for count, turns in of_counts.items())
        }
        for form, of_counts in found.items()
    }
    for count in counts:
        first = figures["bf16"][count]["tokens_per_second"] if "bf16" in figures else None
        for form in forms:
            speed, prompts = figures[form][count]["tokens_per_second"], figures[form][count]["prompt_tokens_per_second"]
            ratio = f" {speed / first:5.2f}x" if first else ""
            print(f"{count:3} requests  {form:22} {speed:8.2f} tokens/s{ratio}   prompts {prompts:7.1f}")
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        for package in ("torchao", "optimum-quanto"):
            if is_installed(package.replace("-", ".")):
                versions[package] = importlib.metadata.version(package)
        written = {
            "settings": settings, "shape": SHAPES[options.shape], "versions": versions,
            "machine": platform.processor() or platform.machine(), "kernels": native_build.status(), "forms": figures,
        }  # fmt: skip
        options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
