"""Admission: makes requests from prompts and options. Takes no lock of the engine, and waits for the device only if
PEFT adapters are in use."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Mapping, Set
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any

import torch

from hf_paged.annotations import Model, Tokenizer
from hf_paged.cache.layers import longest_length
from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import SchedulerConfig
from hf_paged.generation.drafts import LOOKUP_NGRAM
from hf_paged.generation.engine.inputs import digest_of, encoder_inputs, media_of
from hf_paged.generation.engine.ranks import num_ranks
from hf_paged.generation.engine.sizing import OpenedMemory
from hf_paged.generation.options import option
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
    check_prompts,
    check_token_range,
    is_integer,
    position_limit,
    prompt_limit,
    refuse_meta,
    refuse_placeholders,
    shown,
)
from hf_paged.model.adapters import AdapterChoice, Adapters
from hf_paged.model.devices import device_of
from hf_paged.model.media import Media

# Nothing limits such a request, but whoever asks for the longest one needs a number.
_LONGEST = 1 << 16
"""Tokens of the longest request of a model that has neither K/V nor a greatest position."""


class Admission:
    """Makes the requests of one engine, from any thread."""

    def __init__(
        self,
        model: Model,
        adapters: Adapters,
        asked: SchedulerConfig,
        config: SchedulerConfig,
        opened: OpenedMemory,
        ids_in_use: Container[str],
        draft_length: int,
    ) -> None:
        """asked: the caller's, which became `config`. draft_length: of the drafts that the engine's drafter makes,
        unless the request says otherwise; 0: it has none."""
        self._model = model
        self._adapters = adapters
        self._asked, self._config = asked, config
        self._preparer = Preparer(model)
        self._ids_in_use = ids_in_use
        self._numbers = count()
        self._draft_length = draft_length
        self.use_memory(opened)

    def use_memory(self, opened: OpenedMemory) -> None:
        """Admit requests from now on that fit in this memory."""
        self._manager, self._storage = opened.executor.memory.manager, opened.executor.memory.pool.storage
        self._max_length, self._seats = opened.executor.max_length, opened.seats(self._asked)
        self._state_blocks, self._verifies = opened.beside.blocks, opened.executor.verifies

    def request(self, prompt_ids: Any, options: RequestOptions, tokenizer: Tokenizer | None) -> Request:
        """A request that arrives now. Raises ValueError for a wrong argument."""
        if self._model.config.is_encoder_decoder:
            return self._encoder_request(prompt_ids, options, tokenizer)
        media: Media | None = None
        if options.inputs:
            prompt = _token_ids(self._model, prompt_ids, options.attention_mask, tokenizer)
            can_run = num_ranks(self._model) == 1
            media = media_of(self._model, prompt, options.inputs, can_run=can_run, salt=options.cache_salt)
        else:
            prompt = as_prompt(self._model, prompt_ids, options.attention_mask, tokenizer)
        check_generation(self._model, options, self._config, self._seats, tokenizer=tokenizer)
        choice = self._adapters.choose(options.adapter)
        prepared = self._preparer.prepare(prompt, options, tokenizer)
        self._check_size(prepared)
        return self._made(prepared, options, choice, media)

    def _encoder_request(self, prompt_ids: Any, options: RequestOptions, tokenizer: Tokenizer | None) -> Request:
        # First: what the decoder begins with may be found by the model, with the request's adapters.
        choice = self._adapters.choose(options.adapter)
        read = partial(as_prompt, self._model, tokenizer=tokenizer)
        inputs = encoder_inputs(self._model, prompt_ids, options, read, partial(self._adapters.run, choice))
        check_generation(self._model, options, self._config, self._seats, tokenizer=tokenizer)
        prepared = self._preparer.prepare_encoded(inputs, options, tokenizer)
        self._check_size(prepared)
        return self._made(prepared, options, choice)

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
        self, prepared: PreparedRequest, options: RequestOptions, choice: AdapterChoice, media: Media | None = None
    ) -> Request:
        """A request of the kind that `prepared` asks for, with its `group` for the scheduler."""
        width = prepared.generation_config.num_beams if prepared.uses_beams else prepared.num_rows
        root, encoder = self.cache_root(choice, options.cache_salt), None
        if prepared.encoder is not None:  # the K/V of a token depends on the encoder's states too
            root = digest_of(prepared.encoder, root)
            encoder = EncoderInput(root, prepared.encoder)
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
            adapters=choice,
            encoder=encoder,
            media=media,
        )
        generator = _seeded_generator(self._model, options.generation_config)
        kind: type[Request] = GroupRequest if prepared.num_rows > 1 else SingleRequest
        request = (BeamRequest if prepared.uses_beams else kind)(group, prepared, generator)
        request.options = options
        # Beams are chosen anew at each token, so they decode without drafts.
        if not isinstance(request, BeamRequest):
            self._add_drafts(request, options.generation_config)
        if options.deadline is not None:
            request.time_limits.append((options.deadline, FinishReason.DEADLINE))
        request.streamer = options.streamer
        if options.prompt_logprobs is not None:
            prompt, start = prepared.prompt_token_ids, options.prompt_logprobs_start
            if start > len(prompt):
                raise ValueError(f"prompt_logprobs_start={start}: the prompt has {len(prompt)} tokens")
            request.prompt_scores = PromptScores(prompt, options.prompt_logprobs, start)
            # Cached prefixes have K/V, but no logits: the tokens that are scored must be computed.
            group.scored_from = request.prompt_scores.next_position
        return request

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

    def cache_root(self, choice: AdapterChoice, cache_salt: str | None) -> bytes:
        """The root digest of the prefixes that a request may share: those of its adapters, stored as its K/V is."""
        return root_digest(f"{type(self._model).__name__} {self._storage}", choice.key, cache_salt)


def _seeded_generator(model: Model, generation_config: Any) -> torch.Generator | None:
    """The random numbers of a request whose config has a `seed`; None (torch's default ones) otherwise."""
    config = model.generation_config if generation_config is None else generation_config
    seed = getattr(config, "seed", None)
    return None if seed is None else torch.Generator(device=device_of(model)).manual_seed(seed)


def as_prompts(prompts: Any, attention_mask: Any) -> list[tuple[Any, Any]]:
    """Each prompt with its mask (None: no padding).

    prompts: a list of prompts, or an int tensor [num_prompts, length]. attention_mask: None, a tensor of the same shape
    or a list with one mask (or None) for each prompt.
    """
    _refuse_other_kinds("prompts", prompts, "lists of token ids ([tokenizer(text).input_ids])")
    try:
        rows = list(prompts)  # a tensor without dimensions raises TypeError as well
    except TypeError:
        raise ValueError(f"prompts={shown(prompts)}: a list of prompts is needed, such as [[5, 6, 7]]") from None
    if not rows:
        raise ValueError("prompts=[]: give at least one prompt")
    if isinstance(rows[0], Integral) or (isinstance(rows[0], torch.Tensor) and rows[0].ndim == 0):
        raise ValueError(f"prompts={shown(prompts)} is a single prompt; put it into a list: [prompt]")
    if attention_mask is None:
        return [(row, None) for row in rows]
    masks = list(attention_mask)
    if len(masks) != len(rows):
        raise ValueError(f"attention_mask has {len(masks)} rows for {len(rows)} prompts; give one for each")
    return list(zip(rows, masks))


def _refuse_other_kinds(name: str, given: Any, wanted: str) -> None:
    """Raises ValueError for what has items, but no token ids in their order."""
    kind = type(given).__name__
    if isinstance(given, (str, bytes, bytearray)):
        raise ValueError(f"{name}={shown(given)} is text; give {wanted}")
    if isinstance(given, Mapping):
        raise ValueError(f"{name} is a {kind}; give its token ids, {name}['input_ids'], and its attention_mask")
    if isinstance(given, Set):
        raise ValueError(f"{name}={shown(given)} is a {kind}, which has no order; give a list")


def as_prompt(
    model: Model, prompt_ids: Any, attention_mask: Any = None, tokenizer: Tokenizer | None = None
) -> list[int]:
    """Token ids without padding.

    attention_mask: 1 for a token of the prompt, 0 for padding, which may appear only at the ends. Raises ValueError for
    an invalid prompt, for padding tokens without a mask, and for placeholders of images or audio.
    """
    ids = _token_ids(model, prompt_ids, attention_mask, tokenizer)
    refuse_placeholders(model, ids)
    return ids


def _token_ids(model: Model, prompt_ids: Any, attention_mask: Any, tokenizer: Tokenizer | None) -> list[int]:
    if _is_plain_prompt(model, prompt_ids) and attention_mask is None:
        ids: list[int] = prompt_ids[:]
    else:
        given = _prompt_tensor(model, prompt_ids)
        # A tensor without contents cannot be moved, so it is refused before.
        refuse_meta(given, "prompt_ids")
        given = given.cpu()
        check_prompts(model, given, "prompt_ids")
        given = given.to(torch.int64)
        if attention_mask is not None:
            kept: list[int] = _without_padding(given, attention_mask)[0].tolist()
            return kept
        ids = given[0].tolist()
    # A row of a padded batch without its mask would be answered as if the padding were text.
    pads = _pad_tokens(model, tokenizer)
    for name, token in (("begins", ids[0]), ("ends", ids[-1])):
        if token in pads:
            raise ValueError(
                f"prompt_ids {name} with the padding token {token}; leave padding out, or give the prompt's "
                "attention_mask (ones, if the token is text)"
            )
    return ids


def _is_plain_prompt(model: Model, prompt_ids: Any) -> bool:
    """Return True if the prompt is a list of valid ids, short enough to need no closer look.

    (The same check by tensors takes ten times as long.)
    """
    if type(prompt_ids) is not list or set(map(type, prompt_ids)) != {int}:
        return False
    limit = prompt_limit(model)
    is_short = limit is None or len(prompt_ids) <= limit
    return is_short and min(prompt_ids) >= 0 and max(prompt_ids) < model.get_input_embeddings().weight.shape[0]


def _prompt_tensor(model: Model, prompt_ids: Any) -> torch.Tensor:
    """int [1, length]. What is a tensor already is not checked against the model."""
    _refuse_other_kinds("prompt_ids", prompt_ids, "token ids (tokenizer(text).input_ids)")
    if not isinstance(prompt_ids, torch.Tensor):
        try:
            ids = list(prompt_ids)
        except TypeError:
            raise ValueError(f"prompt_ids={shown(prompt_ids)}: a list of token ids is needed") from None
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        wrong = [token for token in ids if not is_integer(token)]
        if wrong:
            raise ValueError(f"{shown(wrong[0])} in the prompt is not a token id; integers are needed")
        check_token_range(model, min(ids), max(ids), "prompt_ids")
        prompt_ids = torch.tensor(ids, dtype=torch.int64, device="cpu")
    if prompt_ids.ndim == 1:
        prompt_ids = prompt_ids[None]
    if prompt_ids.ndim == 2 and prompt_ids.shape[0] > 1:
        raise ValueError(f"prompt_ids has shape {tuple(prompt_ids.shape)}: one request is one prompt; add one for each")
    return prompt_ids  # type: ignore[no-any-return]


def _without_padding(ids: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    """ids int64 [1, length]; attention_mask [length] or [1, length], a tensor or a list."""
    try:
        # In float32, 1 - 1e-9 would become 1, and no longer be refused.
        mask = torch.as_tensor(attention_mask, dtype=torch.float64, device=ids.device).reshape(-1)
        is_binary = bool(((mask == 0) | (mask == 1)).all())
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"attention_mask={shown(attention_mask)}: ones and zeros are needed, one a token") from None
    if mask.numel() != ids.shape[1] or not is_binary:
        raise ValueError(
            f"attention_mask={shown(attention_mask)}: ones and zeros are needed, one for each of the {ids.shape[1]} "
            "tokens of the prompt"
        )
    kept = mask.nonzero().flatten()
    if not len(kept):
        raise ValueError("attention_mask is all zeros: an empty prompt; leave it out")
    first, last = int(kept[0]), int(kept[-1])
    if last - first + 1 != len(kept):
        raise ValueError(
            f"attention_mask={shown(mask.long().tolist())} has zeros between ones; padding may appear only at the ends"
        )
    return ids[:, first : last + 1]


def _pad_tokens(model: Model, tokenizer: Tokenizer | None) -> set[int]:
    """Ids that can be nothing but padding: those that end or begin texts are left out."""
    sources = [model.generation_config, *([] if tokenizer is None else [tokenizer])]
    marks: set[Any] = set()
    for source in sources:
        for name in ("eos_token_id", "bos_token_id"):
            value = getattr(source, name, None)
            marks.update(value if isinstance(value, (list, tuple)) else [value])
    return {pad for source in sources if (pad := getattr(source, "pad_token_id", None)) is not None} - marks
