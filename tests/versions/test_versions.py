"""Versions of transformers: those that are tested, and what happens with others."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_paged
from hf_paged import versions
from hf_paged.features.watch import foreign
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.integration import names
from hf_paged.model import version_trial
from scripts import check_versions
from tests import models
from tests.architectures.tiny import tiny_model
from tests.versions import cases

ROOT = Path(__file__).parents[2]
PAGED = {"cache_implementation": "paged"}

DOORS = """
import sys, warnings
from tests.versions import newer
newer.pretend(renames={renames})
import torch, hf_paged
from hf_paged.cli.main import main
from tests import models
model, ids = models.build("llama"), torch.tensor([[5, 6, 7]])
def generate(**given):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **given)
plain = generate()
doors = dict(
    generate=lambda: generate(cache_implementation="paged"), Engine=lambda: hf_paged.Engine(model),
    check=lambda: hf_paged.check(model), serving=hf_paged.install_serving,
)
for name, door in doors.items():
    try:
        found = door()
        print(name, "ran", *str(found).splitlines()[-1:], file=sys.stderr)
    except Exception as error:
        print(name, type(error).__name__, error, file=sys.stderr)
hf_paged.install(default=True)
assert generate().equal(plain)
print("exit", main(["check", "examples/pydoc-lm-base"]), main(["serve", "examples/pydoc-lm-base", "--port", "99999"]))
"""


def run_doors(renames: bool) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DOORS.format(renames=renames)], capture_output=True, text=True, cwd=ROOT, check=False
    )


@pytest.mark.slow
def test_the_error_of_a_version_with_other_names() -> None:
    """All doors name the versions, and none a model; calls that are paged by default run without a paged cache."""
    done = run_doors(renames=True)
    assert done.returncode == 0, done.stderr
    wanted = (
        r"transformers 5\.99\.0 is not supported by hf_paged [\d.]+ \(tested: 5\.17 to [\d.]+\): a tiny model does not "
        r"run over blocks; install transformers>=5\.17,<5\.\d+, or a newer hf_paged"
    )
    for door in ("generate", "Engine", "check", "serving"):
        line = next(line for line in done.stderr.splitlines() if line.startswith(door + " "))
        assert re.fullmatch(f"{door} UnsupportedVersionError {wanted}", line), line
    assert len(re.findall(f"^hf-paged: .*{wanted}$", done.stderr, re.MULTILINE)) >= 1, done.stderr
    assert "runs without a paged cache: transformers 5.99.0" in done.stderr
    assert "LlamaForCausalLM cannot" not in done.stderr
    assert done.stdout.strip().endswith("exit 2 2")


@pytest.mark.slow
def test_a_newer_version_that_works() -> None:
    done = run_doors(renames=False)
    assert done.returncode == 0, done.stderr
    assert "generate ran" in done.stderr and "Engine ran <Engine" in done.stderr
    note = "RuntimeWarning: transformers 5.99.0 is newer than those that this hf_paged is tested with"
    assert done.stderr.count(note) == 1
    tested = re.escape(versions.tested())
    assert re.search(rf"check ran   versions: transformers 5.99.0 \(not tested: {tested} are\), torch", done.stderr)


def test_an_older_version_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.shared("llama")  # before: transformers imports itself again with its first model
    monkeypatch.setattr(versions.sys.modules["transformers"], "__version__", "5.16.1")
    monkeypatch.setattr(version_trial, "_difference", lambda *args: pytest.fail("a trial"))
    for door in (hf_paged.check, hf_paged.Engine, lambda model: model.generate(torch.ones(1, 2).long(), **PAGED)):
        with pytest.raises(hf_paged.UnsupportedVersionError, match=r"transformers 5\.16\.1.*: it is too old; install"):
            door(model)
    with pytest.raises(hf_paged.UnsupportedVersionError, match="too old"):
        hf_paged.install_serving()
    assert not hf_paged.plugin.is_serving_installed()


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed transformers one that is not known and has not been tried."""
    models.shared("llama")
    monkeypatch.setattr(versions.sys.modules["transformers"], "__version__", "5.99.0")
    monkeypatch.setattr(version_trial, "_failures", {})


