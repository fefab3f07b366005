"""POST /v1/rerank (Cohere's, Jina's and vLLM's forms) and /v1/score (vLLM's): how well texts fit together.

A model whose head has one label reads each pair (a cross-encoder), and so does a language model that is to answer a
question about it. Of any other decoder, scores are the cosines of embeddings, each text read once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from hf_paged.features.tasks.answers import FirstOfTwo, answer_tokens, filled
from hf_paged.features.tasks.embedding import Pooling
from hf_paged.serving.problems import Json, Problem
from hf_paged.serving.recipe import Recipe, check_count
from hf_paged.serving.served import ServedModel
from hf_paged.serving.tasks import ResultsForm, TextsRequest, embedding_of, labels_of, numbers_of, task_recipe
from hf_paged.serving.values import AList, AnObject, AString, AtLeastOne, Body, ByKind, Count, Items, Text


class TextDocument(Body):
    """A document as an object, as some clients send it."""

    text: Text


Document = Annotated[Annotated[Text, AString] | Annotated[TextDocument, AnObject], ByKind]
Documents = Annotated[Items[Document], Field(min_length=1)]
Texts = Annotated[Annotated[Text, AString] | Annotated[Documents, AList], ByKind]


class PairsRequest(TextsRequest):
    """Fields of both routes. use_activation: of a head, its score from 0 to 1; otherwise the logit. pooling: of
    embeddings. answers, template: as for `Engine.rank`."""

    pooling: Pooling = "last"
    use_activation: bool = True
    answers: Annotated[Items[Text], Field(min_length=2, max_length=2)] | None = None
    template: Text | None = None

    @model_validator(mode="after")
    def _answers_to_a_template(self) -> PairsRequest:
        if (self.answers is None) != (self.template is None):
            raise ValueError("answers and template belong together; give both, or none")
        return self

    @property
    def texts(self) -> tuple[str, list[str], str, list[str]]:
        """The texts of the first side and of the second one, each after the name of its field."""
        raise NotImplementedError

    @property
    def max_tokens(self) -> int | None:
        """Tokens of a text of the second side; what is beyond them is left out."""
        return None


class RerankRequest(PairsRequest):
    """POST /v1/rerank."""

    query: Text
    documents: Documents
    top_n: Count | None = None
    return_documents: bool = True
    max_tokens_per_doc: AtLeastOne | None = None

    @property
    def texts(self) -> tuple[str, list[str], str, list[str]]:
        return "query", [self.query], "documents", _texts(self.documents)

    @property
    def max_tokens(self) -> int | None:
        return self.max_tokens_per_doc


_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(PairsRequest):
    """POST /v1/score: a text, or as many as on the other side, under one of four pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _one_pair(self) -> ScoreRequest:
        named = {name for pair in _SIDES for name in pair if getattr(self, name) is not None}
        if named not in map(set, _SIDES):
            raise ValueError(f"give the texts as {', or '.join(' and '.join(pair) for pair in _SIDES)}")
        _, firsts, second, seconds = self.texts
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(
                f"{second}: {len(seconds)} texts for {len(firsts)}; give one on the first side, or as many"
            )
        return self

    @property
    def texts(self) -> tuple[str, list[str], str, list[str]]:
        first, second = next(pair for pair in _SIDES if None not in (getattr(self, name) for name in pair))
        return first, _texts(getattr(self, first)), second, _texts(getattr(self, second))


def _texts(given: Any) -> list[str]:
    many = [given] if isinstance(given, str) else given
    return [each if isinstance(each, str) else each.text for each in many]


def _reads_pairs(body: PairsRequest, served: ServedModel) -> bool:
    return body.answers is not None or served.task in ("classify", "classify_tokens")


