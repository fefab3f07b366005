"""Replicas on Ray Serve: `build_app` makes an application of one ingress and any number of engines.

The ingress checks keys and sizes, and hands each request to a replica (`relay`), which `routing` chooses. A replica is
the HTTP application of one engine (`replica`). Ray starts, places, checks and replaces the processes, and moves bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.serving.middleware import Gate, send_problem
from hf_paged.serving.problems import draining, not_served
from hf_paged.serving.relay import SILENCE_SECONDS, Asked, Part, Relay, ReplicaLost
from hf_paged.serving.routing import Policy, Router, make_routing
from hf_paged.serving.scaling import Pressure, wanted_replicas
from hf_paged.serving.settings import Limits, Settings

log = logging.getLogger("hf_paged.serving")

# Lists in a configuration file.
_TUPLES = ("names", "api_keys", "hosts", "media_hosts", "private_media_hosts", "logits_processors")
# What waits for memory changes with steps; what this router sends, it counts itself at once.
_STATS_SECONDS = 1.0  # between two reports of a replica
_HEALTH_SECONDS = 5.0  # between two checks, of which three must fail; a process that has ended is noticed at once
_LAST_SECONDS = 1.0  # from the death of an engine, or the end of a drain, to that of the process: clients are told

_REQUEST_ID = b"x-request-id"

# Of one replica, and a client cannot say which.
_OF_ONE = ("/", "/live", "/metrics")


class AppArgs(BaseModel):
    """The arguments of `build_app`, which a configuration file of Ray Serve gives as `args`.

    checkpoint: a folder that every machine of the cluster has, or a name on the hub. replicas: that are started;
    max_replicas: to which autoscaling may add (None: no autoscaling). routing: see `routing.make_routing`, with
    routing_options for PrefixRouting. cpus, gpus: of one replica. adapters: name -> folder; a replica loads one when
    the first request names it. settings, cache, scheduler: fields of Settings, CacheConfig and SchedulerConfig; the
    last two are those of one replica. switches: arguments of its Engine. drain_seconds: that requests of a replica
    which is to end may take. wait_seconds: for a replica that takes a request, before the client gets status 503.
    """

    model_config = ConfigDict(extra="forbid")

    checkpoint: str
    replicas: int = Field(1, ge=1)
    max_replicas: int | None = None
    routing: Policy = "prefix"
    routing_options: dict[str, int | float] = Field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    cpus: float = Field(1.0, gt=0)
    gpus: float = Field(0.0, ge=0)
    adapters: dict[str, str] = Field(default_factory=dict)
    settings: dict[str, Any] = Field(default_factory=dict)
    cache: dict[str, Any] = Field(default_factory=dict)
    scheduler: dict[str, Any] = Field(default_factory=dict)
    switches: dict[Literal["fuse", "prepack"], bool] = Field(default_factory=dict)
    source: dict[Literal["revision", "trust_remote_code"], str | bool] = Field(default_factory=dict)
    drain_seconds: float = Field(30.0, ge=0)
    wait_seconds: float = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> AppArgs:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas={self.max_replicas} is less than replicas={self.replicas}; raise it")
        # Made here too, so that the command fails and not a process that Ray starts.
        make_routing(self.routing, **self.routing_options)
        CacheConfig(**self.cache)
        SchedulerConfig(**self.scheduler)
        if self.make_settings().admin_key is not None:
            raise ValueError("admin_key: its routes would change one replica of several; leave it out")
        if taken := self.adapters.keys() & set(self.make_settings().names):
            raise ValueError(f"adapters: the name {min(taken)!r} is the model's; choose another one")
        return self

    def make_settings(self) -> Settings:
        key = os.environ.get("HF_PAGED_API_KEY")  # so that it need not be in a configuration file
        given: dict[str, Any] = {"names": (self.checkpoint,), "api_keys": (key,) if key else (), **self.settings}
        lists = {name: tuple(given[name]) for name in _TUPLES if given.get(name) is not None}
        return Settings(**{**given, **lists, "limits": Limits(**given.get("limits", {}))})


def build_app(args: AppArgs | dict[str, Any]) -> serve.Application:
    """The application for `serve.run`, or for `serve run hf_paged.serving.ray:build_app checkpoint=... replicas=2`.

    args: AppArgs, or its fields. Raises ValueError for those that cannot be used.
    """
    args = AppArgs.model_validate(args)
    settings = args.make_settings()
    if Path(args.checkpoint).is_dir():  # of this machine: replicas may run in another folder
        folder = str(Path(args.checkpoint).resolve())
        named = {"names": settings.names, **args.settings}
        args = args.model_copy(update={"checkpoint": folder, "settings": named})
    scale: dict[str, Any] = {"num_replicas": args.replicas}
    if args.max_replicas is not None:
        policy = AutoscalingPolicy(policy_function="hf_paged.serving.ray:scaling_policy")
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=args.replicas, max_replicas=args.max_replicas, policy=policy
            )
        }
    engines = serve.deployment(
        EngineReplica,
        name="engine",
        max_ongoing_requests=settings.limits.connections,  # further ones wait; the engine refuses before
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        graceful_shutdown_timeout_s=args.drain_seconds,
        # Ray asks so often whether the last request has ended.
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=2 * _HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="hf_paged.serving.ray:ReplicaRouter",
            request_router_kwargs={"policy": args.routing, **args.routing_options},
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        **scale,
    )
    ingress = serve.deployment(
        Ingress,
        name="ingress",
        max_ongoing_requests=settings.limits.connections * (args.max_replicas or args.replicas),
        # It computes nothing, and must find a place on a machine whose CPUs are taken.
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return ingress.bind(engines.bind(args), settings, args.wait_seconds)


class EngineReplica:
    """The deployment of engines: loads the checkpoint and answers requests."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]
        logging.getLogger("hf_paged").setLevel(logging.INFO)
        from hf_paged.serving.replica import Replica  # torch: the ingress does not need it

        name = serve.get_replica_context().replica_id.unique_id
        service = await asyncio.to_thread(_load, args)
        service.on_death = _end_soon
        self._replica = Replica(service, name, args.adapters)
        await self._replica.start()

    async def answer(self, asked: Asked) -> AsyncGenerator[Part, None]:
        async for part in self._replica.answer(asked):
            yield part

    async def check_health(self) -> None:
        self._replica.check_alive()

    async def record_routing_stats(self) -> dict[str, float]:
        return await self._replica.figures()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._replica.figures()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.stop()


