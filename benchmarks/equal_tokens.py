"""How many prompts get the greedy tokens of plain `generate`, engine by engine: in fp32, one prompt a call, it judges.

    python scripts/real_models.py smollm2
    python benchmarks/equal_tokens.py build/real/smollm2 --systems engine:fp32,engine:bf16,plain:bf16

Systems and their options are those of peers.py; each gets all prompts at once. Of a text that differs, the first token
that does counts: its place, and the margin there, by which plain's most likely token is ahead of the second. A small
margin is a near tie, which a sum in another order may decide.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import peers  # noqa: E402

SUBJECTS = ["bread", "rivers", "chess", "the moon", "bees", "paper", "volcanoes"]
QUESTIONS = [
    "What should a child know about {}?", "Write a haiku about {}.", "Name three facts about {}, one a line.",
    "Why do people like {}?", "What is the history of {}? Answer in a few sentences.",
]  # fmt: skip


def prompts_of(checkpoint: str) -> list[list[int]]:
    """60 prompts: those of the tests on real models (questions, code, examples, turns, documents), and chats."""
    from transformers import AutoTokenizer

    from tests.real.prompts import prompts

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    found = [ids for every in prompts(tokenizer).values() for ids in every]
    for subject in SUBJECTS:
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question.format(subject)}]
            found.append(
                list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
            )
    return found


class Judge:
    """Plain tokens in fp32, cut after the end of the text, and their margins. They are kept in a file."""

    def __init__(self, args: argparse.Namespace, prompts: list[list[int]]) -> None:
        from transformers import GenerationConfig

        ends = GenerationConfig.from_pretrained(args.checkpoint).eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self._args = args
        self.rows = self._kept()
        if [row["prompt"] for row in self.rows] != prompts:
            peer = peers.Peer("plain", args.checkpoint, "fp32")
            self.rows = [self._row(peer, prompt) for prompt in prompts]
            peer.close()
            args.judge.write_text(json.dumps(self.rows))

    def _kept(self) -> list[dict[str, Any]]:
        return json.loads(self._args.judge.read_text()) if self._args.judge.exists() else []

    def _row(self, peer: peers.Peer, prompt: list[int]) -> dict[str, Any]:
        answer = peer.ask(prompts=[prompt], counts=[self._args.tokens], wants_margins=True)
        tokens = self.until_end(answer["tokens"][0][0])
        return {"prompt": prompt, "tokens": tokens, "margins": answer["margins"][0][: len(tokens)]}

    def until_end(self, tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self._ends), tokens)

    def figures(self, made: list[list[int]]) -> dict[str, Any]:
        """Of one engine's tokens."""
        pairs = [(row, self.until_end(tokens)) for row, tokens in zip(self.rows, made, strict=True)]
        differing = [(row, tokens) for row, tokens in pairs if tokens != row["tokens"]]
        # Up to its end a text agrees with one that is longer, so one of the two has a token more there.
        firsts = [
            next(i for i, (a, b) in enumerate(zip([*row["tokens"], -1], [*tokens, -1])) if a != b)
            for row, tokens in differing
        ]
        margins = [row["margins"][first] for (row, _), first in zip(differing, firsts)]
        return {
            "equal": len(pairs) - len(differing), "prompts": len(pairs),
            "first differing token, median": statistics.median(firsts) if firsts else None,
            "margin there, median": float(f"{statistics.median(margins):.2g}") if margins else None,
            "margin there, largest": float(f"{max(margins):.2g}") if margins else None,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--judge", type=Path, help="where plain's tokens are kept (default: beside the checkpoint)")
    args = parser.parse_args()
    args.judge = args.judge or Path(args.checkpoint) / f"plain-{args.tokens}.json"
    prompts = prompts_of(args.checkpoint)
    judge = Judge(args, prompts)
    for system in args.systems:
        with peers.opened(system, args) as peer:
            if peer is None:
                continue
            answer = peer.ask(prompts=prompts, counts=[args.tokens] * len(prompts))
            figures = judge.figures([outputs[0] for outputs in answer["tokens"]])
            peers.write(args, {"case": "equal tokens", "system": system, **figures}, peer)


if __name__ == "__main__":
    main()
