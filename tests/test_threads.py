"""Threads that run steps, and the end of the program."""

from __future__ import annotations

import _thread
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_paged import threads
from hf_paged.threads import SteppingThread

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of other tests in this process go on."""
    monkeypatch.setattr(threads, "_started", {})


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


def test_one_that_cannot_be_asked_keeps_no_other_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LAST_SECONDS", 0.05)
    monkeypatch.setattr(threads, "_SILENT_SECONDS", 0.05)
    all_steps = [Steps() for _ in range(4)]
    for steps in all_steps:
        steps.thread.start()
    monkeypatch.setattr(all_steps[0].thread, "ask_to_stop", lambda: 1 / 0)
    threads._stop_all()
    for steps in all_steps[1:]:  # the end has stopped waiting for them, perhaps
        steps.thread.join(120)
    assert [steps.thread.is_alive() for steps in all_steps] == [True, False, False, False]
    all_steps[0].wanted.set()


def test_who_interrupts_the_wait_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that a shell starts in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Steps, "end", lambda self: _thread.interrupt_main())
    statuses: list[int] = []
    monkeypatch.setattr(threads.os, "_exit", statuses.append)
    hanging = Steps()
    hanging.thread.start()
    threads._stop_all()
    hanging.wanted.set()
    signal.signal(signal.SIGINT, before)
    assert statuses == [130]


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(threads, "LAST_SECONDS", 0.05)
    monkeypatch.setattr(threads, "_SILENT_SECONDS", 0.02)
    monkeypatch.setattr(Steps, "end", lambda self: None)
    hanging = Steps()
    hanging.thread.start()
    with caplog.at_level("WARNING", "hf_paged"):
        threads._stop_all()
    assert hanging.thread.is_alive() and "ends when the step in progress does, in steps" in caplog.text
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
from hf_paged.serving.worker import EngineWorker
engine = hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=4096))
worker = EngineWorker(engine, max_in_flight=16)
worker._thread.start()
for _ in range(16):
    engine.add_request([1, 2, 3], config)
while engine.stats().steps < 20:
    time.sleep(0.01)
assert engine.has_unfinished_requests()
print("ends", flush=True)
sys.exit(3)
"""


@pytest.mark.slow  # processes that import torch
def test_a_program_may_end_in_the_middle_of_steps() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 3 and done.stdout == "ends\n" and "terminate" not in done.stderr, done.stderr


DRAINING = """
import atexit
import hf_paged

hf_paged.install_serving()
atexit.register(lambda: (manager.stop(), print(*[manager.get_result(key).error for key in keys])))
from transformers import GenerationConfig
from tests import models

config = GenerationConfig(max_new_tokens=140, eos_token_id=-1, pad_token_id=0)
manager = models.build("llama").init_continuous_batching(generation_config=config)
manager.start()
keys = [manager.add_request([1, 2, 3]) for _ in range(8)]
"""


@pytest.mark.slow
def test_exit_functions_of_the_program_may_still_use_its_threads() -> None:
    done = subprocess.run([sys.executable, "-c", DRAINING], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout == " ".join(["None"] * 8) + "\n", done.stderr
