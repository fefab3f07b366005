"""`hf-paged bench paper`: a tiny version of each figure, the page, what a later call continues, and the fit."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.paper import adapters, bench, beside, kernels, kinds, plots, reading, runs, speed
from benchmarks.paper.beyond import ASSUMPTIONS, BEYOND
from benchmarks.paper.cost import CostModel
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.fit import compare, load_of_workload
from benchmarks.paper.page import NOTES, render, said
from benchmarks.paper.reading import TINY, Figure, check, shape, sustained
from benchmarks.paper.real import RealRun, model, run_in_turns, simulate
from benchmarks.paper.runs import Run, execute, pace
from benchmarks.paper.store import Store
from hf_paged.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.quick_cases("[1]", "[2]", "[18b]", "[chunks]", "[assumptions]")
@pytest.mark.parametrize("figure", [*FIGURES, *BEYOND, ASSUMPTIONS], ids=lambda figure: figure.name)
def test_a_tiny_version_of_each_figure(figure: Figure, tmp_path: Path) -> None:
    job = bench.Job((figure.name,), TINY, tmp_path, tmp_path / "page.md", plots=False)
    fewer = {
        k: replace(each, requests=max(10, each.requests // 40), pool=each.pool // 12)
        for k, each in kinds.DEMANDS.items()
    }
    with mock.patch.dict(kinds.DEMANDS, fewer):
        data = bench.run(job, lambda _: None)[figure.name]
    assert json.loads((tmp_path / f"figure-{figure.name}.json").read_text())
    text = (tmp_path / "page.md").read_text()
    assert f"figure-{figure.name}.png" in text or figure is ASSUMPTIONS
    assert "TB/s" in text and all(row["what"] in text for row in data["checks"] if figure in FIGURES)
    assert data.get("sentence", "") in text and ("sentence" in data) == (figure in BEYOND)


def test_figure_18a_is_measured() -> None:
    """Over contexts and batch sizes, as in the paper."""
    assert (kernels.CONTEXTS, kernels.ROWS) == ((64, 128, 256), (8, 32))
    data = kernels.measure((64,), (8,), calls=1)
    assert [series["system"] for series in data["panels"][0]["series"]] == ["ours", "contiguous"]
    assert data["checks"][0]["paper"] == pytest.approx(31.46 / 21.88, abs=1e-3)
    assert "Figure 18a (section 7.1)" in render({"18a": data}, "plots")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # what PEFT asks
def test_adapters_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": 2, "OUTPUT": 2, "COUNTS": (0, 1, 2)}.items():
        monkeypatch.setattr(adapters, name, value)
    data = adapters.measure(1)
    assert data["panels"][0]["series"][0]["x"] == [0, 1, 2] and "Adapters" in render({"adapters": data}, "plots")


def test_speed_is_measured() -> None:
    data = speed.measure(20)
    assert data["requests"] == 20 and data["sentence"] in render({"speed": data}, "plots")


def rows(*ours: float) -> list[dict[str, Any]]:
    return [check(f"{k}: rate, ours / x", 2.0, value, source="printed", unit="x") for k, value in zip("klm", ours)]


def test_each_value_has_its_source_and_its_tolerance() -> None:
    share = check("d", 40.0, 43.5, source="section 6.3", unit="%")
    bound = check("e", "up to 1.2", 1.25, source="section 7.3", unit="x", within=(0.0, 1.2))
    alike = shape("f", "16, 32", "16, 32", source="read off")
    checks = [*rows(2.4, 1.5), share, bound, alike]
    assert [row["agrees"] for row in checks] == [True, False, False, False, True]
    text = render({"15": {"checks": checks}}, "plots")
    assert "1 of 4 numbers agree with the paper, and 1 of 1 shapes" in text
    assert "within 20% of the paper's" in text and "within 3 percentage points" in text
    assert "| l: rate, ours / x | 2x | printed | 1.6 to 2.4 | 1.5x | **-25%** |" in text
    assert "| d | 40 % | section 6.3 | 37 to 43 | 43.5 % | **+3.5 points** |" in text
    assert "| e | up to 1.2x | section 7.3 | 0 to 1.2 | 1.25x | **differs** |" in text
    assert "| f | 16, 32 | read off | shape only | 16, 32 |  |" in text


def test_a_reason_is_given_for_what_differs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on the side on which it differs, with the numbers of the run."""
    monkeypatch.setitem(NOTES, "15", "Runs: {count}.\n?< k: k is low.\n?> k: k is high by {count}.\n? l: l.")
    data: dict[str, Any] = {"facts": {"count": "7"}}
    assert said("15", data | {"checks": rows(2.0, 2.0)}) == "Runs: 7."
    assert said("15", data | {"checks": rows(9.0, 2.0)}) == "Runs: 7. k is high by 7."
    others = "We know no reason for: m: rate, ours / x."
    assert said("15", data | {"checks": rows(0.5, 0.5, 0.5)}) == f"Runs: 7. k is low. l. {others}"


