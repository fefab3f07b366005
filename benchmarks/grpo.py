"""GRPO with TRL by route: time of a step and of its generation, peak memory, and how far rollouts are from the loss.

Routes: plain (`generate`), paged (`generation_kwargs={"cache_implementation": "paged"}`), batching (transformers' own
continuous batching), cb (the same on our engine), engine (`hf_paged.rollouts.attach`) and exact (with `exact=True`).
A process of its own runs each route, so that its peak is its own. The reward is the length of a completion. Needs trl
and datasets, in an environment of their own (torch as in constraints.txt).

    python benchmarks/grpo.py --model FOLDER --prompts 32 --generations 8 --completion-length 16 --only-generation
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from throughput import SHAPES
from trl import GRPOConfig, GRPOTrainer

import hf_paged
from hf_paged.rollouts import attach

CHECKPOINT = str(Path(__file__).parent.parent / "examples" / "pydoc-lm-base")
ROUTES: dict[str, dict[str, Any]] = {
    "plain": {},
    "paged": {"generation_kwargs": {"cache_implementation": "paged"}},
    "batching": {"use_transformers_continuous_batching": True},
    "cb": {"use_transformers_continuous_batching": True},
    "engine": {},
    "exact": {},
}
CLIPPED = 0.2
"""How far the ratio may be from 1: TRL's default epsilon."""


def build_model(name: str, dtype: torch.dtype) -> Any:
    if name not in SHAPES:
        return transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT if name == "pydoc" else name, dtype=dtype)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def build_prompts(tokenizer: Any, count: int, length: int) -> list[str]:
    """Texts of about `length` tokens, each with its own beginning."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(300, len(tokenizer) - 1, (count, length), generator=generator)
    return [tokenizer.decode(tokenizer(tokenizer.decode(row))["input_ids"][:length]) for row in rows]


class Drawn(transformers.LogitsProcessor):
    """Notes the log-probabilities of what `generate` draws, of which TRL reads none."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.note(ids)
        self._scores = scores.float().log_softmax(-1)
        return scores

    def note(self, ids: torch.Tensor) -> None:
        if self._scores is not None:
            self._rows.append(self._scores.gather(1, ids[:, -1:]))

    def rows(self) -> list[list[float]]:
        return torch.cat(self._rows, dim=1).tolist()


class Measured:
    """A trainer, with the time of its generations, and log-probabilities of rollouts less those of the loss."""

    def __init__(self, trainer: Any, *, notes: bool) -> None:
        """notes: whether the model's own `generate` draws, and log-probabilities are to be noted."""
        self._rows: list[list[float]] | None = None
        if notes:
            self._draw, trainer.model.generate = trainer.model.generate, self.draw
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of the process: steadier on a busy machine
        self.tokens: list[int] = []
        self.differences: list[torch.Tensor] = []
        self._sampled: Any = None
        self._turn, self._loss = trainer._generate_single_turn, trainer._compute_loss
        self._logps = trainer._get_per_token_logps_and_entropies
        trainer._generate_single_turn, trainer._compute_loss = self.generate, self.compute
        trainer._get_per_token_logps_and_entropies = self.score

    def draw(self, *args: Any, **kwargs: Any) -> Any:
        noted = Drawn()
        ids = self._draw(*args, logits_processor=[noted], **kwargs)
        noted.note(ids)
        self._rows = noted.rows()
        return ids

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        started, cpu = time.perf_counter(), time.process_time()
        ids, logprobs = self._turn(*args, **kwargs)
        self.seconds.append(time.perf_counter() - started)
        self.cpu_seconds.append(time.process_time() - cpu)
        self.tokens.append(sum(map(len, ids)))
        if self._rows is not None:
            logprobs = [own[: len(row)] for own, row in zip(self._rows, ids)]
        return ids, logprobs

    def compute(self, model: Any, inputs: Any) -> Any:
        self._sampled = inputs.get("sampling_per_token_logps")
        return self._loss(model, inputs)

    def score(self, model: Any, ids: Any, mask: Any, keep: int, *args: Any, **kwargs: Any) -> Any:
        result = self._logps(model, ids, mask, keep, *args, **kwargs)
        if self._sampled is not None:
            own = mask[:, -keep:].bool()
            self.differences.append((self._sampled - result[0].detach().float())[own])
        return result


def run(route: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    if route == "cb":
        hf_paged.install_serving()
    dtype = getattr(torch, args.dtype)
    source = args.model if Path(args.model).is_dir() else CHECKPOINT
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = args.prompts * args.generations
    routed = dict(ROUTES[route])
    if route == "batching":
        # Its default takes half of the memory, and a CPU half a minute to write that.
        blocks = rows * (-(-(args.prompt_length + args.completion_length) // 32) + 1)
        sizes = {"block_size": 32, "num_blocks": blocks, "max_batch_tokens": 2048}
        routed["transformers_continuous_batching_config"] = sizes
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=build_model(args.model, dtype),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(
                output_dir=folder, per_device_train_batch_size=args.batch, steps_per_generation=rows // args.batch,
                gradient_accumulation_steps=rows // args.batch, num_generations=args.generations,
                max_completion_length=args.completion_length, max_steps=args.steps, logging_steps=1, report_to=[],
                bf16=False, use_cpu=True, learning_rate=1e-6, seed=0, save_strategy="no",
                disable_tqdm=True, **routed,
            ),
            train_dataset=Dataset.from_dict(
                {"prompt": build_prompts(tokenizer, args.prompts * args.steps, args.prompt_length)}
            ),
            processing_class=tokenizer,
        )  # fmt: skip
        if route in ("engine", "exact"):
            attach(trainer, exact=route == "exact", scheduler_config={"max_num_seqs": rows})
        measured = Measured(trainer, notes=route in ("plain", "paged") and not args.only_generation)
        cpu = time.process_time()
        if args.only_generation:
            texts = [text for text in trainer.train_dataset["prompt"][: args.prompts] for _ in range(args.generations)]
            for _ in range(args.steps):
                measured.generate(*trainer._tokenize_prompts(texts), args.generations)
        else:
            trainer.train()
        cpu = time.process_time() - cpu
        logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    off = torch.cat(measured.differences) if measured.differences else None
    return {
        "route": route,
        "generation_s": [round(value, 3) for value in measured.seconds],
        "generation_cpu_s": [round(value, 3) for value in measured.cpu_seconds],
        "tokens": measured.tokens,
        "cpu_s": round(cpu, 2),
        "step_s": [round(float(entry["step_time"]), 2) for entry in logged],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "largest_difference": None if off is None else float(off.abs().max()),
        "mean_difference": None if off is None else float(off.abs().mean()),
        "clipped": None if off is None else float(((off.exp() - 1).abs() > CLIPPED).float().mean()),
        "rewards": [entry["reward"] for entry in logged],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pydoc", help=f"pydoc, a folder, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--routes", default="plain,batching,engine,exact")
    parser.add_argument("--prompts", type=int, default=1, help="of a step")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--completion-length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="rows of a training forward")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--only-generation", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="results are added to it, a line for each route")
    args = parser.parse_args()
    routes = args.routes.split(",")
    if len(routes) > 1:
        for route in routes:
            subprocess.run([sys.executable, *sys.argv, "--routes", route], check=True)
        return
    result = run(routes[0], args)
    speed = statistics.median(tokens / seconds for tokens, seconds in zip(result["tokens"], result["generation_s"]))
    print(f"{routes[0]}: {speed:.1f} tokens/s", result, flush=True)
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        with args.json.open("a") as file:
            file.write(json.dumps({"options": options, **result}) + "\n")


if __name__ == "__main__":
    main()
