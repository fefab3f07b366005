"""The live page's files and data, metrics during a step, log lines and traces."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock

import httpx
import pytest

import hf_paged
from hf_paged.serving import live_replies, tracing
from hf_paged.serving.metrics import Recent
from hf_paged.serving.page_files import PAGE_FILES
from tests.serving.harness import KEY, NAME, Ended, Running, serving
from tests.waiting import Gate, until

FOLDER = files("hf_paged.serving") / "page"
SOURCES = {name: (FOLDER / name).read_text() for name in PAGE_FILES.values()}


def test_the_files_are_open_and_the_data_is_not() -> None:
    with serving(api_keys=(KEY,)) as running:
        bare = httpx.Client(base_url=running.url)
        for path in PAGE_FILES:
            answer = bare.get(path)
            policy = answer.headers["content-security-policy"]
            assert answer.status_code == 200 and answer.text == SOURCES[PAGE_FILES[path]]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert bare.get("/live").status_code == bare.get("/page/").status_code == 401
        assert bare.post("/").status_code == 405
        assert running.http.get("/live").status_code == 200


def test_the_page_brings_everything_with_it() -> None:
    """No address of another host, nothing inline, and nothing that makes elements of text."""
    index = SOURCES["index.html"]
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|javascript:", index)
    for name, source in SOURCES.items():
        addresses = set(re.findall(r"https?://[\w./]+", source)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
        words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
        assert [word for word in words if word in source] == [], name
        for used in re.findall(r'(?:src|href)="(page/[^"]+)"|from "\./([^"]+)"', source):
            assert "".join(used).removeprefix("page/") in SOURCES, (name, used)
    assert len(set(re.findall(r'id="([\w-]+)"', index))) == len(re.findall(r'id="([\w-]+)"', index))
    for name in re.findall(r'\$\("([\w-]+)"\)', "".join(SOURCES.values())):
        assert f'id="{name}"' in index, name


def in_flight(server: Running, **options: Any) -> Any:
    body = {"max_tokens": 40, "stream": True, "extra_body": {"ignore_eos": True}, **options}
    return server.client.completions.create(model=NAME, prompt=[5] * 20, **body)


def test_neither_live_nor_metrics_waits_for_a_step(server: Running, every_step: None) -> None:
    """While a step holds the engine's lock, both answer: with the state in which the step before has left it."""
    server.http.get("/live")  # from now on snapshots are made
    gate = Gate(server.engine, 1)
    stream = in_flight(server)
    try:
        gate.wait()
        figures = server.http.get("/metrics")
        live = server.http.get("/live").json()
    finally:
        gate.open()
        list(stream)
    assert figures.status_code == 200 and f'num_requests_running{{model_name="{NAME}"}} 1.0' in figures.text
    live_replies.LiveState.model_validate(live)
    (request,) = live["engine"]["requests"]
    assert (request["status"], request["prompt"], request["limit"]) == ("running", 20, 60)
    assert [len(table) for table in request["sequences"][0]["tables"]] == [2]


