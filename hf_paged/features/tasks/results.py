"""The results of tasks of requests that end with their prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.sockets import Task


def results_of(
    generate: Callable[..., list[RequestOutput]],
    prompts: Sequence[list[int]],
    tasks: Sequence[Task],
    options: dict[str, Any],
    names: Sequence[str] = (),
) -> list[Any]:
    """Return the result of each prompt's task. prompts: token ids. generate: `Engine.generate`. options: of requests.

    Raises RuntimeError for a request that has ended too early. names: what it says was not done.
    """
    # A prompt may begin or end with the padding token, which is one of its tokens.
    masks = [[1] * len(prompt) for prompt in prompts]
    outputs = generate(prompts, progress=False, attention_mask=masks, task=list(tasks), **options)
    names = names or [f"prompt {number + 1} was not computed" for number in range(len(outputs))]
    for name, task, output in zip(names, tasks, outputs):
        if task.start < task.stop:
            reason = output.outputs[0].finish_reason
            raise RuntimeError(f"{name} to its end: its request has ended before ({reason})")
    return [output.result for output in outputs]
