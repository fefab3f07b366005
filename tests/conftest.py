"""What the tests share: one thread, fixed seeds, and the comparison of a paged generate call with the plain one."""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU the Triton kernels run in triton's interpreter, which triton decides when it is first imported.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

import hf_paged
from hf_paged.cache import memory as memory_module
from hf_paged.features.watch import foreign
from hf_paged.generation.engine import snapshots
from hf_paged.integration.names import CACHE_NAMES, EDITS_ARE_KNOWN, ENCODES_MEDIA
from hf_paged.kernels.native import build as native_build
from tests import covering, models, schedulings

torch.set_num_threads(1)

if importlib.util.find_spec("peft") is not None:
    # From transformers 5.24 on, its methods for adapters want a PEFT that is not released. They work with today's.
    from transformers.integrations import peft as peft_methods

    peft_methods.MIN_PEFT_VERSION = min(peft_methods.MIN_PEFT_VERSION, "0.21.0")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")

_GRAMMARS = [f"generation/test_{name}.py" for name in ("grammar", "schemas", "gbnf")] + ["serving/test_constrained.py"]
_NEEDED = {
    "hypothesis": ["generation/test_scheduler_properties.py", "cache/test_state_machine.py"],
    "llguidance": _GRAMMARS,
    "jsonschema": _GRAMMARS,
}

# A machine with a GPU may have no network, and then not all packages.
collect_ignore = [path for name, paths in _NEEDED.items() if importlib.util.find_spec(name) is None for path in paths]

if not EDITS_ARE_KNOWN:
    collect_ignore.append("generation/test_editors.py")
if not ENCODES_MEDIA:
    collect_ignore += [f"generation/test_media{part}.py" for part in ("", "_classes", "_encoding")]
    collect_ignore += [f"serving/test_{part}.py" for part in ("images", "sound_and_videos", "media_urls")]

_memories: weakref.WeakSet[memory_module.PagedMemory] = weakref.WeakSet()
_init = memory_module.PagedMemory.__init__


