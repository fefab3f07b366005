"""POST /v1/decisions: typed questions about one input, answered by the probabilities of the options' labels.

The schema is that of OpenAI's Decisions API (openai 3.54), as vLLM 0.33 serves it. Each question is a prompt that ends
where the answer would begin; what the prompts have in common is computed once, by the prefix cache.
"""

from __future__ import annotations

import json
from functools import cache, partial
from math import exp
from string import ascii_uppercase
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from hf_paged.features.tasks.decision import FirstTokens
from hf_paged.serving.attachments import parts_of
from hf_paged.serving.problems import Json, Problem, not_served
from hf_paged.serving.recipe import Recipe, check_count
from hf_paged.serving.refusals import check_messages, note_unused
from hf_paged.serving.responses import Item, TextContent, messages_of, text_of
from hf_paged.serving.schema import Message
from hf_paged.serving.served import ServedModel
from hf_paged.serving.tasks import ResultsForm, TaskRequest, numbers_of, task_recipe
from hf_paged.serving.values import ABoolean, AList, AString, Body, ByKind, Hint, Items, TemplateKwargs, Text

# Characters of the end of a prompt, in whose context a label is tokenized: more than any word or mark.
_TAIL = 64
# Switches of chat templates: an answer begins with its label, so that no reasoning may come first.
_NO_REASONING = {"enable_thinking": False, "thinking": False}
_END = "Answer with the letter of one option, and nothing else."


class _Question(Body):
    instructions: Annotated[Annotated[Text, AString] | Annotated[Items[TextContent], AList], ByKind]
    name: Hint | None = None

    @property
    def options(self) -> list[str]:
        """The options as the model reads them."""
        raise NotImplementedError

    def answer(self, probabilities: list[float], confidence: float) -> Json:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The question as the model reads it, after the input."""
        lines = (f"{label}: {option}" for label, option in zip(ascii_uppercase, self.options))
        return "\n".join([text_of(self.instructions, "questions"), *lines, _END])


class Predicate(_Question):
    """A statement that is true or not."""

    type: Literal["predicate"]

    @property
    def options(self) -> list[str]:
        return ["true", "false"]

    def answer(self, probabilities: list[float], confidence: float) -> Json:
        return {"type": "predicate", "name": self.name, "probability": probabilities[0]}


class Option(Body):
    value: Annotated[Annotated[Text, AString] | Annotated[bool, ABoolean], ByKind]
    description: Text | None = None


class Choice(_Question):
    type: Literal["choice"]
    choices: Annotated[Items[Option], Field(min_length=2, max_length=255)]

    @model_validator(mode="after")
    def _are_distinct(self) -> Choice:
        # The string "true" and the truth value are two choices.
        if len({(type(each.value), each.value) for each in self.choices}) < len(self.choices):
            raise ValueError("choices: two have one value; give each another")
        return self

    @property
    def options(self) -> list[str]:
        return [_described(json.dumps(each.value, ensure_ascii=False), each.description) for each in self.choices]

    def answer(self, probabilities: list[float], confidence: float) -> Json:
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        found = [{"value": each.value, "probability": own} for each, own in zip(self.choices, probabilities)]
        return {
            "type": "choice",
            "name": self.name,
            "choice": self.choices[best].value,
            "probabilities": found,
            "confidence": confidence,
        }


class Level(Body):
    label: Text
    description: Text | None = None


class Score(_Question):
    """A rating on ordered levels, from 0."""

    type: Literal["score"]
    levels: Annotated[Items[Level], Field(min_length=2, max_length=10)]

    @property
    def options(self) -> list[str]:
        return [_described(each.label, each.description) for each in self.levels]

    def answer(self, probabilities: list[float], confidence: float) -> Json:
        found = [
            {"value": place, "label": level.label, "probability": own}
            for place, (level, own) in enumerate(zip(self.levels, probabilities))
        ]
        mean = sum(place * own for place, own in enumerate(probabilities))
        return {
            "type": "score",
            "name": self.name,
            "score": mean,
            "probabilities": found,
            "confidence": confidence,
        }


def _described(name: str, description: str | None) -> str:
    return f"{name} ({description})" if description else name


Question = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(TaskRequest):
    """POST /v1/decisions."""

    input: Annotated[
        Annotated[Text, AString] | Annotated[Items[Item], Field(min_length=1, max_length=4096), AList], ByKind
    ]
    questions: Annotated[Items[Question], Field(min_length=1, max_length=400)]
    chat_template_kwargs: TemplateKwargs | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_options: dict[str, Any] | None = None


def decision_recipe(body: DecisionRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of a prompt for each question. It tokenizes; not for the event loop. Raises Problem."""
    served.check_writes_text()
    served.check_reads_alone("/v1/decisions")
    for name in ("safety_identifier", "prompt_cache_key", "prompt_cache_options"):
        if getattr(body, name) is not None:
            note_unused(name, "it changes no answer")
    check_count(len(body.questions), served, width=0, param="questions")
    messages = messages_of(body.input)
    check_messages(messages)
    if not messages:
        raise Problem(400, "input: it has no message and no call", param="input")
    if parts_of(messages):
        raise not_served("input: decisions are about text; leave media out", param="input")
    label_ids = cache(partial(_label_ids, served))
    prompts, tasks, room = [], list[FirstTokens](), served.settings.limits.body
    for place, question in enumerate(body.questions):
        text = _rendered(body, served, messages, question)
        # The input is tokenized with each question, all of them together as much as one body may have.
        if (room := room - len(text)) < 0:
            raise Problem(
                400,
                f"{len(body.questions)} questions about this input make more than {served.settings.limits.body} "
                "characters of prompts; send fewer of them in a request",
                param="questions",
            )
        count, where = len(question.options), f"questions[{place}]"
        if count > len(ascii_uppercase):
            raise Problem(
                400, f"{where}: {count} choices; the {len(ascii_uppercase)} letters label as many", param="questions"
            )
        prompts.append(served.encode(text, add_special_tokens=False))
        tasks.append(FirstTokens(label_ids(text[-_TAIL:], count)))
    return task_recipe(body, served, key_digest, prompts, tasks, "input")


