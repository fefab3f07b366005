"""Admission: makes requests from prompts and options. Takes no lock of the engine, and waits for the device only if
PEFT adapters are in use."""

from __future__ import annotations

import math
import pkgutil
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from transformers import GenerationConfig

from hf_paged.annotations import Model, Tokenizer
from hf_paged.cache.layers import longest_length
from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import LOOKUP_NGRAM, SchedulerConfig
from hf_paged.errors import UnsupportedModelError
from hf_paged.generation.engine.sizing import OpenedMemory
from hf_paged.generation.options import option
from hf_paged.generation.prepare import PreparedRequest, Preparer
from hf_paged.generation.prompts import as_prompt, token_ids
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.group import GroupRequest
from hf_paged.generation.requests.request import Request, SingleRequest
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup
from hf_paged.generation.validation import (
    check_fits,
    check_generation,
    check_length,
    position_limit,
    shown,
)
from hf_paged.model.devices import device_of
from hf_paged.model.heads import HeadModel
from hf_paged.registry import BEAMS, Choice, Variants
from hf_paged.sockets import Attachment, Inputs, SideMemory, Task
from hf_paged.tasks import task_of

# In place of a `max_time` of the checkpoint's config.
_EVER = 1e9  # seconds

# Nothing limits such a request, but whoever asks for the longest one needs a number.
_LONGEST = 1 << 16
"""Tokens of the longest request of a model that has neither K/V nor a greatest position."""


