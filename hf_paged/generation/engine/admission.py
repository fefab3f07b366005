"""Admission: makes requests from prompts and options. Takes no lock of the engine, and waits for the device only if
PEFT adapters are in use."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import longest_length
from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.prompts import as_prompt
from hf_paged.generation.prepare import PreparedRequest, Preparer
from hf_paged.generation.requests.beam_request import BeamRequest
from hf_paged.generation.requests.group import GroupRequest
from hf_paged.generation.requests.request import Request, SingleRequest
from hf_paged.generation.requests.scores import PromptScores
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup
from hf_paged.generation.validation import check_fits, check_generation, check_length, check_request, position_limit
from hf_paged.model.adapters import AdapterChoice, Adapters
from hf_paged.model.devices import device_of


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request besides its prompt and its config; see `Engine.add_request`."""

    request_id: str | None = None
    priority: int = 0
    logits_processor: Any = None
    stopping_criteria: Any = None
    streamer: Any = None
    adapter: str | None = None
    cache_salt: str | None = None
    attention_mask: Any = None
    deadline: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0


class Admission:
    """Makes the requests of one engine, from any thread."""

    def __init__(
        self,
        model: Any,
        adapters: Adapters,
        config: SchedulerConfig,
        manager: BlockManager,
        max_length: int | None,
        ids_in_use: Container[str],
    ) -> None:
        """max_length: the longest sequence that requests can share a forward with (None: no limit)."""
        self._model = model
        self._adapters = adapters
        self._config = config
        self._preparer = Preparer(model)
        self._ids_in_use = ids_in_use
        self._numbers = count()
        self.use_memory(manager, max_length)

    def use_memory(self, manager: BlockManager, max_length: int | None) -> None:
        """Admit requests from now on that fit in another memory."""
        self._manager = manager
        self._max_length = max_length

    def request(self, prompt_ids: Any, generation_config: Any, options: RequestOptions, tokenizer: Any) -> Request:
        """A request that arrives now. Raises ValueError for a wrong argument."""
        check_request(generation_config, options)
        prompt = as_prompt(self._model, prompt_ids, options.attention_mask, tokenizer)
        check_generation(self._model, generation_config, self._config, tokenizer=tokenizer, options=options)
        choice = self._adapters.choose(options.adapter)
        prepared = self._preparer.prepare(
            prompt,
            generation_config,
            logits_processor=options.logits_processor,
            stopping_criteria=options.stopping_criteria,
            tokenizer=tokenizer,
        )
        self._check_size(prepared)
        return self._made(prepared, generation_config, options, choice)

    def longest_request(self, num_beams: int) -> int:
        """The greatest `max_length` that is safe for any request."""
        manager, size = self._manager, self._manager.block_size
        blocks = manager.allocator.num_blocks - (num_beams - 1) * len(manager.groups)
        longest = longest_length(manager.groups, blocks, size, max(blocks, 0) * size)
        limits = (longest, position_limit(self._model), self._max_length)
        return min(limit for limit in limits if limit is not None)

    def _check_size(self, prepared: PreparedRequest) -> None:
        config, length = prepared.generation_config, len(prepared.prompt_token_ids)
        check_length(self._model, length, config.max_length, self._max_length)
        check_fits(length, prepared.max_length, config.num_beams if prepared.uses_beams else 1, self._manager)

    def _made(
        self, prepared: PreparedRequest, generation_config: Any, options: RequestOptions, choice: AdapterChoice
    ) -> Request:
        """A request of the kind that `prepared` asks for, with its `group` for the scheduler."""
        width = prepared.generation_config.num_beams if prepared.uses_beams else prepared.num_rows
        group = SequenceGroup(
            self._free_id() if options.request_id is None else options.request_id,
            prepared.prompt_token_ids,
            width=width,
            priority=options.priority,
            arrival=time.monotonic(),
            cache_root=self.cache_root(choice, options.cache_salt),
            adapters=choice,
        )
        generator = _seeded_generator(self._model, generation_config)
        kind: type[Request] = GroupRequest if prepared.num_rows > 1 else SingleRequest
        request = (BeamRequest if prepared.uses_beams else kind)(group, prepared, generator)
        if options.deadline is not None:
            request.time_limits.append((options.deadline, FinishReason.DEADLINE))
        request.streamer = options.streamer
        request.num_top = options.logprobs
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
        """The root digest of the prefixes that a request may share, which the same adapters have computed."""
        return root_digest(type(self._model).__name__, choice.key, cache_salt)


def _seeded_generator(model: Any, generation_config: Any) -> torch.Generator | None:
    """The random numbers of a request whose config has a `seed`; None (torch's default ones) otherwise."""
    config = model.generation_config if generation_config is None else generation_config
    seed = getattr(config, "seed", None)
    return None if seed is None else torch.Generator(device=device_of(model)).manual_seed(seed)


# -- options of several prompts ------------------------------------------------------------------------------------

_LISTS = ("logits_processor", "stopping_criteria")  # options that are lists themselves


def options_of_each(given: Mapping[str, Any], count: int) -> list[RequestOptions]:
    """The options of each of `count` prompts, where an option is one for all or a list with one for each.

    Raises ValueError for a list of another length, and for an id or a streamer that would be of several prompts.
    """
    names = [field.name for field in fields(RequestOptions)]
    unknown = [name for name in given if name not in names]
    if unknown:
        raise TypeError(f"{unknown[0]}= is no option of a request; choose from {', '.join(names)}")
    columns = {name: one_each(name, value, count) for name, value in given.items()}
    return [RequestOptions(**{name: column[row] for name, column in columns.items()}) for row in range(count)]


def one_each(name: str, given: Any, count: int) -> Sequence[Any]:
    """One value of the option for each of `count` prompts."""
    is_list = isinstance(given, (list, tuple))
    if name in _LISTS:
        is_list = is_list and len(given) > 0 and all(each is None or isinstance(each, (list, tuple)) for each in given)
    if not is_list:
        if name in ("request_id", "streamer") and given is not None and count > 1:
            raise ValueError(f"{name}: one for {count} prompts; give a list with one for each")
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} {name.replace('_', ' ')}s for {count} prompts: give one, or one for each")
    return list(given)
