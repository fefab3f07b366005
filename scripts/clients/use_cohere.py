"""The calls of Cohere's Python client."""

from __future__ import annotations

import cohere
from calls import close, fails, run, same, task
from cohere.core.api_error import ApiError

client = cohere.ClientV2(task.key, base_url=task.url)
ranked = sorted(range(len(task.documents)), key=lambda place: -task.cosines[place])


def rerank() -> None:
    answer = client.rerank(model=task.model, query=task.query, documents=task.documents)
    same([each.index for each in answer.results], ranked)
    close([each.relevance_score for each in answer.results], [task.cosines[place] for place in ranked])


def rerank_best() -> None:
    answer = client.rerank(model=task.model, query=task.query, documents=task.documents, top_n=1)
    same([each.index for each in answer.results], ranked[:1])


def rerank_first_version() -> None:
    older = cohere.Client(task.key, base_url=task.url)
    answer = older.rerank(model=task.model, query=task.query, documents=task.documents, return_documents=True)
    same([each.document.text for each in answer.results], [task.documents[place] for place in ranked])


def errors() -> None:
    fails(ApiError, lambda: client.rerank(model="another", query=task.query, documents=task.documents))
    fails(ApiError, lambda: client.rerank(model=task.model, query=task.query, documents=[]))


run("cohere", rerank, rerank_best, rerank_first_version, errors)
