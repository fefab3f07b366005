"""Refuses what can never be served, before anything is built: a ValueError of one line, with the value and the remedy.

First the checks that `generate` and the engine share, then those of `generate`, then those of the engine and its
requests. Changes nothing.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_paged.annotations import Model, Tokenizer
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import longest_length, peak_blocks
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.generation.options import check_options
from hf_paged.integration.names import CACHE, given_cache, paged_part
from hf_paged.model.report import SupportReport
from hf_paged.model.state import unwrapped
from hf_paged.model.support import check, known_positions
from hf_paged.sockets import Task

# -- generate and the engine ---------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """The value for an error message: its repr, shortened."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the repr of the caller's own object, or of an integer too long to print
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_generation_config(generation_config: Any) -> None:
    """Raises ValueError unless it is None or a GenerationConfig."""
    if isinstance(generation_config, Mapping):
        raise ValueError(
            f"generation_config={shown(generation_config)} is a {type(generation_config).__name__}; write "
            "transformers.GenerationConfig(**options)"
        )
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ValueError(
            f"generation_config={shown(generation_config)} is a {type(generation_config).__name__}; a "
            "transformers.GenerationConfig is needed, or None for the model's own"
        )


def refuse_no_cache(use_cache: object) -> None:
    if use_cache is False:
        raise ValueError("use_cache=False contradicts a paged cache; drop one of them")


def is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


class _Rule(NamedTuple):
    """Says what an option has to be; `needed` tells it to the caller who gave something else."""

    fits: Callable[[Any], bool]
    needed: str
    may_be_none: bool = True


def _integer(least: int, most: float = math.inf, needed: str = "") -> _Rule:
    bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return _Rule(lambda value: is_integer(value) and least <= value <= most, needed or f"an integer {bounds} is needed")


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and (isinstance(value, Integral) or math.isfinite(value))


def _is_list_of_callables(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(callable, value))


def _is_streamer(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("put", "end"))


