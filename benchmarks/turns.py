"""Measures how long short requests of one API key wait beside another key's flood of long prompts.

    python benchmarks/turns.py build/real/smollm2 --policies fcfs fair --max-num-batched-tokens 64

The flood is one request of 128 prompts of 900 random tokens. Prints the time to the first token of the short requests,
in seconds: median and 99th percentile, on the idle server and beside the flood.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import threading
import time
import urllib.request
from typing import Any

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


def post(key: str, prompt: Any, max_tokens: int) -> float:
    """Return the seconds until the whole answer is there; infinity if that takes more than a minute."""
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    began = time.monotonic()
    request = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60):
            return time.monotonic() - began
    except TimeoutError:
        return math.inf


def short(draw: random.Random) -> float:
    return post("short", [draw.randrange(100, 9000) for _ in range(20)], 1)


def shown(seconds: list[float]) -> str:
    seconds = sorted(seconds)
    return f"{seconds[len(seconds) // 2]:.3f} {seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))]:.3f}"


def measure(arguments: argparse.Namespace, policy: str) -> None:
    draw = random.Random(0)
    command = [
        sys.executable, "-m", "hf_paged.cli", "serve", arguments.checkpoint, "--served-model-name", "m",
        "--api-key", "flood", "--api-key", "short", "--port", str(PORT), "--scheduling-policy", policy,
        "--log-level", "error", "--max-num-batched-tokens", str(arguments.max_num_batched_tokens),
        "--max-num-seqs", str(arguments.max_num_seqs),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{URL}/ready")
                    break
                except OSError:
                    time.sleep(0.5)
            short(draw)
            idle = [short(draw) for _ in range(20)]
            flood = [[draw.randrange(100, 9000) for _ in range(900)] for _ in range(128)]
            # Of its answer nothing is read: the server is stopped before.
            threading.Thread(target=lambda: post("flood", flood, 64), daemon=True).start()
            time.sleep(2.0)  # the flood is queued and runs
            beside, until = [], time.monotonic() + arguments.seconds
            while time.monotonic() < until:
                beside.append(short(draw))
                time.sleep(0.5)
            print(
                f"{policy}: idle {shown(idle)}, beside the flood {shown(beside)} ({len(beside)} requests)", flush=True
            )
        finally:
            server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "fair"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    for policy in arguments.policies:
        measure(arguments, policy)


if __name__ == "__main__":
    main()
