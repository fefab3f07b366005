"""Paged against plain `generate` on a model that people know: time, K/V memory, and whether the tokens are equal.

    python scripts/real_models.py smollm2
    python benchmarks/real_models.py build/real/smollm2 --out benchmarks/results/real-models.json

Three cases: samples of one prompt, 64 requests that the engine gets at once (plain: one padded batch of them), and
beams. Plain and paged run in turns; the first turn is not counted, and times are medians of the others, in seconds of
the clock. Memory is K/V at its peak; plain's is that of its padded tensors at their final length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import environment
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged

SUBJECTS = ["bread", "rivers", "chess", "the moon", "bees", "paper", "volcanoes", "trains"]
QUESTIONS = [
    "What should a child know about {}?", "Write a haiku about {}.", "Name three facts about {}, one a line.",
    "Why do people like {}?", "Ask me a question about {}.", "Write one sentence about {} in the style of a newspaper.",
    "What is the history of {}? Answer in a few sentences.", "Write a short dialogue of two friends about {}.",
]  # fmt: skip
Run = tuple[list[list[int]], int]  # the new tokens of each text; bytes of K/V


class Cases:
    """The calls of a model, paged or plain. count: new tokens of a text, at most."""

    def __init__(self, model: Any, tokenizer: Any, count: int) -> None:
        self._model, self._tokenizer, self._count = model, tokenizer, count
        self._bytes_per_token = sum(kind.bytes_per_token for kind in hf_paged.check(model).memory)
        chats = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
        self._prompts = [self._encoded(chat) for chat in chats]
        self.all: dict[str, Callable[[bool], Run]] = {
            "8 samples of one prompt": partial(self._call, do_sample=True, num_return_sequences=8),
            "64 requests": self._requests,
            "4 beams": partial(self._call, num_beams=4),
        }

    def _encoded(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        made = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def _config(self, **options: Any) -> GenerationConfig:
        eos = self._model.generation_config.eos_token_id
        asked = {"do_sample": False, **options}
        return GenerationConfig(max_new_tokens=self._count, eos_token_id=eos, pad_token_id=eos, **asked)

    def _call(self, is_paged: bool, **options: Any) -> Run:
        torch.manual_seed(0)
        return self._generated(self._prompts[:1], self._config(**options), is_paged)

    def _generated(self, prompts: list[list[int]], config: GenerationConfig, is_paged: bool) -> Run:
        longest, pad = max(map(len, prompts)), config.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        given: dict[str, Any] = {"cache_implementation": "paged"} if is_paged else {}
        with hf_paged.record_calls() as records:
            made = self._model.generate(ids, attention_mask=mask, generation_config=config, **given)
        rows = made[:, longest:].tolist()
        places = len(prompts) * (config.num_beams or config.num_return_sequences or 1) * (made.shape[1] - 1)
        used = records[0].kv_bytes_used if is_paged else places * self._bytes_per_token
        return [self._until_end(row) for row in rows], used

    def _requests(self, is_paged: bool) -> Run:
        if not is_paged:
            return self._generated(self._prompts, self._config(), is_paged)
        used = 0
        with hf_paged.Engine(self._model, hf_paged.CacheConfig(memory="1GiB")) as engine:
            found = {}
            ids = [engine.add_request(prompt, self._config()) for prompt in self._prompts]
            while engine.has_unfinished_requests():
                found |= {output.request_id: output for output in engine.step() if output.finished}
                used = max(used, engine.stats().kv_bytes_used)
        return [self._until_end(found[each].outputs[0].token_ids) for each in ids], used

    def _until_end(self, row: list[int]) -> list[int]:
        eos = self._model.generation_config.eos_token_id
        return row[: row.index(eos)] if eos in row else list(row)


def measured(run: Callable[[bool], Run], repeats: int) -> dict[str, Any]:
    times: dict[bool, list[float]] = {True: [], False: []}
    made: dict[bool, Run] = {}
    for _ in range(repeats + 1):
        for is_paged in times:
            began = time.perf_counter()
            made[is_paged] = run(is_paged)
            times[is_paged].append(round(time.perf_counter() - began, 3))
    paged, plain = (statistics.median(each[1:]) for each in times.values())
    return {
        "seconds": {"paged": paged, "plain": plain, "all paged": times[True][1:], "all plain": times[False][1:]},
        "times as fast": round(plain / paged, 2),
        "K/V bytes": {"paged": made[True][1], "plain": made[False][1]},
        "new tokens": sum(map(len, made[True][0])),
        "equal texts": f"{sum(a == b for a, b in zip(made[True][0], made[False][0]))} of {len(made[True][0])}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=args.dtype).eval()
    cases = Cases(model, AutoTokenizer.from_pretrained(args.checkpoint), args.tokens)
    found = {}
    for name, run in cases.all.items():
        found[name] = measured(run, args.repeats)
        print(name, json.dumps(found[name]), flush=True)
    if args.out:
        args.out.write_text(
            json.dumps({"dtype": args.dtype, **found, "environment": environment("cpu")}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
