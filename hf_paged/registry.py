"""Features that the core asks for by a name in a table, and the interfaces of what they give it.

A table has places of functions, which are imported when they are called. So the core imports no feature. What else a
feature may be, `sockets.py` says. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from hf_paged.sockets import Group

Choice = Any
Request = Any
_Result = TypeVar("_Result")

REPORTS = {"is_encoder_decoder": "hf_paged.features.encoder_decoder.trial:report"}
"""Fields of a model's config with which it is tried in a way of its own: the place of a function that makes its report,
of the model and of the reason not to try packed rows, or None."""

OF_HEADS = "hf_paged.features.encoders.both_ways:report"
"""The place of a function that makes the report of a model with a head for labels, or without a head, if it is an
encoder."""

BEAMS = "hf_paged.features.beams.beam_request:BeamRequest"
"""The place of the class of requests that search with beams."""

EDITORS = "hf_paged.features.editors.of_transformers:EDITORS"
"""The place of a table: by the type of a processor of transformers, a function that makes its editor. It gets the
processor and the number of scores, and may return None."""

WITHOUT_VARIANTS = ("hf_paged.features.adapters.adapters:without_adapters",)
"""Contexts, made of a model, in which it is tried as it is without what requests choose."""


class Variants(Protocol):
    """The variants of a model that its requests choose between, as the adapters of PEFT are."""

    @property
    def seen(self) -> bool:
        """True if the model has had any. Otherwise nobody need switch to a choice."""

    def choose(self, adapter: str | None) -> Choice:
        """Return what a request computes with: a variant by its name, or what is active now."""

    def run(self, choice: Choice, compute: Callable[[], _Result]) -> _Result:
        """Return what `compute()` returns while a choice is switched on."""

    def is_active(self, choice: Choice) -> bool:
        """Return True if a choice is what is active now."""

    def alone(self) -> list[Choice]:
        """Return the choices that requests may make of what is there now."""

    def describe(self, choice: Choice) -> bytes:
        """Return the choice as data for other processes."""

    def described(self, description: bytes) -> Choice:
        """Return the choice that another process has described."""


class Drafting(Protocol):
    """Who gives sequences drafts, and what became of these."""

    drafter: Any
    num_drafts: int
    drafted_tokens: int
    accepted_tokens: int

    @property
    def requests(self) -> Mapping[Group, Any]:
        """Return those that may get drafts, by group."""

    @property
    def accepted_by_position(self) -> Sequence[int]:
        """Return the numbers of right tokens by their position in a draft."""

    def begin(self, request: Request) -> None:
        """A request that drafts has been admitted."""

    def draft(self, *, verifies: bool) -> Any:
        """Return drafts for the next step, between two steps, by sequence."""

    def verified(self, seq: Any, num_right: int, num_drafted: int) -> None:
        """A step has verified a draft."""

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, drafts included, took so long."""
