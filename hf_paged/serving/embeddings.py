"""POST /v1/embeddings: its fields, and its answer. Each input is a request of the engine with a task, which generates
nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from hf_paged.annotations import Tokenizer
from hf_paged.features.tasks.embedding import Embedding, Pooling
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.choices import Delta, check_output
from hf_paged.serving.forms import Form
from hf_paged.serving.problems import Json, Problem, not_served
from hf_paged.serving.recipe import Recipe, Submission, check_priority, client_named, ids_of, salt_of
from hf_paged.serving.schema import AtLeastOne, Body, Hint, Prompts
from hf_paged.serving.served import ServedModel


class EmbeddingRequest(Body):
    """POST /v1/embeddings: OpenAI's fields, and some of the engine's."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: AtLeastOne | None = None
    user: Hint | None = None
    pooling: Pooling = "last"
    normalize: bool = True
    add_special_tokens: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)] = 0


def embedding_recipe(body: EmbeddingRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of embeddings. It tokenizes; not for the event loop. Raises Problem."""
    if served.model.config.is_encoder_decoder:
        raise not_served("/v1/embeddings is served of decoders, and this model has an encoder")
    check_priority(body.priority, served)
    # Before texts are tokenized, and refused here because the engine finds it in a step only.
    size = served.model.config.get_text_config(decoder=True).hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise Problem(400, f"dimensions={body.dimensions}: a vector of this model has {size}", param="dimensions")
    prompts = ids_of(body.input, "input", served, add_special_tokens=body.add_special_tokens)
    for prompt in prompts:
        _check_length(prompt, served)
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
                attention_mask=[1] * len(prompt),
                task=Embedding(body.pooling, body.dimensions, normalizes=body.normalize),
            ),
        )
        for prompt in prompts
    ]
    return Recipe(model=name, prompts=prompts, submissions=submissions, user=body.user)


def _check_length(prompt: list[int], served: ServedModel) -> None:
    if not prompt:
        raise Problem(400, "an input is empty; give at least one token", param="input")
    if served.max_length is not None and len(prompt) > served.max_length:
        raise Problem(
            400,
            f"an input of {len(prompt)} tokens goes beyond the model's {served.max_length}; shorten it",
            param="input",
            code="context_length_exceeded",
        )


class EmbeddingForm(Form):
    """The answer, and the reader of what it is made of."""

    is_long = True
    completion_tokens = 0

    def __init__(
        self, body: EmbeddingRequest, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int
    ) -> None:
        self._recipe, self._is_text = recipe, body.encoding_format == "base64"
        self._vectors: dict[int, torch.Tensor] = {}
        self.cached_tokens = 0

    def reading(self, recipe: Recipe, tokenizer: Tokenizer) -> EmbeddingForm:
        return self

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]:
        """Take finished vectors. outputs: by the place of their input. Raises Problem for a request that failed."""
        for place, output in outputs.items():
            check_output(output)
            if output.finished:
                self._vectors[place] = output.result
                self.cached_tokens += output.metrics.num_cached_tokens
        return []

    @property
    def are_finished(self) -> bool:
        return len(self._vectors) == len(self._recipe.prompts)

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        data = [
            {"object": "embedding", "index": place, "embedding": self._shown(self._vectors[place])}
            for place in range(len(self._vectors))
        ]
        counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return {"object": "list", "data": data, "model": self._recipe.model, "usage": counts}

    def _shown(self, vector: torch.Tensor) -> Any:
        # As OpenAI's clients read it: numbers of 32 bits, the lowest byte first.
        return b64encode(vector.numpy().astype("<f4").tobytes()).decode() if self._is_text else vector.tolist()
