"""Requests that generate nothing, as far as their routes have it in common: each prompt is a request of the engine with
a task, and the answer is made of the results of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from hf_paged.annotations import Tokenizer
from hf_paged.features.tasks.embedding import Embedding, Pooling
from hf_paged.features.tasks.labels import Labels
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.choices import Delta, check_output
from hf_paged.serving.forms import Form
from hf_paged.serving.problems import Json, Problem
from hf_paged.serving.recipe import Recipe, check_priority, client_named, salt_of
from hf_paged.serving.sampling_options import Submission
from hf_paged.serving.served import ServedModel
from hf_paged.serving.values import Body, Hint
from hf_paged.sockets import Task


class TaskRequest(Body):
    """Fields of all of these routes: the model, which may be an adapter, and some of the engine's."""

    model: str | None = None
    user: Hint | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)] = 0


class TextsRequest(TaskRequest):
    """Fields of routes whose texts are tokenized as they are."""

    add_special_tokens: bool = True


def task_recipe(
    body: TaskRequest,
    served: ServedModel,
    key_digest: bytes | None,
    prompts: list[list[int]],
    tasks: Sequence[Task],
    param: str,
) -> Recipe:
    """Make the recipe of prompts with a task for each. param: the field that has them. Raises Problem (400)."""
    check_priority(body.priority, served)
    for prompt in prompts:
        _check_length(prompt, served, param)
    name, adapter = served.adapter_of(body.model)
    submissions = [
        Submission(
            prompt,
            RequestOptions(
                adapter=adapter,
                cache_salt=salt_of(key_digest, body.cache_salt),
                priority=body.priority,
                client=client_named(served.settings, key_digest, body.user),
                deadline=served.settings.limits.request_seconds,
                # A prompt may begin or end with the padding token, which is one of its tokens.
                attention_mask=[1] * len(prompt),
                task=task,
            ),
        )
        for prompt, task in zip(prompts, tasks)
    ]
    return Recipe(model=name, prompts=prompts, submissions=submissions, user=body.user)


def _check_length(prompt: list[int], served: ServedModel, param: str) -> None:
    if not prompt:
        raise Problem(400, f"{param}: an input is empty; give at least one token", param=param)
    if served.max_length is not None and len(prompt) > served.max_length:
        raise Problem(
            400,
            f"{param}: an input of {len(prompt)} tokens goes beyond the model's {served.max_length}; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def embedding_of(
    served: ServedModel, pooling: Pooling = "last", dimensions: int | None = None, *, normalizes: bool = True
) -> Embedding:
    """Return the task of a prompt of which a vector is wanted."""
    return Embedding(pooling, dimensions, normalizes=normalizes, has_head=served.task != "embed")


def labels_of(served: ServedModel, types: Sequence[list[int] | None]) -> list[Labels]:
    """Return the tasks of prompts that the model's head classifies. types: of the tokens of each."""
    pad = served.model.config.get_text_config(decoder=True).pad_token_id
    return [Labels(pad, of_each_token=served.task == "classify_tokens", types=own) for own in types]


class ResultsForm(Form):
    """The answer, and the reader of the results of which it is made."""

    is_long = True
    completion_tokens = 0

    def __init__(
        self, body: Any, served: ServedModel, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int
    ) -> None:
        self._body, self._served = body, served
        self._recipe, self._answer_id, self._created = recipe, answer_id, created
        self._results: dict[int, Any] = {}
        self.cached_tokens = 0

    def reading(self, recipe: Recipe, tokenizer: Tokenizer) -> ResultsForm:
        return self

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]:
        """Take results. outputs: by the place of their input. Raises Problem for a request that failed."""
        for place, output in outputs.items():
            check_output(output)
            if output.finished:
                self._results[place] = output.result
                self.cached_tokens += output.metrics.num_cached_tokens
        return []

    @property
    def are_finished(self) -> bool:
        return len(self._results) == len(self._recipe.prompts)

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return self.answer([self._results[place] for place in range(len(self._results))], counts)

    def answer(self, results: list[Any], usage: Json) -> Json:
        """Return the JSON of the results, in the order of the prompts. usage: the counts of their tokens."""
        raise NotImplementedError


def numbers_of(scores: torch.Tensor) -> Any:
    """Return scores as JSON has them. Raises Problem (500) for those that JSON lacks."""
    if not scores.isfinite().all():
        raise Problem(500, "the model's scores are NaN or infinite", code="generation_failed")
    return scores.tolist()
