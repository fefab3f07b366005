"""Logits processors that an operator registers by name, and the arguments with which requests may ask for them.

`NAME=module:Class` names a class as transformers has them, or a class of the operator's. The schema of its arguments
comes from the annotations of its constructor. Knows classes; neither requests nor HTTP.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from transformers import LogitsProcessor

from hf_paged.annotations import Tokenizer

# Parameters that the server fills in: a request cannot have them. The last two are the length of the prompt.
_OURS = ("tokenizer", "device", "prompt_length", "input_ids_seq_length")


@dataclass(frozen=True, slots=True)
class Registered:
    """A class of processors. arguments: the model of what a request gives. own: parameters that the server fills in."""

    name: str
    kind: Any
    arguments: type[BaseModel]
    own: tuple[str, ...]

    @classmethod
    def of(cls, name: str, place: str) -> Registered:
        """place: module:Class. Raises ValueError if there is none, or if its arguments have no schema."""
        try:
            kind = pkgutil.resolve_name(place)
        except Exception as error:  # the module is the operator's, and may raise anything when it is imported
            raise ValueError(f"{name}={place} cannot be imported: {type(error).__name__}: {error}") from error
        if not (isinstance(kind, type) and any("__call__" in vars(each) for each in kind.__mro__)):
            raise ValueError(f"{name}={place} is no class of logits processors, which have a method __call__")
        own, fields = [], dict[str, Any]()
        try:
            for parameter in _parameters(kind):
                if parameter.name in _OURS:
                    own.append(parameter.name)
                else:
                    fields[parameter.name] = _field(kind, parameter)
            arguments = create_model(name, __config__=_CONFIG, **fields)
        except Exception as error:  # annotations may name what is not there, and pydantic knows some only
            raise ValueError(f"{name}={place}: its arguments have no schema: {error}") from error
        return cls(name, kind, arguments, tuple(own))

    def made(self, given: Mapping[str, Any], tokenizer: Tokenizer, device: Any, prompt: list[int], width: int) -> Any:
        """Return a processor with these arguments for a prompt. width: of the scores. Raises ValueError for arguments
        that it does not take, also if it fails on the prompt."""
        try:
            # As JSON, which has lists for tuples.
            read = self.arguments.model_validate_json(json.dumps(dict(given)))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (self.name, *first["loc"])))
            raise ValueError(f"{place}: {first['msg']}") from error
        asked = {name: getattr(read, name) for name in read.model_fields_set}
        filled = {"tokenizer": tokenizer, **dict.fromkeys(_OURS[2:], len(prompt))}
        try:
            # On one of its own, because it may keep what it has seen, and on the host, where a wrong index is an error.
            self._new(asked, {**filled, "device": "cpu"})(
                torch.tensor([prompt], dtype=torch.int64, device="cpu"),
                torch.zeros(1, width, dtype=torch.float32, device="cpu"),
            )
            return self._new(asked, {**filled, "device": device})
        except Exception as error:  # the class may raise anything for what a client has sent
            raise ValueError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _new(self, asked: dict[str, Any], filled: dict[str, Any]) -> Any:
        return self.kind(**asked, **{name: filled[name] for name in self.own})


_CONFIG = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
)


def _parameters(kind: Any) -> list[inspect.Parameter]:
    """The parameters of a constructor. Raises ValueError for those that have no name of their own."""
    if kind.__init__ in (object.__init__, LogitsProcessor.__init__):
        return []
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    for each in parameters:
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise ValueError(f"{kind.__name__}: the constructor has {each}, where arguments need names of their own")
    return parameters


def _field(kind: Any, parameter: inspect.Parameter) -> tuple[Any, Any]:
    hints = get_type_hints(kind.__init__)
    default = ... if parameter.default is parameter.empty else parameter.default
    return hints.get(parameter.name, Any), default