def _rendered(body: DecisionRequest, served: ServedModel, messages: list[Message], question: _Question) -> str:
    """Return the prompt of a question. Raises Problem (400) if the answer would begin with reasoning."""
    *before, last = messages
    # One message, because some templates refuse two of one role in a row.
    is_asked = last.role == "user"
    content = f"{last.content}\n\n{question.text}" if is_asked else question.text
    asked = [*(before if is_asked else messages), Message.model_construct(role="user", content=content)]
    kwargs = {**_NO_REASONING, **(body.chat_template_kwargs or {})}
    text = served.render(asked, add_generation_prompt=True, continue_final_message=False, kwargs=kwargs)
    served.check_size(text, "input")
    is_content = served.answers.is_content(text, None)
    if is_content is not None and not is_content(""):
        raise Problem(
            400,
            "with these chat_template_kwargs the chat template begins an answer with reasoning; leave them out, or "
            "ask in /v1/chat/completions",
            param="chat_template_kwargs",
            code="not_served",
        )
    return text


def _label_ids(served: ServedModel, tail: str, count: int) -> list[int]:
    """Return the token of each label after a prompt that ends like this. Raises Problem (400) for a tokenizer that has
    no single tokens for them."""
    before, found = served.encode(tail, add_special_tokens=False), list[int]()
    for label in ascii_uppercase[:count]:
        *others, last = served.encode(tail + label, add_special_tokens=False)
        if others != before or last in found:
            raise Problem(
                400,
                f"this model's tokenizer has no token of its own for the label {label!r} of an option; ask with fewer "
                "options, or in /v1/chat/completions",
                param="questions",
                code="not_served",
            )
        found.append(last)
    return found


class DecisionForm(ResultsForm):
    """The answers, in the order of the questions."""

    _body: DecisionRequest

    def answer(self, results: list[list[float]], usage: Json) -> Json:
        answers = [self._answered(question, logprobs) for question, logprobs in zip(self._body.questions, results)]
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {"model": self._recipe.model, "answers": answers, "usage": counts}

    def _answered(self, question: _Question, logprobs: list[float]) -> Json:
        probabilities = numbers_of(torch.tensor(logprobs, dtype=torch.float64, device="cpu").softmax(dim=0))
        # Of all tokens, not of the labels alone: it is low where the model would say something else.
        return question.answer(probabilities, exp(max(logprobs)))