def _load(args: AppArgs) -> Any:
    from hf_paged.serving.loading import load_engine, load_extractor, load_processor
    from hf_paged.serving.service import Service

    engine, tokenizer = load_engine(
        args.checkpoint,
        CacheConfig(**args.cache),
        SchedulerConfig(**args.scheduler),
        dtype=args.dtype,
        device=args.device,
        switches=args.switches,  # type: ignore[arg-type]
        source=args.source,  # type: ignore[arg-type]
    )
    extractor = load_extractor(args.checkpoint, engine.model, args.source)  # type: ignore[arg-type]
    processor = load_processor(args.checkpoint, engine.model, args.source)  # type: ignore[arg-type]
    return Service(engine, tokenizer, args.make_settings(), extractor=extractor, processor=processor)


def _end_soon(error: BaseException) -> None:
    """End this process, so that no further request is sent to an engine that has died. Ray starts another one."""
    asyncio.get_running_loop().call_later(_LAST_SECONDS, os._exit, 1)


_taken: dict[str, tuple[str, float]] = {}
"""Requests of which nothing has been heard since they were given to a replica: its name, and when.

The router writes it, in another thread of the process of the ingress, and the ingress removes it.
"""


def _check_taken(request_id: str) -> None:
    """Raise ReplicaLost if a replica has had the request for too long without saying so."""
    name, since = _taken.get(request_id, ("", math.inf))
    if time.monotonic() - since > SILENCE_SECONDS:
        raise ReplicaLost(f"the replica {name} has said nothing for {SILENCE_SECONDS:g} seconds", name)


# -- the way of a request ----------------------------------------------------------------------------------------------


class Ingress:
    """The deployment that clients reach, without a model. If its process ends, its requests lose their connections."""

    def __init__(self, engines: DeploymentHandle, settings: Settings, wait_seconds: float) -> None:
        handle = engines.options(method_name="answer", stream=True)

        async def open_stream(asked: Asked) -> AsyncGenerator[Part, None]:
            response: Any = handle.remote(asked)
            try:
                # Looked at each second, because a replica that hangs neither answers nor fails.
                first = asyncio.ensure_future(anext(aiter(response), None))
                try:
                    while not (await asyncio.wait({first}, timeout=1.0))[0]:
                        _check_taken(asked.request_id)
                finally:
                    first.cancel()
                    # It has been heard of, or nobody waits for it.
                    _taken.pop(asked.request_id, None)
                if (part := first.result()) is not None:
                    yield part
                async for part in response:
                    yield part
            # An error of the replica's own code: another replica would raise it too.
            except RayTaskError:
                raise
            except (RayError, RayServeException) as error:
                raise ReplicaLost((str(error).strip() or type(error).__name__).splitlines()[0]) from error
            finally:
                # Whatever has ended it, the replica must not compute for nobody.
                with suppress(Exception):  # it may have ended, or never begun
                    response.cancel()

        relay = Relay(open_stream, wait_seconds=wait_seconds, request_seconds=settings.limits.request_seconds)
        self._relay, self._shared = relay, _Shared(relay)
        self._gate = Gate(self._shared, settings=settings, on_answer=lambda path, status: None)

    async def __call__(self, request: Request) -> Response:
        return _Through(self._gate)

    async def drain(self, seconds: float) -> int:
        """Take no further requests. Those that have not ended in time get an error. Returns how many they are."""
        # Two rounds: requests end by themselves, or by an error, which their clients have time to read.
        if left := await self._shared.drain(seconds):
            self._relay.end()
            await self._shared.drain(_LAST_SECONDS)
        return left


