"""Figure 18a: latency of paged attention over context lengths on this CPU, beside attention over contiguous K/V.

Measured, not simulated; needs torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.paper import published
from benchmarks.paper.reading import READ, check

HEADS, HEAD_DIM = 40, 128  # of OPT-13B; the paper does not name the model
BLOCK_SIZE = 16
CONTEXTS, ROWS = (64, 128, 256), (8, 32)
CALLS = 10


def measure(contexts: tuple[int, ...] = CONTEXTS, rows: tuple[int, ...] = ROWS, calls: int = CALLS) -> dict[str, Any]:
    """Medians of the CPU time of one decode call with one thread, in milliseconds; the two take turns."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    panels, checks = [], []
    try:
        for count in rows:
            title, paper = f"{count} rows", published.FIGURES["18"][f"{count} rows"]
            times = [
                turns({"ours": paged(torch, count, context), "contiguous": contiguous(torch, count, context)}, calls)
                for context in contexts
            ]
            series = [
                {"system": name, "x": list(contexts), "median": [each[name] for each in times]} for name in times[0]
            ]
            panels.append(
                {
                    "title": title,
                    "xlabel": "context",
                    "ticks": list(contexts),
                    "ylabel": "CPU time, ms",
                    "series": series,
                }
            )
            theirs = {x: ours / flat for x, ours, flat in zip(paper["ours"]["x"], *(paper[n]["y"] for n in times[0]))}
            checks += [
                check(
                    f"{title}, context {context}: paged / contiguous",
                    round(theirs[context], 3),
                    each["ours"] / each["contiguous"],
                    unit="x",
                    source=READ,
                )
                for context, each in zip(contexts, times)
            ]
            ratios = [
                {"system": "ratio", "x": list(contexts), "median": [t["ours"] / t["contiguous"] for t in times]}
                | {"paper": {"x": list(theirs), "y": list(theirs.values())}}
            ]
            panels.append(
                {
                    "title": title,
                    "xlabel": "context",
                    "ticks": list(contexts),
                    "ylabel": "paged / contiguous",
                    "series": ratios,
                }
            )
    finally:
        torch.set_num_threads(threads)
    return {"panels": panels, "checks": checks}


def turns(contenders: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    for call in contenders.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(calls):
        for name, call in contenders.items():
            begin = time.process_time_ns()
            call()
            times[name].append((time.process_time_ns() - begin) / 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def contiguous(torch: Any, rows: int, context: int) -> Callable[[], Any]:
    query = torch.randn(rows, HEADS, 1, HEAD_DIM)
    key, value = (torch.randn(rows, HEADS, context, HEAD_DIM) for _ in range(2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def paged(torch: Any, rows: int, context: int, block_size: int = BLOCK_SIZE) -> Callable[[], Any]:
    """Decode over blocks in random order."""
    from hf_paged.kernels import ops
    from hf_paged.kernels.arguments import Attention, LayerKV
    from hf_paged.kernels.metadata import AttentionMetadata

    needed = -(-context // block_size)
    table = torch.randperm(rows * needed, dtype=torch.int32).view(rows, needed)
    caches = [torch.randn(rows * needed, block_size, HEADS, HEAD_DIM) for _ in range(2)]
    query = torch.randn(rows, HEADS, HEAD_DIM)
    last = table[:, (context - 1) // block_size].long() * block_size + (context - 1) % block_size
    metadata = AttentionMetadata(
        block_tables=table,
        seq_lens=torch.full((rows,), context, dtype=torch.int32),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32),
        slot_mapping=last,
        max_query_len=1,
        max_seq_len=context,
    )
    return lambda: ops.paged_attention(query, LayerKV(*caches), metadata, Attention(HEAD_DIM**-0.5))
