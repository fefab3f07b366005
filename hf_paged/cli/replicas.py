"""`hf-paged serve --replicas N`: the server as an application of Ray Serve, on a local cluster or a given one."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_paged.cli.common import UsageError, source_of, without_none
from hf_paged.config import configs_of_arguments, kv_dtypes

log = logging.getLogger("hf_paged.serving")

_APP = "hf-paged"
# Requests and answers are small, where Ray would take a share of the memory.
_OBJECT_STORE_BYTES = 128 * 2**20
_ADDRESS = "RAY_ADDRESS"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds until processes of a cluster that ends are killed: no request is left that they could end.
_SHUTDOWN_SECONDS = 2.0
# Seconds between two looks at the application, as between two checks of a replica (`ray._HEALTH_SECONDS`).
_LOOK_SECONDS = 5.0
# Looks in a row at an application that Ray does not answer: its controller may be away for a moment.
_MOST_FAILURES = 3


def check_replicas(given: dict[str, Any]) -> None:
    """Raise UsageError for options that do not go together."""
    if given["replicas"] is None:
        for name, default in (("max_replicas", None), ("routing", "prefix"), ("route_prefix", "/")):
            if given[name] != default:
                raise UsageError(f"--{name.replace('_', '-')} {given[name]} is for replicas; add --replicas")
        return
    flag = f"--replicas {given['replicas']}"
    if find_spec("ray") is None:
        raise UsageError(f"{flag} needs ray; in a checkout: pip install -e '.[ray]'")
    if given["tensor_parallel_size"] > 1:
        raise UsageError(
            f"{flag} with --tensor-parallel-size {given['tensor_parallel_size']}: each replica is one process; "
            "drop one of the two"
        )
    if given["admin_key"] is not None:
        raise UsageError(
            f"{flag} with --admin-key: its routes would change one replica of several; drop one of the two"
        )
    if (given["device"] or "").startswith("cuda:"):
        raise UsageError(
            f"{flag} with --device {given['device']}: Ray chooses the GPU of each replica; use --device cuda"
        )
    if given["max_replicas"] is not None and given["max_replicas"] < given["replicas"]:
        raise UsageError(f"--max-replicas {given['max_replicas']} is less than {flag}; raise it")


def engine_options(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The given fields of CacheConfig and of SchedulerConfig."""
    try:
        dtypes = kv_dtypes(given["kv_cache_dtype"])
    except ValueError as error:
        raise UsageError(f"--kv-cache-dtype {error}") from None
    cache, scheduler = configs_of_arguments(dict(given))
    if given["scheduling_policy"] == "fair":
        scheduler["policy"] = "fair"
    return cache | dtypes, scheduler


def engine_switches(given: dict[str, Any]) -> dict[str, bool]:
    """The given arguments of Engine that switch something on or off."""
    return without_none(fuse=given["fuse"], prepack=given["prepack"])


def serve_replicas(given: dict[str, Any], settings: Any, adapters: dict[str, str]) -> int:
    """Serve until a signal. Returns the exit status."""
    is_local = _ADDRESS not in os.environ
    if is_local:
        _free_port(given["host"], given["port"])  # a port in use is told now: Ray takes seconds to start
        _prepare_environment()
    import ray
    import torch

    from hf_paged.serving.ray import AppArgs

    device = given["device"]
    cache, scheduler = engine_options(given)
    args = AppArgs(  # type: ignore[call-arg]
        checkpoint=given["checkpoint"],
        replicas=given["replicas"],
        max_replicas=given["max_replicas"],
        routing=given["routing"].value,
        dtype=given["dtype"].value,
        device=device,
        gpus=int(torch.cuda.is_available() if device is None else device == "cuda"),
        adapters={name: str(Path(folder).resolve()) for name, folder in adapters.items()},
        settings=asdict(settings),
        cache=cache,
        scheduler=scheduler,
        switches=engine_switches(given),  # type: ignore[arg-type]
        source=source_of(given["revision"], given["trust_remote_code"]),  # type: ignore[arg-type]
        drain_seconds=given["drain_seconds"],
    )
    # Checked before a cluster is started or joined.
    prefix = _checked_prefix(given["route_prefix"])
    try:
        _connect(args, is_local=is_local, is_verbose=given["log_level"].value == "debug")
        _on_signals(_interrupt)  # Ray has set handlers of its own
        host, port = _start_serve(given["host"], given["port"])
        return _run_app(args, prefix, host, port, is_local=is_local)
    finally:
        _on_signals(signal.SIG_IGN)
        if is_local:  # signals that would end them are blocked in Ray's processes
            kill = threading.Timer(_SHUTDOWN_SECONDS, _kill_children)
            kill.daemon = True
            kill.start()
        ray.shutdown()