class _Through(Response):
    """An ASGI application in the form of an answer, as Ray wants it. It gets the request without the path's prefix.

    Ray's proxy itself answers with the request's id, which it has given to a request without one.
    """

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_id = any(name.lower() == _REQUEST_ID for name, _ in scope["headers"])

        async def send_once(message: Message) -> None:
            if has_id and message["type"] == "http.response.start":
                headers = [each for each in message["headers"] if each[0].lower() != _REQUEST_ID]
                message = {**message, "headers": headers}
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        await self._app({**scope, "path": path, "root_path": ""}, receive, send_once)


class _Shared:
    """Refuses the routes that are about one engine, and all work when the application is to end."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._in_flight = 0
        self._is_draining = False
        self._changed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in _OF_ONE:
            text = f"{path} is about one engine, and there are several; see Ray's dashboard and metrics"
            await send_problem(send, not_served(text), path)
        elif self._is_draining and path != "/health":
            await send_problem(send, draining(), path)
        else:
            self._in_flight += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._in_flight -= 1
                self._changed.set()

    async def drain(self, seconds: float) -> int:
        """See `Ingress.drain`."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        return self._in_flight


class ReplicaRouter(RequestRouter):
    """Ray's interface to `routing`. Each ingress has one, which knows what it has sent itself.

    The load of a replica is the number of requests that this router has in flight there, and those that wait there for
    memory, which the replica reports every second.
    """

    def initialize_state(self, policy: Policy = "prefix", **options: float) -> None:
        self._policy: Router[ReplicaID] = make_routing(policy, **options)
        self._chosen: dict[asyncio.Future[Any], ReplicaID] = {}  # by a request that is on its way
        self._seen: set[asyncio.Future[Any]] = set()  # whose end is awaited
        self._in_flight: Counter[tuple[str, ReplicaID]] = Counter()  # by a request that is there
        self._loads: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        asked = pending_request.args[0] if pending_request.args else None
        chain, lost = (asked.chain, asked.lost) if isinstance(asked, Asked) else ((), ())
        known = {replica.replica_id: replica for replica in candidate_replicas}
        # Where a request was lost it may have been the cause, unless there is no other replica.
        fresh = {each: replica for each, replica in known.items() if each.unique_id not in lost} or known
        # Ray may ask again for one request, whose last choice then does not count.
        self._put_back(pending_request.future)
        reported = {each: float((replica.routing_stats or {}).get("waiting", 0.0)) for each, replica in fresh.items()}
        loads = {each: self._loads[each] + waiting for each, waiting in reported.items()}
        choice = self._policy.choose(chain, loads)
        # Noted now, because other requests are routed before this one has arrived.
        self._policy.sent(chain, choice.replica)
        self._note(pending_request, choice.replica)
        others = sorted((each for each in fresh if each != choice.replica), key=loads.__getitem__)
        return [[known[choice.replica]], [known[each] for each in others]]

    def _note(self, pending: PendingRequest, replica_id: ReplicaID) -> None:
        future, name = pending.future, pending.metadata.internal_request_id
        if future.done():
            return
        if future not in self._seen:
            self._seen.add(future)
            future.add_done_callback(lambda done: self._assigned(done, name, pending.args))
        self._chosen[future] = replica_id
        self._count(replica_id, 1)

    def _put_back(self, future: asyncio.Future[Any]) -> None:
        if (before := self._chosen.pop(future, None)) is not None:
            self._count(before, -1)

    def _assigned(self, future: asyncio.Future[Any], name: str, args: Sequence[Any] = ()) -> None:
        """Note the replica of a request that has got one; a cancelled request is forgotten."""
        self._put_back(future)
        self._seen.discard(future)
        if not future.cancelled():
            replica_id = future.result().replica_id
            self._in_flight[name, replica_id] += 1
            self._count(replica_id, 1)
            if args and isinstance(args[0], Asked):
                _taken[args[0].request_id] = replica_id.unique_id, time.monotonic()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        place = internal_request_id, replica_id
        if place in self._in_flight:  # calls to all replicas have not been counted
            self._count(replica_id, -1)
            self._in_flight[place] -= 1
            if not self._in_flight[place]:
                del self._in_flight[place]

    def _count(self, replica_id: ReplicaID, change: int) -> None:
        self._loads[replica_id] += change
        if not self._loads[replica_id]:
            del self._loads[replica_id]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        # A replica that comes back has an empty cache.
        gone = set(self.curr_replicas) - {replica.replica_id for replica in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self._policy.forget(replica_id)


def scaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray's interface to `scaling`. The second value is a state, of which there is none."""
    figures = context.aggregated_metrics or {}
    waiting, kv_used = figures.get("waiting", {}), figures.get("kv_used", {})
    # A replica that starts has one figure and not yet the other.
    pressures = [Pressure(waiting[each], kv_used[each]) for each in waiting.keys() & kv_used.keys()]
    wanted = wanted_replicas(
        pressures,
        current=context.current_num_replicas,
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
    )
    return wanted, {}
