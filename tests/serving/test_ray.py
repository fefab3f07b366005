"""`hf-paged serve --replicas`: what is refused, and with Ray (which is no dependency of the tests) two replicas."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_paged.cli import replicas
from hf_paged.cli.main import main
from scripts import check_clients
from scripts.server_process import CHECKPOINT, ROOT, serving

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs the extra `ray`")


def test_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(replicas, "find_spec", lambda name: object())
    for options, words in (
        ("--replicas 2 --tensor-parallel-size 2", "--replicas 2 with --tensor-parallel-size 2: each replica"),
        ("--replicas 2 --admin-key k", "--replicas 2 with --admin-key"),
        ("--replicas 2 --device cuda:1", "--replicas 2 with --device cuda:1: Ray chooses"),
        ("--replicas 3 --max-replicas 2", "--max-replicas 2 is less than --replicas 3"),
        ("--max-replicas 2", "--max-replicas 2 is for replicas; add --replicas"),
        ("--route-prefix /a", "--route-prefix /a is for replicas; add --replicas"),
        ("--routing round-robin", "--routing round-robin is for replicas; add --replicas"),
    ):
        assert main(["serve", str(CHECKPOINT), *options.split()]) == 2
        assert words in capsys.readouterr().err


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(replicas, "find_spec", lambda name: None)
    assert main(["serve", str(CHECKPOINT), "--replicas", "2"]) == 2
    assert "--replicas 2 needs ray; in a checkout: pip install -e '.[ray]'" in capsys.readouterr().err


@needs_ray
def test_arguments_that_are_refused() -> None:
    from hf_paged.serving.ray import AppArgs

    AppArgs.model_validate({"checkpoint": "m", "routing_options": {"most_blocks": 4096, "blocks_per_request": 2.5}})
    wrong: tuple[tuple[dict[str, object], str], ...] = (
        ({"replica": 2}, "replica"), ({"replicas": 0}, "greater than or equal to 1"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas=2 is less than replicas=3"),
        ({"routing_options": {"most_blocks": 0}}, "most_blocks=0"), ({"cache": {"block_size": 0}}, "block_size=0"),
        ({"settings": {"admin_key": "k"}}, "admin_key"), ({"settings": {"limits": {"in_flight": 0}}}, "in_flight=0"),
        ({"adapters": {"m": "folder"}}, "the name 'm' is the model's"),
    )  # fmt: skip
    for fields, words in wrong:
        with pytest.raises(ValueError, match=words):
            AppArgs.model_validate({"checkpoint": "m", **fields})


@needs_ray
def test_the_application() -> None:
    from hf_paged.serving.ray import build_app

    app = build_app({"checkpoint": str(CHECKPOINT), "replicas": "3", "settings": {"names": ["a"], "api_keys": ["k"]}})
    assert app._bound_deployment.name == "ingress"
    with pytest.raises(ValueError, match="checkpoint"):
        build_app({"replicas": 2})


@needs_ray
def test_the_ingress_asks_for_the_key() -> None:
    """Before any replica is asked, with the settings that the application has given it."""
    from hf_paged.serving.ray import Ingress, build_app

    fields = {"api_keys": ["k"], "limits": {"body": 5}}
    _, settings, _ = build_app({"checkpoint": str(CHECKPOINT), "settings": fields})._bound_deployment.init_args
    asked: list[Any] = []

    async def answer(request: Any) -> Any:
        asked.append(request)
        head = {"type": "http.response.start", "status": 200, "headers": []}
        for messages in ((), (head, {"type": "http.response.body", "body": b"", "more_body": False})):
            yield SimpleNamespace(replica="r", messages=messages)

    async def status_of(path: str, key: bytes, body: bytes = b"{}") -> int:
        engines: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=answer))
        ingress, sent = Ingress(engines, settings, 60.0), list[Any]()
        headers = [(b"authorization", b"Bearer " + key), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return given.pop() if given else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        response: Any = await ingress(SimpleNamespace())  # type: ignore[arg-type]
        await asyncio.wait_for(response(scope, receive, send), 60)
        return int(sent[0]["status"])

    async def run() -> None:
        for path in ("/v1/completions", "/v1/models", "/metrics", "/no/such/route"):
            assert await status_of(path, b"wrong") == 401
        assert await status_of("/v1/completions", b"k", b"x" * 6) == 413
        assert not asked
        assert await status_of("/v1/completions", b"k") == 200 and len(asked) == 1

    asyncio.run(run())


@needs_ray
def test_the_ingress_drains_and_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in flight end, others get 503; a replica that has a request and says nothing is lost."""
    from hf_paged.serving import ray as module
    from hf_paged.serving.settings import Settings

    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.0)
    lost: list[tuple[str, ...]] = []

    async def run() -> None:
        go_on = asyncio.Event()

        async def answer(request: Any) -> Any:
            lost.append(request.lost)
            await go_on.wait()
            module._taken[request.request_id] = f"replica-{len(lost)}", 0.0
            await asyncio.Event().wait()
            yield

        engines: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=answer))
        ingress = module.Ingress(engines, Settings(names=("m",)), 60.0)

        async def ask(path: str) -> tuple[int, list[Any]]:
            sent: list[Any] = []
            head = {"type": "http", "method": "GET", "headers": [(b"x-request-id", b"r")]}
            response: Any = await ingress(SimpleNamespace())  # type: ignore[arg-type]

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {**head, "path": f"/prefix{path}", "root_path": "/prefix"}
            await asyncio.wait_for(response(scope, asyncio.Event().wait, send), 60)
            return sent[0]["status"], sent[0]["headers"]

        running = asyncio.ensure_future(ask("/v1/models"))
        while not lost:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(ingress.drain(60.0))
        while not ingress._shared._is_draining:
            await asyncio.sleep(0)
        status, headers = await ask("/v1/models")
        assert status == 503 and b"x-request-id" not in dict(headers), "Ray's proxy adds it"
        assert not draining.done()
        go_on.set()
        assert (await running)[0] == 503 and await draining == 0
        hanging = module.Ingress(engines, Settings(names=("m",)), 60.0)
        monkeypatch.setattr(module, "SILENCE_SECONDS", 60.0)
        ingress, before = hanging, len(lost)
        late = asyncio.ensure_future(ask("/v1/models"))
        while len(lost) == before:
            await asyncio.sleep(0)
        assert await hanging.drain(0.0) == 1
        assert (await late)[0] == 503 and hanging._shared._in_flight == 0
        del lost[before:]

    asyncio.run(run())
    assert lost == [(), ("replica-1",), ("replica-1", "replica-2")] and not module._taken


