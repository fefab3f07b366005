"""A ragged batch through plain and paged `generate`: checks that the tokens are equal, prints time and memory of both.

python examples/generate_batch.py
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

CHECKPOINT = Path(__file__).parent / "pydoc-lm-qa"
SUBJECTS = ["str.capitalize", "str.format", "list", "dict", "object.__init__", "str.join", "object.__call__", "int"]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    # 16 chats of growing length: each quotes more of the documentation before its question.
    quote = "A string is an immutable sequence of characters. " * 12
    chats = [
        [{"role": "user", "content": quote[: 30 * number] + f"What does {SUBJECTS[number % 8]}() do?"}]
        for number in range(16)
    ]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )

    seconds: dict[str, list[float]] = {"plain": [], "paged": []}
    with hf_paged.record_calls() as records:
        for _ in range(4):
            for kind, options in (("plain", {}), ("paged", {"cache_implementation": "paged"})):
                started = time.perf_counter()
                output = model.generate(**inputs, max_new_tokens=48, **options)
                seconds[kind].append(time.perf_counter() - started)
                if kind == "plain":
                    expected = output
                else:
                    assert torch.equal(output, expected), "paged generate must give the tokens of plain generate"

    print(tokenizer.decode(output[0], skip_special_tokens=True))
    plain, paged = (statistics.median(times[1:]) for times in seconds.values())
    print(f"plain {plain:.3f} s, paged {paged:.3f} s: paged / plain = {paged / plain:.2f}")
    record = records[-1]
    print(f"KV memory: {record.kv_bytes_used} bytes used, contiguous tensors take {record.kv_bytes_contiguous}")


if __name__ == "__main__":
    main()