def test_the_page_of_the_checkout_shows_all_results() -> None:
    """And is what `render` makes of them."""
    folder = ROOT / "benchmarks" / "results" / "paper"
    paths = {name: folder / (f"{name}.json" if name in bench.REAL else f"figure-{name}.json") for name in bench.NAMES}
    data = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    assert (ROOT / "docs" / "paper.md").read_text() == render(data, "paper")


def test_a_second_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("OPT-13B", "alpaca", "ours", 1.0, 0, 0.1)
    store = Store(tmp_path / "runs.jsonl")
    first = store.all([run], lambda _: None)
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('["half a li')
    monkeypatch.setattr(runs, "execute", lambda _: pytest.fail("it is simulated again"))
    assert Store(tmp_path / "runs.jsonl").all([run], lambda _: None) == first


def test_pace() -> None:
    """98 of 100 tokens take a second, one takes 2 and one 3: 99 % take at most 2."""
    assert pace([(1.0, 98), (3.0, 1), (2.0, 1)]) == 2.0
    assert pace([]) == 0.0


def test_the_same_seed_gives_the_same_figures() -> None:
    run = Run("OPT-13B", "alpaca", "ours", 2.0, 3, 0.2, "beams", 2)
    assert execute(run) == execute(run) != execute(replace(run, seed=4))


def test_sustained_rate() -> None:
    assert sustained([1.0, 2.0, 3.0], [0.1, 0.1, 1.0], 0.3162) == pytest.approx(2.5, abs=1e-3)
    assert sustained([1.0, 2.0], [1.0, 2.0], 0.5) == 0.0
    assert sustained([1.0, 2.0], [0.1, 0.2], 0.5) == 2.0


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(plots.PlotsMissing, match=r"pip install -e '\.\[paper\]'"):
        bench.run(bench.Job(("2",), TINY, tmp_path, tmp_path / "page.md"), lambda _: None)
    assert not list(tmp_path.iterdir()), "the message comes before the work"


@pytest.mark.parametrize("name", ["1", "13"])
def test_plots(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.run(bench.Job((name,), TINY, tmp_path, tmp_path / "page.md"), lambda _: None)
    assert (tmp_path / f"figure-{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / f"figure-{name}.svg").read_bytes()
    assert (tmp_path / "page" / f"figure-{name}.png").exists()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "QUICK", TINY)
    arguments = ["bench", "paper", "--quick", "--no-plots", "--workers", "1", "--out", str(tmp_path), "--figures"]
    assert main([*arguments, "2"]) == 0
    assert "figure 2   ours: holds tokens: paper 96.3" in capsys.readouterr().out
    assert main([*arguments, "2,20"]) == 2
    assert "figure '20' is unknown; there are 1, 2, 11" in capsys.readouterr().err


def test_a_wheel_has_no_benchmarks(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("hf_paged.__file__", str(tmp_path / "hf_paged" / "__init__.py"))
    assert main(["bench", "paper"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_the_engine_beside_the_simulation() -> None:
    """Steps and preemptions of overloads are those of the simulation, although the engines take turns."""
    load = replace(load_of_workload("sharegpt", 6, 1e9, 0), slots=320)
    loads = [load, replace(load, preemption="swap")]
    for each, run in zip(loads, run_in_turns(model(), loads)):
        row = compare(each, [run], [CostModel(0.01, 0.0, 1e-4, 1e-6, request=0.01)])
        assert row["steps"][0] == row["steps"][1] and row["preemptions"][0] == row["preemptions"][1] > 0
        assert len(run.steps) == run.result.num_steps and len(run.adding) == 6


def test_every_load_of_the_engine_beside_its_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few requests there are. The simulator stands in for the engine, so both agree."""
    cost = CostModel(0.01, 0.0, 1e-4, 1e-6)
    monkeypatch.setattr(beside, "run_engine", lambda _, load: RealRun(simulate(load, cost), [], []))
    data = beside.compare_all(lambda: None, cost, 2, 1, Store(tmp_path / "runs.jsonl"), lambda _: None)
    assert all(row["engine"] == pytest.approx(row["simulated"]) for row in data["rows"])
    preempted = [row for row in data["rows"] if row["value"] == "preemptions"]
    assert len(preempted) == 6 and all(row["engine"] > 0 for row in preempted)
    text = render({"real": data}, "plots")
    assert all(f"| {figure} |" in text for figure in ("2", "13", "14, 15", "16", "19"))
