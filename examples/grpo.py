"""GRPO on the shipped checkpoint: the engine draws completions with the trainer's own model, and scores them with a
graph. The log-probabilities of both are equal to the last bit, so that the ratio before each update is exactly 1.

The reward is the share of a completion's words that have at most three letters.

python examples/grpo.py --steps 20
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged

CHECKPOINT = Path(__file__).parent / "pydoc-lm-base"
PROMPTS = ("The with statement", "A list of", "The import statement", "Objects are")


def reward(text: str) -> float:
    words = text.split()
    return sum(len(word) <= 3 for word in words) / max(len(words), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--generations", type=int, default=16, help="completions of each prompt")
    parser.add_argument("--length", type=int, default=32, help="tokens of a completion, at most")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=args.length, num_return_sequences=args.generations, pad_token_id=0
    )
    with hf_paged.Engine(model, {"memory": "64MiB"}, {"batch_invariant": True}) as engine:
        for step in range(args.steps):
            begin = time.perf_counter()
            outputs = engine.generate(prompts, config, progress=False)
            drawn = time.perf_counter() - begin
            rows = [(output.prompt_token_ids, own) for output in outputs for own in output.outputs]
            rewards = torch.tensor([reward(tokenizer.decode(own.token_ids)) for _, own in rows])
            groups = rewards.view(len(prompts), -1)
            advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

            scores = engine.score([prompt for prompt, _ in rows], [own.token_ids for _, own in rows], grad=True)
            engine.sleep()  # the optimizer may have the memory for K/V
            ratios = [torch.exp(new - torch.tensor(own.logprobs)) for new, (_, own) in zip(scores, rows)]
            loss = -torch.stack([(ratio * each).mean() for ratio, each in zip(ratios, advantages)]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            engine.wake()

            difference = max(float((ratio.detach() - 1).abs().max()) for ratio in ratios)
            print(
                f"step {step:2d}  reward {float(rewards.mean()):.3f}  largest |ratio - 1| {difference:g}  "
                f"generation {drawn:.2f} s of {time.perf_counter() - begin:.2f} s"
            )


if __name__ == "__main__":
    main()
