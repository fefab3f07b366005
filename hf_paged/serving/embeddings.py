"""POST /v1/embeddings: its fields, and its answer."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import torch

from hf_paged.features.tasks.embedding import Pooling, check_dimensions
from hf_paged.serving.problems import Json, Problem
from hf_paged.serving.recipe import Recipe, ids_of
from hf_paged.serving.served import ServedModel
from hf_paged.serving.tasks import ResultsForm, TextsRequest, embedding_of, task_recipe
from hf_paged.serving.values import AtLeastOne, Prompts


class EmbeddingRequest(TextsRequest):
    """POST /v1/embeddings: OpenAI's fields, and some of the engine's."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: AtLeastOne | None = None
    pooling: Pooling = "last"
    normalize: bool = True


def embedding_recipe(body: EmbeddingRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of embeddings. It tokenizes; not for the event loop. Raises Problem."""
    served.check_reads_alone("/v1/embeddings")
    # Before texts are tokenized, which takes long for many.
    try:
        check_dimensions(served.model, body.dimensions)
    except ValueError as error:
        raise Problem(400, str(error), param="dimensions") from error
    prompts = ids_of(body.input, "input", served, width=0, add_special_tokens=body.add_special_tokens)
    tasks = [embedding_of(served, body.pooling, body.dimensions, normalizes=body.normalize) for _ in prompts]
    return task_recipe(body, served, key_digest, prompts, tasks, "input")


class EmbeddingForm(ResultsForm):
    _body: EmbeddingRequest

    def answer(self, results: list[torch.Tensor], usage: Json) -> Json:
        data = [
            {"object": "embedding", "index": place, "embedding": self._shown(vector)}
            for place, vector in enumerate(results)
        ]
        return {"object": "list", "data": data, "model": self._recipe.model, "usage": usage}

    def _shown(self, vector: torch.Tensor) -> Any:
        if self._body.encoding_format == "float":
            return vector.tolist()
        # As OpenAI's clients read it: numbers of 32 bits, the lowest byte first.
        return b64encode(vector.numpy().astype("<f4").tobytes()).decode()
