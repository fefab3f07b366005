"""Task: what a request wants of the model's output besides tokens. See `sockets.py`. Standard library only."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from hf_paged.executor import Tensor


class Task:
    """A wish of a request: rows of the model's output at positions of its prompt, in place of new tokens or with them.

    `Engine.add_request(task=...)` takes an object for each request. It gets each position once, in order, over as many
    steps as the prompt takes. If the prompt is computed again, what it has got is left out. What its
    methods raise ends its request alone. This class wants nothing.

    Attributes:
        keeps: "logits" = rows [num_rows, vocab]. "hidden" = rows [num_rows, size], which the base model gives its head.
        generates: True if tokens follow the prompt. False = the request ends when it has its rows, and nothing of its
            config counts.
        start: The first position that is still wanted. It is computed, and not taken from cached prefixes. The engine
            sets it to the one after those that were consumed.
        stop: The position after the last one that is wanted.

    Example:
        ```python
        from hf_paged.sockets import Task


        class LastHidden(Task):
            keeps, generates = "hidden", False

            def begin(self, prompt):
                self.start, self.stop, self.state = len(prompt) - 1, len(prompt), None

            def consume(self, first, rows):
                self.state = rows[-1].float().cpu()

            def fill(self, output):
                output.result = self.state


        task = LastHidden()
        task.begin([5, 6, 7])
        assert list(task.wanted(0, 3)) == [2]
        ```
    """

    keeps: Literal["logits", "hidden"] = "logits"
    generates = True
    start = 0
    stop = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Set `start` and `stop`, when a request is made, in any thread.

        Args:
            prompt: Token ids of the request.
        """

    def wanted(self, first: int, end: int) -> range:
        """Return the wanted positions of those that a step computes.

        Args:
            first: The first position that the step computes.
            end: The position after the last one.

        Returns:
            Positions without a gap.
        """
        return range(max(first, self.start), min(end, self.stop))

    def consume(self, first: int, rows: Tensor) -> None:
        """Take rows on their device. Copy what you keep, because the next step may use their memory.

        Args:
            first: Position of the token of the first row.
            rows: A row for each token from there on.
        """

    def fill(self, output: Any) -> None:
        """Enter the result, as far as there is one, in a new output of the request.

        Args:
            output: A `RequestOutput`, whose attribute `result` is free for it.
        """


TASKS = {"prompt_logprobs": "hf_paged.features.tasks.prompt_scores:task_of"}
"""Options of requests that are tasks: the place of a function that makes one of all options."""


def task_of(options: Any) -> Task | None:
    """Return the task that the options of a request ask for, or None."""
    asked: Iterator[Task] = (
        pkgutil.resolve_name(place)(options) for name, place in TASKS.items() if getattr(options, name) is not None
    )
    return next(asked, options.task)
