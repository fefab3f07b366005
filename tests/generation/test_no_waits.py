"""On a GPU the host does not wait for the device while it prepares a step; only what was sampled is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from tests import models
from tests.fake_cuda import DEVICE, Waits, fake_cuda, no_waits
from tests.logical_devices import in_child
from tests.model.adapted import BASE, IGNORED, with_transformers

pytestmark = IGNORED

SAMPLED = {"do_sample": True, "top_k": 1}
OPTIONS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7, "no_repeat_ngram_size": 2},
    {"exponential_decay_length_penalty": (2, 1.2), "suppress_tokens": [7]},
    {"sequence_bias": {(5,): 1.5, (9, 4): 3.0}, "min_new_tokens": 4},
    {"forced_eos_token_id": 9, "bad_words_ids": [[11], [3, 5]]}, {**SAMPLED, "temperature": 0.7},
    {**SAMPLED, "temperature": 1.3}, {"do_sample": True, "top_k": 1, "repetition_penalty": 1.1, "temperature": 0.9},
    {"do_sample": True, "top_k": 5, "top_p": 1e-6}, {"do_sample": True, "top_k": 7, "top_p": 1e-5},
    {"do_sample": True, "top_k": 0, "top_p": 1e-6}, {"do_sample": True, "top_k": 0, "top_p": 1e-5},
    {"do_sample": True, "top_k": 0, "min_p": 1.0}, {"do_sample": True, "top_k": 0, "min_p": 0.9999},
    {**SAMPLED, "typical_p": 0.5}, {**SAMPLED, "typical_p": 0.4}, {**SAMPLED, "epsilon_cutoff": 0.1},
    {**SAMPLED, "eta_cutoff": 0.1}, {**SAMPLED, "top_h": 0.5}, {"num_beams": 2},
    {**SAMPLED, "num_return_sequences": 2, "temperature": 0.3},
]  # fmt: skip


def served(model: Any) -> list[list[list[int]]]:
    """The tokens of a request for each of the options, in two batches that use adapters in turn, without a wait."""
    prompts = models.prompts(*(3 + number % 4 for number in range(len(OPTIONS))))
    scheduler = SchedulerConfig(async_scheduling=True)
    found: dict[str, list[list[int]]] = {}
    with Engine(model, CacheConfig(num_blocks=200, block_size=4), scheduler, cuda_graphs=False, warmup=False) as engine:
        requests = list(enumerate(zip(prompts, OPTIONS)))
        arriving = [requests[:10], requests[10:]]
        while arriving or engine.has_unfinished_requests():
            for number, (prompt, options) in arriving.pop(0) if arriving else ():
                config = GenerationConfig(max_new_tokens=2 + number % 2, eos_token_id=None, pad_token_id=0, **options)
                adapter = ("x", BASE)[number % 2]
                engine.add_request(prompt.tolist(), config, adapter=adapter, request_id=str(number))
            with no_waits():
                outputs = engine.step()
            for output in outputs:
                assert output.error is None, output.error
                found[output.request_id] = [each.token_ids for each in output.outputs]
    return [found[str(number)] for number in range(len(OPTIONS))]


@pytest.mark.slow
def test_a_step_of_requests_with_all_options() -> None:
    def check() -> None:
        model = with_transformers().requires_grad_(False)
        expected = served(model)
        with fake_cuda():
            assert served(model.to(DEVICE)) == expected

    in_child(check)


def test_what_waits_is_noticed() -> None:
    def check() -> None:
        with fake_cuda():
            x, row = torch.ones(3, device=DEVICE), torch.ones(3)
            waits: list[Callable[[], Any]] = [
                x.sum().item, x.tolist, x.cpu, x.nonzero, lambda: bool(x.any()), lambda: x[x > 0],
                lambda: row.to(DEVICE),
                lambda: row.to(DEVICE, non_blocking=True), lambda: row.pin_memory().to(DEVICE), lambda: row.copy_(x),
                lambda: torch.tensor([1, 2], device=DEVICE), lambda: x.to("cpu", non_blocking=True),
            ]  # fmt: skip
            for wait in waits:
                wait()
                with no_waits(), pytest.raises(Waits):
                    wait()
            with no_waits():
                host = torch.empty(3, pin_memory=True)
                sent = row.pin_memory().to(DEVICE, non_blocking=True)
                host.copy_(sent[torch.zeros_like(x, dtype=torch.int64)] + x, non_blocking=True)
                assert host.tolist() == [2, 2, 2]

    in_child(check)
