"""`hf-paged serve --replicas N`: the server as an application of Ray Serve, on a local cluster or a given one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_paged.cli.common import UsageError, source_of, without_none

log = logging.getLogger("hf_paged.serving")

_APP = "hf-paged"
_OBJECT_STORE_BYTES = 128 * 2**20  # requests and answers are small
_ADDRESS = "RAY_ADDRESS"


def check_replicas(given: dict[str, Any]) -> None:
    """Raises UsageError for options that do not go together."""
    if given["replicas"] is None:
        for name, flag in (("max_replicas", "--max-replicas"), ("routing", "--routing")):
            if given[name] not in (None, "prefix"):
                raise UsageError(f"{flag} {given[name]} is for replicas; add --replicas")
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
    cache = without_none(
        block_size=given["block_size"],
        memory=given["kv_cache_memory"],
        memory_fraction=given["gpu_memory_utilization"],
        swap_memory=given["swap_memory"],
    )
    scheduler = without_none(
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        prefix_caching=given["enable_prefix_caching"],
    )
    return cache, scheduler


def engine_switches(given: dict[str, Any]) -> dict[str, bool]:
    """The given arguments of Engine that switch something on or off."""
    return without_none(fuse=given["fuse"], prepack=given["prepack"])


def serve_replicas(given: dict[str, Any], settings: Any, adapters: dict[str, str]) -> int:
    """Serve until a signal. Returns the exit status."""
    import ray
    import torch
    from ray import serve

    from hf_paged.serving.ray import AppArgs, build_app

    device = given["device"]
    num_gpus = int(torch.cuda.is_available() if device is None else device == "cuda")
    cache, scheduler = engine_options(given)
    args = AppArgs(
        checkpoint=given["checkpoint"],
        replicas=given["replicas"],
        max_replicas=given["max_replicas"],
        routing=given["routing"].value,
        dtype=given["dtype"].value,
        device=device,
        gpus=num_gpus,
        adapters={name: str(Path(folder).resolve()) for name, folder in adapters.items()},
        settings=asdict(settings),
        cache=cache,
        scheduler=scheduler,
        switches=engine_switches(given),
        source=source_of(given["revision"], given["trust_remote_code"]),
        drain_seconds=given["drain_seconds"],
    )
    host, port = given["host"], _free_port(given["host"], given["port"])
    if _ADDRESS in os.environ:
        ray.init(log_to_driver=False)
    else:
        most = args.max_replicas or args.replicas
        ray.init(
            num_cpus=max(os.cpu_count() or 1, most),  # a share each, whatever the machine has
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=given["log_level"].value == "debug",
        )
    stop, has_begun = threading.Event(), False
    try:
        _on_signals(_interrupt)  # Ray has set handlers of its own
        serve.start(http_options={"host": host, "port": port})
        app = build_app(args)
        has_begun = True
        serve.run(app, name=_APP, route_prefix="/")
        _on_signals(lambda *_: stop.set())
        log.info("running on http://%s:%d (Ctrl-C ends it), %d replicas", host, port, args.replicas)
        stop.wait()
        log.info("draining")
    finally:
        _on_signals(signal.SIG_IGN)
        try:
            if has_begun:  # else an application of that name is another program's
                serve.delete(_APP)
        except Exception:  # what ended the server is raised
            log.exception("the application could not be deleted")
        finally:
            ray.shutdown()
    return 0


def _on_signals(handler: Any) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handler)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _free_port(host: str, port: int) -> int:
    """The port, or any free one for 0. Raises OSError with the address if it cannot be used."""
    from hf_paged.serving.server import listen

    sockets = listen(host, port)
    found = int(sockets[0].getsockname()[1])
    for each in sockets:
        each.close()
    return found
