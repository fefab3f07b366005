"""Admission: makes requests from prompts and options. Takes no lock of the engine, and waits for the device only if
PEFT adapters are in use."""

from __future__ import annotations

import time
from collections.abc import Container
from itertools import count
from typing import Any

import torch

from hf_paged.cache.layers import longest_length
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.inputs import as_prompt, digest_of, encoder_inputs
from hf_paged.generation.prepare import PreparedRequest, Preparer
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.beam_request import BeamRequest
from hf_paged.generation.requests.group import GroupRequest
from hf_paged.generation.requests.request import Request, SingleRequest
from hf_paged.generation.requests.scores import PromptScores
from hf_paged.generation.requests.sequence import EncoderInput, FinishReason, SequenceGroup
from hf_paged.generation.validation import (
    check_fits,
    check_generation,
    check_length,
    position_limit,
)
from hf_paged.model.adapters import AdapterChoice, Adapters
from hf_paged.model.devices import device_of

_LONGEST = 1 << 16
"""Tokens of the longest request of a model that has neither K/V nor a greatest position."""


class Admission:
    """Makes the requests of one engine, from any thread."""

    def __init__(
        self,
        model: Any,
        adapters: Adapters,
        config: SchedulerConfig,
        memory: PagedMemory,
        max_length: int | None,
        seats: int | None,
        ids_in_use: Container[str],
    ) -> None:
        """max_length: the longest sequence that requests can share a forward with (None: no limit). seats: sequences
        whose states the memory holds, if fewer than the caller asked for."""
        self._model = model
        self._adapters = adapters
        self._config = config
        self._preparer = Preparer(model)
        self._ids_in_use = ids_in_use
        self._numbers = count()
        self.use_memory(memory, max_length, seats)

    def use_memory(self, memory: PagedMemory, max_length: int | None, seats: int | None) -> None:
        """Admit requests from now on that fit in another memory."""
        self._manager, self._storage = memory.manager, memory.pool.storage
        self._max_length = max_length
        self._seats = seats

    def request(self, prompt_ids: Any, options: RequestOptions, tokenizer: Any) -> Request:
        """A request that arrives now. Raises ValueError for a wrong argument."""
        if self._model.config.is_encoder_decoder:
            return self._encoder_request(prompt_ids, options, tokenizer)
        if options.inputs:
            name = type(self._model).__name__
            raise ValueError(f"inputs has {min(options.inputs)!r}: {name} takes no such inputs in the engine")
        prompt = as_prompt(self._model, prompt_ids, options.attention_mask, tokenizer)
        check_generation(self._model, options, self._config, self._seats, tokenizer=tokenizer)
        choice = self._adapters.choose(options.adapter)
        prepared = self._preparer.prepare(
            prompt,
            options.generation_config,
            logits_processor=options.logits_processor,
            stopping_criteria=options.stopping_criteria,
            tokenizer=tokenizer,
        )
        self._check_size(prepared)
        return self._made(prepared, options, choice)

    def _encoder_request(self, prompt_ids: Any, options: RequestOptions, tokenizer: Any) -> Request:
        inputs = encoder_inputs(self._model, prompt_ids, options, tokenizer)
        check_generation(self._model, options, self._config, self._seats, tokenizer=tokenizer)
        choice = self._adapters.choose(options.adapter)
        prepared = self._preparer.prepare_encoded(
            inputs,
            options.generation_config,
            logits_processor=options.logits_processor,
            stopping_criteria=options.stopping_criteria,
            tokenizer=tokenizer,
        )
        self._check_size(prepared)
        return self._made(prepared, options, choice)

    def longest_request(self, num_beams: int) -> int:
        """The greatest `max_length` that is safe for any request."""
        manager, size = self._manager, self._manager.block_size
        blocks = manager.allocator.num_blocks - (num_beams - 1) * len(manager.groups)
        # A model without K/V takes no blocks, and may have no limit at all.
        most = max(blocks, 0) * size if manager.groups else _LONGEST
        limits = (longest_length(manager.groups, blocks, size, most), position_limit(self._model), self._max_length)
        return min(limit for limit in limits if limit is not None)

    def _check_size(self, prepared: PreparedRequest) -> None:
        config, length = prepared.generation_config, len(prepared.prompt_token_ids)
        check_length(self._model, length, config.max_length, self._max_length)
        check_fits(length, prepared.max_length, config.num_beams if prepared.uses_beams else 1, self._manager)

    def _made(self, prepared: PreparedRequest, options: RequestOptions, choice: AdapterChoice) -> Request:
        """A request of the kind that `prepared` asks for, with its `group` for the scheduler."""
        width = prepared.generation_config.num_beams if prepared.uses_beams else prepared.num_rows
        root, encoder = self.cache_root(choice, options.cache_salt), None
        if prepared.encoder is not None:  # the K/V of a token depends on the encoder's states too
            root = digest_of(prepared.encoder, root)
            encoder = EncoderInput(root, prepared.encoder)
        group = SequenceGroup(
            self._free_id() if options.request_id is None else options.request_id,
            prepared.prompt_token_ids,
            width=width,
            priority=options.priority,
            arrival=time.monotonic(),
            cache_root=root,
            adapters=choice,
            encoder=encoder,
        )
        generator = _seeded_generator(self._model, options.generation_config)
        kind: type[Request] = GroupRequest if prepared.num_rows > 1 else SingleRequest
        request = (BeamRequest if prepared.uses_beams else kind)(group, prepared, generator)
        request.options = options
        if options.deadline is not None:
            request.time_limits.append((options.deadline, FinishReason.DEADLINE))
        request.streamer = options.streamer
        if options.prompt_logprobs is not None:
            prompt, start = prepared.prompt_token_ids, options.prompt_logprobs_start
            if start > len(prompt):
                raise ValueError(f"prompt_logprobs_start={start}: the prompt has {len(prompt)} tokens")
            request.prompt_scores = PromptScores(prompt, options.prompt_logprobs, start)
            group.scored_from = request.prompt_scores.next_position
        return request

    def _free_id(self) -> str:
        return next(name for number in self._numbers if (name := f"request-{number}") not in self._ids_in_use)

    def cache_root(self, choice: AdapterChoice, cache_salt: str | None) -> bytes:
        """The root digest of the prefixes that a request may share: those of its adapters, stored as its K/V is."""
        return root_digest(f"{type(self._model).__name__} {self._storage}", choice.key, cache_salt)


def _seeded_generator(model: Any, generation_config: Any) -> torch.Generator | None:
    """The random numbers of a request whose config has a `seed`; None (torch's default ones) otherwise."""
    config = model.generation_config if generation_config is None else generation_config
    seed = getattr(config, "seed", None)
    return None if seed is None else torch.Generator(device=device_of(model)).manual_seed(seed)