class Admission:
    """Makes the requests of one engine, from any thread."""

    def __init__(
        self,
        model: Model,
        variants: Variants,
        asked: SchedulerConfig,
        config: SchedulerConfig,
        opened: OpenedMemory,
        sides: Iterable[SideMemory],
        ids_in_use: Container[str],
        draft_length: int,
    ) -> None:
        """asked: the caller's, which became `config`. draft_length: of the drafts that the engine's drafter makes,
        unless the request says otherwise; 0: it has none."""
        self._model = model
        self._variants = variants
        self._asked, self._config = asked, config
        self._preparer = Preparer(model)
        self._ids_in_use = ids_in_use
        self._numbers = count()
        self._draft_length = draft_length
        self.use_memory(opened, sides)

    def use_memory(self, opened: OpenedMemory, sides: Iterable[SideMemory]) -> None:
        """Admit requests from now on that fit in this memory."""
        self._sides = tuple(sides)
        self._manager, self._storage = opened.executor.memory.manager, opened.executor.memory.pool.storage
        self._max_length, self._seats = opened.executor.max_length, opened.seats(self._asked)
        self._state_blocks, self._verifies = opened.beside.blocks, opened.executor.verifies
        self._executor, self._is_alone = opened.executor, opened.ranks is None

    def request(self, prompt_ids: Any, options: RequestOptions, tokenizer: Tokenizer | None) -> Request:
        """A request that arrives now. Raises ValueError for a wrong argument."""
        task = task_of(options)
        if task is not None and not task.generates:
            _refuse_of_tokens(task, options)
            options = replace(options, generation_config=_no_tokens())
        elif isinstance(self._model, HeadModel):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} has no language-modelling head, so that no tokens follow a prompt; use "
                "embed or classify, or load it with AutoModelForCausalLM"
            )
        inputs = self._read(prompt_ids, options, tokenizer)
        assert inputs.read is not None
        check_generation(self._model, options, self._config, self._seats, tokenizer=tokenizer)
        choice = self._variants.choose(options.adapter)
        prepared = self._preparer.prepare(inputs.read, options, tokenizer, inputs.methods)
        self._check_size(prepared)
        return self._made(prepared, options, choice, task, inputs.beside)

    def _read(self, prompt: Any, options: RequestOptions, tokenizer: Tokenizer | None) -> Inputs:
        """Read the prompt and the other inputs of a request. Raises ValueError."""

        def run(compute: Callable[[], Any]) -> Any:  # a part of the inputs, for a side memory
            return self._variants.run(self._variants.choose(options.adapter), compute)

        read, given = partial(token_ids, self._model, tokenizer=tokenizer), dict(options.inputs or {})
        inputs = Inputs(prompt, options, given, read, run)
        for side in self._sides:
            side.read(inputs)
        if inputs.others:
            kind = type(self._model).__name__
            raise ValueError(
                f"inputs has {min(inputs.others)!r}: {kind} takes no such inputs in the engine; leave it out"
            )
        if given and not self._is_alone:
            raise ValueError(f"inputs has {min(given)!r}: a model on several ranks takes texts only; use one process")
        if inputs.read is None:
            inputs.read = as_prompt(self._model, prompt, options.attention_mask, tokenizer)
        return inputs

    def longest_request(self, num_beams: int) -> int:
        """The greatest `max_length` that is safe for any request."""
        manager, size = self._manager, self._manager.block_size
        # Beams share all blocks but their last ones, so each further beam takes one block of each group.
        blocks = (
            manager.allocator.num_blocks - (num_beams - 1) * len(manager.groups) - self._blocks_of_states(num_beams)
        )
        # A model without K/V takes no blocks, and may have no limit at all.
        most = max(blocks, 0) * size if manager.groups else _LONGEST
        limits = (longest_length(manager.groups, blocks, size, most), position_limit(self._model), self._max_length)
        return min(limit for limit in limits if limit is not None)

    def _check_size(self, prepared: PreparedRequest) -> None:
        config, length = prepared.generation_config, len(prepared.prompt_token_ids)
        check_length(self._model, length, config.max_length, self._max_length)
        beams = config.num_beams if prepared.uses_beams else 1
        states = self._blocks_of_states(max(beams, prepared.num_rows))
        check_fits(length, prepared.max_length, beams, self._manager, states)

    def _blocks_of_states(self, num_seqs: int) -> int:
        return math.ceil(self._state_blocks * num_seqs)

    def _made(
        self,
        prepared: PreparedRequest,
        options: RequestOptions,
        choice: Choice,
        task: Task | None,
        beside: Mapping[str, Attachment],
    ) -> Request:
        """A request of the kind that `prepared` asks for, with its `group` for the scheduler."""
        width = prepared.generation_config.num_beams if prepared.uses_beams else prepared.num_rows
        root = self.cache_root(choice, options.cache_salt)
        for each in beside.values():
            root = each.root(root)
        # A caller may have named a request like this.
        free_ids = (name for number in self._numbers if (name := f"request-{number}") not in self._ids_in_use)
        group = SequenceGroup(
            next(free_ids) if options.request_id is None else options.request_id,
            prepared.prompt_token_ids,
            width=width,
            priority=options.priority,
            arrival=time.monotonic(),
            client=options.client,
            cache_root=root,
            variant=choice,
            beside=beside,
        )
        generator = _seeded_generator(self._model, options.generation_config)
        request = _kind_of(prepared)(group, prepared, generator)
        request.options = options
        if task is not None:
            self._begin(task, request)
        # Beams are chosen anew at each token, so they decode without drafts.
        if not prepared.uses_beams and (task is None or task.generates):
            self._add_drafts(request, options.generation_config)
        if options.deadline is not None:
            request.time_limits.append((options.deadline, FinishReason.DEADLINE))
        request.streamer = options.streamer
        return request

    def _begin(self, task: Task, request: Request) -> None:
        """Give a request its task."""
        task.begin(request.prompt_token_ids)
        wants_more, length = task.start < task.stop, request.prompt_length
        if not task.start >= 0 or task.stop > length or not (wants_more or task.generates):
            raise ValueError(
                f"task={type(task).__name__} wants the positions from {task.start} to {task.stop} of a prompt "
                f"of {length} tokens; begin() sets start and stop to some of them"
            )
        # Read for each request, because the modules may have changed.
        if task.keeps == "hidden" and (reason := self._executor.no_hidden):
            raise UnsupportedModelError(f"task={type(task).__name__} reads hidden states, but {reason}")
        request.task, request.group.task = task, task if wants_more else None

    def _add_drafts(self, request: Request, config: Any) -> None:
        """Read how the request drafts."""
        names = ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens_schedule")
        defaults = self._model.generation_config
        length, ngram, schedule = (option(config, defaults, name) for name in names)
        request.drafts_always = schedule == "constant"
        if length is None:
            if self._draft_length:
                request.draft_length = int(option(config, defaults, "num_assistant_tokens") or self._draft_length)
            return
        if not self._verifies:
            raise ValueError(
                f"prompt_lookup_num_tokens={length}: {type(self._model).__name__} computes next tokens one by one "
                "(hf_paged.check says why), so that no step verifies drafts; leave it out"
            )
        request.lookup_ngram, request.draft_length = ngram or LOOKUP_NGRAM, int(length)

    def cache_root(self, choice: Choice, cache_salt: str | None) -> bytes:
        """The root digest of the prefixes that a request may share: those of its adapters, stored as its K/V is."""
        return root_digest(f"{type(self._model).__name__} {self._storage}", choice.key, cache_salt)


def _kind_of(prepared: PreparedRequest) -> type[Request]:
    if prepared.uses_beams:
        kind: type[Request] = pkgutil.resolve_name(BEAMS)
        return kind
    return GroupRequest if prepared.num_rows > 1 else SingleRequest


def _no_tokens() -> GenerationConfig:
    """The config of a request that ends with its prompt: nothing of what the checkpoint's own says concerns it."""
    return GenerationConfig(
        max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1, max_time=_EVER, token_healing=False,
        penalty_alpha=0.0, stop_strings=[], guidance_scale=1.0,
    )  # fmt: skip


def _refuse_of_tokens(task: Task, options: RequestOptions) -> None:
    """Raises ValueError for what is asked of the tokens of a request that has none."""
    for name in ("logprobs", "logits_processor", "stopping_criteria"):
        if (value := getattr(options, name)) not in (None, [], ()):
            raise ValueError(
                f"{name}={shown(value)}: no token follows the prompt of task={type(task).__name__}; leave it out"
            )


def _seeded_generator(model: Model, generation_config: Any) -> torch.Generator | None:
    """The random numbers of a request whose config has a `seed`; None (torch's default ones) otherwise."""
    config = model.generation_config if generation_config is None else generation_config
    seed = getattr(config, "seed", None)
    return None if seed is None else torch.Generator(device=device_of(model)).manual_seed(seed)
