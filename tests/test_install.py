"""`import hf_paged` installs the backend, before or after transformers; `uninstall()` restores everything."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import plugin
from tests import conftest, models

PATCHED = ("generate", "_prepare_cache_for_generation", "_sample", "_beam_search")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


GENERATE = """
import torch
config = transformers.LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, initializer_range=0.6)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.tensor([[3, 4, 5], [0, 6, 7]])
options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
plain = model.generate(ids, **options)
with hf_paged.record_calls() as records:
    assert torch.equal(model.generate(ids, **options, cache_implementation="paged"), plain)
assert len(records) == 1 and records[0].route == "packed", records
print("ok")
"""


IMPORTS = [
    "import hf_paged, transformers",
    "from transformers import AutoModelForCausalLM, LlamaForCausalLM\nimport hf_paged, transformers",
]


@pytest.mark.slow
def test_import_order() -> None:
    """Each in a child of one process that has imported torch, which takes longest."""
    code = f"""
import os, sys, torch
for imports in {IMPORTS!r}:
    if os.fork() == 0:
        assert not any(name in sys.modules for name in ("transformers", "hf_paged"))
        exec(imports + {GENERATE!r})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, imports
"""
    assert _run(code).split() == ["ok"] * len(IMPORTS)


def test_uninstall_before_transformers_is_imported() -> None:
    code = (
        "import sys, hf_paged\n"
        "finders = len(sys.meta_path)\n"
        "hf_paged.uninstall(); hf_paged.uninstall()\n"
        "assert len(sys.meta_path) == finders - 1 and 'transformers' not in sys.modules\n"
        "hf_paged.install()\n"
        "assert len(sys.meta_path) == finders\n"
        "print('ok')"
    )
    assert _run(code).strip() == "ok"


@pytest.fixture
def restored() -> Any:
    yield
    hf_paged.install()


def _mixin() -> Any:
    from transformers import GenerationMixin

    return GenerationMixin


def test_uninstall_puts_everything_back(restored: Any) -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    mixin = _mixin()
    hf_paged.uninstall()
    for name in PATCHED:
        method = vars(mixin)[name]
        assert "hf_paged" not in method.__code__.co_filename
    assert "hf_paged" not in AttentionInterface._global_mapping
    assert "hf_paged" not in AttentionMaskInterface._global_mapping
    assert not any(type(finder).__module__.startswith("hf_paged") for finder in sys.meta_path)
    assert not plugin.is_installed()
    originals = {name: vars(mixin)[name] for name in PATCHED}
    hf_paged.install()
    assert all(vars(mixin)[name] is not originals[name] for name in PATCHED)
    hf_paged.uninstall()
    assert all(vars(mixin)[name] is originals[name] for name in PATCHED)


def test_an_lm_eval_without_a_registry_of_names_is_left_alone(restored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.models", "lm_eval.api", "lm_eval.api.registry"):  # as lm-eval 0.4.9
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    hf_paged.uninstall()
    hf_paged.install()
    assert plugin.is_installed()


def test_install_and_uninstall_are_idempotent(restored: Any) -> None:
    mixin = _mixin()
    installed = {name: vars(mixin)[name] for name in PATCHED}
    hf_paged.install()
    assert all(vars(mixin)[name] is installed[name] for name in PATCHED)
    hf_paged.uninstall()
    hf_paged.uninstall()
    for _ in range(3):
        hf_paged.install()
    assert _paged_and_plain({}) == (True, 1)


def test_signatures_stay() -> None:
    import inspect

    method = vars(_mixin())["generate"]
    assert "generation_config" in inspect.signature(method).parameters
    assert method.__name__ == "generate" and method.__doc__


class Patch:
    """A patch of another library: it wraps the methods and counts their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.below = {name: vars(_mixin())[name] for name in PATCHED}
        self.own = {name: self._wrapped(name, function) for name, function in self.below.items()}
        for name, method in self.own.items():
            monkeypatch.setattr(_mixin(), name, method)

    def _wrapped(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def method(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return method

    def in_place(self) -> bool:
        return all(vars(_mixin())[name] is method for name, method in self.own.items())


def _paged_and_plain(mode: dict[str, Any]) -> tuple[bool, int]:
    """Whether a paged call gives plain's tokens, and how many paged calls were recorded."""
    model, inputs = models.shared("llama"), models.batch(5, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, **mode}
    plain = model.generate(**inputs, **options)
    with hf_paged.record_calls() as records:
        same = model.generate(**inputs, **options, cache_implementation="paged").equal(plain)
    return same, len(records)


def test_uninstall_keeps_a_patch_that_came_later(restored: Any, monkeypatch: Any) -> None:
    mode, patch = {"num_beams": 2}, Patch(monkeypatch)
    assert _paged_and_plain(mode) == (True, 1) and "generate" in patch.calls
    hf_paged.uninstall()
    assert patch.in_place() and not plugin.is_installed()
    patch.calls.clear()
    model, inputs = models.shared("llama"), models.batch(5, 9)
    model.generate(**inputs, **mode, max_new_tokens=2)
    assert patch.calls[0] == "generate" and len(patch.calls) >= 2
    # By transformers itself, whose own paged mode allocates gigabytes: it is stopped where it begins.
    monkeypatch.setattr(type(model), "generate_batch", lambda *_, **__: (_ for _ in ()).throw(NotImplementedError))
    with hf_paged.record_calls() as records, contextlib.suppress(NotImplementedError):
        model.generate(**inputs, **mode, max_new_tokens=2, cache_implementation="paged")
    assert not records
    hf_paged.install()
    assert patch.in_place(), "ours is still below it"
    assert _paged_and_plain(mode) == (True, 1)


@pytest.mark.parametrize("when", ["installed", "uninstalled"])
@pytest.mark.parametrize("puts_back", ["what it found", "transformers' own"])
def test_a_later_patch_that_is_taken_out(puts_back: str, when: str, restored: Any, monkeypatch: Any) -> None:
    hf_paged.uninstall()
    originals = {name: vars(_mixin())[name] for name in PATCHED}
    hf_paged.install()
    patch = Patch(monkeypatch)
    hf_paged.uninstall()
    if when == "installed":
        hf_paged.install()
    for name in PATCHED:
        monkeypatch.setattr(_mixin(), name, (patch.below if puts_back == "what it found" else originals)[name])
    if when == "installed" and puts_back == "transformers' own":
        hf_paged.uninstall()  # they took ours out too
    hf_paged.install()
    assert _paged_and_plain({}) == (True, 1) and not patch.calls
    hf_paged.uninstall()
    assert all(vars(_mixin())[name] is originals[name] for name in PATCHED)


def test_patches_that_came_while_uninstalled(restored: Any, monkeypatch: Any) -> None:
    first = Patch(monkeypatch)
    hf_paged.uninstall()
    second = Patch(monkeypatch)
    hf_paged.install()
    assert _paged_and_plain({}) == (True, 1)
    # Two of our wrappers are in the chain, but only one is in use.
    assert first.calls.count("generate") == second.calls.count("generate") == 2
    hf_paged.uninstall()
    assert second.in_place()
    for name, method in first.below.items():  # both go, and leave what the first one had found
        monkeypatch.setattr(_mixin(), name, method)
    hf_paged.install()
    assert _paged_and_plain({}) == (True, 1)
    monkeypatch.undo()  # puts a wrapper back that is not the newest
    hf_paged.uninstall()
    assert all("hf_paged" not in vars(_mixin())[name].__code__.co_filename for name in PATCHED)


def test_uninstall_while_a_call_runs(restored: Any) -> None:
    model, inputs = models.shared("llama"), models.batch(5, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    reached, go = threading.Event(), threading.Event()
    results = []

    def wait(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        reached.set()
        assert go.wait(120)
        return scores

    def work() -> None:
        results.append(model.generate(**inputs, **options, logits_processor=[wait], cache_implementation="paged"))

    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(120)
    hf_paged.uninstall()
    go.set()
    thread.join()
    assert torch.equal(results[0], expected)
    assert conftest.blocks_in_use() == 0