def pairs_recipe(body: PairsRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of scores: of the texts of both sides, or of their pairs. It tokenizes; not for the event loop.
    Raises Problem."""
    served.check_reads_alone("/v1/rerank and /v1/score")
    _check_options(body, served)
    first, firsts, second, seconds = body.texts
    count = len(seconds) if _reads_pairs(body, served) else len(firsts) + len(seconds)
    # Before texts are tokenized, which takes long for many.
    check_count(count, served, width=0, param=second)
    for name, texts in ((first, firsts), (second, seconds)):
        for text in texts:
            served.check_size(text, name)
            if not text:
                raise Problem(400, f"{name}: a text is empty; leave it out", param=name)
    if body.max_tokens is not None:
        seconds = [_cut(text, body.max_tokens, served) for text in seconds]
    if body.answers is not None and body.template is not None:
        pairs_of_texts = zip(_as_many(firsts, len(seconds)), seconds)
        prompts, tokens = _questions(body.answers, body.template, served, pairs_of_texts)
        return task_recipe(body, served, key_digest, prompts, [FirstOfTwo(tokens) for _ in prompts], "template")
    encode = partial(served.encode, add_special_tokens=body.add_special_tokens)
    if not _reads_pairs(body, served):
        prompts = [encode(text) for text in (*firsts, *seconds)]
        tasks = [embedding_of(served, body.pooling) for _ in prompts]
        return task_recipe(body, served, key_digest, prompts, tasks, second)
    join = partial(served.encode_pair, add_special_tokens=body.add_special_tokens)
    pairs = [join(left, right) for left, right in zip(_as_many(firsts, len(seconds)), seconds)]
    labels = labels_of(served, [types for _, types in pairs])
    return task_recipe(body, served, key_digest, [ids for ids, _ in pairs], labels, second)


def _questions(
    answers: list[str], template: str, served: ServedModel, pairs: Iterable[tuple[str, str]]
) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of a question about each pair, and the tokens of its two answers. Raises Problem."""
    prompts = []
    try:
        tokens = answer_tokens(served.tokenizer, answers)
        for pair in pairs:
            text = filled(template, *pair)
            served.check_size(text, "template")
            # The template has the special tokens.
            prompts.append(served.encode(text, add_special_tokens=False))
    except ValueError as error:
        raise Problem(400, str(error)) from error
    return prompts, tokens


def _check_options(body: PairsRequest, served: ServedModel) -> None:
    """Raise Problem (400) for an option of the other kind of scores, and for a head that gives none."""
    if body.answers is not None and served.task != "generate":
        text = "this model has no language-modelling head, which would answer; leave it and the template out"
        raise Problem(400, f"answers: {text}", param="answers", code="not_served")
    if body.answers is not None and body.add_special_tokens and "add_special_tokens" in body.model_fields_set:
        text = "the template has the special tokens; leave it out"
        raise Problem(400, f"add_special_tokens=true: {text}", param="add_special_tokens")
    reads_pairs = _reads_pairs(body, served)
    if reads_pairs and body.pooling != "last":
        text = "this model reads pairs, and makes no embeddings; leave it out"
        raise Problem(400, f"pooling={body.pooling!r}: {text}", param="pooling", code="not_served")
    if not (reads_pairs or body.use_activation):
        text = "scores of this model are cosines of embeddings, which have no activation; leave it out"
        raise Problem(400, f"use_activation=false: {text}", param="use_activation", code="not_served")
    if reads_pairs and body.answers is None:
        _check_one_label(served)


def _check_one_label(served: ServedModel) -> None:
    count = served.model.config.num_labels
    if count != 1 or served.task != "classify":
        raise Problem(
            400,
            f"the head of this {type(served.model).__name__} has {count} labels, and pairs need one of one label; use "
            "/v1/classify, or serve a cross-encoder or an embedding model",
            code="not_served",
        )


def _as_many(firsts: list[Any], count: int) -> list[Any]:
    return firsts * count if len(firsts) == 1 else firsts


def _cut(text: str, count: int, served: ServedModel) -> str:
    ids = served.encode(text, add_special_tokens=False)
    return text if len(ids) <= count else served.decode(ids[:count])


class _PairsForm(ResultsForm):
    _body: PairsRequest

    def _scores(self, results: list[torch.Tensor]) -> list[float]:
        """Return the score of each pair."""
        _, firsts, _, seconds = self._body.texts
        if _reads_pairs(self._body, self._served):
            logits = torch.cat(results)
            scores = logits.sigmoid() if self._body.use_activation else logits
        else:
            left = torch.stack(_as_many(results[: len(firsts)], len(seconds)))
            scores = (left * torch.stack(results[len(firsts) :])).sum(dim=1)
        found: list[float] = numbers_of(scores)
        return found


class RerankForm(_PairsForm):
    """The documents, the best first."""

    _body: RerankRequest

    def answer(self, results: list[torch.Tensor], usage: Json) -> Json:
        body, scores = self._body, self._scores(results)
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
        texts = _texts(body.documents)
        found = [
            {
                "index": place,
                "relevance_score": scores[place],
                **({"document": {"text": texts[place]}} if body.return_documents else {}),
            }
            for place in order
        ]
        return {"id": self._answer_id, "model": self._recipe.model, "results": found, "usage": usage}


class ScoreForm(_PairsForm):
    """The scores, in the order of the pairs."""

    def answer(self, results: list[torch.Tensor], usage: Json) -> Json:
        data = [
            {"index": place, "object": "score", "score": score} for place, score in enumerate(self._scores(results))
        ]
        head = {"id": self._answer_id, "object": "list", "created": self._created, "model": self._recipe.model}
        return {**head, "data": data, "usage": usage}
