"""Beam search: the beams share the blocks of their common prefix. Prints how many blocks are shared and copied.

python examples/beam_search.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged

CHECKPOINT = Path(__file__).parent / "pydoc-lm-base"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    inputs = tokenizer('The "with" statement is used to wrap the execution of a block', return_tensors="pt")
    ids = inputs["input_ids"]
    options = {"num_beams": 6, "num_return_sequences": 3, "max_new_tokens": 40, "early_stopping": True}

    with hf_paged.record_calls() as records:
        paged = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache_implementation="paged",
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(paged.sequences, plain), "paged beam search must give the tokens of plain beam search"

    for sequence, score in zip(paged.sequences, paged.sequences_scores):
        print(f"{score:.3f}  {tokenizer.decode(sequence, skip_special_tokens=True)!r}")
    record = records[0]
    print(f"blocks at the peak: {record.peak_blocks_used} used, {record.peak_blocks_shared} shared")
    print(f"copied on write: {record.cow_copies} blocks in {record.steps} steps")


if __name__ == "__main__":
    main()
