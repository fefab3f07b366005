"""The words of docs/paper.md."""

from __future__ import annotations

INTRODUCTION = """# The paper, reproduced

`hf-paged bench paper` makes this page and its plots from a checkout: the evaluation of PagedAttention (SOSP'23, section
6), simulated. It needs the extra `paper` and no GPU. `--quick` makes a rough version. A stopped call continues.

Only memory management differs between the systems:

- *ours*: hf_paged's own scheduler, block manager and prefix cache;
- *Orca (Max)*, *(Pow2)*, *(Oracle)*: a contiguous reservation for each sequence, of 2,048 tokens, of the output rounded
  up to a power of two, of the exact output; buddy allocator; batches change in every step;
- *FasterTransformer*: static padded batches, as large as memory allows at 2,048 tokens for each sequence.

A simulator drives them on a virtual clock. Its steps equal the engine's one by one: batches, blocks, copies and
preemptions (`tests/paper/test_against_engine.py`). What a step takes follows from published A100 figures and a few
assumptions, of which none was fitted to a result of the paper ([below](#assumptions)).

A system *sustains* a rate while its mean normalized latency (seconds for each output token) is at most {factor:g} times
ours without load. *At least* means that ours still sustains the highest rate that was simulated.
"""

FIGURES = dict.fromkeys(("2", "12", "13", "14", "15", "16", "17", "18", "18b", "19"), "")
BEYOND = "Simulated in the same way, but for the adapters, which were measured."
ASSUMPTIONS = ""
PUBLISHED = ""
ASSUMED = "{assumed}"
LENGTHS = "{sigmas} {translation} {beta} {seeds} {last} {share}"
REAL = ""
FIT = ""
