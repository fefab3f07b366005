"""The service behind the routes: one model, one engine's thread, and what is counted and logged about requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hf_paged.errors import QueueFull
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.engine.outputs import RequestOutput
from hf_paged.generation.engine.stats import EngineStats
from hf_paged.serving.adapters import check_adapter, load_adapter
from hf_paged.serving.answers import JobAnswer, Outcome
from hf_paged.serving.choices import Choices
from hf_paged.serving.forms import Form
from hf_paged.serving.metrics import Metrics
from hf_paged.serving.plan import Plan
from hf_paged.serving.problems import Problem
from hf_paged.serving.served import ServedModel
from hf_paged.serving.settings import Settings
from hf_paged.serving.worker import EngineStopped, EngineWorker

log = logging.getLogger("hf_paged.serving")

_Result = TypeVar("_Result")
_LOG_SECONDS = 10.0


class Service:
    """Used on the event loop that `start` was called on.

    engine: is closed by `stop`. `on_death` is called on the event loop if the engine's thread ends with an error.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        settings: Settings,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """adapters: name -> folder of those that the model has already."""
        self.settings = settings
        self.served = ServedModel.of(engine.model, tokenizer, settings, created=int(time.time()))
        self.served.adapters |= adapters or {}
        self.metrics = Metrics(self.served.name)
        self.worker = EngineWorker(
            engine,
            max_in_flight=settings.limits.in_flight,
            on_death=self._died,
            on_output=_Watch(self.metrics).observe,
        )
        self.is_draining = False
        self.on_death: Callable[[BaseException], None] = lambda error: None
        # One thread: a tokenizer is not safe in several, and long prompts are not to hold up the event loop.
        self._tokenizing = ThreadPoolExecutor(1, "hf-paged-tokenizer")
        self._reporter: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.worker.start()
        self._reporter = asyncio.create_task(self._report())

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        await self.worker.stop()
        self._tokenizing.shutdown(wait=True)

    def check_alive(self) -> None:
        """Raises Problem (503) if the engine's thread has ended."""
        if not self.worker.is_alive:
            error = self.worker.error
            cause = "" if error is None else f": {type(error).__name__}: {error}"
            raise Problem(503, f"the engine has stopped{cause}", code="engine_stopped")

    def check_ready(self) -> None:
        """Raises Problem (503) if new requests should go elsewhere."""
        self.check_alive()
        if self.is_draining:
            raise Problem(503, "the server is shutting down", code="draining")

    async def prepared(self, what: Callable[[], _Result]) -> _Result:
        """The result of something that tokenizes."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, what)

    async def answer(
        self, make_plan: Callable[[], Plan], form_of: Callable[[Plan, Any, str, int], Form], name: str, request_id: str
    ) -> JobAnswer:
        """Queue the requests of a plan; raises Problem if it cannot be served. name: how the answer's id begins."""
        began = time.monotonic()
        self.check_ready()
        try:
            plan = await self.prepared(make_plan)
            job = await self.call_engine(self.worker.open(plan.submissions)) if plan.submissions else None
        except Problem as problem:
            log.info("request=%s refused status=%d reason=%r", request_id, problem.status, problem.message)
            raise
        form = form_of(plan, self.served.tokenizer, f"{name}-{request_id}", int(time.time()))

        def ended(outcome: Outcome) -> None:
            log.info(
                "request=%s model=%s status=%r prompt_tokens=%d cached_tokens=%d completion_tokens=%d finish=%s "
                "seconds=%.3f",
                request_id,
                plan.model,
                outcome.status,
                outcome.prompt_tokens,
                outcome.cached_tokens,
                outcome.completion_tokens,
                ",".join(outcome.finish_reasons) or "-",
                time.monotonic() - began,
            )

        return JobAnswer(
            plan,
            job,
            Choices(plan, self.served.tokenizer),
            form,
            send_seconds=self.settings.limits.send_seconds,
            on_end=ended,
        )

    async def call_engine(self, awaitable: Any) -> Any:
        """The result of what the engine was asked for, its refusals as Problems."""
        try:
            return await awaitable
        except QueueFull as error:
            raise Problem(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
        except ValueError as error:
            raise Problem(400, str(error)) from error
        except EngineStopped as error:
            raise Problem(503, str(error), code="engine_stopped") from error

    async def stats(self) -> EngineStats:
        stats: EngineStats = await self.call_engine(self.worker.call(lambda engine: engine.stats()))
        return stats

    # -- adapters -----------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: str) -> None:
        """Raises Problem if it cannot be loaded; the model is then unchanged."""
        if name in self.settings.names or name in self.served.adapters:
            raise Problem(400, f"the model name {name!r} is taken; unload it, or choose another one", param="lora_name")
        try:
            check_adapter(folder)
        except ValueError as error:
            raise Problem(400, str(error), param="lora_path") from error
        await self.call_engine(self.worker.call(lambda engine: load_adapter(engine.model, name, folder)))
        self.served.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Requests that use it end with an error. Raises Problem (404) if there is none of this name."""
        if name not in self.served.adapters:
            raise Problem(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found")
        del self.served.adapters[name]
        await self.call_engine(self.worker.call(lambda engine: engine.model.delete_adapter(name)))

    # -- in the background --------------------------------------------------------------------------------------

    def _died(self, error: BaseException) -> None:
        log.critical("the engine's thread has ended: %s: %s", type(error).__name__, error, exc_info=error)
        self.on_death(error)

    async def _report(self) -> None:
        """A line every few seconds while something happens."""
        before, then = await self.stats(), time.monotonic()
        while True:
            await asyncio.sleep(_LOG_SECONDS)
            try:
                stats = await self.stats()
            except Problem:  # the engine has stopped, which is logged elsewhere
                return
            now = time.monotonic()
            if stats.steps > before.steps:
                log.info(
                    "running=%d waiting=%d swapped=%d kv_used=%.1f%% generated=%.1f tokens/s prompts=%.1f tokens/s "
                    "prefix_hits=%.1f%%",
                    stats.num_running,
                    stats.num_waiting,
                    stats.num_swapped,
                    100 * stats.blocks_used / stats.num_blocks,
                    (stats.generated_tokens - before.generated_tokens) / (now - then),
                    (stats.prompt_tokens - before.prompt_tokens) / (now - then),
                    100 * stats.prefix_cache_hit_rate,
                )
            before, then = stats, now


class _Watch:
    """Turns the outputs of requests into times between tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, tuple[float, int]] = {}  # when, and how many tokens there were

    def observe(self, outputs: Mapping[str, RequestOutput]) -> None:
        """Called with the latest state of the requests that have changed; of each request until it has finished."""
        now = time.monotonic()
        for request_id, output in outputs.items():
            count = max((each.num_tokens for each in output.outputs), default=0)
            then, before = self._seen.get(request_id, (now, 0))
            if before == 0 and count:
                self._metrics.observe_first(output)
            elif count > before:
                self._metrics.observe_gap(now - then, count - before)
            self._seen[request_id] = now, count
            if output.finished:
                self._metrics.observe_end(output)
                del self._seen[request_id]
