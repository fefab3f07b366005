"""BoundEngine: an engine's model, bound to memory, and followed when its weights or modules change.

Knows the model, its memory and the parts of an engine; `Admission` knows prompts and options.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch

from hf_paged.annotations import Model, Tokenizer
from hf_paged.config import DRAFT_LENGTH, CacheConfig, SchedulerConfig, Switches
from hf_paged.errors import RankError, UnsupportedModelError
from hf_paged.features.executors import side_memories
from hf_paged.features.parts import (
    Drafter,
    Drafting,
    ModelVariants,
    check_parallel,
    close_drafter,
    graphed_steps,
    make_drafter,
    make_runner,
    warm_up,
)
from hf_paged.generation.engine.admission import Admission
from hf_paged.generation.engine.arrivals import SLEEP
from hf_paged.generation.engine.loop import EngineLoop
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.sizing import OpenedMemory, open_memory
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.request import Request
from hf_paged.generation.validation import LONGEST_DRAFT
from hf_paged.kernels import buffers
from hf_paged.kernels.ops import release_workspaces
from hf_paged.model.devices import device_of
from hf_paged.model.report import SupportReport
from hf_paged.model.state import release, state_of
from hf_paged.model.support import examine, refuse_unsupported
from hf_paged.registry import Variants

Prompt = SequenceOf[int] | torch.Tensor


class BoundEngine(EngineLoop):
    """The part of an engine that takes memory for its model, gives it back, follows changes of the model, and admits
    requests to that memory.

    Invariant: between two steps, requests hold blocks of `_opened` only; it is None while the model cannot be paged.
    """

    def __init__(
        self,
        model: Model,
        cache_config: CacheConfig,
        asked: SchedulerConfig,
        switches: Switches,
        *,
        assistant: Any,
        tokenizers: Mapping[str, Tokenizer | None],
    ) -> None:
        """asked: the caller's, of which `scheduler_config` is made. assistant: drafts for requests, if it is not None.
        tokenizers: of the model and of the assistant."""
        check_parallel(model, asked, switches)
        self.cache_config, self.scheduler_config = cache_config, asked.for_device(device_of(model).type)
        opened = open_memory(model, cache_config, self.scheduler_config, switches)
        self._model = opened.executor.model
        self._memory = opened.executor.memory
        self.scheduler_config = opened.usable(asked, self.scheduler_config)
        chunk, sides = opened.executor.chunk, side_memories(opened.executor, opened.beside)
        scheduler = Scheduler(
            self.scheduler_config, opened.executor.memory.manager, opened.host_manager, chunk, side_memories=sides
        )
        scheduler.may_grow = asked.max_num_batched_tokens is None
        with scheduler.releasing_policy():
            self._variants: Variants = ModelVariants(self._model)
            runner = make_runner(opened, self._variants, self.scheduler_config.max_num_seqs, switches, sides)
            # On several ranks, kernels are compiled when a step needs them.
            if runner.is_alone:
                warm_up(opened.executor, runner.captures(), self.scheduler_config, switches.warmup)
            self._weights = state_of(self._model).weights
            self._weights.look()
            self._weights_epoch = self._weights.epoch  # of the weights that the cached prefixes were computed with
            self._structure = self._weights.structure
            self._attentions = _attentions(self._model)
            self._asked, self._switches = asked, switches
            self._way = runner.way  # in which the requests' K/V and the cached prefixes were computed
            self._is_released = False
            self._opened: OpenedMemory | None = opened  # None: the model has changed, and cannot be paged
            self._assistant, self._tokenizers, self.tokenizer = assistant, tokenizers, tokenizers["tokenizer"]
            drafter = self._make_drafter(opened, self.scheduler_config)
            vocabulary = self._model.config.get_text_config(decoder=True).vocab_size  # some have no input embeddings
            super().__init__(
                self.scheduler_config,
                scheduler,
                runner,
                Drafting(drafter, vocabulary, goes_back=opened.executor.has_states),
            )
            config, length = self.scheduler_config, _draft_length(assistant)
            self._admission = Admission(
                self._model, self._variants, asked, config, opened, sides, self._requests, length
            )

    def prepare_request(self, prompt_ids: Prompt, options: RequestOptions) -> Request:
        """Make a request for `submit`, in any thread: the longer part of `add_request`. It has arrived now. Raises
        ValueError."""
        self._check_usable()
        return self._admission.request(prompt_ids, options, self.tokenizer)

    def _check_usable(self) -> None:
        with self._door:  # raises in a forked child
            self._check_open()
        self._runner.check_model()
        self._runner.check_caller()

    # -- changes between two steps ------------------------------------------------------------------------------

    def _resume(self, recompute: bool) -> None:
        if recompute:
            self._scheduler.recompute_all()
        self._weights.changed()
        self._drop_stale_prefixes()

    def _fall_asleep(self) -> None:
        self._stepper.settle()
        self._runner.pause()
        # The pool may only go when no request holds blocks of it.
        self._scheduler.recompute_all()
        self._pauses[SLEEP] = threading.current_thread()
        self._let_memory_go()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.executor.drop_overrides()
        release(self._model)
        release_workspaces()
        buffers.trim()

    def _awake(self) -> None:
        self._weights.look(contents=True)
        self._structure = self._weights.structure
        self._opened = self._bind_anew(_report_of(self._model))
        self._code_followed = -1
        # Last: if the memory does not suffice, the engine sleeps on.
        del self._pauses[SLEEP]

    def _drop_stale_prefixes(self, *, contents: bool = False) -> None:
        """Drop cached prefixes that other weights have computed."""
        self._weights.look(contents=contents)
        if (epoch := self._weights.epoch) != self._weights_epoch:
            self._scheduler.forget_prefixes()
            self._weights_epoch = epoch

    def _follow_model(self) -> None:
        # Only a group that starts looks for a prefix. Contents take longer to compare, so that is left for when nothing
        # runs.
        if self._scheduler.may_admit:
            self._drop_stale_prefixes(contents=self._scheduler.is_idle)
        code = self._weights.code
        if code == self._code_followed:
            return
        try:
            if self._weights.structure != self._structure or self._opened is None:
                # Whatever ends this before its end, the next step begins it again.
                opened, self._opened = self._opened, None
                self._structure = self._weights.structure
                self._opened = self._follow_structure(opened)
        except (UnsupportedModelError, ValueError, RankError) as error:
            self._fail_all(f"the modules of the model have changed: {error}", error)
            return
        try:
            self._runner.follow_model()
            if self._runner.way != self._way:
                self._stepper.settle()
                self._stepper.is_async = bool(self.scheduler_config.async_scheduling) and self._runner.is_packed
                self._scheduler.begin_anew(shares_prefixes=self._runner.is_plain)
                self._way = self._runner.way
            self._code_followed = code  # last: if Ctrl-C ends this earlier, the next step begins it again
        except UnsupportedModelError as error:
            self._fail_all(str(error), error)

    def _fail_all(self, error: str, exception: BaseException) -> None:
        for request in list(self._requests.values()):
            self._fail(request, error, exception)

    def _follow_structure(self, opened: OpenedMemory | None) -> OpenedMemory:
        """The model has other modules: bind it anew. If its K/V differs, all requests are computed again."""
        if not self._runner.is_alone:  # to try the model, all ranks would have to run it together
            if opened is None or _attentions(self._model) != self._attentions:
                raise RankError("its attention is another, and the engine runs on several ranks; make a new engine")
            self._runner.follow_structure()
            return opened
        report = _report_of(self._model)
        if opened is not None and opened.fits(report):
            self._runner.follow_structure()
            return opened
        # Tokens that were sampled count before their sequences are computed again, and the old memory goes before new
        # memory is taken.
        self._stepper.settle()
        self._scheduler.recompute_all()
        self._let_memory_go()
        return self._bind_anew(report)

    def _bind_anew(self, report: SupportReport) -> OpenedMemory:
        """Take memory for the model as it is now. No request holds blocks, and the former memory has gone."""
        asked, switches = self._asked, self._switches
        if not report.native:  # what the caller has insisted on does not exist any more
            caching = asked.prefix_caching and None
            asked = replace(asked, async_scheduling=None, prefix_caching=caching, prefix_eviction="lru")
            switches = Switches()
        config = asked.for_device(device_of(self._model).type)
        opened = open_memory(self._model, self.cache_config, config, switches)
        config = opened.usable(asked, config)
        executor = opened.executor
        sides = side_memories(executor, opened.beside, self._scheduler.side_memories)
        executor.graphs = graphed_steps(executor, config.max_num_seqs, switches.cuda_graphs)
        self._runner.use_memory(executor, opened.host_pool, sides)
        manager, host = opened.executor.memory.manager, opened.host_manager
        self._scheduler.use_tables(config, manager, host, executor.chunk, side_memories=sides)
        # Requests that are checked from now on must fit in this memory.
        self._admission.use_memory(opened, sides)
        self._stepper.is_async = bool(config.async_scheduling)
        self._stepper.drafting.drafter = self._make_drafter(opened, config)
        self._memory, self.scheduler_config = opened.executor.memory, config
        return opened

    def _make_drafter(self, opened: OpenedMemory, config: SchedulerConfig) -> Drafter | None:
        return make_drafter(self._assistant, opened, self.cache_config, config, **self._tokenizers)

    def _let_memory_go(self) -> None:
        """Free the K/V tensors. No request holds blocks."""
        if self._scheduler.prefix_cache is not None:
            self._scheduler.prefix_cache.clear()  # pins hold blocks
        for side in self._scheduler.side_memories:
            side.forget()  # what no request reads may hold blocks
        self._runner.close()
        self._memory.release()
        drafter, self._stepper.drafting.drafter = self._stepper.drafting.drafter, None
        close_drafter(drafter)


def _report_of(model: Model) -> SupportReport:
    """Return the way to compute the model as it is now, without third-party code. Raises UnsupportedModelError."""
    refuse_unsupported(model, by_engine=True)
    examined = examine(model)
    return examined.bare if examined.bare.native else examined.present


def _draft_length(assistant: Any) -> int:
    """Return the length of the assistant's drafts, unless a request says otherwise; 0 without an assistant."""
    if assistant is None:
        return 0
    says = getattr(assistant, "generation_config", assistant)
    length = int(getattr(says, "num_assistant_tokens", None) or DRAFT_LENGTH)
    if not 1 <= length <= LONGEST_DRAFT:
        raise ValueError(f"num_assistant_tokens={length} of assistant_model: use 1 to {LONGEST_DRAFT}")
    return length


def _attentions(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that keep K/V."""
    return [module for module in model.modules() if hasattr(module, "layer_idx")]
