"""Statistics of a load test, on outcomes written by hand; the requests that options stand for."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hf_paged.cli import bench_serve
from hf_paged.cli.common import UsageError
from hf_paged.cli.main import main
from hf_paged.load import report
from hf_paged.load.client import Outcome, Planned, Run


def outcome(arrival: float, pieces: list[float], end: float, tokens: int | None, **rest: Any) -> Outcome:
    return Outcome(arrival, arrival + 0.001, pieces, end, 7, tokens, **rest)


RUN = Run(
    [
        outcome(0.0, [1.0, 1.5, 2.5], 2.5, 4),  # TTFT 1, ITL 0.5 and 1, TPOT 0.5, e2e 2.5
        outcome(1.0, [1.5, 2.0], 2.0, 2),  # TTFT 0.5, ITL 0.5, TPOT 0.5, e2e 1
        outcome(2.0, [2.1], 2.1, 1),  # one token: neither ITL nor TPOT
        outcome(2.0, [3.0], 3.5, None, has_left=True),
        outcome(3.0, [], 3.2, None, error="429: later"),
    ],
    5.0,
)


def test_summary() -> None:
    summary = report.summarise(RUN)
    assert (summary.requests, summary.complete, summary.left) == (5, 3, 1)
    assert summary.errors == {"429: later": 1} and summary.goodput is None
    assert summary.requests_per_s == pytest.approx(3 / 5) and summary.tokens_per_s == pytest.approx(7 / 5)
    assert (summary.prompt_tokens, summary.completion_tokens) == (21, 7)
    means = {name: values["mean"] for name, values in summary.metrics.items()}
    assert means == pytest.approx(
        {"ttft": (1 + 0.5 + 0.1) / 3, "itl": 2 / 3, "tpot": 0.5, "norm": (2.5 / 4 + 0.5 + 0.1) / 3, "e2e": 3.6 / 3}
    )
    assert summary.metrics["e2e"]["max"] == 2.5 and summary.send_lag_p99 == pytest.approx(0.001)
    assert json.loads(json.dumps(summary.as_dict()))["metrics"]["ttft"]["p50"] == 0.5


def test_goodput() -> None:
    for objectives, good in (
        *(({"ttft": 0.5}, 2), ({"itl": 0.6}, 2), ({"itl": 0.75}, 3)),
        *(({"ttft": 0.6, "e2e": 0.5}, 1), ({"norm": 1.0}, 3)),
    ):
        assert report.summarise(RUN, objectives).goodput == pytest.approx(good / 5), objectives
    no_usage = Run([outcome(0.0, [1.0, 2.0], 2.0, None)], 1.0)
    assert report.summarise(no_usage, {"ttft": 1.0, "itl": 1.0}).goodput == 1
    for name in ("tpot", "norm"):
        summary = report.summarise(no_usage, {"ttft": 1.0, name: 0.001})
        assert summary.goodput is None and "goodput is not known" in report.table(summary)


def test_the_table_names_everything() -> None:
    text = report.table(report.summarise(RUN, {"ttft": 0.5}))
    for words in ("3 of 5 requests complete, 1 clients left, 1 errors", "1.4 tokens/s", "goodput 0.400", "429: later"):
        assert words in text
    assert text.count("\n") > 8
    no_usage = Run([outcome(0.0, [1.0], 1.0, None)], 1.0)
    assert "the server gave no usage" in report.table(report.summarise(no_usage))
    nothing = Run([outcome(0.0, [], 1.0, None, error="refused")], 1.0)
    assert report.summarise(nothing).metrics == {} and "0 of 1 requests" in report.table(report.summarise(nothing))


OPTIONS: dict[str, Any] = {
    "num_prompts": 40, "seed": 3, "trace": None, "request_rate": 10.0, "workload": bench_serve.Workload.sharegpt,
    "scale": 0.1, "prompts": bench_serve.Prompts.tokens, "endpoint": bench_serve.Route.completions, "vocab_size": 64,
    "disconnect": 0.5,
}  # fmt: skip


def test_the_same_seed_gives_the_same_requests() -> None:
    first, second = bench_serve.planned(OPTIONS), bench_serve.planned(OPTIONS)
    assert first == second != bench_serve.planned({**OPTIONS, "seed": 4})
    arrivals = [request.arrival for request in first]
    assert arrivals == sorted(arrivals) and 1 < arrivals[-1] < 20
    assert all(set(request.prompt) <= set(range(3, 64)) for request in first)
    leaving = [request for request in first if request.leaves_after is not None]
    assert 8 < len(leaving) < 32 and all(1 <= r.leaves_after <= max(1, r.output_length - 1) for r in leaving)
    staying = bench_serve.planned({**OPTIONS, "disconnect": 0.0})
    assert [(r.arrival, r.prompt) for r in staying] == [(r.arrival, r.prompt) for r in first]


def test_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2500, "input_length": 4, "output_length": 2},
        {"timestamp": 500, "input_length": 3, "output_length": 9},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    requests = bench_serve.planned({**OPTIONS, "trace": path, "request_rate": None, "disconnect": 0.0})
    assert [(r.arrival, len(r.prompt), r.output_length) for r in requests] == [(0.0, 3, 9), (2.0, 4, 2)]
    for option, value in (("--request-rate", "1"), ("--scale", "2"), ("--workload", "alpaca")):
        assert main(["bench", "serve", "--trace", str(path), option, value]) == 2
        assert f"leave {option} out" in capsys.readouterr().err
    for wrong in ('{"timestamp": 1}', "[1]", "1"):
        path.write_text(wrong)
        with pytest.raises(UsageError, match="every line is a JSON object"):
            bench_serve.planned({**OPTIONS, "trace": path, "request_rate": None})


def test_objectives() -> None:
    assert bench_serve.objectives_of(["ttft:500", "tpot:20.5"]) == {"ttft": 0.5, "tpot": 0.0205}
    for wrong in ("ttft", "ttft:x", "other:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(UsageError, match="METRIC:MILLISECONDS"):
            bench_serve.objectives_of([wrong])


def test_requests_beyond_the_model_are_cut() -> None:
    """The answer gets half of the model's tokens if the prompt leaves it less."""
    cases = ((64, (32, 32)), (100, (50, 50)), (120, (60, 60)), (200, (90, 80)))
    for prompt, (longest, lengths) in product(([7] * 90, "word " * 18), cases):
        request = Planned(1.0, prompt, 80, leaves_after=70)
        cut = bench_serve.clamped(request, longest)
        is_text = isinstance(cut.prompt, str)
        size = len(cut.prompt.split()) * 5 if is_text else len(cut.prompt)
        assert cut.output_length == lengths[1] and lengths[0] - 5 * is_text <= size <= lengths[0]
        assert cut.leaves_after is not None and cut.leaves_after <= cut.output_length
        assert bench_serve.clamped(request, None) is request
        assert (cut is request) == (longest == 200)
