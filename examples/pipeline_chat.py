"""A text-generation pipeline with a paged cache: `hf_paged.install()` and one argument are new.

python examples/pipeline_chat.py "What does str.join() do?"
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import pipeline

import hf_paged

CHECKPOINT = Path(__file__).parent / "pydoc-lm-qa"


def main() -> None:
    hf_paged.install()  # the import does it too, but linters remove an import that is not used
    questions = sys.argv[1:] or ["What does str.capitalize() do?", "What is the grammar of assert_stmt?"]
    chat = pipeline("text-generation", model=str(CHECKPOINT))
    chats = [[{"role": "user", "content": question}] for question in questions]
    for answer in chat(chats, max_new_tokens=80, cache_implementation="paged"):
        question, reply = answer[0]["generated_text"]
        print(f"{question['role']}: {question['content']}\n{reply['role']}: {reply['content']}\n")


if __name__ == "__main__":
    main()