def _is_inputs(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


# Sixteen times the length that drafts have by default. Chosen without a measurement.
LONGEST_DRAFT = 128
"""Tokens of a draft, at most: each is a row of logits as long as the vocabulary."""

# More most likely tokens than any caller reads: OpenAI's API has 20 at most. Chosen without a measurement.
_LOGPROBS = _integer(0, 1024, "an integer from 0 to 1024 is needed, or None")

COUNTS = dict.fromkeys(("num_beams", "num_return_sequences"), _integer(1)) | dict.fromkeys(
    ("max_new_tokens", "min_new_tokens", "max_length", "min_length"), _integer(0)
)
DRAFTS = dict.fromkeys(
    ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"), _integer(1, LONGEST_DRAFT)
)
_SEED = {"seed": _integer(-(2**63), 2**64 - 1, "an integer from -2**63 to 2**64 - 1 is needed")}
_OF_CALL = {
    "logits_processor": _Rule(_is_list_of_callables, "a list of LogitsProcessors is needed (one: [processor])"),
    "stopping_criteria": _Rule(_is_list_of_callables, "a list of StoppingCriteria is needed (one: [criterion])"),
    "streamer": _Rule(_is_streamer, "an object with the methods put and end is needed, such as a TextStreamer"),
}
_TEXT = _Rule(lambda value: isinstance(value, str), "a string is needed, or None")
OF_REQUEST = {
    "priority": _Rule(_is_number, "a finite number is needed; lower numbers run first", may_be_none=False),
    "deadline": _Rule(lambda value: _is_number(value) and value > 0, "a positive number of seconds is needed, or None"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "request_id": _TEXT._replace(needed="a string is needed, or None for one made by the engine"),
    "client": _TEXT,
    "cache_salt": _TEXT,
    "inputs": _Rule(_is_inputs, "a dict of tensors by name is needed, of one row each"),
    "task": _Rule(lambda value: isinstance(value, Task), "a hf_paged.sockets.Task is needed, or None"),
    **_OF_CALL,
}


def check_values(rules: Mapping[str, _Rule], options: Mapping[str, Any]) -> None:
    """Raises ValueError for the first of these options that is not what it has to be."""
    for name, rule in rules.items():
        value = options.get(name)
        if not (rule.may_be_none if value is None else rule.fits(value)):
            raise ValueError(f"{name}={shown(value)}: {rule.needed}")


# -- generate ------------------------------------------------------------------------------------------------------


def check_inputs(model: Model, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for prompts, masks and options that cannot be served."""
    check_values(_OF_CALL, kwargs)
    cache = paged_part(given_cache(kwargs))
    if cache is not None and not isinstance(cache, PagedKVCache):
        raise ValueError(
            f"{CACHE} is a {type(cache).__name__}, but cache_implementation='paged' continues a PagedKVCache; "
            "pass a hf_paged.PagedKVCache, or drop cache_implementation"
        )
    check_generation_config(generation_config)
    refuse_no_cache(kwargs.get("use_cache", getattr(generation_config, "use_cache", None)))
    check_values(COUNTS, {**(vars(generation_config) if generation_config is not None else {}), **kwargs})
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    embeds = kwargs.get("inputs_embeds")
    mask = kwargs.get("attention_mask")
    if embeds is not None:
        if isinstance(embeds, torch.Tensor):
            refuse_meta(embeds, "inputs_embeds")
        if mask is not None:
            _check_mask("inputs_embeds", embeds, mask, cache)
    elif ids is not None:
        check_prompts(model, ids, "input_ids")
        if mask is not None:
            _check_mask("input_ids", ids, mask, cache)


def check_cache(model: Model, report: SupportReport, cache: PagedKVCache) -> None:
    """Raises ValueError for a cache whose layers are not those of the model."""
    remedy = "pass a cache that this model has filled, or an empty hf_paged.PagedKVCache(model.config)"
    # A looped model has more layers of K/V than its config specifies.
    if cache.num_layers not in (None, len(report.layers), PagedKVCache(model.config).num_layers):
        raise ValueError(
            f"{CACHE} has {cache.num_layers} layers, {report.model} {len(report.layers)}: it belongs to "
            f"another model; {remedy}"
        )
    for layer in report.layers:
        stored, own = cache.sizes_of(layer.index), (layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        if stored is not None and own[0] is not None and stored != own:
            raise ValueError(
                f"layer {layer.index} of {CACHE} has {stored[0]} K/V heads of size {stored[1]}, that of "
                f"{report.model} {own[0]} of size {own[1]}: it belongs to another model; {remedy}"
            )


def check_pool(lengths: Sequence[int], cache_config: CacheConfig, num_blocks: int | None) -> None:
    """Raises ValueError if prompts of these lengths, in tokens, do not fit in `num_blocks` blocks (None: unbounded)."""
    needed = sum(-(-length // cache_config.block_size) for length in lengths)
    if num_blocks is not None and needed > num_blocks:
        given = {
            "num_blocks": num_blocks,
            "memory": cache_config.memory,
            "memory_fraction": cache_config.memory_fraction,
        }
        name = next(name for name in ("memory", "memory_fraction", "num_blocks") if given[name] is not None)
        held = f"{name}={given[name]!r}" + ("" if name == "num_blocks" else f" ({num_blocks} blocks)")
        raise ValueError(
            f"the prompts need {needed} blocks of {cache_config.block_size} tokens, the cache has {held}; "
            f"raise {name}, or give fewer or shorter prompts"
        )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_prompts(model: Model, ids: object, name: str, *, by_decoder: bool = False) -> None:
    """ids int [batch, length] of tokens the model knows, at least one row and one token. by_decoder: they are what the
    decoder of a model with an encoder begins with."""
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"{name} is a {type(ids).__name__}; a tensor [batch, length] of token ids is needed")
    if ids.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; [batch, length] is needed (one prompt: {name}[None])")
    refuse_meta(ids, name)
    if ids.dtype not in _INTEGERS:
        raise ValueError(f"{name} has dtype {ids.dtype}; integer token ids are needed")
    if ids.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: the list of prompts is empty; give at least one prompt")
    if ids.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: the prompt is empty; give at least one token")
    has_vocabulary = not by_decoder or isinstance(model.get_decoder(), PreTrainedModel)  # else it is unknown
    if has_vocabulary:
        check_token_range(model.get_decoder() if by_decoder else model, int(ids.min()), int(ids.max()), name)
    limit = position_limit(model) if by_decoder else prompt_limit(model)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"{name} has {ids.shape[1]} tokens a row, {_limit_text(model, limit, by_decoder=by_decoder)}; "
            "shorten the prompt"
        )


def check_token_range(model: PreTrainedModel, low: int, high: int, name: str) -> None:
    """Raises ValueError unless the model knows all ids from `low` to `high`, the least and the largest of a prompt."""
    embeddings: Any = model.get_input_embeddings()
    vocab = embeddings.weight.shape[0]
    if low < 0 or high >= vocab:
        bad = shown(low if low < 0 else high)
        raise ValueError(f"token id {bad} in {name} is outside the vocabulary of {vocab} (ids 0 to {vocab - 1})")


def refuse_meta(given: torch.Tensor, name: str) -> None:
    """Raises ValueError for a tensor without contents."""
    if given.is_meta:
        raise ValueError(f"{name} is on the device 'meta', where tensors have no contents; give its values")


def _limit_text(model: PreTrainedModel, limit: int, *, by_decoder: bool) -> str:
    if not model.config.is_encoder_decoder:
        return f"the model's max_position_embeddings is {limit}"
    return f"the model's {'decoder' if by_decoder else 'encoder'} has {limit} positions"


def prompt_limit(model: Model) -> int | None:
    """The maximum length of a prompt: of the encoder's text, if there is an encoder."""
    if model.config.is_encoder_decoder:
        return known_positions(model).text
    return position_limit(model)


def position_limit(model: Model) -> int | None:
    """The maximum sequence length of the model, or of its decoder; None if its config has none, or if it scales
    positions beyond it. That of a model with an encoder is found by trial, because some tables grow."""
    if model.config.is_encoder_decoder:
        return known_positions(model).decoder
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0 or extends_positions(config):
        return None
    return limit


def extends_positions(config: Any) -> bool:
    """Rotary scalings that are made for running past max_position_embeddings."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type", "default") not in (None, "default") for kind in kinds)


def _check_mask(name: str, given: torch.Tensor, mask: object, cache: PagedKVCache | None) -> None:
    """`given`: input_ids [batch, length] or inputs_embeds [batch, length, hidden]."""
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"attention_mask is a {type(mask).__name__}; a tensor [batch, length] is needed")
    refuse_meta(mask, "attention_mask")
    if mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; generate takes a 2D padding mask")
    if cache is None and mask.shape != given.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, {name} {tuple(given.shape)}; "
            "batch and length must be the same"
        )
    empty = (mask != 0).sum(dim=1) == 0
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"row {row} of attention_mask is all zeros: an empty prompt; leave it out of the batch")


# -- the engine ----------------------------------------------------------------------------------------------------


def check_engine(model: Model, switches: Switches, **tokenizers: Any) -> None:
    """The arguments of `Engine` but its two configs. Raises TypeError for an object that is not a transformers model,
    as `hf_paged.check` does."""
    if isinstance(model, str):
        raise ValueError(f"model={model!r} is a name; write Engine(AutoModelForCausalLM.from_pretrained({model!r}))")
    if not isinstance(unwrapped(model), PreTrainedModel):
        check(model)
    for name, tokenizer in tokenizers.items():
        if tokenizer is not None and not hasattr(tokenizer, "get_vocab"):
            raise ValueError(f"{name}={shown(tokenizer)}: a tokenizer of transformers is needed, or None")
    for name, value in switches._asdict().items():
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}={shown(value)}: use True, False or None")


# The beginnings of `image_token_id` and the like in configs.
_SHOWN = ("image", "video", "audio", "speech")


@functools.lru_cache(maxsize=64)
def _takes_more(forward: Callable[..., Any]) -> bool:
    """Return True if a model's forward takes images or audio beside token ids."""
    starts = ("pixel_values", "input_features", "input_values", *_SHOWN)
    return any(name.startswith(starts) for name in inspect.signature(forward).parameters)


def refuse_placeholders(model: Model, ids: Sequence[int]) -> None:
    """Raises ValueError for a prompt with tokens whose embeddings an image, a video or audio would replace."""
    if not _takes_more(type(model).forward):
        return
    for kind in _SHOWN:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            token = getattr(model.config, name, None)
            if is_integer(token) and token in ids:
                raise ValueError(
                    f"the prompt has {ids.count(token)} placeholders of the {kind} token {token} ({name}), but the "
                    f"request brings no {kind}; give inputs= what the model's processor returns beside input_ids, "
                    f"or in chat messages a part that has the {kind}"
                )


def check_generation(
    model: Model,
    options: Any,
    scheduler: SchedulerConfig,
    seats: int | None = None,
    *,
    tokenizer: Tokenizer | None | None,
) -> None:
    """Check the config of a request's `RequestOptions` as far as that is cheap, and whether it fits the others. What it
    does not set comes from the model's. seats: sequences whose states the memory holds, if that limits them. Raises
    ValueError.
    """
    config, defaults = options.generation_config, model.generation_config
    # As in transformers: None in a request's config means that the model's own config decides.
    given = {**vars(defaults), **{n: v for n, v in vars(config or defaults).items() if v is not None}}
    refuse_no_cache(getattr(config, "use_cache", None))
    check_options(config, defaults)
    check_values(COUNTS, given)
    if config is not None:
        check_values(DRAFTS, vars(config))
    # The larger of the two is how many sequences run at once, and is what the caller has to lower.
    name = max(("num_beams", "num_return_sequences"), key=lambda name: given.get(name) or 1)
    width = given.get(name) or 1
    if seats is not None and width > seats:
        raise ValueError(
            f"{name}={width} sequences in one request, but the memory holds the recurrent states of {seats}; lower it, "
            "or give the cache more memory"
        )
    # A request whose sequences never fit into one step would wait for ever.
    limits = {"max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.token_budget}
    for limit_name, limit in limits.items():
        if width > limit:
            raise ValueError(
                f"{name}={width} sequences in one request, but {limit_name}={limit}; lower it or raise that"
            )
    if options.streamer is not None and width > 1:
        raise ValueError(
            f"streamer={type(options.streamer).__name__} follows one sequence, but the request has several; drop it, "
            "or ask for num_beams=1 and num_return_sequences=1"
        )
    if options.logprobs is not None and (given.get("num_beams") or 1) > 1:
        raise ValueError(
            f"logprobs={options.logprobs}: beams have no lists of likely tokens (their own log-probabilities are in "
            "the output); leave it out, or ask for num_beams=1"
        )
    if given.get("output_scores") and (given.get("num_beams") or 1) > 1:
        raise ValueError(
            "output_scores=True: the engine keeps no processed log-probabilities of beams (their raw ones are in the "
            "output); leave it out, or use generate"
        )
    if model.config.is_encoder_decoder and given.get("guidance_scale") not in (None, 1):
        raise ValueError(
            f"guidance_scale={shown(given['guidance_scale'])}: its processor calls the model, without an encoder's "
            "input; leave it out"
        )
    if options.adapter is not None and given.get("guidance_scale") not in (None, 1):
        raise ValueError(
            f"guidance_scale={shown(given['guidance_scale'])} with adapter={shown(options.adapter)}: its processor "
            "calls the model outside the request's step, with whatever adapters are active then; use generate"
        )
    check_values(_SEED, vars(config or defaults))
    if given.get("stop_strings") and tokenizer is None:
        raise ValueError(
            f"stop_strings={shown(given['stop_strings'])} need the tokenizer; make the engine with "
            "Engine(model, tokenizer=tokenizer)"
        )


def check_length(model: Model, prompt_length: int, max_length: int, native_length: int | None) -> None:
    """Raises ValueError for a request that may grow beyond the model, or beyond what requests can share."""
    limit = position_limit(model)
    # The last token is not computed, so it needs no position.
    if limit is not None and max(prompt_length, max_length - 1) > limit:
        raise ValueError(
            f"{prompt_length} prompt tokens and max_length={max_length}, but "
            f"{_limit_text(model, limit, by_decoder=True)}; shorten the prompt or lower max_new_tokens"
        )
    if native_length is not None and max_length > native_length:
        raise ValueError(
            f"max_length={max_length}: this model's rotary frequencies depend on the longest sequence of the batch "
            f"beyond {native_length} tokens, so requests cannot share one; use model.generate"
        )


def check_fits(
    prompt_length: int, max_length: int, num_beams: int, manager: BlockManager, state_blocks: int = 0
) -> None:
    """Raises ValueError if the request, grown to `max_length`, needs more blocks than an empty pool has.

    The least that can be needed is counted: samples may agree to the end, beams share all blocks but their last ones,
    blocks that no token attends to any more are free again, and K/V of the last token is never stored. state_blocks:
    for the states of the request's sequences.
    """
    stored = max(prompt_length, max_length - 1)
    # The last token is not stored, so after a single new one beams have stored nothing of their own.
    beams = num_beams if max_length - prompt_length > 1 else 1
    size, total, groups = manager.block_size, manager.allocator.num_blocks, manager.groups
    for_beams = (beams - 1) * len(groups) + state_blocks
    needed = peak_blocks(groups, stored, size) + for_beams
    if needed <= total:
        return
    remedy = "shorten the prompt"
    # If the prompt alone fits, fewer new tokens are enough.
    if peak_blocks(groups, prompt_length, size) + state_blocks <= total:
        longest = longest_length(groups, total - for_beams, size, stored)
        remedy = f"lower max_new_tokens to {max(1, longest - prompt_length + 1)} or less"
    several = f" with {beams} beams" if beams > 1 else ""
    states = f" ({state_blocks} for states)" if state_blocks else ""
    raise ValueError(
        f"a prompt of {prompt_length} tokens and {max_length - prompt_length} new ones{several} need {needed} "
        f"blocks of {size}{states}, but the cache has {total}; {remedy}, or give the cache more memory"
    )
