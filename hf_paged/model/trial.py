"""The one harness of trials: computes a candidate beside a reference, compares them, and says why not as data.

Knows results, errors and how long to keep a verdict; not what is tried, nor what follows from a refusal.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError, described, raise_mistake
from hf_paged.model.calls import without_modes
from hf_paged.registry import WITHOUT_VARIANTS

_Result = TypeVar("_Result")
_Logits = Sequence[torch.Tensor] | Callable[[], Sequence[torch.Tensor]]

_passing: ContextVar[list[Exception] | None] = ContextVar("hf_paged_trial", default=None)
"""Errors of the present trials that the next ones may not meet, as where memory lacked. None: nothing is tried."""


class Refusal(NamedTuple):
    """Why a trial does not end as it should. passing: the error for it, if the next trial may not meet it."""

    reason: str
    passing: Exception | None = None


class _NoReference(UnsupportedModelError):
    """There is nothing to compare with while the weights are what they are."""


@contextmanager
def trying(device: torch.device, *, autocast: bool = False) -> Iterator[list[Exception]]:
    """Within it nothing of the caller's counts: default device, gradients, autocast, modes; calls of `generate` are
    plain.

    Afterwards the random state is what it was. Yields the errors that the next trial may not meet, as they come.
    autocast: leave the caller's on, as where K/V gets the dtype that steps will write.
    """
    errors: list[Exception] = []
    kind = device.type
    # Only where it is on: torch refuses to switch autocast off for a backend that has none.
    is_on = not autocast and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    token = _passing.set(errors)
    try:
        with (
            device,
            torch.no_grad(),
            torch.autocast(kind, enabled=False) if is_on else nullcontext(),
            without_modes(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        ):
            yield errors
    finally:
        _passing.reset(token)


@contextmanager
def as_itself(model: Model) -> Iterator[None]:
    """Within it the model computes without what callers or requests have chosen."""
    with ExitStack() as stack:
        for place in WITHOUT_VARIANTS:
            stack.enter_context(pkgutil.resolve_name(place)(model))
        yield


def is_trying() -> bool:
    """Return True within `trying`, in this thread."""
    return _passing.get() is not None


def attempt(compute: Callable[[], _Result], failed: str = "") -> _Result | Refusal:
    """Return the result, or why there is none, where code that is not ours may raise anything.

    failed: what an error means, with {} for its first line. "": whoever asks wants to know no more than that.
    """
    try:
        return compute()
    except UnsupportedModelError as error:
        return _noted(error, str(error)) if isinstance(error, _NoReference) else Refusal(str(error))
    except Exception as error:  # of the model, or of what others have put into it
        raise_mistake(error)
        return _noted(error, failed.format(first_line(error))) if failed else Refusal(first_line(error))


def _noted(error: Exception, reason: str) -> Refusal:
    if (errors := _passing.get()) is not None:
        errors.append(error)
    return Refusal(reason, error)


@dataclass(frozen=True, slots=True)
class Trial:
    """Logits, or computations of them, that should be the same but for rounding. The candidate is computed first.

    failed: as for `attempt`. what: the candidate's logits, in a word. differs: what it means if they are others, with
    the fields `error` and `scale`. noise: a difference that is tolerated in any case; if it is infinite, nothing is
    compared.
    """

    model: Model
    candidate: _Logits
    reference: _Logits
    failed: str = ""
    what: str = "packed"
    differs: str = "its logits are others"
    noise: float = 0.0

    def refusal(self) -> Refusal | None:
        """Run it. None: the candidate may replace the reference."""
        return attempt(self._run, self.failed)

    def _run(self) -> None:
        actual, expected = (each() if callable(each) else each for each in (self.candidate, self.reference))
        if self.noise < math.inf:
            for pair in zip(actual, expected, strict=True):
                self._compare(*pair)

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if actual.shape != expected.shape:
            raise UnsupportedModelError(
                f"its logits have shape {tuple(expected.shape)}, {self.what} {tuple(actual.shape)}"
            )
        if expected.isnan().any():
            raise _NoReference("its own logits are NaN, so nothing can be compared: mend its weights first")
        error, scale = difference(self.model.dtype, actual, expected)
        # `not <=`, so that NaN does not pass.
        if not error <= max(self.noise, logits_tolerance(self.model.dtype) * max(scale, 1e-6)):
            raise UnsupportedModelError(self.differs.format(error=error, scale=scale))


def logits_tolerance(dtype: torch.dtype) -> float:
    """Tolerated difference of logits in this dtype, as a share of the largest logit."""
    # In fp32 rounding moves logits by about 1e-6 of the largest one, far less than a wrong layout does. A unit in the
    # last place of bf16 is up to 0.8 % of a number, and the layers add up some.
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def difference(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors of logits, and the largest logit of `right`. dtype: of the model.

    Logits that the model has masked, with -inf or with the least number of a dtype, are left out: beside 3e38 each
    difference would seem small. NaN, with which no comparison holds, unless both have masked the same ones."""
    least = torch.finfo(dtype).min
    masked, others = (each <= max(least, torch.finfo(each.dtype).min) for each in (left, right))
    if not torch.equal(masked, others):
        return math.nan, math.nan
    left, right = (each.float().masked_fill(masked, 0) for each in (left, right))
    return (left - right).abs().max().item(), right.abs().max().item()


def first_line(error: BaseException) -> str:
    """The error in a line of a report."""
    return described(error).splitlines()[0][:220]


def random_numbers() -> Callable[..., torch.Tensor]:
    """Return a function from sizes to normal numbers, fp32 on the CPU: the same ones in each trial of a part."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    return draw