@pytest.mark.usefixtures("untested")
def test_the_trial_compares_with_a_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where calls are paged by default; such a call is then plain."""
    model, ids = models.shared("llama"), torch.tensor([[5, 6, 7]])
    plain = model.generate(ids, max_new_tokens=4)
    own = PackedDecoder._output
    monkeypatch.setattr(PackedDecoder, "_output", lambda self, logits: own(self, logits.flip(-1)))
    hf_paged.install(default=True)
    try:
        with pytest.warns(RuntimeWarning, match="a tiny model generates other tokens over blocks than without"):
            assert model.generate(ids, max_new_tokens=4).equal(plain)
    finally:
        hf_paged.install(default=False)


@pytest.mark.usefixtures("untested")
def test_the_trial_does_not_depend_on_the_caller() -> None:
    model, ids = models.shared("llama"), torch.tensor([[5, 6, 7]])
    state = torch.get_rng_state()
    caller = torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.device("meta")
    with pytest.warns(RuntimeWarning, match="gave the tokens of plain generate"), caller[0], caller[1], caller[2]:
        assert hf_paged.check(model).native
    assert torch.get_rng_state().equal(state)
    assert model.generate(ids, max_new_tokens=4, **PAGED).equal(model.generate(ids, max_new_tokens=4))


def test_the_range_stands_in_one_place() -> None:
    oldest, newest = (".".join(map(str, each)) for each in (versions.OLDEST, versions.NEWEST))
    assert f'"transformers>={oldest},<6"' in (ROOT / "pyproject.toml").read_text()
    first, _, last = check_versions.tested_versions()
    assert first.startswith(oldest) and last.startswith(newest)
    page = check_versions.PAGE.read_text()
    for version in check_versions.tested_versions():
        assert f"| {version} |" in page
    assert versions.is_tested("5.24.1") and versions.is_tested("5.24.0.dev0") and not versions.is_tested("5.25.0.dev0")
    assert not versions.is_tested("6.0.0") and versions.is_older("4.57.1") and not versions.is_older("main")


# -- names ---------------------------------------------------------------------------------------------------------


def test_names_follow_the_installed_version() -> None:
    """A call takes the names that plain `generate` takes; its output has those of plain outputs."""
    model, ids = models.shared("llama"), torch.tensor([[5, 6, 7, 8]])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "return_dict_in_generate": True}
    plain = model.generate(ids, **given)
    for name in sorted(names.CACHE_NAMES):
        try:
            model.generate(ids, **given, **{name: type(getattr(plain, names.CACHE))()})
        except (TypeError, ValueError):  # before 5.24 there is one name
            with pytest.raises((TypeError, ValueError)):
                model.generate(ids, **given, **{name: hf_paged.PagedKVCache(model.config)})
            continue
        cache = hf_paged.PagedKVCache(model.config)
        paged = model.generate(ids, **given, **{name: cache})
        assert paged.sequences.equal(plain.sequences) and cache.get_seq_length() == 6
        assert list(paged.keys()) == list(plain.keys())
        assert getattr(paged, name) is getattr(paged, names.CACHE) is cache


@pytest.mark.skipif(names.CACHE == "past_key_values", reason="there is one name before transformers 5.24")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")
def test_of_two_caches_that_of_the_newer_name_is_used() -> None:
    """Even if it is None, as in transformers: then the call has no cache of ours and is plain."""
    model, ids = models.shared("llama"), torch.tensor([[5, 6, 7, 8]])
    new, old = (hf_paged.PagedKVCache(model.config) for _ in range(2))
    with hf_paged.record_calls() as records:
        model.generate(ids, max_new_tokens=3, cache=new, past_key_values=old)
        model.generate(ids, max_new_tokens=3, cache=None, past_key_values=old)
    assert len(records) == 1 and (new.get_seq_length(), old.get_seq_length()) == (6, 0)


def test_a_model_with_the_former_name_is_refused_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if names.CACHE == "past_key_values":
        pytest.skip("this transformers still passes past_key_values")
    model = models.build("llama")
    own = type(model).forward

    def forward(self: Any, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        return own(self, input_ids, cache=past_key_values, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(hf_paged.UnsupportedModelError, match="takes no cache, the name by which this transformers"):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, **PAGED)


def test_functions_that_transformers_decorates_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does with that of SDPA's masks in 5.17 and 5.18. What a user wraps around them is not."""
    from transformers import masking_utils
    from transformers.utils.deprecation import deprecate_kwarg

    model, sdpa = models.build("llama"), ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    decorated = deprecate_kwarg("something", version="99.0.0")(sdpa)

    @functools.wraps(sdpa)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return sdpa(*args, **kwargs)

    for function, is_own in ((decorated, True), (wrapper, False)):
        monkeypatch.setattr(masking_utils, foreign._wrapped(sdpa).__next__().__name__, function)
        monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", function)
        assert hf_paged.check(model).native is is_own


