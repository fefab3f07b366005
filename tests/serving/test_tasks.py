"""Routes whose requests generate nothing, and checkpoints without another: what the model's own forward gives."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import normalize
from transformers import AutoConfig

from hf_paged.cli.main import main
from hf_paged.serving.checkpoints import load_model
from hf_paged.serving.replies import Decisions
from tests.serving.harness import NAME, QA, Running, ids_of, serving, shared_model, tokenizer

TEXTS = ["A list is a sequence", "A tuple"]
QUERY, DOCUMENTS = "What is a list?", ["A list is a sequence", "Files are closed", "A list", "A dict is a mapping"]
CLOSE = {"abs": 2e-5, "rel": 2e-5}


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


def saved(folder: Path, kind: str, num_labels: int) -> str:
    """The folder of a checkpoint with another head, or none."""
    config = AutoConfig.from_pretrained(QA)
    config.num_labels, config.num_hidden_layers = num_labels, 2
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModel{kind}").from_config(config, dtype=torch.float32)
    for each in model.parameters():
        each.data.mul_(3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["", "ForSequenceClassification", "ForTokenClassification", "reward"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    kind, count = (request.param, 3) if request.param != "reward" else ("ForSequenceClassification", 1)
    model = load_model(saved(tmp_path_factory.mktemp("headed"), kind, count), "float32", "cpu")
    assert type(model).__name__ == f"Llama{kind or 'Model'}"
    with serving(model=model) as running:
        yield running


@torch.no_grad()
def logits_of(running: Running, ids: list[int]) -> torch.Tensor:
    # In float64: with AVX2, the model's own forward in fp32 is 2e-5 away from it.
    return copy.deepcopy(running.engine.model).double()(torch.tensor([ids]))[0][0].float()  # type: ignore[no-any-return]


def test_checkpoints_with_other_heads(headed: Running) -> None:
    task = headed.http.get("/v1/models").json()["data"][0]["task"]
    for path, body in {"completions": {"prompt": "a"}, "chat/completions": {"messages": CHAT}}.items():
        error = headed.post(f"/v1/{path}", **body).json()["error"]
        assert error["code"] == "not_served" and "no tokens follow a prompt; it has /v1/" in error["message"]
    vectors = headed.client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float").data
    with torch.no_grad():
        states = [headed.engine.model.base_model(torch.tensor([ids_of(text)]))[0][0, -1] for text in TEXTS]
    for vector, state in zip(vectors, states):
        assert vector.embedding == pytest.approx(normalize(state, dim=0).tolist(), **CLOSE)
    answer = headed.post("/v1/classify", input=TEXTS)
    if task == "embed":
        assert answer.status_code == 400 and "no head for labels" in answer.text
    else:
        for text, found in zip(TEXTS, answer.json()["data"]):
            logits = logits_of(headed, ids_of(text))
            wanted = logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)
            assert torch.allclose(torch.tensor(found["probs"]), wanted, atol=2e-5)
            names = [f"LABEL_{each}" for each in wanted.reshape(-1, wanted.shape[-1]).argmax(-1)]
            assert found["label"] == (names if task == "classify_tokens" else names[0])
    if task == "classify_tokens":
        answer = headed.post("/v1/classify", input=[[5] * 1024] * 700)
        assert answer.status_code == 400, answer.text[:200]
    assert main(["check", headed.engine.model.name_or_path]) == 0
    headed.service._is_suspect = True
    assert headed.http.get("/ready").status_code == 200
    headed.assert_idle()


def test_pairs_by_a_head(headed: Running) -> None:
    answer = headed.post("/rerank", query=QUERY, documents=DOCUMENTS)
    if headed.engine.model.config.num_labels == 3 and hasattr(headed.engine.model, "score"):
        assert answer.status_code == 400 and "3 labels, and pairs need" in answer.text
        assert "3 labels" in headed.post("/rerank", query=QUERY, documents=[""]).text  # before texts are looked at
    if headed.engine.task != "classify" or headed.engine.model.config.num_labels != 1:
        return
    pairs = [tokenizer()(QUERY, text)["input_ids"] for text in DOCUMENTS]
    assert headed.post("/rerank", query=QUERY, documents=DOCUMENTS, pooling="mean").status_code == 400
    logits = [float(logits_of(headed, ids)) for ids in pairs]
    scores = torch.tensor(logits).sigmoid().tolist()
    order = sorted(range(4), key=lambda place: -scores[place])
    assert [each["index"] for each in answer.json()["results"]] == order
    found = [each["relevance_score"] for each in answer.json()["results"]]
    assert found == pytest.approx([scores[place] for place in order], **CLOSE)
    found = headed.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False).json()["data"]
    assert [each["score"] for each in found] == pytest.approx(logits, **CLOSE)
    chat = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": TEXTS[0]}]
    text = tokenizer().apply_chat_template(chat, tokenize=False)
    for more in ({}, {"add_special_tokens": True}):
        [reward] = headed.post("/classify", messages=chat, use_activation=False, **more).json()["data"]
        ids = tokenizer()(text, add_special_tokens=bool(more))["input_ids"]
        assert reward["probs"] == pytest.approx(logits_of(headed, ids).tolist(), **CLOSE)


def test_pairs_by_embeddings(server: Running) -> None:
    query, *vectors = (normalize(states_of(text)[-1], dim=0) for text in (QUERY, *DOCUMENTS))
    wanted = [float(query @ vector) for vector in vectors]
    for fields in ({"text_1": QUERY, "text_2": DOCUMENTS}, {"queries": [QUERY] * 4, "documents": DOCUMENTS},
                   {"queries": QUERY, "items": DOCUMENTS}, {"data_1": [QUERY], "data_2": DOCUMENTS}):  # fmt: skip
        found = server.post("/v1/score", **fields).json()
        assert [each["score"] for each in found["data"]] == pytest.approx(wanted, **CLOSE), fields
    counts = [len(ids_of(text)) for text in (QUERY, *DOCUMENTS)]
    assert found["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    asked: dict[str, Any] = {"/v1": {}, "": {"top_n": 2}, "/v2": {"top_n": 9, "return_documents": False}}
    for path, options in asked.items():
        documents: list[Any] = [{"text": text} for text in DOCUMENTS] if options else DOCUMENTS
        results = server.post(f"{path}/rerank", model=NAME, query=QUERY, documents=documents, **options).json()[
            "results"
        ]
        order = sorted(range(4), key=lambda place: -wanted[place])[: options.get("top_n", 4)]
        assert [each["index"] for each in results] == order
        assert [each["relevance_score"] for each in results] == pytest.approx([wanted[i] for i in order], **CLOSE)
        texts = [DOCUMENTS[place] for place in order]
        assert [each.get("document", {}).get("text") for each in results] == (texts if len(options) < 2 else [None] * 4)
    cut = tokenizer().decode(tokenizer()(DOCUMENTS[0], add_special_tokens=False)["input_ids"][:3])
    fields = {"query": QUERY, "documents": DOCUMENTS[:1], "max_tokens_per_doc": 3}
    asked = {"answers": [" is", " of"], "template": "{document} {query}?"}
    found = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, **asked).json()["results"]
    tokens = [tokenizer()(text, add_special_tokens=False)["input_ids"][0] for text in asked["answers"]]
    rows = [tokenizer()(f"{text} {QUERY}?", add_special_tokens=False)["input_ids"] for text in DOCUMENTS]
    with torch.no_grad():
        shares = [float(shared_model()(torch.tensor([row])).logits[0, -1, tokens].softmax(0)[0]) for row in rows]
    assert {each["index"]: each["relevance_score"] for each in found} == pytest.approx(dict(enumerate(shares)), **CLOSE)
    [short] = server.post("/v1/rerank", **fields).json()["results"]
    assert short["relevance_score"] == pytest.approx(float(query @ normalize(states_of(cut)[-1], dim=0)), **CLOSE)


QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "p", "instructions": [{"type": "input_text", "text": "It is a sequence."}]},
    {"type": "score", "instructions": "How long?", "levels": [{"label": "short"}, {"label": "long"}]},
    {"type": "choice", "instructions": "What is it?",
     "choices": [{"value": "list", "description": "changes"}, {"value": True}, {"value": "true"}]},
]  # fmt: skip
ASKS = {"role": "user", "content": [{"type": "input_text", "text": TEXTS[0]}]}
STORY: list[Any] = [{"role": "system", "content": "Decide."}, ASKS]


@torch.no_grad()
def label_logprobs(messages: list[Any], count: int) -> torch.Tensor:
    text = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = [tokenizer()(text + label, add_special_tokens=False)["input_ids"] for label in "ABC"[:count]]
    assert all(each[:-1] == ids[0][:-1] for each in ids)
    logprobs = shared_model()(torch.tensor([ids[0][:-1]])).logits[0, -1].log_softmax(-1)
    return logprobs[[each[-1] for each in ids]]


def test_decisions(server: Running) -> None:
    made = server.client.decisions.create(model=NAME, input=STORY, questions=QUESTIONS)
    Decisions.model_validate(made.model_dump(exclude_unset=True))
    found: list[Any] = []
    for lines in (
        ["It is a sequence.", "A: true", "B: false"], ["How long?", "A: short", "B: long"],
        ["What is it?", 'A: "list" (changes)', "B: true", 'C: "true"'],
    ):  # fmt: skip
        text = "\n".join([*lines, "Answer with the letter of one option, and nothing else."])
        told = [("system", "Decide."), ("user", f"{TEXTS[0]}\n\n{text}")]
        found.append(label_logprobs([{"role": role, "content": each} for role, each in told], len(lines) - 1))
    predicate, score, choice = made.answers
    shares = [each.softmax(-1).tolist() for each in found]
    assert (predicate.name, predicate.probability) == ("p", pytest.approx(shares[0][0], **CLOSE))
    assert [(each.value, each.probability) for each in choice.probabilities] == [
        (value, pytest.approx(share, **CLOSE)) for value, share in zip(("list", True, "true"), shares[2])
    ]
    assert choice.choice == ("list", True, "true")[int(found[2].argmax())] and choice.name is None
    assert choice.confidence == pytest.approx(float(found[2].max().exp()), **CLOSE)
    assert score.score == pytest.approx(shares[1][1], **CLOSE) and score.probabilities[1].label == "long"


def test_questions_share_their_input(server: Running) -> None:
    text = "A list is a sequence. " * 40
    ask = [{"type": "predicate", "instructions": f"It has {number} items."} for number in range(30)]
    made = server.client.decisions.create(model=NAME, input=text, questions=ask)  # type: ignore[arg-type]
    assert made.usage.input_tokens_details.cached_tokens > 0.5 * made.usage.input_tokens


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 422), "no input": ({"input": []}, 422), "empty": ({"input": [[]]}, 422),
    "number": ({"input": 5}, 422), "mixed": ({"input": ["a", 5]}, 422), "no token": ({"input": [10**6]}, 400),
    "long": ({"input": [5] * 5000}, 400), "text": ({"input": "a " * 10**5}, 400), "half": ({"input": "\ud800"}, 422),
    "many": ({"input": ["a"] * 5000}, 400), "size": ({"input": "a", "dimensions": 10**6}, 400),
    "format": ({"input": "a", "encoding_format": "int8"}, 422), "pooling": ({"input": "a", "pooling": "max"}, 422),
    "model": ({"input": "a", "model": "another"}, 404), "priority": ({"input": "a", "priority": 1}, 400),
}  # fmt: skip
D = ["a"]
ASKED = {"query": "a", "documents": D}
CHAT = [{"role": "user", "content": "a"}]
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]


def choices(*values: str) -> dict[str, Any]:
    return {"type": "choice", "instructions": "a", "choices": [{"value": value} for value in values]}


WRONG_PAIRS: dict[str, tuple[str, dict[str, Any], int]] = {
    "none": ("rerank", {**ASKED, "documents": []}, 422), "empty": ("rerank", {"query": "", "documents": D}, 400),
    "no query": ("rerank", {"documents": D}, 422),
    "many": ("rerank", {"query": "a", "documents": D * 5000}, 400), "model": ("rerank", {**ASKED, "model": "x"}, 404),
    "nan": ("rerank", {**ASKED, "top_n": float("nan")}, 422), "spans": ("rerank", {**ASKED, "relevant_spans": {}}, 422),
    "long": ("rerank", {"query": "a", "documents": ["a " * 10**5]}, 400), "nothing": ("score", {}, 422),
    "object": ("rerank", {"query": "a", "documents": [{"image": "a"}]}, 422), "no labels of": ("classify", {}, 422),
    "mixed": ("score", {"text_1": "a", "documents": "b"}, 422), "no labels": ("classify", {"input": "a"}, 400),
    "activation": ("score", {"text_1": "a", "text_2": "b", "use_activation": False}, 400),
    "answers": ("score", {"text_1": "a", "text_2": "b", "answers": ["a", "b"]}, 422),
    "long answers": ("rerank", {**ASKED, "answers": ["a b c", "b"], "template": "{query} {document}"}, 400),
    "special tokens": ("score", {"text_1": "a", "text_2": "b",
                                 "answers": [" is", " of"], "template": "{query}{document}",
                                 "add_special_tokens": True}, 400),
    "template": ("classify", {"input": "a", "chat_template_kwargs": {"a": 1}}, 422),
    "uneven": ("score", {"queries": D * 2, "documents": D * 3}, 422),
    "both": ("classify", {"input": "a", "messages": CHAT}, 422), "no question": ("decisions", {"input": "a"}, 422),
    "equal choices": ("decisions", {"input": "a", "questions": [choices("a", "a")]}, 422),
    "letters": ("decisions", {"input": "a", "questions": [choices(*map(str, range(27)))]}, 400),
    "reasoning": ("decisions", {"input": [{"type": "reasoning"}], "questions": [choices("a", "b")]}, 400),
    "image": ("decisions", {"input": IMAGE, "questions": [choices("a", "b")]}, 400),
    "questions": ("decisions", {"input": "a" * 10**5, "questions": [choices("a", "b")] * 400}, 400),
}  # fmt: skip


WRONG_PAIRS |= {f"embeddings: {name}": ("embeddings", *case) for name, case in WRONG.items()}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_what_is_refused(server: Running, name: str) -> None:
    path, body, status = WRONG_PAIRS[name]
    headers = {"content-type": "application/json"}
    answer = server.http.post(f"/v1/{path}", content=json.dumps(body), headers=headers)
    assert answer.status_code == status and answer.json()["error"]["message"], answer.text
