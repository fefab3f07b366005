"""Threads that run steps, and the end of the program."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_paged import threads
from hf_paged.threads import SteppingThread

ROOT = Path(__file__).parent.parent


class Steps:
    def __init__(self) -> None:
        self.wanted, self.begun = threading.Event(), threading.Event()
        self.thread = SteppingThread(self.run, "steps", self.end)

    def run(self) -> None:
        self.begun.set()
        self.wanted.wait()

    def end(self) -> None:
        self.wanted.set()


def test_the_end_asks_all_that_run_and_waits_for_them() -> None:
    steps, idle = Steps(), Steps()
    steps.thread.start()
    steps.begun.wait()
    threads._stop_all()
    assert not steps.thread.is_alive() and not idle.wanted.is_set()


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LAST_SECONDS", 0.05)
    monkeypatch.setattr(Steps, "end", lambda self: None)
    hanging = Steps()
    hanging.thread.start()
    threads._stop_all()
    assert hanging.thread.is_alive()
    hanging.wanted.set()


PROGRAM = """
import sys, time
import torch
from transformers import GenerationConfig
import hf_paged
from tests import models

torch.set_num_threads(1)
model = models.build("llama", max_position_embeddings=20_000)
config = GenerationConfig(max_new_tokens=10_000, eos_token_id=-1, pad_token_id=0)
if sys.argv[1] == "manager":
    hf_paged.install_serving()
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    for _ in range(16):
        manager.add_request([1, 2, 3])
    engine = manager._engine
else:
    from hf_paged.serving.worker import EngineWorker
    engine = hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=4096))
    worker = EngineWorker(engine, max_in_flight=16)
    worker._thread.start()
    for _ in range(16):
        engine.add_request([1, 2, 3], config)
time.sleep(1.0)
assert engine.has_unfinished_requests()
print("ends", flush=True)
sys.exit(3)
"""


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("way", ["manager", "worker"])
def test_a_program_may_end_in_the_middle_of_steps(way: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and done.stdout == "ends\n" and "terminate" not in done.stderr, done.stderr