def test_beam_sampling_continues_in_the_order_of_this_version() -> None:
    """The first finished candidates end beams: the order decides where an end is drawn."""
    assert cases.beam_sampling(10) == {"generate": 10, "engine": 10}


# -- looped models -------------------------------------------------------------------------------------------------

LOOPED = [name for name in ("dory", "inkling2_loop_text") if name in CONFIG_MAPPING]


@pytest.mark.skipif(not LOOPED, reason="no looped models before transformers 5.24")
@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("dory", {}),
        pytest.param("inkling2_loop_text", {"do_sample": True, "num_return_sequences": 2}, marks=pytest.mark.slow),
    ],
)
def test_looped_models(name: str, sampled: dict[str, Any]) -> None:
    """Further passes write to copies of cache layers, which the model appends to the cache that it is given."""
    model, ids = tiny_model(name), torch.cat([prompt[None] for prompt in models.prompts(20, 20, 20)]) % 90
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    given = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    for options in (sampled, {"num_beams": 3, **sampled}):
        rows = []
        for door in ({}, PAGED):
            torch.manual_seed(3)
            rows.append(model.generate(ids, **given, **options, **door))
        assert rows[1].equal(rows[0]), options
    report = hf_paged.check(model)
    assert len(report.layers) == 8  # 4, of which 2 run twice more
    with hf_paged.Engine(model, {"num_blocks": 200}) as engine:
        outputs = engine.generate([row.tolist() for row in ids], GenerationConfig(max_new_tokens=8, eos_token_id=None))
    for row, output in zip(ids, outputs):
        plain = model.generate(row[None], attention_mask=torch.ones(1, 20).long(), max_new_tokens=8, pad_token_id=0)
        assert output.outputs[0].token_ids == plain[0, 20:].tolist()


@pytest.mark.skipif(not LOOPED, reason="no looped models before transformers 5.24")
def test_caches_of_looped_models() -> None:
    model, ids = tiny_model("dory"), models.prompts(12)[0][None] % 90
    given = {"max_new_tokens": 5, "return_dict_in_generate": True, "pad_token_id": 0}
    cache = hf_paged.PagedKVCache(model.config)
    for _ in range(2):
        first = [model.generate(ids, **given), model.generate(ids, **given, **{names.CACHE: cache})]
        assert first[1].sequences.equal(first[0].sequences)
        longer = torch.cat([first[0].sequences, models.prompts(4)[0][None] % 90], dim=1)
        copied = copy.deepcopy(cache)
        expected = model.generate(longer, **given, **{names.CACHE: names.cache_of(first[0])}).sequences
        for each in (cache, copied):
            assert model.generate(longer, **given, **{names.CACHE: each}).sequences.equal(expected)
        cache.check_integrity()
        cache.reset()


@pytest.mark.skipif("inkling2_loop_text" not in CONFIG_MAPPING, reason="no looped models before transformers 5.24")
def test_states_of_a_looped_model_after_a_forward_that_failed() -> None:
    """It failed before the model appended its copies, and other sequences go on."""
    model, cache = tiny_model("inkling2_loop_text"), hf_paged.PagedKVCache(tiny_model("inkling2_loop_text").config)
    with torch.no_grad():
        model(models.prompts(6)[0][None] % 90, **{names.CACHE: cache})
    states = cache.states
    assert len(states) == len(cache.layers) == 8
    cache.set_states(None)
    assert len(cache.layers) == 4
    cache.set_states(states)
    assert len(cache.layers) == 8 and [layer.index for layer in cache.layers] == [*range(8)]
    for kept, given in zip(cache.states, states):
        assert kept.keys() == given.keys()
