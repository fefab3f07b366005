"""Compiled grammars for requests.

A grammar comes from a client. Its size is limited here, before anything reads it, and llguidance limits its own work
(patterns of one string excepted, which `schemas` limits). So it is compiled in a thread of this process: the worst that
is known takes two seconds of processor time and 100 MiB, while other threads run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hf_paged.features.grammar.constraints import Constraint, check_installed, is_larger
from hf_paged.features.grammar.vocabulary import Compiled, Vocabulary
from hf_paged.serving.problems import Problem, not_served

# Grammars that are compiled at the same time, so that one which takes long does not hold up all others.
_AT_ONCE = 2
# At the two seconds of the worst that is known, the last one would wait for a minute.
_MAX_WAITING = 64


class Grammars:
    """A compiler of grammars for one vocabulary, which works on threads. Used on the event loop."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, max_bytes: int, seconds: float) -> None:
        """vocabulary: makes it, or finds it; takes a second. max_bytes: of a constraint. seconds: that a request waits
        for its grammar; 0: none is compiled."""
        self._new_vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._vocabulary: Vocabulary | None = None  # when it has been needed
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hf-paged-grammars")
        self._num_waiting = 0

    async def compiled(self, constraint: Constraint) -> Compiled:
        """Compile a constraint. Raises Problem if that cannot be done, or not now."""
        self._check(constraint)
        # Without a thread: most requests of a client have the same schema.
        known = None if self._vocabulary is None else self._vocabulary.known(constraint)
        if known is not None:
            return known
        if self._num_waiting >= _MAX_WAITING:
            raise Problem(
                429, f"{_MAX_WAITING} grammars are being compiled", code="queue_full", headers={"retry-after": "1"}
            )
        self._num_waiting += 1
        try:
            # A request whose client has gone leaves the queue: its wait is cancelled, and with it what has not begun.
            async with asyncio.timeout(self._seconds):
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint)
        except TimeoutError:
            raise Problem(
                503,
                f"the grammar was not compiled within {self._seconds:g} seconds",
                code="no_compiler",
                headers={"retry-after": "10"},
            ) from None
        except ValueError as error:
            why = str(error)
            raise _refused(why, "tools" if why.startswith("tools: ") else None) from error
        finally:
            self._num_waiting -= 1

    def _compile(self, constraint: Constraint) -> Compiled:
        self._vocabulary = self._new_vocabulary()
        return self._vocabulary.compiled(constraint)

    def _check(self, constraint: Constraint) -> None:
        if not self._seconds:
            raise not_served("schemas, grammars and forced tool calls are switched off here", param="response_format")
        try:
            check_installed()
        except ImportError as error:
            raise not_served(str(error), param="response_format") from error
        # Before anything follows the constraint, which may be as large as a body.
        if is_larger(constraint, self._max_bytes):
            raise _refused(f"it has more than the {self._max_bytes} characters that a request's grammar may have")

    def close(self) -> None:
        """Waits for what is being compiled."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def _refused(why: str, param: str | None = None) -> Problem:
    return Problem(400, f"the grammar of this request is refused: {why}", param=param, code="invalid_grammar")
