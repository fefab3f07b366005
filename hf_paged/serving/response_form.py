"""The JSON of /v1/responses: an answer as a list of items, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_paged.annotations import Tokenizer
from hf_paged.serving.choices import Delta
from hf_paged.serving.forms import Form, chat_scores
from hf_paged.serving.parsing import CallPart
from hf_paged.serving.problems import Json, Problem
from hf_paged.serving.recipe import Recipe
from hf_paged.serving.responses import ResponsesRequest


class ResponseForm(Form):
    """The form of answers of /v1/responses. Has one choice. A whole answer is what the last event of its stream has."""

    names_events = True

    def __init__(
        self, body: ResponsesRequest, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._scores_of = chat_scores(recipe, tokenizer)
        self._answer_id = answer_id
        self._number = 0  # of the next event
        self._items: list[Json] = []
        self._call: int | None = None  # number of the tool call that the last item is
        self._pending: list[Json] = []  # log-probabilities of tokens whose text is buffered
        self._finish_reason: str | None = None
        # Fields of OpenAI's object that this server has no meaning for have the value that means nothing.
        self._head = {
            "id": answer_id,
            "object": "response",
            "created_at": created,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": recipe.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}, "verbosity": None},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        if body.text is not None and body.text.format is not None:
            self._head["text"] = {"format": body.text.format.model_dump(by_alias=True), "verbosity": None}
        if body.tool_choice is not None:
            given = body.tool_choice
            self._head["tool_choice"] = given if isinstance(given, str) else given.model_dump()
        if body.tools is not None:
            self._head["tools"] = [tool.model_dump() for tool in body.tools]

    # -- as a Form ----------------------------------------------------------------------------------------------

    def opening(self) -> list[Json]:
        return [
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def chunks(self, delta: Delta) -> list[Json]:
        events: list[Json] = []
        if self._recipe.logprobs is not None:
            self._pending += self._scores_of(delta)
        if delta.reasoning or delta.calls:
            self._pending = []  # only the text's are returned
        if delta.reasoning:
            events += self._more("reasoning", delta.reasoning)
        if delta.text:
            events += self._more("message", delta.text)
        for part in delta.calls:
            events += self._more_of_call(part)
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def closing(self, usage: Json) -> list[Json]:
        # An answer without text has an empty message, because clients expect an item.
        events = self._end_item() if self._items else [*self._more("message", ""), *self._end_item()]
        return [*events, self._event(f"response.{self._status}", response=self._response(self._status, usage))]

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        for delta in deltas:
            # Its events are dropped: the last one has all that they say.
            self.chunks(delta)
        response: Json = self.closing(usage)[-1]["response"]
        return response

    def failure(self, problem: Problem) -> Json:
        code = "server_error" if problem.status >= 500 else "invalid_prompt"
        response = {**self._response("failed"), "error": {"code": code, "message": problem.message}}
        return self._event("response.failed", response=response)

    # -- items --------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _more(self, kind: str, text: str) -> list[Json]:
        """More text for the last item, or for a new one."""
        events = []
        if not self._items or self._items[-1]["type"] != kind or self._items[-1]["status"] != "in_progress":
            events = self._end_item()
            part: Json = {"type": "reasoning_text", "text": ""}
            item: Json = {"type": kind, "content": []}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item["role"] = "assistant"
            else:
                item["summary"] = []
            events.append(self._begin_item("msg" if kind == "message" else "rs", item))
            # A copy, because the part grows while events with it wait to be sent.
            events.append(self._of_item("response.content_part.added", part=dict(part), content_index=0))
            self._items[-1]["content"] = [part]
        part = self._items[-1]["content"][0]
        part["text"] += text
        if text:
            events.append(self._of_item(f"response.{part['type']}.delta", delta=text, **self._scores(part)))
        return events

    def _scores(self, part: Json) -> Json:
        """Return the fields of an event for further text: its place in the item and the buffered log-probabilities."""
        if part["type"] != "output_text":
            return {"content_index": 0}
        new, self._pending = self._pending, []
        part["logprobs"] += new
        # Of all tokens since the last event: text may be buffered until a character is whole.
        return {"content_index": 0, "logprobs": new}

    def _more_of_call(self, part: CallPart) -> list[Json]:
        events = []
        if part.index != self._call:
            events = self._end_item()
            item = {"type": "function_call", "name": part.name, "arguments": ""}
            events.append(self._begin_item("fc", item, call_id=f"call-{len(self._items)}-{self._answer_id}"))
            self._call = part.index
        self._items[-1]["arguments"] += part.arguments
        if part.arguments:
            events.append(self._of_item("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _begin_item(self, name: str, item: Json, **fields: Any) -> Json:
        made = {"id": f"{name}-{len(self._items)}-{self._answer_id}", **item, **fields, "status": "in_progress"}
        self._items.append(made)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(made))

    def _end_item(self) -> list[Json]:
        """The events for the end of the last item, if it has not ended."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        events = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        else:
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                part["logprobs"] += self._pending
                self._pending = []
                done["logprobs"] = part["logprobs"]
            events.append(self._of_item(f"response.{part['type']}.done", **done))
            events.append(self._of_item("response.content_part.done", part=dict(part), content_index=0))
        item["status"] = self._status
        self._call = None
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))]

    def _of_item(self, kind: str, **fields: Any) -> Json:
        """An event about the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _response(self, status: str, usage: Json | None = None) -> Json:
        is_cut = status == "incomplete"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            # Only at the end, because events of a stream have told the items before.
            "output": list(self._items) if usage is not None else [],
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Json) -> Json:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = "".join(item["content"][0]["text"] for item in self._items if item["type"] == "reasoning")
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._count(thought)},
            "total_tokens": usage["total_tokens"],
        }

    def _count(self, text: str) -> int:
        """Tokens of the reasoning's text, without the marks around it."""
        if not text:
            return 0
        backend = getattr(self._tokenizer, "backend_tokenizer", None)  # safe beside the thread that tokenizes
        encoded = self._tokenizer.tokenize(text) if backend is None else backend.encode(text, add_special_tokens=False)
        return len(encoded)
