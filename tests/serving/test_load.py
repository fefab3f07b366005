"""`hf-paged bench serve` against our server: what its clients see, and what they leave behind."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hf_paged.cli.main import main
from hf_paged.load import client
from tests.serving.harness import NAME, serving

LOAD = ("bench", "serve", "--scale", "0.02", "--vocab-size", "400", "--num-prompts", "12")


def bench(server: Any, *words: str, status: int = 0) -> None:
    url = server if isinstance(server, str) else server.url
    assert main([*LOAD, "--base-url", url, *words]) == status


def test_figures(server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "run.json"
    bench(server, "--request-rate", "200", "--goodput", "ttft:600000", "--goodput", "e2e:0", "--json", str(path))
    answer = json.loads(path.read_text())
    rows, summary = answer["requests"], answer["summary"]
    assert summary["complete"] == 12 and not summary["errors"] and summary["goodput"] == 0 < summary["requests_per_s"]
    # Every answer has its full length, and its prompt was sent token for token.
    assert [row["completion_tokens"] for row in rows] == [row["asked_tokens"] for row in rows]
    assert summary["completion_tokens"] == sum(row["asked_tokens"] for row in rows)
    assert all(row["arrival"] <= row["sent"] < row["first"] <= row["end"] for row in rows)
    assert set(summary["metrics"]) | {"itl"} == {"ttft", "itl", "tpot", "norm", "e2e"}  # ITL: not if all came at once
    assert answer["options"]["seed"] == 0 and "api_key" not in answer["options"]
    out = capsys.readouterr().out
    assert "12 of 12 requests complete" in out and "norm. latency" in out


def test_chat_and_text(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench(server, "--endpoint", "chat/completions")
    bench(server, "--prompts", "text", "--model", NAME)
    assert capsys.readouterr().out.count("12 of 12 requests complete") == 2


@pytest.mark.slow
def test_a_model_shorter_than_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests beyond its length are cut, which is said."""
    with serving(max_model_len=40) as running:
        bench(running, "--scale", "0.2", "--model", NAME)
    printed = capsys.readouterr()
    assert "12 of 12 requests complete" in printed.out and "40 tokens" in printed.out + printed.err


def test_errors_are_counted_and_end_with_status_1(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench(server, "--extra-body", '{"top_p": 7}', "--warmups", "0", status=1)
    out = capsys.readouterr().out
    assert "12 errors" in out and "12 x 422" in out
    bench(server, "--model", "another", status=2)
    assert "does not serve the first request: 404" in capsys.readouterr().err


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--model", "x")):
        bench("http://127.0.0.1:9", *words, status=2)
        assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main([*LOAD, "--model", "x", "--extra-body", "[]"]) == 2
    assert "a JSON object is needed" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot(server: Any, tmp_path: Path) -> None:
    bench(server, "--plot", str(tmp_path / "run.svg"))
    assert "TTFT" in (tmp_path / "run.svg").read_text()


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_the_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LOAD, "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


@contextmanager
def fake_server(*parts: str, delay: threading.Event | None = None) -> Iterator[str]:
    """A server that answers every request with these parts of an event stream, the last ones after `delay`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for part in parts:
                self.wfile.write(part.encode())
                self.wfile.flush()
                if delay is not None:
                    delay.wait(120)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sent(url: str, count: int = 1, leaves_after: int | None = None, **options: Any) -> list[client.Outcome]:
    endpoint = client.Endpoint(url, "m", **options)
    return client.run(endpoint, [client.Planned(0.0, [5, 6], 3, leaves_after)] * count).outcomes


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def test_events_of_other_servers() -> None:
    """An event may be split anywhere; the stream may end without [DONE]; there may be no usage."""
    stream = event(choices=[{"delta": {"role": "assistant", "content": ""}}]) + event(
        choices=[{"delta": {"content": "a"}}]
    )
    end = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    with fake_server(stream[:30], stream[30:] + ": a comment\n\n", end) as url:
        (outcome,) = sent(url, route="chat/completions")
    assert outcome.is_complete and len(outcome.pieces) == 1 and outcome.completion_tokens is None


def test_no_proxy_is_asked_for_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "ftp://nowhere")
    with fake_server() as url, pytest.raises(ValueError, match="501"):  # the server's answer
        client.served_model(url, None)


def test_answers_that_are_none() -> None:
    with fake_server(event(choices=[{"text": "a"}])) as url:
        assert sent(url)[0].error == "the answer broke off without a finish_reason"
    with fake_server(event(error={"message": "no"})) as url:
        assert "no" in (sent(url)[0].error or "")
    with fake_server("data: {no JSON\n\n") as url:
        assert "JSONDecodeError" in (sent(url)[0].error or "")
    for odd in ('{"usage": {}}', "5", '{"choices": [7]}'):
        with fake_server(f"data: {odd}\n\n") as url:
            assert "Error: " in (sent(url)[0].error or ""), odd
    never = threading.Event()
    with fake_server(event(choices=[{"text": "a"}]), delay=never) as url:
        assert sent(url, timeout=0.05)[0].error == "no end after 0.05 s"
        never.set()


def test_a_client_leaves_after_as_many_pieces_as_planned() -> None:
    with fake_server(*[event(choices=[{"text": "a"}])] * 5) as url:
        for outcome in sent(url, count=3, leaves_after=2):
            assert outcome.has_left and len(outcome.pieces) == 2 and not outcome.is_complete and outcome.error is None


def test_requests_are_sent_whether_or_not_others_are_answered() -> None:
    together = threading.Barrier(8)

    class AllThere(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return together.wait(120) >= 0  # no answer ends before all eight requests have come

    with fake_server(event(choices=[{"text": "a", "finish_reason": "length"}]), delay=AllThere()) as url:
        assert all(outcome.is_complete for outcome in sent(url, count=8))
