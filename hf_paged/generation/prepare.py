"""Prepares a request as transformers' `generate` would if it ran alone.

`generate` itself does the work up to its decoding loop: defaults, validation, special tokens, length limits, logits
processors and stopping criteria. Only the loop is replaced, by one that records its arguments. Requests with equal
configs share the result, as far as it depends neither on the prompt nor on the time.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.annotations import Model, Tokenizer
from hf_paged.features.watching import stranger
from hf_paged.generation.options import option
from hf_paged.generation.request_options import RequestOptions
from hf_paged.integration.names import PREPARE_ENCODER
from hf_paged.integration.patches import own_method
from hf_paged.locks import usable_after_fork
from hf_paged.model.devices import device_of
from hf_paged.model.inputs import EncoderArguments


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request after `generate`'s preparation, for `num_rows` samples or beams of one prompt.

    stopping_criteria: without those for the length and for EOS tokens, which are `max_length` (in tokens, prompt
    included) and `eos`. own_processors: those of `logits_processor` that are the caller's objects. encoder: what the
    encoder of an encoder-decoder model gets; the prompt is then the decoder's.
    """

    prompt_token_ids: list[int]
    num_rows: int
    device: torch.device
    generation_config: Any
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    max_length: int
    eos: frozenset[int]
    uses_beams: bool
    own_processors: tuple[Any, ...] = ()
    encoder: EncoderArguments | None = None


class StopStrings:
    """The criteria for stop strings, kept because each takes hundreds of milliseconds to make.

    A criterion keeps its table on the device of its last call, and no other state, so all requests of a process on one
    device may share it. If the tokenizer has grown, a new one is made.
    """

    MAX_KEPT = 16  # a table has some numbers for each token of the vocabulary

    def __init__(self) -> None:
        # By last use. The key has the id of a tokenizer; the reference tells whether it is still the same one.
        self._made: OrderedDict[Hashable, tuple[weakref.ref[Any], StopStringCriteria]] = OrderedDict()
        self._lock = usable_after_fork(threading.Lock())

    def criterion(self, tokenizer: Tokenizer, strings: str | list[str], device: torch.device) -> StopStringCriteria:
        key = (id(tokenizer), len(tokenizer), (strings,) if isinstance(strings, str) else tuple(strings), device)
        with self._lock:
            reference, made = self._made.get(key, (None, None))
            if made is None or reference is None or reference() is not tokenizer:
                made = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
                self._made[key] = weakref.ref(tokenizer), made
                if len(self._made) > self.MAX_KEPT:
                    self._made.popitem(last=False)
            self._made.move_to_end(key)
        return made


STOP_STRINGS = StopStrings()


