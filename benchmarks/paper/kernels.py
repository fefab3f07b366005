"""Figure 18: latency of paged attention over block sizes on this CPU, beside attention over contiguous K/V.

Measured, not simulated; needs torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.paper.reading import check

HEADS, KV_HEADS, HEAD_DIM = 8, 8, 64
SIZES = (8, 16, 32, 64, 128, 256)


def measure(contexts: tuple[int, ...] = (128, 512), rows: int = 8, calls: int = 30) -> dict[str, Any]:
    """Medians of the CPU time of one decode call with one thread, in microseconds; the contenders take turns."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        panels = []
        for context in contexts:
            contenders = {"contiguous (torch SDPA)": contiguous(torch, rows, context)}
            contenders |= {str(size): paged(torch, rows, context, size) for size in SIZES}
            times = turns(contenders, calls)
            flat = times.pop("contiguous (torch SDPA)")
            series = [
                {"system": "ours", "x": list(SIZES), "median": [times[str(size)] for size in SIZES]},
                {"system": "contiguous (torch SDPA)", "x": list(SIZES), "median": [flat] * len(SIZES)},
            ]
            title = f"{rows} rows, context {context}"
            panels.append({"title": title, "xlabel": "block size", "ylabel": "CPU time, us", "series": series})
    finally:
        torch.set_num_threads(threads)
    checks = []
    for panel in panels:
        value = panel["series"][0]["median"][1] / panel["series"][1]["median"][1]
        what = f"{panel['title']}, block size 16: paged / contiguous"
        checks.append(check(what, "1.20 to 1.26", value, unit="x", within=(1.2, 1.26)))
    return {"panels": panels, "log_x": True, "checks": checks}


def turns(contenders: dict[str, Callable[[], Any]], calls: int) -> dict[str, float]:
    for call in contenders.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(calls):
        for name, call in contenders.items():
            begin = time.process_time_ns()
            for _ in range(5):
                call()
            times[name].append((time.process_time_ns() - begin) / 5000)
    return {name: statistics.median(values) for name, values in times.items()}


def contiguous(torch: Any, rows: int, context: int) -> Callable[[], Any]:
    query = torch.randn(rows, HEADS, 1, HEAD_DIM)
    key, value = (torch.randn(rows, KV_HEADS, context, HEAD_DIM) for _ in range(2))
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)


def paged(torch: Any, rows: int, context: int, block_size: int) -> Callable[[], Any]:
    """Decode over blocks in random order."""
    from hf_paged.kernels import ops
    from hf_paged.kernels.metadata import AttentionMetadata

    needed = -(-context // block_size)
    table = torch.randperm(rows * needed, dtype=torch.int32).view(rows, needed)
    caches = [torch.randn(rows * needed, block_size, KV_HEADS, HEAD_DIM) for _ in range(2)]
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
    return lambda: ops.paged_attention(query, *caches, metadata, scale=HEAD_DIM**-0.5)
