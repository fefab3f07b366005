"""POST /v1/embeddings, by OpenAI's client and by none."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from tests.serving.harness import NAME, Running, ids_of, shared_model

TEXTS = ["A list is a sequence", "A tuple"]


@torch.no_grad()
def states_of(text: str) -> torch.Tensor:
    return shared_model().model(torch.tensor([ids_of(text)])).last_hidden_state[0]  # type: ignore[no-any-return]


def test_vectors(server: Running) -> None:
    wanted = [normalize(states_of(text)[-1], dim=0) for text in TEXTS]
    for given in (TEXTS, [ids_of(text) for text in TEXTS]):
        for encoding in ({}, {"encoding_format": "float"}):  # the client asks for base64, unless it is told
            made = server.client.embeddings.create(model=NAME, input=given, **encoding)  # type: ignore[arg-type]
            found = torch.tensor([each.embedding for each in made.data])
            torch.testing.assert_close(found, torch.stack(wanted), atol=2e-5, rtol=2e-5)
    assert made.usage.total_tokens == made.usage.prompt_tokens == sum(map(len, map(ids_of, TEXTS)))
    assert [each.index for each in made.data] == [0, 1] and made.model == NAME
    other = {"pooling": "mean", "normalize": False}
    [one] = server.client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8, extra_body=other).data
    torch.testing.assert_close(torch.tensor(one.embedding), states_of(TEXTS[0]).mean(0)[:8], atol=2e-5, rtol=2e-5)


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 422), "no input": ({"input": []}, 422), "empty": ({"input": [[]]}, 422),
    "number": ({"input": 5}, 422), "mixed": ({"input": ["a", 5]}, 422), "no token": ({"input": [10**6]}, 400),
    "long": ({"input": [5] * 5000}, 400), "text": ({"input": "a " * 10**5}, 400), "half": ({"input": "\ud800"}, 422),
    "many": ({"input": ["a"] * 5000}, 400), "size": ({"input": "a", "dimensions": 10**6}, 400),
    "no size": ({"input": "a", "dimensions": 0}, 422), "nan": ({"input": "a", "dimensions": float("nan")}, 422),
    "format": ({"input": "a", "encoding_format": "int8"}, 422), "pooling": ({"input": "a", "pooling": "max"}, 422),
    "model": ({"input": "a", "model": "another"}, 404), "priority": ({"input": "a", "priority": 1}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(server: Running, name: str) -> None:
    body, status = WRONG[name]
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/embeddings", content=json.dumps(body), headers=headers)
    param = answer.json()["error"]["param"] or "input"
    assert answer.status_code == status and param.partition("[")[0] in {"input", *body}