@needs_ray
def test_the_ingress_needs_no_torch() -> None:
    """It starts in a second or two, and takes little memory."""
    code = "import sys, hf_paged.serving.ray; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
@needs_ray
def test_clients(tmp_path: Path) -> None:
    """OpenAI's calls pass through two replicas, which end without an error."""
    task = check_clients.make_task()
    client = check_clients.chosen("openai-python")[0]
    with serving(
        *("--replicas", "2", "--kv-cache-memory", "16MiB", "--dtype", "float32"),
        *("--api-key", check_clients.KEY, "--served-model-name", check_clients.NAME),
    ) as server:
        task["url"] = server.url
        result = check_clients.check(client, sys.executable, task, tmp_path)
    assert result.summary == "passed" and len(result.calls) > 10
    assert server.status == 0, "".join(server.lines[-30:])


@pytest.mark.slow
@needs_ray
def test_a_signal_while_replicas_load() -> None:
    """Nothing waits for them: an application that cannot start would load for ever."""
    command = [sys.executable, "-m", "hf_paged.cli", "serve", str(CHECKPOINT), "--replicas", "2", "--port", "0"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as server:
        assert server.stderr is not None
        next(line for line in server.stderr if "Started Serve" in line)
        server.terminate()
        rest = server.stderr.read()
    assert server.returncode == 130 and "interrupted" in rest and "running on" not in rest


@needs_ray
def test_loads_of_the_router() -> None:
    """A request counts from its choice to its end, also while it is on its way, and not after it was given up."""
    from hf_paged.serving.ray import ReplicaRouter
    from hf_paged.serving.relay import Asked

    class Name(str):
        unique_id = property(str)

    replicas = [SimpleNamespace(replica_id=Name(name), routing_stats={}) for name in "ab"]

    def pending(name: str, chain: tuple[int, ...] = (), lost: tuple[str, ...] = ()) -> Any:
        asked = Asked("POST", "/v1/completions", b"", (), b"", None, chain, lost)
        metadata = SimpleNamespace(internal_request_id=name)
        return SimpleNamespace(args=[asked], metadata=metadata, future=asyncio.get_running_loop().create_future())

    async def run() -> None:
        router = ReplicaRouter.__new__(ReplicaRouter)
        router.initialize_state("prefix", most_blocks=100)

        async def choose(request: Any) -> str:
            first, _ = await router.choose_replicas(replicas, request)
            return str(first[0].replica_id)

        one, other, third = pending("1", (1, 2)), pending("2", (1, 2)), pending("3", (7, 8), lost=("a",))
        assert [await choose(one), await choose(other), await choose(third)] == ["a", "b", "b"]
        assert router._loads == {"a": 1, "b": 2}
        assert await choose(other) == "a" and router._loads == {"a": 2, "b": 1}  # chosen again, counted once
        for request, place in ((one, 0), (third, 1)):
            request.future.set_result(replicas[place])
        other.future.cancel()
        await asyncio.sleep(0)
        assert router._loads == {"a": 1, "b": 1} and not router._chosen
        router.on_request_completed("a", "1")  # type: ignore[arg-type]
        router.on_request_completed("a", "a call that was sent to all replicas")  # type: ignore[arg-type]
        assert router._loads == {"b": 1}
        router.on_request_completed("b", "3")  # type: ignore[arg-type]
        assert not router._loads and not router._in_flight and not router._seen

    asyncio.run(run())