def _prepare_environment() -> None:
    """Set variables for a cluster of this command's own, before Ray is imported: its processes inherit them."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # its processes listen on all interfaces
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")  # one that hangs hears of no other end
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "hf_paged.serving.proxy:middlewares")


def _checked_prefix(prefix: str) -> str:
    if not re.fullmatch(r"/|(/[\w.-]+)+", prefix):
        raise UsageError(f"--route-prefix {prefix}: write / or a path such as /name")
    return prefix


def _connect(args: Any, *, is_local: bool, is_verbose: bool) -> None:
    """Connect to the cluster in the environment, or start a local cluster, which ends with this process."""
    import ray

    if not is_local:
        ray.init(log_to_driver=False)
        return
    most = args.max_replicas or args.replicas
    # A signal to the whole process group is for this process, which needs the others to drain.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        ray.init(
            address="local",  # whatever else runs on this machine
            num_cpus=max(os.cpu_count() or 1, most),  # a share each, whatever the machine has
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=is_verbose,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _start_serve(host: str, port: int) -> tuple[str, int]:
    """Start Ray Serve unless it runs. Returns where its proxies listen. Raises UsageError if that is elsewhere,
    OSError if they cannot listen."""
    from ray import serve
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        serve.start(http_options={"host": host, "port": _free_port(host, port)})
        client = _get_global_client()
    assert client is not None
    runs = client.http_config
    if (host, port or runs.port) != (runs.host, runs.port):
        raise UsageError(
            f"--host {host} --port {port}: Ray Serve runs on this cluster already and listens on {runs.host}:"
            f"{runs.port}, for all its applications; give --host {runs.host} --port {runs.port}"
        )
    return str(runs.host), int(runs.port)


def _run_app(args: Any, prefix: str, host: str, port: int, *, is_local: bool) -> int:
    from ray import serve
    from ray.serve.exceptions import RayServeException

    from hf_paged.serving.ray import build_app

    name = f"{_APP}-{secrets.token_hex(4)}"  # of its own: an application of the same name would be replaced
    stop, hurry = threading.Event(), threading.Event()
    is_over = threading.Event()
    losses: list[str] = []
    # In a thread: a cluster that has died does not answer.
    watcher = threading.Thread(target=_await_loss, args=(name, is_over, losses), daemon=True)
    app, has_begun = build_app(args), False
    try:
        # Before the call, which may be interrupted when the application is there already.
        has_begun = True
        try:
            handle = serve.run(app, name=name, route_prefix=prefix)
        except RayServeException as error:
            if "is being used by application" not in str(error):
                raise
            raise UsageError(f"--route-prefix {prefix}: {error} Choose another one, or end that application") from None
        _on_signals(lambda *_: hurry.set() if stop.is_set() else stop.set())
        path = "" if prefix == "/" else prefix
        for url in _urls(host, port):
            log.info("running on %s%s (Ctrl-C ends it), %d replicas, as %s", url, path, args.replicas, name)
        watcher.start()
        cluster = _cluster_processes() if is_local else {}
        while not stop.wait(_LOOK_SECONDS):
            if losses:
                log.error("the application %s %s", name, losses[0])
                has_begun = False
                return 1
            _end_with(cluster)
        log.info("draining")
        _drain(handle, args.drain_seconds, hurry, cluster)
        return 0
    finally:
        _on_signals(signal.SIG_IGN)
        is_over.set()
        if watcher.ident is not None:  # it has been started
            watcher.join(_LOOK_SECONDS)  # its next call would start a cluster of its own
        if has_begun and not is_local:  # a cluster of its own ends as a whole
            try:
                serve.delete(name)
            except Exception:  # what ended the server is raised
                log.exception("the application %s could not be deleted", name)


def _await_loss(name: str, is_over: threading.Event, losses: list[str]) -> None:
    """Look at the application until `is_over`. Once it is lost, `losses` says how."""
    from ray import serve

    failures = 0
    while not is_over.wait(_LOOK_SECONDS):
        try:
            applications = serve.status().applications
        except Exception as error:  # of Ray, whose controller may be away for a moment
            failures += 1
            if failures == _MOST_FAILURES:
                losses.append(f"cannot be seen any more: {str(error).splitlines()[0]}")
                return
            continue
        failures = 0
        if name not in applications:
            losses.append("has been deleted by another program")
            return


def _drain(handle: Any, seconds: float, hurry: threading.Event, cluster: dict[int, str]) -> None:
    """Wait until the requests in flight have ended, the time is over, or a second signal has come."""
    from ray.exceptions import RayError

    done = handle.drain.remote(seconds)
    # A little longer than the ingress takes, which ends requests itself.
    end = time.monotonic() + seconds + _LOOK_SECONDS
    while not hurry.is_set() and time.monotonic() < end:
        _end_with(cluster)
        try:
            if left := done.result(timeout_s=0.2):
                log.warning("%d requests have not ended in time", left)
            return
        except TimeoutError:
            pass
        except RayError as error:  # the ingress has ended
            log.warning("the ingress cannot drain: %s", str(error).splitlines()[0])
            return
    if hurry.is_set():
        with suppress(TimeoutError, RayError):
            handle.drain.remote(0.0).result(timeout_s=_SHUTDOWN_SECONDS)


def _urls(host: str, port: int) -> list[str]:
    """Where the proxies answer: each is on the machine of a node of the cluster."""
    import ray
    from ray import serve

    from hf_paged.serving.settings import is_loopback

    proxies = serve.status().proxies
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    if is_loopback(host):
        here = ray.get_runtime_context().get_node_id()
        own = f"http://{_bracketed(host)}:{port}"
        return [own if node == here else f"{own} of the machine {nodes.get(node, node)}" for node in proxies]
    return [f"http://{_bracketed(nodes.get(node, host))}:{port}" for node in proxies]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _children() -> list[int]:
    """List the ids of child processes; none on a system without /proc."""
    found: list[int] = []
    with suppress(FileNotFoundError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                found += map(int, (thread / "children").read_text().split())
    return found


def _cluster_processes() -> dict[int, str]:
    """Return the children that a cluster cannot do without: their names by process id."""
    names: dict[int, str] = {}
    for child in _children():
        with suppress(OSError):  # it has ended meanwhile
            names[child] = Path(f"/proc/{child}/comm").read_text().strip()
    return {child: name for child, name in names.items() if name in ("gcs_server", "raylet")}


def _end_with(cluster: dict[int, str]) -> None:
    """End this process if the cluster has died: no call of Ray's would return any more."""
    if dead := [name for pid, name in cluster.items() if _has_ended(pid)]:
        log.error("%s has ended, and with it the cluster", dead[0])
        _kill_children()
        os._exit(1)


def _has_ended(child: int) -> bool:
    """Return True if a child has ended. Ray's workers end once the raylet's parent notes its end, as this does."""
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:  # another thread has taken note
        return True


def _kill_children() -> None:
    for child in _children():
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _on_signals(handler: Any) -> None:
    for each in _SIGNALS:
        signal.signal(each, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _free_port(host: str, port: int) -> int:
    """The port, or any free one for 0. Raises OSError with the address if it cannot be used."""
    from hf_paged.serving.sockets import listen

    sockets = listen(host, port)
    found = int(sockets[0].getsockname()[1])
    for each in sockets:
        each.close()
    return found
