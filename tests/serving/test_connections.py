"""Connections that send nothing, take nothing, or are too many; and how all of them end."""

from __future__ import annotations

import errno
import json
import resource
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from hf_paged.serving import server as server_module
from hf_paged.serving.server import listen
from hf_paged.serving.settings import Limits
from tests.serving.harness import NAME, Ended, Running, serving
from tests.waiting import Gate, until

PROMPT = "A list is"


def request_of(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}".encode() + b"\r\n\r\n" + body


def was_reset(connection: socket.socket) -> bool:
    """Reads to the end."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        return True
    return False


# -- heads ---------------------------------------------------------------------------------------------------------


def test_a_connection_without_a_head_is_closed() -> None:
    """Silent, with half a head, and with one that comes byte by byte, which gets no further time."""
    with serving(limits=Limits(head_seconds=0.05)) as running:
        for begun in (b"", b"GET /health HTTP/1.1\r\nhost"):
            connection = running.connect()
            with suppress(ConnectionError):  # it was closed before it had read this
                connection.sendall(begun)
                assert connection.recv(1) == b""
        connection = running.connect()
        connection.settimeout(0.01)
        for _ in range(6000):
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is open after a minute")


def test_the_head_after_an_answer_has_a_limit_of_time_too() -> None:
    with serving() as running:
        connection, answer = running.connect(), b""
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while not answer.endswith(b'"ok"}'):  # head and body may come apart
            part = connection.recv(4096)
            assert part, answer
            answer += part
        (protocol,) = running.server.server_state.connections
        protocol._limits = Limits(head_seconds=0.05)
        connection.sendall(b"GET /hea")
        assert connection.recv(4096) == b""


def test_the_head_has_a_limit_of_size(shared_server: Running) -> None:
    connection = shared_server.connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * 2**17)
    assert connection.recv(100).startswith(b"HTTP/1.1 400")


# -- number --------------------------------------------------------------------------------------------------------


def test_connections_that_wait_make_room_for_others() -> None:
    """Neither they nor requests that are refused take /health down."""
    with serving(limits=Limits(in_flight=1, spare_connections=4)) as running:
        gate = Gate(running.engine, 0)
        stream = running.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, stream=True)
        silent = [running.connect() for _ in range(12)]
        assert running.http.get("/health").status_code == 200
        assert silent[0].recv(1) == b"" and silent[5].recv(1) == b""
        answer = running.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 429 and answer.json()["error"]["code"] == "queue_full"
        gate.open()
        assert list(stream)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "stray", [b"\r\n", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["line", "request"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_after_stray_bytes_is_seen(server: Running, stray: bytes, stream: bool) -> None:
    gate = Gate(server.engine, 2)
    with Ended("status='disconnected'") as ended:
        connection = server.connect()
        connection.sendall(request_of({"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": stream}))
        gate.wait()
        connection.sendall(stray)
        (protocol,) = (each for each in server.server.server_state.connections if not each.is_idle)
        until(lambda: protocol.conn.trailing_data[0] == stray)
        connection.close()
        try:
            ended.wait()  # in the middle of a step, so not because an answer could not be written
        finally:
            gate.open()
    server.assert_idle()


def test_requests_that_come_before_the_answer_are_answered_in_turn(server: Running) -> None:
    connection = server.connect()
    health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    connection.sendall(request_of({"prompt": PROMPT, "max_tokens": 3}) + health + health[:30])
    connection.sendall(health[30:].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    answers = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answers.count(b"HTTP/1.1 200") == 3 and answers.count(b'{"status":"ok"}') == 2


def test_what_a_client_sends_before_its_answer_has_a_bound(server: Running) -> None:
    gate = Gate(server.engine, 1)
    with Ended("bytes before its answer") as cut, Ended("status='disconnected'") as ended:
        connection = server.connect()
        connection.sendall(request_of({"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}))
        gate.wait()
        with suppress(ConnectionError):  # it is closed meanwhile
            connection.sendall(b"x" * 2**18)
        cut.wait(), ended.wait()
        gate.open()


def test_connections_that_cannot_be_taken_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running:
        error = OSError(errno.EMFILE, "Too many open files")
        for _ in range(100):
            context = {"message": "socket.accept() out of system resource", "exception": error}
            running.loop.call_soon_threadsafe(running.loop.call_exception_handler, context)
        assert running.http.get("/health").status_code == 200
    (record,) = (each for each in caplog.records if "Too many open files" in each.getMessage())
    assert record.exc_info is None
    assert running.server.config.backlog < 20  # so many connections are taken at once, before others can be closed


def test_few_open_files_are_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for files in (64, 700):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))  # noqa: B023
        limits = server_module._allowed(Limits())
        used = len(list(Path("/dev/fd").iterdir()))
        assert limits.in_flight >= 1 and limits.spare_connections >= 2
        assert limits.connections <= max(4, files - used)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_reader_that_does_not_read_is_cut_off(stream: bool) -> None:
    """The requests that it left do not run on, and the server does not keep what the client did not take."""
    with serving(limits=Limits(send_seconds=0.1)) as running, Ended("status='slow'") as ended:
        # What the kernel takes for a client; connections inherit it.
        running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
        # What the prompts echo is more than the kernel takes.
        fields = {"prompt": [[5] * 900] * 30, "echo": True, "max_tokens": 100 if stream else 0, "ignore_eos": True}
        connection.sendall(request_of({**fields, "return_token_ids": True, "stream": stream}))
        ended.wait()
        running.assert_idle()
        assert was_reset(connection)
        connection.close()


# -- the end -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drain", "signal"])
def test_requests_that_the_end_cuts_get_an_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LAST_SECONDS", 120.0)
    with (
        serving(drain_seconds=0.05 if how == "drain" else 600) as running,
        Ended("ending 2 requests") as ended,
        Ended("status='the server is stopping'") as told,
    ):
        gate = Gate(running.engine, 3)
        fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
        stream = running.client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gate.wait()
        whole = running.beside(running.post, "/v1/completions", **fields)
        running.await_command()
        gate.pass_on(1)
        gate.wait()  # in the fifth step, which has both
        running.send_signal()
        if how == "signal":
            running.send_signal()
        ended.wait()
        gate.open()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        answer = whole.result(120)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_stopped"
        told.wait(2)


def test_a_third_signal_ends_the_connections_and_the_engine() -> None:
    with serving() as running:
        connection = running.connect()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{"
        )  # the rest never
        for _ in range(3):
            running.send_signal()
        running.thread.join(120)
        assert not running.thread.is_alive()
        assert not running.service.worker.is_alive
        with pytest.raises(RuntimeError, match="closed"):
            running.engine.step()


def test_a_drain_ends_a_pause() -> None:
    with serving(admin=True) as running:
        gate = Gate(running.engine, 1)
        stream = running.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, stream=True)
        gate.wait()
        pausing = running.beside(running.http.post, "/pause", params={"mode": "keep"})
        running.await_command()
        gate.open()
        assert pausing.result(120).status_code == 200 and running.service.worker.num_in_flight == 1
        running.send_signal()
        assert list(stream)[-1].choices[0].finish_reason is not None


def test_a_port_in_use_is_found_before_the_model_is_loaded() -> None:
    (taken,) = listen("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        listen("127.0.0.1", port)
    taken.close()
    for one in listen("localhost", 0):
        one.close()
