"""How long the simulator takes for many requests. Measured."""

from __future__ import annotations

import resource
import time
from typing import Any

from benchmarks.paper.runs import Run, execute

RATE = 30.0


def measure(count: int) -> dict[str, Any]:
    """`count` Alpaca requests on ours, at the rate of the paper's Figure 13, in this process."""
    begin = time.process_time()
    outcome = execute(Run("OPT-13B", "alpaca", "ours", RATE, 0, count / RATE / 60))
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sentence = (
        f"{outcome['requests']:,} requests of Alpaca at {RATE:g}/s, {outcome['seconds'] / 3600:.1f} hours of OPT-13B, "
        f"are simulated in {seconds / 60:.1f} minutes of CPU time ({outcome['steps']:,} steps; {peak:.1f} GiB at most)."
    )
    return {"requests": outcome["requests"], "cpu_seconds": round(seconds, 1), "checks": [], "sentence": sentence}
