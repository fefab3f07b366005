"""GRPO with TRL: how long generation takes, and what K/V memory it needs, by route.

Routes: plain (`generate`), paged (`generation_kwargs={"cache_implementation": "paged"}`), cb (TRL's
`use_transformers_continuous_batching=True` on our engine), exact (`PagedGRPOTrainer`: the log-probabilities of the loss
are those of the rollout to the last bit) and engine (the same trainer with `exact=False`). The reward is the length of
a completion. Needs trl and datasets, in an environment of their own (torch as in constraints.txt).

    python benchmarks/grpo.py --model pydoc --prompt-length 512 --generations 16 --completion-length 64 --steps 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from throughput import SHAPES
from trl import GRPOConfig, GRPOTrainer

import hf_paged
from hf_paged.bridges.trl import PagedGRPOTrainer

CHECKPOINT = str(Path(__file__).parent.parent / "examples" / "pydoc-lm-base")
ROUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"generation_kwargs": {"cache_implementation": "paged"}},
    "cb": {"use_transformers_continuous_batching": True},
    "exact": {},
    "engine": {},
}


def build_model(name: str) -> Any:
    if name == "pydoc":
        return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def build_prompts(tokenizer: Any, count: int, length: int) -> list[str]:
    """Texts of about `length` tokens, each with its own beginning."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(300, len(tokenizer) - 1, (count, length), generator=generator)
    return [tokenizer.decode(tokenizer(tokenizer.decode(row))["input_ids"][:length]) for row in rows]


class Timed:
    """A method of the model, timed."""

    def __init__(self, model: Any, name: str) -> None:
        self._function = getattr(model, name)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of the process: steadier on a busy machine
        self.shapes: list[Any] = []
        setattr(model, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started, cpu = time.perf_counter(), time.process_time()
        result = self._function(*args, **kwargs)
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu)
        rows = [output.generated_tokens for output in result.values()] if isinstance(result, dict) else result
        rows = rows[0] if isinstance(rows, tuple) else rows  # ids and log-probabilities
        self.shapes.append([len(rows), len(rows[0])])
        return result


def run(route: str, args: argparse.Namespace) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    model = build_model(args.model)
    is_ours = route in ("exact", "engine")
    timed = {} if is_ours else {name: Timed(model, name) for name in ("generate", "generate_batch")}
    with tempfile.TemporaryDirectory() as folder, hf_paged.record_calls() as records:
        trainer = (partial(PagedGRPOTrainer, exact=route == "exact") if is_ours else GRPOTrainer)(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=args.generations,
                num_generations=args.generations,
                max_completion_length=args.completion_length,
                max_steps=args.steps,
                logging_steps=1,
                report_to=[],
                bf16=False,  # the weights are in bf16: autocast would only round in between
                use_cpu=True,
                learning_rate=1e-6,
                seed=0,
                save_strategy="no",
                disable_tqdm=True,
                **ROUTES[route],
            ),
            train_dataset=Dataset.from_dict({"prompt": build_prompts(tokenizer, args.steps, args.prompt_length)}),
            processing_class=tokenizer,
        )
        if is_ours:
            timed = {"generate_batch": Timed(trainer, "_generate_single_turn")}
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    if not is_ours:
        del model.generate, model.generate_batch
    used = next(each for each in timed.values() if each.seconds)
    return {
        "route": route,
        "seconds": [round(value, 3) for value in used.seconds],
        "median_s": statistics.median(used.seconds),
        "median_cpu_s": statistics.median(used.cpu_seconds),
        "step_s": [round(float(entry["step_time"]), 2) for entry in logged],
        "shapes": used.shapes[-1],
        "kv_bytes_used": max((record.kv_bytes_used for record in records), default=None),
        "routes": sorted({f"{record.route}: {record.reason}" for record in records}),
        "rewards": [entry["reward"] for entry in logged],
        "grad_norms": [entry["grad_norm"] for entry in logged],
    }


def kv_of_return_sequences(args: argparse.Namespace) -> int:
    """K/V bytes of one prompt with `num_return_sequences`."""
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(CHECKPOINT), build_model(args.model).eval()
    ids = tokenizer(build_prompts(tokenizer, 1, args.prompt_length), return_tensors="pt")["input_ids"]
    with hf_paged.record_calls() as records:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            num_return_sequences=args.generations,
            max_new_tokens=args.completion_length,
            cache_implementation="paged",
        )
    return records[0].kv_bytes_used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["pydoc", "135m", "tiny"], default="pydoc")
    parser.add_argument("--routes", default="plain,paged,cb")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--completion-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1, help="the routes run in turns; the median run is shown")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hf_paged.install_serving()
    loads = [os.getloadavg()[0]]
    runs: dict[str, list[dict[str, Any]]] = {route: [] for route in args.routes.split(",")}
    for _ in range(args.runs):
        for route in runs:
            runs[route].append(run(route, args))
            loads.append(os.getloadavg()[0])
    best = {route: sorted(each, key=lambda run: run["median_s"])[len(each) // 2] for route, each in runs.items()}
    one = kv_of_return_sequences(args)
    plain = best.get("plain")
    print(
        f"\nload of the machine: {', '.join(f'{load:.2f}' for load in loads)}; K/V of num_return_sequences: {one} bytes"
    )
    for route, result in best.items():
        faster = ""
        if plain is not None:
            ratios = [plain[name] / result[name] for name in ("median_s", "median_cpu_s")]
            faster = f", {ratios[0]:.2f}x as fast as plain, {ratios[1]:.2f}x by CPU time"
        kv = result["kv_bytes_used"]
        memory = "" if kv is None else f", K/V {kv} bytes = {kv / one:.2f}x"
        print(f"{route}: {result['median_s']:.3f} s a step, {result['median_cpu_s']:.3f} s CPU{faster}{memory}")
        print("   whole steps", result["step_s"])
        print("   seconds", result["seconds"], "rows and tokens", result["shapes"])
        print("   rewards", result["rewards"], "gradients", [round(value, 3) for value in result["grad_norms"]])
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        answer = {"options": options, "loads": loads, "kv_of_return_sequences": one, "runs": runs}
        args.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
