"""Tensor parallelism over processes with gloo: the tokens of one rank, and an end for all when one rank fails."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.generation.solo import config, solo
from tests.parallel import programs
from tests.parallel.ranks import Ranks, run

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("HF_PAGED_KILLS", "3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("llama"))
    programs.save("llama", folder)
    return folder


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])  # windows, experts
def test_two_ranks_give_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    programs.save(family, folder)
    model = programs.load(folder)
    names = [*programs.WAYS, "swap", "recompute"]
    with programs.small_engine(model, "swap") as engine:
        tokens = programs.serve(engine)
    wanted = [(name, programs.generate(model, name) if name in programs.WAYS else tokens) for name in names]
    driver, follower = run(2, programs.all_doors, folder)
    assert driver == wanted
    assert follower == wanted[:3]


def test_each_rank_has_its_share(llama: str) -> None:
    model = programs.load(llama)
    whole = sum(parameter.numel() for parameter in model.parameters())
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    driver, follower = run(2, programs.shares, llama)
    assert driver == follower
    shares = dict(driver)
    assert shares["weights"] == (whole - norms) // 2 + norms
    # 2 layers, K and V, one KV head of two, of 8 values of 4 bytes; rank 1 has 3 MiB for them.
    assert shares["blocks"] == 3 * 2**20 // (16 * 2 * 2 * 1 * 8 * 4)
    assert shares["bytes"] == 3 * 2**20


def test_weights_may_change_in_a_pause(llama: str) -> None:
    prompt, model = models.prompts(20)[0], programs.load(llama)
    wanted = [solo(model, prompt, config("greedy"))[0]]
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(0.5)
    wanted.append(solo(model, prompt, config("greedy"))[0])
    driver, _ = run(2, programs.weights_of_all, llama)
    assert driver == wanted and wanted[0] != wanted[1]


@pytest.mark.parametrize("where", [0, 1])
def test_a_forward_that_raises_ends_the_engine_everywhere(where: int, llama: str) -> None:
    with closing(Ranks(2, programs.failing_forward, llama, where)) as ranks:
        assert ranks.read(ranks.are_gone, 120)
        ranks.read(ranks.are_silent, 120)
        cause = f"rank {where}: MemoryError: no memory for this layer"
        assert ranks.said(0)[-1] == f"RankError: {cause}; this engine has ended on all ranks"
        errors: list[Any] = ranks.said(0)[0]
        assert all("no memory for this layer" in error for error in errors)
        if where == 1:
            assert ranks.said(1) == ["MemoryError: no memory for this layer"]
        else:  # it learns the reason, or ends its process, in which it cannot leave the forward
            assert ranks.said(1) == [f"RankError: {cause}; this engine has ended on all ranks"] or ranks.codes()[1] == 1


def test_nothing_is_unpickled(llama: str) -> None:
    with programs.small_engine(programs.load(llama), "swap") as engine:
        wanted = programs.serve(engine)
    assert run(2, programs.without_pickle, llama) == [[wanted], []]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_all(victim: int, llama: str) -> None:
    """The driver kills one that hangs; a rank that waits for the driver ends itself."""
    with closing(Ranks(2, programs.long_requests, llama, 5.0)) as ranks:
        assert ranks.have_all_said("ready", 120)
        os.kill(ranks.processes[victim].pid, signal.SIGSTOP)
        assert ranks.read(lambda: not ranks.processes[1].is_alive(), 120)
        if victim == 0:
            assert ranks.codes()[0] is None and ranks.codes()[1] in (1, 3)  # in a forward, or between two
        else:
            assert ranks.read(ranks.are_gone, 120) and ranks.codes() == [3, -signal.SIGKILL]
            ranks.read(ranks.are_silent, 120)
            cause = "rank 1 hangs: nothing has been heard of it for 5 seconds"
            assert ranks.said(0)[-1] == f"{cause}; this engine has ended on all ranks"


@pytest.mark.parametrize("where", [0, 1])
def test_a_forward_that_never_ends(where: int, llama: str) -> None:
    with closing(Ranks(2, programs.hanging_forward, llama, where)) as ranks:
        assert ranks.read(ranks.are_gone, 120), "a rank waits for ever"
        ranks.read(ranks.are_silent, 120)
        assert ranks.codes()[1] == 1
        if where == 1:
            assert all("a step has not ended within 1 seconds; this engine" in error for error in ranks.said(0)[0])
        else:
            assert ranks.codes()[0] == 1


def test_killed_ranks_end_all(llama: str) -> None:
    """With HF_PAGED_KILLS=100 and --timeout 0 it takes ten minutes."""
    chances = random.Random(0)
    for number in range(KILLS):
        victim = chances.randrange(2)
        with closing(Ranks(2, programs.long_requests, llama)) as ranks:
            assert ranks.have_all_said("ready", 120)
            time.sleep(chances.random())
            ranks.processes[victim].kill()
            killed = time.monotonic()
            assert ranks.read(ranks.are_gone, 120), f"run {number}, rank {victim} killed: {ranks.said(1 - victim)}"
            seconds = time.monotonic() - killed
            ranks.read(ranks.are_silent, 120)
            assert "this engine has ended on all ranks" in ranks.said(1 - victim)[-1] or ranks.codes()[1 - victim] == 1
            print(f"run {number}: rank {victim} killed, all ended after {seconds:.2f} s: {ranks.said(1 - victim)[-1]}")
