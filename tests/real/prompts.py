"""Prompts as people send them: questions, code, examples to follow, conversations, documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]

QUESTIONS = [
    "What is the capital of Australia?", "Write a haiku about rain.", "Explain photosynthesis to a child.",
    "List five kinds of cheese.", "Translate to German: The cat sleeps on the warm roof.", "What is 17 times 23?",
    "What is the difference between a list and a tuple in Python?", "Give me a recipe for pancakes.",
]  # fmt: skip
EXAMPLES = {
    "Say whether the review is good or bad.": [
        ("A wonderful film.", "good"), ("I want my money back.", "bad"), ("The actors try their best.", "good"),
    ],
    "Write the plural.": [("mouse", "mice"), ("house", "houses"), ("child", "children")],
    "Write the date as year-month-day.": [("3 May 2021", "2021-05-03"), ("July 4, 1999", "1999-07-04")],
}  # fmt: skip
UNKNOWN = ["Nobody laughed.", "goose"]
CODE = ["cache/allocator.py", "kernels/reference.py"]
PAGES = {"prefixes.md": 700, "quantised.md": 1200, "sizing.md": 2000}
"""Documents, and how many tokens of them are read."""


def prompts(tokenizer: Any) -> dict[str, list[list[int]]]:
    """Token ids by kind, as the checkpoint is asked: with its chat template, if it has one."""

    def chat(*turns: str) -> list[int]:
        if tokenizer.chat_template is None:
            return text("\n".join([*turns, ""]))
        roles = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        ids = tokenizer.apply_chat_template(roles, add_generation_prompt=True, return_dict=True)["input_ids"]
        return list(ids)

    def text(words: str) -> list[int]:
        return list(tokenizer(words)["input_ids"])

    sources = [(HERE / "hf_paged" / name).read_text() for name in CODE]
    documents = {(HERE / "docs" / name).read_text(): size for name, size in PAGES.items()}
    shots = ["".join(f"{given} -> {answer}\n" for given, answer in pairs) for pairs in EXAMPLES.values()]
    return {
        "questions": [chat(each) for each in QUESTIONS],
        "code": [text(source[:size]) for source in sources for size in (500, 1500)],
        "examples": [text(f"{task}\n{shot}{new} ->") for task, shot in zip(EXAMPLES, shots) for new in UNKNOWN],
        "turns": [chat(*QUESTIONS[i : i + 2], QUESTIONS[i + 2]) for i in range(4)],
        "documents": [text(page)[:size] + chat("Summarise this.") for page, size in documents.items()],
    }
