"""POST /v1/classify in vLLM's form: the labels of texts, of token ids or of a conversation."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import model_validator

from hf_paged.serving.attachments import parts_of
from hf_paged.serving.problems import Json, Problem, not_served
from hf_paged.serving.recipe import Recipe, ids_of
from hf_paged.serving.refusals import check_messages
from hf_paged.serving.schema import Messages
from hf_paged.serving.served import ServedModel
from hf_paged.serving.tasks import ResultsForm, TextsRequest, labels_of, numbers_of, task_recipe
from hf_paged.serving.values import Prompts, TemplateKwargs


class ClassifyRequest(TextsRequest):
    """POST /v1/classify. use_activation: probabilities; otherwise the logits of the head."""

    input: Prompts | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    use_activation: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either an input or messages")
        if self.messages is None and self.chat_template_kwargs is not None:
            raise ValueError("chat_template_kwargs needs messages; an input has no chat template")
        return self


def classify_recipe(body: ClassifyRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of labels. It tokenizes; not for the event loop. Raises Problem."""
    served.check_has_labels("/v1/classify")
    if body.messages is None:
        prompts = ids_of(body.input, "input", served, width=0, add_special_tokens=body.add_special_tokens)
        _check_size(prompts, served, "input")
        return task_recipe(body, served, key_digest, prompts, labels_of(served, [None] * len(prompts)), "input")
    check_messages(body.messages)
    if parts_of(body.messages):
        raise not_served("messages: only text is classified; leave media out", param="messages")
    kwargs = body.chat_template_kwargs
    text = served.render(body.messages, add_generation_prompt=False, continue_final_message=False, kwargs=kwargs)
    served.check_size(text, "messages")
    # As in chats: the template has the special tokens, unless the request says otherwise.
    adds = "add_special_tokens" in body.model_fields_set and body.add_special_tokens
    prompt = served.encode(text, add_special_tokens=adds)
    _check_size([prompt], served, "messages")
    return task_recipe(body, served, key_digest, [prompt], labels_of(served, [None]), "messages")


def _check_size(prompts: list[list[int]], served: ServedModel, param: str) -> None:
    """Raise Problem (400) for more numbers than an answer may have: a token classifier has some for each token."""
    num_labels: Any = served.model.config.num_labels
    count, most = sum(map(len, prompts)) * num_labels, served.settings.limits.scores
    if served.task == "classify_tokens" and count > most:
        raise Problem(
            400,
            f"{param}: {count} scores, of all labels for all tokens, are more than the {most} that one answer may "
            "have; send several requests",
            param=param,
        )


def probabilities(logits: torch.Tensor, model: Any) -> torch.Tensor:
    """Return what transformers' pipelines make of the logits [..., num_labels] of this model's head."""
    is_apart = logits.shape[-1] == 1 or getattr(model.config, "problem_type", None) == "multi_label_classification"
    return logits.sigmoid() if is_apart else logits.softmax(dim=-1)


class ClassifyForm(ResultsForm):
    """The answer. Of a token classifier, a result has a label and a row of probabilities for each token."""

    _body: ClassifyRequest

    def answer(self, results: list[torch.Tensor], usage: Json) -> Json:
        data = [{"index": place, **self._labelled(logits)} for place, logits in enumerate(results)]
        head = {"id": self._answer_id, "object": "list", "created": self._created, "model": self._recipe.model}
        return {**head, "data": data, "usage": usage}

    def _labelled(self, logits: torch.Tensor) -> Json:
        scores = probabilities(logits, self._served.model) if self._body.use_activation else logits
        names, best = self._served.model.config.id2label or {}, scores.argmax(dim=-1).tolist()
        # A reward model need not name what its one number means.
        label = [names.get(each) for each in best] if isinstance(best, list) else names.get(best)
        return {"label": label, "probs": numbers_of(scores), "num_classes": logits.shape[-1]}