def _tracked_init(self: memory_module.PagedMemory, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    _memories.add(self)


memory_module.PagedMemory.__init__ = _tracked_init  # type: ignore[method-assign]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`quick_cases`: the suite keeps the cases whose ids have one of these words; the others are slow tests, which
    `.ci/run` runs. `smoke_cases`: likewise, the cases of `pytest -m smoke`. `covering`: see `covering.chosen`."""
    for item in items:
        quick, smoke = item.get_closest_marker("quick_cases"), item.get_closest_marker("smoke_cases")
        if quick is not None and not any(word in item.name for word in quick.args):
            item.add_marker("slow")
        if smoke is not None and any(word in item.name for word in smoke.args):
            item.add_marker("smoke")
    if not config.getoption("--every-case"):
        kept = covering.chosen(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # collections among tests need not look at the modules and the other tests


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Each process of `-n` takes neighbouring tests, which use the same models and servers, then some of others."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run what the marker `covering` leaves out too")
    parser.addoption("--sabotage", help="inject a fault of tests/sabotage.py into hf_paged: every test should fail")


@pytest.fixture(autouse=True)
def _sabotaged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.config.getoption("--sabotage")
    if name is not None:
        import sabotage

        sabotage.FAULTS[name](monkeypatch)


@pytest.fixture
def trusted_code() -> Iterator[None]:
    """Hooks and functions of the test run in packed steps: they treat each token on its own."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it has patched
        patch.setattr(foreign, "_TRUSTED", foreign._TRUSTED | {"tests"})
        yield


def set_seed(number: int) -> None:
    """As `torch.manual_seed`, which writes down the whole stack at each call where there is no GPU."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    set_seed(0)


@pytest.fixture(params=models.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each of the six families; the model is `models.shared(family)`."""
    return str(request.param)


@pytest.fixture
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """See `schedulings.in_both_schedulings`."""
    if request.param == "async steps":
        schedulings.schedule_asynchronously(monkeypatch)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is made after each step, whatever the time."""
    monkeypatch.setattr(snapshots, "INTERVAL", 0.0)
    monkeypatch.setattr(snapshots, "PATIENCE", 1e9)


def blocks_in_use() -> int:
    """Blocks in use in every PagedMemory of the process. Also checks the invariants of each."""
    if _count_blocks():
        gc.collect()  # unreachable memory, for example of a support probe
    return _count_blocks()


def _count_blocks() -> int:
    used = 0
    for memory in list(_memories):
        memory.check_integrity()
        used += memory.manager.allocator.num_used
    return used


def state_of(model: Any) -> dict[str, Any]:
    """The state of a model that a generate call must restore."""
    modules = list(model.modules())
    return {
        "attention": [m.config._attn_implementation for m in modules if hasattr(m, "config")],
        "training": [m.training for m in modules],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules],
        "attributes": sorted(vars(model)), "forward": "forward" in vars(model),
        "generation_config": copy.deepcopy(vars(model.generation_config)), "config": model.config.to_dict(),
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "class": sorted(vars(type(model))), "grad_enabled": torch.is_grad_enabled(),
    }  # fmt: skip


def assert_same(actual: Any, expected: Any, name: str = "output") -> None:
    """Integers exactly, floats within 1e-3 (infinities exactly), structure, shapes and dtypes exactly."""
    assert type(actual) is type(expected), f"{name}: {type(actual)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, plain {tuple(expected.shape)}"
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, plain {expected.dtype}"
        assert actual.device == expected.device
        if expected.is_floating_point():
            torch.testing.assert_close(
                actual, expected, atol=1e-3, rtol=1e-3, equal_nan=True, msg=lambda m: f"{name}: {m}"
            )
        else:
            assert torch.equal(actual, expected), f"{name}:\npaged {actual.tolist()}\nplain {expected.tolist()}"
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), f"{name}: {len(actual)} items, plain {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected)):
            assert_same(a, e, f"{name}[{i}]")
    else:
        assert actual == expected, f"{name}: {actual!r}, plain {expected!r}"


def assert_same_output(actual: Any, expected: Any) -> None:
    """A tensor, or a ModelOutput with the same fields; the cache by length and class of the paged one."""
    if isinstance(expected, torch.Tensor):
        assert_same(actual, expected)
        return
    assert type(actual) is type(expected)
    assert list(actual.keys()) == list(expected.keys())
    for name in expected:
        if name in CACHE_NAMES:
            assert isinstance(actual[name], hf_paged.PagedKVCache)
            assert actual[name].get_seq_length() == expected[name].get_seq_length()
        else:
            assert_same(actual[name], expected[name], name)


class Comparison:
    """What `paged_equals_plain` found: both outputs, and the CallRecord of the paged call."""

    def __init__(self, plain: Any, paged: Any, record: hf_paged.CallRecord) -> None:
        self.plain, self.paged, self.record = plain, paged, record


def compare(
    model: Any,
    *args: Any,
    fresh: Callable[[], dict[str, Any]] = dict,
    route: str | None = "packed",
    seed: int = 1234,
    **kwargs: Any,
) -> Comparison:
    """Assert that outputs, state and random numbers of a plain and a paged call are equal. route: or None."""
    used = blocks_in_use()
    set_seed(seed)
    plain = model.generate(*args, **copy.deepcopy(kwargs), **fresh())
    plain_random = torch.random.get_rng_state()
    # Recorded after the plain call, because `output_attentions` makes transformers itself leave hooks on the model.
    before = state_of(model)
    set_seed(seed)
    with hf_paged.record_calls() as records:
        paged = model.generate(*args, **copy.deepcopy(kwargs), **fresh(), cache_implementation="paged")
    assert torch.equal(torch.random.get_rng_state(), plain_random), "the random state moved differently"
    after = state_of(model)
    assert after == before, [name for name in before if after[name] != before[name]]
    assert_same_output(paged, plain)
    record = records[-1]
    if route is not None:
        assert record.route == route, f"served by {record.route}: {record.reason}"
    assert record.peak_blocks_used > 0
    cache = None if isinstance(paged, torch.Tensor) else paged.past_key_values
    if cache is not None:
        cache.check_integrity()
        cache.reset()
    assert blocks_in_use() == used, "blocks were left in use"
    return Comparison(plain, paged, record)


@pytest.fixture
def paged_equals_plain() -> Callable[..., Comparison]:
    return compare


@pytest.fixture(autouse=True)
def _no_memory_between_tests() -> Iterator[None]:
    _memories.clear()
    yield
    hf_paged.release_memory()


@pytest.fixture(scope="session", autouse=True)
def _native_kernels() -> None:
    """Compile the kernels before the first test, so that neither a test nor a subprocess of a test compiles them."""
    native_build.library()
