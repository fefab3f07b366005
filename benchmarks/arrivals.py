"""What a request's arrival costs: `Engine.add_request` on an idle engine, and while a step runs in another thread.

An arrival does not run the model, but it waits while a step of the model holds the interpreter's lock. Example:

    python benchmarks/arrivals.py --requests 10000 --model 135m
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import throughput
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine

OPTIONS = {
    "greedy": {"max_new_tokens": 64, "do_sample": False},
    "sampling": {"max_new_tokens": 64, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "min_new_tokens": 4},
    "beams": {"max_new_tokens": 64, "num_beams": 4},
}


def seconds_each(engine: Engine, prompts: list[list[int]], options: dict[str, object]) -> tuple[list[float], float]:
    """Seconds of each of the calls, with a new config for each, as a server makes one for each request. Python's pauses
    for garbage collection, which take longer the more objects the process has, are not counted."""
    # Prepares these options.
    engine.add_request(prompts[0], GenerationConfig(pad_token_id=0, eos_token_id=1, **options))
    taken, cpu = [], time.thread_time()
    begun = paused = 0.0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal begun, paused
        if phase == "start":
            begun = time.perf_counter()
        else:
            paused += time.perf_counter() - begun

    gc.callbacks.append(collecting)
    for prompt in prompts:
        config = GenerationConfig(pad_token_id=0, eos_token_id=1, **options)
        started, before = time.perf_counter(), paused
        engine.add_request(prompt, config)
        taken.append(time.perf_counter() - started - (paused - before))
    gc.callbacks.remove(collecting)
    cpu = time.thread_time() - cpu  # configs included; less than the sum of `taken` if the machine is busy
    return taken, cpu


def report(name: str, taken: list[float], cpu: float) -> None:
    ordered = sorted(taken)
    print(
        f"{name:32} {sum(taken):7.2f} s in all ({cpu:.2f} s CPU), median {ordered[len(ordered) // 2] * 1e6:7.0f} us, "
        f"99 % {ordered[int(len(ordered) * 0.99)] * 1e6:7.0f} us, slowest {ordered[-1] * 1e3:6.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", choices=throughput.SHAPES, default="tiny", help="shape of the random Llama")
    parser.add_argument("--dtype", default="bfloat16")
    parser.set_defaults(device="cpu", seed=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, model = random.Random(0), throughput.build_model(arguments)
    prompts = [[rng.randrange(2, 512) for _ in range(rng.randint(4, 1000))] for _ in range(arguments.requests)]
    for name, options in OPTIONS.items():
        with Engine(model, CacheConfig(num_blocks=1024)) as engine:
            report(f"{name}, idle", *seconds_each(engine, prompts, options))
    with Engine(model, CacheConfig(num_blocks=1024)) as engine:
        ended = threading.Event()

        def steps() -> None:
            while not ended.is_set():
                engine.step()

        engine.generate([prompts[0]], GenerationConfig(max_new_tokens=2, pad_token_id=0), progress=False)
        stepper = threading.Thread(target=steps)
        stepper.start()
        report("greedy, while steps run", *seconds_each(engine, prompts, OPTIONS["greedy"]))
        ended.set()
        stepper.join()


if __name__ == "__main__":
    main()
