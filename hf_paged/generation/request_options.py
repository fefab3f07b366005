"""RequestOptions: what is asked of a request besides its prompt, in one object from the caller to its readers.

A new option is a field here with its check, and a line in the place that reads it (`request.options`, or admission.py).
What depends on the model or on other options is checked in validation.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from hf_paged.generation.validation import OF_REQUEST, check_generation_config, check_values, is_integer, shown
from hf_paged.sockets import Task


class OptionArguments(TypedDict, total=False):
    """The options as keyword arguments of `Engine.add_request`, so that editors show them: the fields of RequestOptions
    but the config."""

    request_id: str | None
    priority: float
    client: str | None
    logits_processor: Any
    stopping_criteria: Any
    streamer: Any
    adapter: str | None
    cache_salt: str | None
    attention_mask: Any
    deadline: float | None
    logprobs: int | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int
    inputs: Mapping[str, Any] | None
    task: Task | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The options of a request, each of which has been checked by itself; `Engine.add_request` says what they mean.

    Raises ValueError for a wrong value.
    """

    generation_config: Any = None
    request_id: str | None = None
    priority: float = 0
    client: str | None = None
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
    inputs: Mapping[str, Any] | None = None
    task: Task | None = None

    def __post_init__(self) -> None:
        check_generation_config(self.generation_config)
        check_values(OF_REQUEST, {name: getattr(self, name) for name in OF_REQUEST})
        start = self.prompt_logprobs_start
        if not is_integer(start) or start < 0 or (start and self.prompt_logprobs is None):
            raise ValueError(f"prompt_logprobs_start={shown(start)}: a place in the prompt, beside prompt_logprobs=k")


NAMES = tuple(field.name for field in fields(RequestOptions))
_LISTS = ("logits_processor", "stopping_criteria")  # options that are lists themselves


def options_of(generation_config: Any, given: Mapping[str, Any]) -> RequestOptions:
    """The options that a caller has given by name. Raises TypeError for an unknown name, ValueError for a value."""
    _check_names(given)
    return RequestOptions(generation_config=generation_config, **given)


def _check_names(given: Mapping[str, Any]) -> None:
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise TypeError(f"{unknown[0]}= is no option of a request; choose from {', '.join(NAMES)}")


def options_of_each(generation_config: Any, given: Mapping[str, Any], count: int) -> list[RequestOptions]:
    """The options of each of `count` prompts, where an option is one for all or a list with one for each.

    Raises as `options_of`, and ValueError for a list of another length, and for an id or a streamer that would be of
    several prompts.
    """
    _check_names(given)
    columns = {name: _one_each(name, value, count) for name, value in given.items()}
    configs = _one_each("generation_config", generation_config, count)
    return [options_of(configs[row], {name: column[row] for name, column in columns.items()}) for row in range(count)]


def _one_each(name: str, given: Any, count: int) -> Sequence[Any]:
    """One value of the option for each of `count` prompts."""
    is_list = isinstance(given, (list, tuple))
    if name in _LISTS:
        is_list = is_list and len(given) > 0 and all(each is None or isinstance(each, (list, tuple)) for each in given)
    if not is_list:
        if name in ("request_id", "streamer", "task") and given is not None and count > 1:
            raise ValueError(f"{name}: one for {count} prompts; give a list with one for each")
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name}: a list of {len(given)} for {count} prompts; give one, or a list with one for each")
    return list(given)
