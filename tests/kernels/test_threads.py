"""The threads of the native kernels: who computes is chance, so results and the end of a call must not depend on it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_paged.fused.cpu.ops import LinearWeight, linear
from hf_paged.kernels.native import build as native_build

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not native_build.has_compiler(), reason="threads of the kernels are for Linux"
)

WORKERS, CALLERS, LATE = 1, -1, 2
PATIENCE = 60  # seconds, of which only a test that fails needs more than a few milliseconds


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
    hold(0)


def hold(which: int) -> bool:
    """Stop these threads before they take work. Returns whether calling threads work alone because others were late."""
    library = native_build.library()
    assert library is not None
    return bool(library.hfp_hold_threads(which))


def weight(columns: int = 300, depth: int = 64) -> LinearWeight:
    return LinearWeight(torch.randn(columns, depth), None, columns, depth, False)


def alone(layer: LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(1)
    expected = linear(layer, rows)
    torch.set_num_threads(3)
    return expected


def in_time(layer: LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    results: list[torch.Tensor] = []
    call = threading.Thread(target=lambda: results.append(linear(layer, rows)), daemon=True)
    call.start()
    call.join(PATIENCE)
    assert results, "the call waits"
    return results[0]


@pytest.mark.parametrize("held", [WORKERS, CALLERS], ids=["workers", "callers"])
@pytest.mark.parametrize("rows", [1, 40])
def test_a_call_ends_whoever_does_not_compute(rows: int, held: int) -> None:
    layer, x = weight(), torch.randn(rows, 64)
    expected = alone(layer, x)
    linear(layer, x)
    hold(held)
    for _ in range(5):
        assert torch.equal(in_time(layer, x), expected)


def test_more_threads_than_work() -> None:
    layer, x = weight(columns=40), torch.randn(2, 64)
    expected = alone(layer, x)
    torch.set_num_threads(7)
    assert torch.equal(in_time(layer, x), expected)


def test_calls_of_many_threads_at_once() -> None:
    layer, rows = weight(2000, 256), [torch.randn(20 + index % 7, 256) for index in range(40)]
    expected = [alone(layer, x) for x in rows]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(pool.map(lambda x: linear(layer, x), rows), expected, strict=True):
            assert torch.equal(found, wanted)


def run(code: str, **environment: str) -> str:
    """What a new process prints. `layer`, `x`, `expected` and this module's names are there."""
    start = (
        "import os, torch\nfrom tests.kernels.test_threads import *\n"
        "layer, x = weight(), torch.randn(3, 64)\nexpected = linear(layer, x)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", start + code], env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_after_a_late_thread_the_calling_thread_works_alone() -> None:
    layer, x = weight(), torch.randn(5, 64)
    expected = alone(layer, x)
    assert torch.equal(in_time(layer, x), expected)
    hold(LATE)
    assert torch.equal(in_time(layer, x), expected)
    assert hold(0)  # for at least four times half a second
    assert not hold(0)


@pytest.mark.slow
def test_a_child_of_a_fork_computes_alone() -> None:
    """OpenMP's threads are not in it, and GNU's library would wait for them."""
    code = """
import signal
child = os.fork()
if not child:
    signal.alarm(PATIENCE)  # the thread that has forked is the one that would wait
    os._exit(not torch.equal(linear(layer, x), expected))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(in_time(layer, x), expected))
"""
    assert run(code, OMP_NUM_THREADS="2") == "0 True"
