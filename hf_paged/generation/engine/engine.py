"""Engine: continuous batching of requests over one model (SOSP'23 sections 4 and 5).

Takes requests and returns outputs, from any thread. The stepper runs the steps.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch

from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import CacheConfig, SchedulerConfig, as_config
from hf_paged.errors import EngineError
from hf_paged.generation.engine.admission import new_request, seeded_generator
from hf_paged.generation.engine.delivery import Delivery, RequestStream, StepGuard
from hf_paged.generation.engine.outputs import RequestOutput
from hf_paged.generation.engine.pauses import Pauses
from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.sequence import FinishReason
from hf_paged.generation.engine.sizing import open_memory
from hf_paged.generation.engine.stats import EngineStats, collect_stats
from hf_paged.generation.engine.stepper import Stepper
from hf_paged.generation.prepare import PreparedRequest, StopStrings, prepare_request
from hf_paged.generation.sampling.request import Request, SingleRequest
from hf_paged.generation.validation import (
    as_prompt,
    as_prompts,
    check_engine,
    check_fits,
    check_generation,
    check_length,
    check_request,
)
from hf_paged.model.adapters import AdapterChoice, Adapters
from hf_paged.model.devices import device_of
from hf_paged.model.graphs import graphed_steps
from hf_paged.model.packed import PackedModel
from hf_paged.model.state import state_of

Prompt = SequenceOf[int] | torch.Tensor


class Engine:
    """Serves requests that arrive and end at any step, each with its own GenerationConfig.

    Results equal those of `model.generate` for the same request alone. The engine does not change the model. Every
    method may be called from any thread; the thread that asks for outputs (`step`, `generate`, `stream`) runs the
    steps. In a forked child every method of the parent's engine raises RuntimeError: create an engine in the child.

    Requests that sample without a seed draw from torch's default generator. Concurrent paged draws never get the same
    random numbers; a concurrent draw by torch's own functions in another thread may. Give requests a seed if that
    matters.

    With PEFT adapters, each request of a step may have its own (`add_request`). A step activates them in the model:
    load, delete or activate adapters, and call the model yourself, only between steps.

    model: a causal LM of transformers, or a PEFT model over one. cache_config, scheduler_config: the config, or a dict
    of its fields. tokenizer: needed only for `stop_strings`. prepack: keep copies of the linear weights in the layout
    that is fastest on a CPU (None = in bf16, if the memory suffices). Sums may then be in another order: in fp32, and
    in bf16 in steps of more than 32 tokens. cuda_graphs: capture decode steps and replay them (None = on a CUDA device,
    with a warning if that is impossible; True = raise if it is impossible). Raises UnsupportedModelError for a model
    that cannot be paged (see `hf_paged.check`), ValueError for a wrong argument.
    """

    def __init__(
        self,
        model: Any,
        cache_config: CacheConfig | Mapping[str, Any] | None = None,
        scheduler_config: SchedulerConfig | Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        prepack: bool | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        check_engine(model, tokenizer=tokenizer, prepack=prepack, cuda_graphs=cuda_graphs)
        self.model = model
        self.cache_config = as_config(CacheConfig, cache_config, "cache_config")
        asked = as_config(SchedulerConfig, scheduler_config, "scheduler_config")
        self.scheduler_config = asked.for_device(device_of(model).type)
        self.tokenizer = tokenizer
        opened = open_memory(model, self.cache_config, self.scheduler_config, prepack)
        self._model = opened.model.model
        self._memory = opened.memory
        self._max_length = opened.max_length
        self._is_packed = isinstance(opened.model, PackedModel)
        self._host_managers = opened.host_managers
        if not opened.shares_prefixes:
            self.scheduler_config = replace(self.scheduler_config, prefix_caching=False)
        if not self._is_packed:
            if asked.async_scheduling:
                raise ValueError(
                    "async_scheduling=True: the model computes one sequence at a time (hf_paged.check says why); "
                    "leave it out"
                )
            self.scheduler_config = replace(self.scheduler_config, async_scheduling=False)
        self._scheduler = Scheduler(self.scheduler_config, opened.memory.managers, opened.host_managers or None)
        self._adapters = Adapters(self._model)
        self._graphs = graphed_steps(opened.model, self.scheduler_config.max_num_seqs, cuda_graphs)
        self._runner = Runner(opened.model, opened.memory, opened.host_pools, self._adapters, self._graphs)
        self._requests: dict[str, Request] = {}
        self._delivery = Delivery()
        self._stepper = Stepper(
            self._scheduler,
            self._runner,
            self._requests,
            self._delivery.changed,
            self._fail,
            is_async=bool(self.scheduler_config.async_scheduling),
        )
        self._guard = StepGuard()
        self._pauses = Pauses(self._guard.lock)
        self._weights = state_of(self._model).weights
        self._weights_epoch = self._weights.look()  # of the weights that the cached prefixes were computed with
        self._ids = itertools.count()
        self._stop_strings = StopStrings()
        self._closed = False
        self._prompt_tokens = 0

    @property
    def _lock(self) -> AbstractContextManager[object]:
        return self._guard.lock  # another one after a fork

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt_ids: Prompt,
        generation_config: Any = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        streamer: Any = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        attention_mask: SequenceOf[int] | torch.Tensor | None = None,
    ) -> str:
        """Queue a request; returns its id. Lower `priority` runs first; equal ones in order of arrival.

        prompt_ids: token ids (list, or int tensor [length] or [1, length]). generation_config: as for `generate`
        (None = the model's); its attribute `seed` seeds the request's own random numbers. streamer: a streamer of
        transformers, fed as by `generate`, in the thread that runs the step. adapter: name of the PEFT adapter for this
        request, independent of the model's active adapters and of other requests; "__base__" = no adapter; None = the
        adapters that are active now, until the request ends. cache_salt: requests share cached prefixes only with
        requests of the same salt and adapter. attention_mask: of a padded prompt, [length], 0 for padding at its ends.

        Raises ValueError for a wrong argument, and for a request that cannot reach its length limit in the memory of
        this engine; QueueFull if `max_waiting` requests wait already. The engine is then unchanged.

        If the adapter is deleted, or merged into the weights, requests that use it end with an error. If its weights
        are changed in place, they continue with the new weights.
        """
        check_request(
            generation_config,
            priority,
            request_id=request_id,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            streamer=streamer,
            cache_salt=cache_salt,
        )
        ids = as_prompt(self._model, prompt_ids, attention_mask, self.tokenizer)
        with self._lock:
            self._check_open()
            self._runner.check_model()
            self._guard.settle()
            if request_id in self._requests:
                raise ValueError(f"request_id {request_id!r} is in use; choose another one")
            check_generation(
                self._model, generation_config, self.scheduler_config, tokenizer=self.tokenizer, streamer=streamer
            )
            choice = self._adapters.choose(adapter)
            prepared = prepare_request(
                self._model,
                ids.to(device_of(self._model)),
                generation_config,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                tokenizer=self.tokenizer,
                stop_strings=self._stop_strings,
            )
            self._check_size(prepared)
            if request_id is None:
                request_id = next(name for n in self._ids if (name := f"request-{n}") not in self._requests)
            request = new_request(
                prepared,
                request_id,
                priority=priority,
                cache_root=self._root(choice, cache_salt),
                adapters=choice,
                generator=seeded_generator(self._model, generation_config),
            )
            self._scheduler.add(request.group)
            self._requests[request_id] = request
            if streamer is not None:
                try:
                    assert isinstance(request, SingleRequest)
                    request.stream_to(streamer)
                except BaseException:
                    self._drop([request])
                    raise
            self._prompt_tokens += request.prompt_length
            return request_id

    def _check_size(self, prepared: PreparedRequest) -> None:
        config, length = prepared.generation_config, prepared.input_ids.shape[1]
        check_length(self._model, length, config.max_length, self._max_length)
        check_fits(length, prepared.max_length, config.num_beams if prepared.uses_beams else 1, self._memory.managers)

    def _root(self, choice: AdapterChoice, cache_salt: str | None) -> bytes:
        """The root digest of the prefixes that a request may share, which the same adapters have computed."""
        return root_digest(type(self._model).__name__, choice.key, cache_salt)

    def abort(self, request_id: str) -> bool:
        """End a request in any state. False if it is unknown or finished.

        The next step returns its last RequestOutput, with finish_reason "abort" and the tokens generated so far.
        """
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            self._guard.defer(partial(self._abort, request))
            self._guard.settle()
            return True

    def _abort(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:
            self._end(request, FinishReason.ABORT, None)

    def has_unfinished_requests(self) -> bool:
        """True while a step would have requests to compute or outputs to deliver."""
        return bool(self._requests or self._delivery)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None, exception: BaseException | None = None
    ) -> None:
        """Finish a request from outside its own decoding; its output waits for the next step."""
        request.stop_all(reason)
        request.error, request.exception = error, exception
        self._scheduler.finish_group(request.group, reason)
        self._close(request)
        self._delivery.ended.append(request)

    def _fail(self, request: Request, error: str, exception: BaseException | None) -> None:
        self._end(request, FinishReason.ERROR, error, exception)

    def _close(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:  # not, if an interrupt came before the rest
            del self._requests[request.request_id]
        if not self._requests:
            self._stepper.close()
        request.metrics = replace(
            request.metrics,
            finish_time=time.monotonic(),
            num_preemptions=request.group.num_preemptions,
            num_cached_tokens=request.group.num_cached_tokens,
        )
        request.end_stream()  # last: it is the caller's

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step; returns snapshots of the outputs that have changed.

        They include outputs that changed in steps of other callers (`generate`, a stream), but not those of requests
        that a stream follows.
        """
        with self._lock:
            outputs = self._delivery.take_unclaimed(self._step())
        return outputs

    def _step(self) -> dict[Request, None]:
        """Run a step and deliver what has changed; returns the requests that have."""
        self._check_not_stepping()
        if self._pauses.owners:
            self._pauses.wait()
        self._check_open()
        self._check_not_stepping()
        self._guard.settle()
        self._guard.is_stepping = True
        try:
            if self._scheduler.has_unfinished():
                if self._scheduler.may_admit:
                    self._follow_weights(contents=self._scheduler.is_idle)
                with torch.no_grad():
                    self._stepper.step()
        finally:
            try:
                delivered = self._delivery.deliver(self._follow_up)
            finally:
                self._guard.is_stepping = False
        return delivered

    def _follow_up(self, request: Request) -> None:
        """Stream the new tokens of a request, and close it if it has ended. Repeated if Ctrl-C interrupts it."""
        if request.metrics.finish_time is not None:
            return
        if request.metrics.first_token_time is None:
            request.metrics = replace(request.metrics, first_token_time=time.monotonic())
        if request.streamer is not None:
            request.tell_streamer()
        if request.group.is_finished:
            self._close(request)
        elif request.error is not None:
            self._fail(request, request.error, request.exception)

    # -- whole requests -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any | SequenceOf[Any] = None,
        progress: bool | None = None,
        *,
        adapter: str | SequenceOf[str | None] | None = None,
        attention_mask: Any = None,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Run all prompts to their end; the outputs are in the order of the prompts.

        generation_config, adapter: one for all, or a list with one for each. progress: a bar with tokens/s on stderr
        (None = on a terminal). attention_mask: of padded prompts, a tensor [num_prompts, length] or one mask for each.
        raise_on_error: when all requests have ended and some of them with an error, raise EngineError, which has the
        outputs of all; False returns the outputs, with `error` set in those that failed.
        """
        stream = self._open_stream(prompts, generation_config, adapter, attention_mask, finals_only=True)
        finished: dict[str, RequestOutput] = {}
        with closing(stream), self._progress(len(stream.requests), progress) as bar:
            started, before = time.monotonic(), self._stepper.generated_tokens
            for output in stream:
                finished[output.request_id] = output
                rate = (self._stepper.generated_tokens - before) / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update()
        outputs = [finished[request.request_id] for request in stream.requests]
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None and raise_on_error:
            raise EngineError(outputs) from failed.exception
        return outputs

    def stream(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any = None,
        *,
        adapter: str | SequenceOf[str | None] | None = None,
        attention_mask: Any = None,
    ) -> RequestStream:
        """Yield an output whenever a request has changed (a slow reader gets the latest state, not every one).

        generation_config, adapter: one for all, or a list with one for each. attention_mask: as in `generate`. The last
        output of a request that failed has `error` set (`RequestOutput.raise_for_error`). Closing the iterator early
        aborts what is unfinished.
        """
        return self._open_stream(prompts, generation_config, adapter, attention_mask)

    async def astream(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any = None,
        *,
        adapter: str | SequenceOf[str | None] | None = None,
        attention_mask: Any = None,
    ) -> AsyncIterator[RequestOutput]:
        """`stream` for asyncio: steps run in a worker thread, several streams share them."""
        outputs = await asyncio.to_thread(
            self.stream, prompts, generation_config, adapter=adapter, attention_mask=attention_mask
        )
        try:
            while (output := await asyncio.to_thread(next, outputs, None)) is not None:
                yield output
        finally:
            # Not awaited: it may wait for the step of a reader that was cancelled, and must not be cancelled itself.
            outputs.abandon()

    def _open_stream(
        self,
        prompts: SequenceOf[Prompt],
        generation_config: Any | SequenceOf[Any],
        adapter: str | SequenceOf[str | None] | None,
        attention_mask: Any = None,
        *,
        finals_only: bool = False,
    ) -> RequestStream:
        rows = as_prompts(prompts, attention_mask)
        configs = _one_each(generation_config, len(rows), "generation configs")
        adapters = _one_each(adapter, len(rows), "adapters")
        requests: list[Request] = []
        with self._lock:
            try:
                for (prompt, mask), config, name in zip(rows, configs, adapters):
                    request_id = self.add_request(prompt, config, adapter=name, attention_mask=mask)
                    requests.append(self._requests[request_id])
            except BaseException:
                self._drop(requests)
                raise
            return RequestStream(
                requests,
                self._delivery.open_inbox(requests),
                self._guard,
                step=self._step,
                drop=self._drop,
                finals_only=finals_only,
            )

    def _drop(self, requests: list[Request]) -> None:
        """Abort the unfinished ones of these requests, and deliver no further outputs of any."""
        for request in requests:
            self._abort(request)
        self._delivery.forget(requests)

    def _progress(self, total: int, progress: bool | None) -> Any:
        from tqdm.auto import tqdm

        wanted = sys.stderr.isatty() if progress is None else progress
        return tqdm(total=total, unit="request", disable=not wanted)

    # -- prefixes, figures, the end -----------------------------------------------------------------------------

    def cache_prefix(self, prompt_ids: Prompt, *, adapter: str | None = None, cache_salt: str | None = None) -> int:
        """Compute a prefix (for example a system prompt) and keep its full blocks until `release_prefix`.

        adapter, cache_salt: those of the requests that will use it. Returns the number of cached tokens, a multiple of
        `block_size`. The prefix is dropped when the weights change.
        """
        ids = as_prompt(self._model, prompt_ids, tokenizer=self.tokenizer)
        cache = self._scheduler.prefix_cache
        if cache is None:
            raise ValueError(
                "there is no prefix cache: prefix_caching=False, or the model has sliding windows or recurrent states"
            )
        from transformers import GenerationConfig

        with self._lock:
            config = GenerationConfig(max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1)
            request_id = self.add_request(ids, config, adapter=adapter, cache_salt=cache_salt, priority=-(2**31))
            request = self._requests[request_id]
            try:
                while self._requests.get(request.request_id) is request:
                    self._step()
            finally:
                self._drop([request])
            if request.error is not None:
                raise RuntimeError(f"the prefix was not computed: {request.error}") from request.exception
            root = request.group.cache_root
            if root is None:
                raise RuntimeError("the prefix was not cached: the weights have changed meanwhile; try again")
            return cache.pin(ids[0].tolist(), root)

    def release_prefix(self, prompt_ids: Prompt, *, adapter: str | None = None, cache_salt: str | None = None) -> bool:
        """Undo `cache_prefix` with the same arguments: the prefix may be evicted again. False if it was not kept."""
        ids = as_prompt(self._model, prompt_ids, tokenizer=self.tokenizer)
        cache = self._scheduler.prefix_cache
        with self._lock:
            root = self._root(self._adapters.choose(adapter), cache_salt)
            return cache is not None and cache.unpin(ids[0].tolist(), root)

    def clear_prefix_cache(self) -> None:
        """Forget every cached prefix, those of `cache_prefix` too. Running requests cache no further blocks."""
        with self._lock:
            self._scheduler.forget_prefixes()

    # -- weights that change ------------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Report a change of the model's weights that may not be noticed (see `hf_paged.weights_changed`).

        No later request uses a prefix or packed copy of the old weights, and prefixes of `cache_prefix` are dropped.
        Running requests keep their K/V and cache no further blocks. A call during a step, for example from a logits
        processor, takes effect after the step.
        """
        self._weights.changed()
        self._guard.defer(self._follow_weights)
        with self._lock:
            self._guard.settle()

    @contextmanager
    def pause(self, *, recompute: bool = False) -> Iterator[None]:
        """Run no step of this engine inside the `with` block, so that weights can change while requests are running.

        The block begins after the step in progress has finished and its results are on the host. Steps in other threads
        wait for the end of the block; requests may be added and aborted meanwhile, from any thread. The weights count
        as changed when the block ends, even with an exception: all cached prefixes are dropped, those of `cache_prefix`
        too, and packed copies are renewed. recompute: running requests drop their K/V, which the new weights compute
        again; otherwise they keep it and cache no further blocks.

        Other engines on the model, and its own `generate`, are not paused. Raises RuntimeError inside a step of this
        thread, and if the pausing thread runs a step.
        """
        with self._lock:
            self._check_open()
            self._check_not_stepping()
            self._guard.settle()
            with torch.no_grad():
                self._stepper.settle()
            self._pauses.begin()
        try:
            yield
        finally:
            with self._lock:
                try:
                    if not self._closed:
                        self._resume(recompute)
                finally:
                    self._pauses.end()

    def _resume(self, recompute: bool) -> None:
        if recompute:
            self._scheduler.recompute_all()
        self._weights.changed()
        self._follow_weights()

    def _follow_weights(self, *, contents: bool = False) -> None:
        """Drop cached prefixes that other weights have computed."""
        epoch = self._weights.look(contents=contents)
        if epoch != self._weights_epoch:
            self._scheduler.forget_prefixes()
            self._weights_epoch = epoch

    def stats(self) -> EngineStats:
        """The current statistics."""
        with self._lock:
            self._guard.settle()
            return collect_stats(
                self._memory,
                self._host_managers,
                self._scheduler,
                self._stepper,
                self._graphs,
                prompt_tokens=self._prompt_tokens,
            )

    def __repr__(self) -> str:
        memory = self._memory.stats()
        return (
            f"<Engine of {type(self._model).__name__}: {memory.num_blocks} blocks of {self._memory.block_size} tokens, "
            f"{memory.bytes_reserved / 2**20:.1f} MiB reserved, {memory.bytes_touched / 2**20:.1f} MiB touched>"
        )

    def block_tables(self, request_id: str) -> list[tuple[list[int], list[int]]]:
        """(tokens computed so far, block ids) of every live sequence of a running request, first layer group.

        A snapshot for tools that show or measure sharing. Empty for a request that holds no block.
        """
        with self._lock:
            group, manager = self._scheduler.get(request_id), self._memory.managers[0]
            if group is None:
                return []
            seqs = [seq for seq in group.live if seq.seq_id in manager]
            return [(seq.token_ids[: seq.num_computed_tokens], list(manager.block_table(seq.seq_id))) for seq in seqs]

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the block tables or queues does not hold (between two steps)."""
        with self._lock:
            self._guard.settle()
            self._scheduler.check_integrity()
            ended = {
                r.request_id for r in self._delivery.changed if r.group.is_finished
            }  # after an interrupt, not told yet
            assert set(self._requests) - ended == {group.request_id for group in self._scheduler.groups}

    def close(self) -> None:
        """Abort all unfinished requests and free the memory. Idempotent.

        In a forked child this does nothing, because the engine belongs to the parent.
        """
        if self._guard.is_forked:
            return
        with self._lock:
            if self._closed:
                return
            self._check_not_stepping()
            for request in list(self._requests.values()):
                self._abort(request)
            if self._scheduler.prefix_cache is not None:
                self._scheduler.prefix_cache.clear()  # pins hold blocks
            self._delivery.clear()
            self._closed = True
            if self._graphs is not None:
                self._graphs.close()
            self._memory.release()
            self._weights.rest()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")

    def _check_not_stepping(self) -> None:
        if self._guard.is_stepping:
            raise RuntimeError("a logits processor or stopping criterion may add and abort requests, nothing else")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _one_each(given: Any, count: int, what: str) -> SequenceOf[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {what} for {count} prompts: give one, or one for each")
    return given