class _ArgumentRecorder:
    """Takes the place of the model in `generate`. Its decoding methods record their arguments and decode nothing."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.recorded: dict[str, Any] = {}
        self.encoder: EncoderArguments | None = None
        if model.config.is_encoder_decoder:
            vars(self).update(dict.fromkeys(PREPARE_ENCODER, self._encoder_later))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _encoder_later(self, tensor: torch.Tensor, model_kwargs: dict[str, Any], name: str, config: Any) -> Any:
        """In place of the method that runs the encoder, which the engine does: with those of other requests."""
        others = {key: value for key, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
        decoders = [key for key in others if key.startswith("decoder_")]
        given = {key: value for key, value in others.items() if key not in decoders}
        self.encoder = EncoderArguments(tensor, name, given)
        states = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")  # in the place of those to come
        return {**model_kwargs, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}

    def _prepare_generation_config(self, *args: object, **kwargs: object) -> tuple[Any, dict[str, Any]]:
        """transformers' own, without what would choose a decoding method that drafts: the engine does that itself."""
        config, others = self._model._prepare_generation_config(*args, **kwargs)
        config.prompt_lookup_num_tokens = None
        return config, others

    def _prepare_cache_for_generation(self, *args: object, **kwargs: object) -> None:
        """No cache: the engine has its own memory."""

    def _get_stopping_criteria(
        self, generation_config: Any, stopping_criteria: Any, tokenizer: Tokenizer | None = None, **kwargs: Any
    ) -> StoppingCriteriaList:
        """transformers' own, but for stop strings, whose criterion is a kept one."""
        strings = generation_config.stop_strings
        # transformers prefers a criterion of the caller's to the config's strings.
        is_own = any(type(each) is StopStringCriteria for each in stopping_criteria or ())
        if strings is None or (strings and (tokenizer is None or is_own)):
            own: StoppingCriteriaList = self._model._get_stopping_criteria(
                generation_config, stopping_criteria, tokenizer, **kwargs
            )
            return own
        # A shallow copy is enough: one attribute changes.
        others = copy(generation_config)
        others.stop_strings = None
        criteria: StoppingCriteriaList = self._model._get_stopping_criteria(
            others, stopping_criteria, tokenizer, **kwargs
        )
        if strings and tokenizer is not None:
            criteria.append(STOP_STRINGS.criterion(tokenizer, strings, device_of(self._model)))
        return criteria

    def _record(self, uses_beams: bool, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        self.recorded = {"uses_beams": uses_beams, "input_ids": input_ids, **kwargs}
        return input_ids

    def _sample(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self._record(False, input_ids, kwargs)

    def _beam_search(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
        return self._record(True, input_ids, kwargs)

    def _assisted_decoding(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise ValueError(
            "the engine decodes in no way of an assisted call but that of prompt_lookup_num_tokens; use "
            "model.generate(..., cache_implementation='paged')"
        )


class Preparer:
    """Prepares the requests of one model, from any thread.

    The results for the last `MAX_KEPT` configs are kept and found again by value: of the request's config, of the
    model's, and of what else the preparation reads. Configs that differ in `max_new_tokens` only have one result, if no
    minimum depends on it. A config that is changed in place is a new one. A request with processors or criteria of the
    caller is prepared by itself, as is one with an option that reads the prompt or keeps a state, and one about whose
    prompt transformers warns.
    """

    # Configs of a server's requests differ in seeds and numbers of tokens mostly, which do not count.
    MAX_KEPT = 64

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: OrderedDict[Hashable, PreparedRequest] = OrderedDict()  # by last use
        self._tokenizer: Any = None  # of the kept results
        self._lock = threading.Lock()

    def prepare(
        self, prompt: list[int], options: RequestOptions, tokenizer: Tokenizer | None = None
    ) -> PreparedRequest:
        """The options have been checked, as far as `validation` does.

        Raises ValueError on options that transformers refuses.
        """
        config = options.generation_config
        is_own = bool(options.logits_processor or options.stopping_criteria)
        key = None if is_own else _key(self._model, config, tokenizer, len(prompt))
        if key is not None:
            with self._lock:
                # Results hold what stop strings are in the tokens of one tokenizer.
                if tokenizer is not self._tokenizer:
                    self._kept.clear()
                    self._tokenizer = tokenizer
                known = self._kept.get(key)
                if known is not None:
                    self._kept.move_to_end(key)
            if known is not None:
                return _at(known, prompt, option(config, self._model.generation_config, "max_new_tokens"))
        input_ids = torch.tensor([prompt], dtype=torch.int64, device=device_of(self._model))
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        prepared = self._prepare(inputs, options, tokenizer, prompt)
        if key is not None and _is_shareable(prepared):
            with self._lock:
                self._kept[key] = replace(prepared, prompt_token_ids=prompt[:])  # the caller may change that list
                if len(self._kept) > self.MAX_KEPT:
                    self._kept.popitem(last=False)
        return prepared

    def prepare_encoded(
        self, inputs: Mapping[str, torch.Tensor], options: RequestOptions, tokenizer: Tokenizer | None = None
    ) -> PreparedRequest:
        """`prepare` for an encoder-decoder model. inputs: what `generate` gets for this row. The model's encoder does
        not run. Raises ValueError for inputs that the model does not take."""
        return self._prepare(inputs, options, tokenizer, None)

    def _prepare(
        self,
        inputs: Mapping[str, torch.Tensor],
        options: RequestOptions,
        tokenizer: Tokenizer | None,
        prompt: list[int] | None,
    ) -> PreparedRequest:
        """prompt: None if the preparation makes it."""
        recorder = _ArgumentRecorder(self._model)
        try:
            # The method that our patch has replaced: the patched one would page the call.
            own_method(GenerationMixin, "generate")(
                recorder,
                **inputs,
                generation_config=options.generation_config,
                logits_processor=options.logits_processor,
                stopping_criteria=options.stopping_criteria,
                tokenizer=tokenizer,
            )
        # A RuntimeError too, but no fault of an option.
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
            # Nothing of the caller's runs in there: an option of a type that transformers does not check.
            raise ValueError(
                f"an option of the generation config cannot be used: {type(error).__name__}: {error}"
            ) from error
        if not recorder.recorded:
            raise ValueError("this generation mode has no decoding loop of transformers' own; use model.generate")
        return _digested(prompt, recorder, tuple(options.logits_processor or ()))


def _digested(
    prompt: list[int] | None, recorder: _ArgumentRecorder, own_processors: tuple[Any, ...]
) -> PreparedRequest:
    """Turn the recorded arguments of the decoding loop into a request, with length and EOS criteria as numbers."""
    recorded = recorder.recorded
    config, input_ids = recorded["generation_config"], recorded["input_ids"]
    max_length: int = config.max_length
    eos: frozenset[int] = frozenset()
    others = []
    # Exact types, because a subclass may decide in another way.
    for criterion in recorded["stopping_criteria"]:
        if type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos |= frozenset(criterion.eos_token_id.reshape(-1).tolist())
        else:
            others.append(criterion)
    return PreparedRequest(
        prompt_token_ids=input_ids[0].tolist() if prompt is None else prompt,
        num_rows=input_ids.shape[0],
        device=input_ids.device,
        generation_config=config,
        logits_processor=recorded["logits_processor"],
        stopping_criteria=StoppingCriteriaList(others),
        max_length=max_length,
        eos=eos,
        uses_beams=recorded["uses_beams"],
        own_processors=own_processors,
        encoder=recorder.encoder,
    )


# -- what requests with equal configs share ------------------------------------------------------------------------

_METHODS = (
    "_prepare_generation_config",
    "_prepare_generated_length",
    "_validate_generated_length",
    "_prepare_special_tokens",
    "_prepare_model_inputs",
    "_expand_inputs_for_generation",
    "_get_logits_processor",
    "_get_stopping_criteria",
)
"""Methods of a model in which the preparation may be changed."""

_LENGTHS: dict[type, str | None] = {
    logits_process.MinLengthLogitsProcessor: "min_length",
    logits_process.MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    logits_process.ForcedEOSTokenLogitsProcessor: "max_length",
    logits_process.ExponentialDecayLengthPenalty: "regulation_start",
    logits_process.SuppressTokensAtBeginLogitsProcessor: "begin_index",
    **dict.fromkeys((
        logits_process.SequenceBiasLogitsProcessor,
        logits_process.NoBadWordsLogitsProcessor,
        logits_process.RepetitionPenaltyLogitsProcessor,
        logits_process.NoRepeatNGramLogitsProcessor,
        logits_process.ForcedBOSTokenLogitsProcessor,
        logits_process.InfNanRemoveLogitsProcessor,
        logits_process.SuppressTokensLogitsProcessor,
        logits_process.TemperatureLogitsWarper,
        logits_process.TopHLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
        logits_process.MinPLogitsWarper,
        logits_process.TypicalLogitsWarper,
        logits_process.EpsilonLogitsWarper,
        logits_process.EtaLogitsWarper,
        logits_process.LogitNormalization,
    )),
}  # fmt: skip
"""Processors that requests may share, because they keep no state and know at most the length of the prompt: which of
their attributes has it (None: none)."""


class _Unknown(Exception):
    """A value that cannot be compared by value."""


def _frozen(value: Any) -> Hashable:
    """Equal for equal values of equal types."""
    kind = type(value)
    # With the type, because 1, 1.0 and True are equal, and not the same to transformers.
    if value is None or kind in (bool, int, float, str):
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_frozen, value))
    if kind is dict:
        return kind, tuple((_frozen(key), _frozen(each)) for key, each in value.items())
    raise _Unknown


def _options(config: Any, but: Collection[str]) -> Hashable:
    """The options that a config sets, without the values of those in `but`. `seed` is ours: transformers does not read
    it."""
    return type(config), *(
        (name, None if name in but else _frozen(value))
        for name, value in vars(config).items()
        if value is not None and name != "seed"
    )


def _key(model: Model, config: Any, tokenizer: Tokenizer | None, length: int) -> Hashable | None:
    """Equal for requests that the preparation can tell apart by nothing but their prompts and `max_new_tokens`. None if
    that is unknown.

    With `max_new_tokens` every length moves with that of the prompt, and one result serves prompts of all lengths.
    (A single token is special for `begin_suppress_tokens`.) Its number counts only beside a minimum.
    """
    # What an instance has of its own, or a stranger has put into the class, may read anything, and is asked each time.
    defaults = model.generation_config
    own = vars(model)
    max_new_tokens, max_length, min_length, min_new_tokens, strings = (
        option(config, defaults, name)
        for name in ("max_new_tokens", "max_length", "min_length", "min_new_tokens", "stop_strings")
    )
    kind = type(model)
    methods = tuple(getattr(kind, name, None) for name in _METHODS)
    if (max_new_tokens is None and max_length is None) or any(name in own for name in _METHODS):
        return None
    if any(method is not None and stranger(method) is not None for method in methods):
        return None  # a criterion that it adds may have a number of its own, which does not move with the prompt
    moves = max_new_tokens is not None and not min_length and length > 1
    is_number = type(max_new_tokens) is int and max_new_tokens > 0
    but = ("max_new_tokens",) if moves and is_number and not min_new_tokens else ()
    try:
        options = _options(defaults, but), None if config is None else _options(config, but)
    except _Unknown:
        return None
    # The id is enough: the Preparer holds the tokenizer of what it keeps.
    reads_text = None if not strings or tokenizer is None else (id(tokenizer), len(tokenizer))
    return options, None if moves else length, methods, reads_text


def _is_shareable(prepared: PreparedRequest) -> bool:
    config = prepared.generation_config
    if (config.min_length or 0) > config.max_length:
        return False  # transformers warns, and names the length of the prompt
    kinds = (MaxTimeCriteria, StopStringCriteria)
    return all(type(each) in _LENGTHS for each in prepared.logits_processor) and all(
        type(each) in kinds for each in prepared.stopping_criteria
    )


def _at(known: PreparedRequest, prompt: list[int], max_new_tokens: int | None) -> PreparedRequest:
    """The result for another request with the same key, which arrives now. max_new_tokens: its own."""
    further = len(prompt) - len(known.prompt_token_ids)
    longer = 0 if max_new_tokens is None else max_new_tokens - known.generation_config.max_new_tokens
    criteria = known.stopping_criteria
    # The time of the request begins now.
    if any(type(each) is MaxTimeCriteria for each in criteria):
        criteria = StoppingCriteriaList(
            MaxTimeCriteria(each.max_time) if type(each) is MaxTimeCriteria else each for each in criteria
        )
    if further == longer == 0:
        return replace(known, prompt_token_ids=prompt, stopping_criteria=criteria)
    config = copy(known.generation_config)
    config.max_new_tokens = max_new_tokens
    config.max_length += further + longer
    if config.min_new_tokens is not None:
        config.min_length += further
    return replace(
        known,
        prompt_token_ids=prompt,
        generation_config=config,
        logits_processor=LogitsProcessorList(_moved(each, further, longer) for each in known.logits_processor),
        stopping_criteria=criteria,
        max_length=known.max_length + further + longer,
    )


def _moved(processor: Any, further: int, longer: int) -> Any:
    """The processor for a prompt that is `further` tokens longer, with `max_new_tokens` greater by `longer`."""
    name = _LENGTHS[type(processor)]
    if name is None:
        return processor
    # A copy, because the kept one may be in use by other requests.
    moved = copy(processor)
    setattr(moved, name, getattr(processor, name) + further + (longer if name == "max_length" else 0))
    return moved
