"""Adapters: the CPU time of a token in the engine when every request has an adapter of its own. Measured.

Needs torch, transformers and peft.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.paper.real import SHAPE, model, options_of, prompt_of
from benchmarks.paper.requests import SimRequest

Data = dict[str, Any]
ROWS, PROMPT, OUTPUT = 16, 24, 32
COUNTS = (0, 1, 4, 16)
RANK = 8


def measure(repeats: int) -> Data:
    """Milliseconds of CPU time for each token of ROWS requests that arrive together, on 0, 1, 4 or 16 adapters, one
    after the other in turns; and with all of them in one engine run for each adapter."""
    adapted = with_adapters(max(COUNTS))
    times: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(repeats + 1):
        for count in COUNTS:
            times[count].append(per_token(adapted, count))
    points = [statistics.median(times[count][1:]) for count in COUNTS]  # the first turn warms up
    low, high = ([choose(times[count][1:]) for count in COUNTS] for choose in (min, max))
    series = {"system": "ours", "x": list(COUNTS), "median": points, "low": low, "high": high}
    panel = {
        "title": f"{ROWS} requests, LoRA of rank {RANK}",
        "xlabel": "different adapters",
        "ylabel": "CPU time, ms/token",
        "series": [series],
    }
    sentence = (
        f"{ROWS} requests with {COUNTS[-1]} different adapters take {points[-1] / points[0]:.2g} times the CPU time of "
        f"the same requests without any, with one common adapter {points[1] / points[0]:.2g} times (a random Llama of "
        f"{SHAPE['num_hidden_layers']} layers on this CPU: the sequences of one adapter share a forward)."
    )
    return {"panels": [panel], "checks": [], "sentence": sentence}


def with_adapters(count: int) -> Any:
    """The random Llama with `count` random adapters, named 0, 1, ..."""
    import peft
    import torch

    adapted = None
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for index in range(count):
            if adapted is None:
                adapted = peft.get_peft_model(model(), config, adapter_name=str(index))
            else:
                adapted.add_adapter(str(index), config)
    return adapted.eval()


def per_token(adapted: Any, count: int) -> float:
    import hf_paged

    requests = [SimRequest(f"r{i}", 0.0, PROMPT, OUTPUT) for i in range(ROWS)]
    with hf_paged.Engine(adapted, hf_paged.CacheConfig(num_blocks=256)) as engine:
        for i, request in enumerate(requests):
            adapter = str(i % count) if count else "__base__"
            engine.add_request(prompt_of(request, i), options_of(request, i), adapter=adapter)
        begin = time.process_time()
        while engine.has_unfinished_requests():
            engine.step()
        return 1000 * (time.process_time() - begin) / (ROWS * OUTPUT)
