"""Values in requests of clients: their kinds, their bounds, and checks of single ones.

pydantic makes an error of each value that is wrong, so lists end at their first one and objects have few keys:
otherwise one large body would keep the event loop busy for seconds. Of several types that a field may have, the value's
own kind chooses one (`ByKind`), so that errors are about what the client meant.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from hf_paged.serving.problems import Problem

# Lists and objects cost more than their text: each is an object that Python's garbage collector visits.
MAX_CONTAINERS = 2**16
# Programs that follow a value call themselves once for each level; Python's own limit of calls is 1,000.
MAX_DEPTH = 128
# As long as a whole body may be (`settings.Limits.body`).
_MAX_STRING = 4 * 2**20
_MAX_KEYS = 200  # of an object with known keys; no request has as many

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

_KINDS = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind_of(given: Any) -> str:
    """Name the kind of a JSON value in words."""
    return _KINDS.get(type(given), type(given).__name__)


def check_containers(data: bytes, what: str, param: str | None = None) -> None:
    """Raise Problem (400) for JSON with too many lists and objects, or in another encoding than UTF-8.

    These are what costs: each is an object of Python's that its garbage collector visits.
    """
    if b"\0" in data:  # as all other encodings of JSON have
        raise Problem(400, f"{what} is not JSON in UTF-8", param=param)
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    # Only now, because most bodies have few brackets, also within strings.
    bare = _STRING.sub(b"", data)
    count = bare.count(b"[") + bare.count(b"{")
    if count > MAX_CONTAINERS:
        raise Problem(400, f"{what} has {count} lists and objects; at most {MAX_CONTAINERS} are read", param=param)


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise ValueError if lists and objects are nested too deeply for programs that follow them."""
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    for each in value.values() if isinstance(value, dict) else value:
        check_depth(each, left - 1)


ByKind = Discriminator(kind_of)
AString, AList, AnObject, ABoolean = Tag("a string"), Tag("a list"), Tag("an object"), Tag("true or false")
_TEXTS, _IDS, _LISTS_OF_IDS = "a list of strings", "a list of token ids", "a list of lists of token ids"
TAGS = frozenset((*_KINDS.values(), _TEXTS, _IDS, _LISTS_OF_IDS))
"""Parts of the places of errors that are no field, key or number."""


def _prompt_kind(given: Any) -> str:
    if not isinstance(given, list) or not given:
        return _TEXTS if given == [] else kind_of(given)
    kinds: dict[type, str] = {str: _TEXTS, list: _LISTS_OF_IDS}
    # By its first item: the error then says what the others should have been.
    return kinds.get(type(given[0]), _IDS)


_Value = TypeVar("_Value")
Items = Annotated[list[_Value], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(max_length=_MAX_STRING)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Bias = Annotated[Number, Field(ge=-100, le=100)]


Temperature = Annotated[Number, Field(ge=0, le=100), AfterValidator(lambda given: given if given >= 1e-3 else 0.0)]
"""Below a thousandth, where scores would overflow, it is 0: greedy search, which it comes nearest to."""


def few(given: Any) -> Any:
    """Return the value. Raises ValueError for an object with too many keys to look at each."""
    if isinstance(given, dict) and len(given) > _MAX_KEYS:
        raise ValueError(f"an object with {len(given)} keys; no request has more than {_MAX_KEYS}")
    return given


def _is_json(given: dict[str, Any]) -> dict[str, Any]:
    """The value. Raises ValueError for one that an answer cannot repeat: its strings are no Unicode, or it has NaN."""
    # First: json.dumps would raise RecursionError, which pydantic takes for no refusal.
    check_depth(given)
    try:
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"a JSON object is needed: {error}") from error
    return given


def _is_printable(given: str) -> str:
    if not given.isprintable():  # a line end would begin a line of the log
        raise ValueError(f"{given[:100]!r} has characters that cannot be printed")
    return given


def _is_shallow(given: Any) -> Any:
    check_depth(given)
    return given


JSONSchema = Annotated[dict[str, Any], AfterValidator(_is_json)]
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_is_shallow)]
Printable = AfterValidator(_is_printable)
Hint = Annotated[str, Field(max_length=1024)]
Texts = Annotated[dict[Hint, Text], BeforeValidator(few)]
"""Values that are texts, by name. With bounds, because pydantic lets strings that are no Unicode pass without."""


class Body(BaseModel):
    """A request's body: no unknown field, no number that is not finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, given: Any) -> Any:
        return few(given)


class Sent(Body):
    """A part of a conversation, which clients send back unchanged, whoever made it. Unknown fields say nothing to the
    model, and are left out."""

    model_config = ConfigDict(extra="ignore")


Prompts = Annotated[
    Annotated[Text, AString]
    | Annotated[Items[Text], Field(min_length=1), Tag(_TEXTS)]
    | Annotated[TokenIds, Tag(_IDS)]
    | Annotated[Items[TokenIds], Field(min_length=1), Tag(_LISTS_OF_IDS)],
    Discriminator(_prompt_kind),
]
"""One prompt or several, as texts or token ids."""