def test_an_idle_server_repeats_nothing(server: Running, every_step: None) -> None:
    server.post("/v1/completions", prompt=[7] * 40, max_tokens=2)
    server.http.get("/live")
    first = server.http.get("/live")
    again = server.http.get("/live", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    live = first.json()
    about = [live["server"][field] for field in ("model", "prefix_eviction", "version")]
    assert about == [NAME, "lru", hf_paged.__version__]
    assert live["engine"]["requests"] == [] and live["engine"]["pool"]["cached"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_the_turn_of_a_cached_block_is_that_of_the_eviction(tmp_path: Path) -> None:
    code = 'console.log(["lru", "clock", "own"].map((each) => turnOf(7, [5, 7], each)).join("|"));'
    (tmp_path / "turn.mjs").write_text(f"{SOURCES['model.js']}\n{code}")
    done = subprocess.run(["node", tmp_path / "turn.mjs"], capture_output=True, text=True, check=True)
    turns = done.stdout.split("|")
    assert "2 of 2 by its last use" in turns[0] and "passes over" in turns[1] and turns[2].strip() == ""
    for eviction, name in (("clock", "clock"), (lambda cached, found: next(iter(cached)), "own")):
        with serving(scheduler_config=hf_paged.SchedulerConfig(prefix_eviction=eviction)) as running:
            assert running.http.get("/live").json()["server"]["prefix_eviction"] == name


@pytest.mark.slow
def test_a_page_that_is_opened_later_has_a_history(server: Running, every_step: None) -> None:
    """The first question gets the figures of the last two minutes; those that follow get the present."""
    before = server.http.get("/live").json()
    server.client.completions.create(model=NAME, prompt=[5] * 20, max_tokens=8, extra_body={"ignore_eos": True})
    assert server.http.post("/v1/completions", json={"prompt": 5.5}).status_code == 422
    until(lambda: server.http.get("/live").json()["history"][-1:] > before["history"][-1:])  # a row is made each second
    answer = server.http.get("/live").json()
    when, generated, used, shared, cached, first, _ = answer["history"][-1]
    assert 0 < when <= answer["engine"]["time"] + 2
    assert 0 < generated <= answer["engine"]["counters"]["generated_tokens"]
    assert 0 <= shared <= used <= cached <= 1 and (first is None or len(first) == 2)
    assert answer["ended"]["finished"] == before["ended"]["finished"] + 1
    assert answer["ended"]["failed"] == before["ended"]["failed"]
    assert answer["ended"]["refused"] > before["ended"]["refused"]
    assert "history" not in server.http.get("/live", headers={"if-none-match": "none"}).json()


def test_fourteen_requests_have_fourteen_colours() -> None:
    """Far enough from one another, and from the warm colours of shared blocks."""
    hues = [int(each) for each in re.findall(r"const hues = \[([\d, ]+)\]", SOURCES["draw.js"])[0].split(",")]
    assert len(hues) == 7 and all(60 < hue < 340 for hue in hues)
    assert min(abs(a - b) for a in hues for b in hues if a != b) >= 30


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_start_says_where_everything_is(keys: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hf_paged.serving"), serving(api_keys=keys) as running:
        lines = [record.getMessage() for record in caplog.records]
    start = next(place for place, line in enumerate(lines) if line.startswith(f"running on {running.url} "))
    assert lines[start + 1] == f"OpenAI's routes: {running.url}/v1"
    assert lines[start + 2] == "API key: " + ("clients must send it (1 known)" if keys else "none is asked for")


def test_an_answer_names_its_requests(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=["a", "b"], max_tokens=1)
    assert re.fullmatch(r"req-\d+,req-\d+", answer.headers["x-engine-request-ids"])
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        assert re.fullmatch(r"req-\d+", stream.headers["x-engine-request-ids"])
        stream.read()


def test_latencies_are_kept_only_while_they_are_read() -> None:
    recent = Recent(1000.0)
    recent.add(0.0, 1.0)
    assert recent.quantiles(0.5) is None
    now = recent._until
    for value in range(10):
        recent.add(now, float(value))
    assert recent.quantiles(0.5, 0.95) == [5.0, 9.0]
    recent._until = now - 1
    recent.add(now, 100.0)
    assert recent.quantiles(1.0) == [9.0]


def test_time_in_the_queue(server: Running) -> None:
    def sums() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines if NAME in name}

    name = f'hf_paged:request_queue_time_seconds_count{{model_name="{NAME}"}}'
    before = sums()
    with Ended("request=timed") as log:
        server.http.post(
            "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3}, headers={"x-request-id": "timed"}
        )
        log.wait()
    after = sums()
    assert after[name] == before[name] + 2
    fields = dict(part.split("=", 1) for part in log.lines[0].split())
    waited, first, seconds = (float(fields[name]) for name in ("queue", "first_token", "seconds"))
    assert 0 <= waited <= first <= seconds and fields["preemptions"] == "0" and fields["completion_tokens"] == "6"


def test_a_span_for_each_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = MagicMock()
    spans = [MagicMock(), MagicMock()]
    fake.get_tracer.return_value.start_span.side_effect = spans
    fake.extract.side_effect = lambda headers: headers.get("traceparent")
    monkeypatch.setattr(tracing, "trace", fake)
    monkeypatch.setattr(tracing, "propagate", fake)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Ended("request=traced") as log:
        server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 5, "temperature": 0.5},
            headers={"x-request-id": "traced", "traceparent": parent},
        )
        log.wait()
    server.post("/v1/completions", prompt="a", model="nobody")
    good, bad = spans
    assert [call.kwargs["context"] for call in fake.get_tracer().start_span.mock_calls] == [parent, None]
    good.update_name.assert_called_with(f"chat {NAME}")
    good.set_status.assert_not_called()
    attributes: dict[str, Any] = {}
    for call in good.set_attributes.mock_calls:
        attributes |= call.args[0]
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "hf_paged", "gen_ai.request.model": NAME,
        "gen_ai.response.id": "chatcmpl-traced", "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 5, "gen_ai.request.stream": False,
    }  # fmt: skip
    assert wanted.items() <= attributes.items()
    assert 1 <= attributes["gen_ai.usage.output_tokens"] <= 4 and attributes["gen_ai.usage.input_tokens"] > 1
    assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert not any(value == "hi" for value in attributes.values())
    bad.set_attribute.assert_called_with("error.type", "404")
    fake.Status.assert_called_once_with(fake.StatusCode.ERROR, ANY)
    assert all(span.end.call_count == 1 for span in spans)


def test_spans_reach_the_sdk(server: Running) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with Ended("request=") as log:
        server.post("/v1/completions", prompt="a", max_tokens=2, n=2, temperature=1, stop=["zzz"])
        log.wait()
    spans = [span for span in exporter.get_finished_spans() if span.instrumentation_scope.name == "hf_paged"]
    (span,) = spans  # transformers makes spans of its own
    assert span.name == f"text_completion {NAME}" and span.attributes is not None
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.request.stop_sequences"] == ("zzz",)
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 2  # type: ignore[arg-type]


def test_without_opentelemetry_nothing_happens(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "trace", None)
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
