"""The JSON of /v1/messages: an answer as a list of blocks, and the events of its stream."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hf_paged.annotations import Tokenizer
from hf_paged.serving.choices import Delta
from hf_paged.serving.forms import Form
from hf_paged.serving.parsing import CallPart
from hf_paged.serving.problems import Json, Problem, as_anthropic
from hf_paged.serving.recipe import Recipe

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageForm(Form):
    """The form of answers of /v1/messages. Has one choice. A whole answer has the blocks that a stream tells."""

    names_events = True

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int) -> None:
        self._recipe, self._answer_id = recipe, answer_id
        self._blocks: list[Json] = []
        self._is_open = False  # the last block
        self._call: int | None = None  # number of the tool call that the last block is
        self._arguments = ""  # of that call
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    # -- as a Form ----------------------------------------------------------------------------------------------

    def opening(self) -> list[Json]:
        # What the cache had is known at the end only.
        count = sum(map(len, self._recipe.prompts))
        usage = {"input_tokens": count, "output_tokens": 0}
        return [{"type": "message_start", "message": {**self._message([], usage), "stop_reason": None}}]

    def chunks(self, delta: Delta) -> list[Json]:
        events: list[Json] = []
        if delta.reasoning:
            events += self._more("thinking", {"thinking": "", "signature": ""}, "thinking_delta", delta.reasoning)
        if delta.text:
            events += self._more("text", {"text": ""}, "text_delta", delta.text)
        for part in delta.calls:
            events += self._more_of_call(part)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        return events

    def closing(self, usage: Json) -> list[Json]:
        ending = {"stop_reason": self._reason, "stop_sequence": self._stop_sequence}
        return [
            *self._end_block(),
            {"type": "message_delta", "delta": ending, "usage": _usage(usage)},
            {"type": "message_stop"},
        ]

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        for delta in deltas:
            # Its events are dropped: the blocks have all that they say.
            self.chunks(delta)
        self._end_block()
        return self._message(self._blocks, _usage(usage))

    def failure(self, problem: Problem) -> Json:
        return as_anthropic(problem)

    # -- blocks -------------------------------------------------------------------------------------------------

    @property
    def _stop_sequence(self) -> str | None:
        return self._stop_reason if isinstance(self._stop_reason, str) else None

    @property
    def _reason(self) -> str:
        if self._stop_sequence is not None and self._finish_reason == "stop":
            return "stop_sequence"
        return _REASONS.get(self._finish_reason or "", "end_turn")

    def _message(self, blocks: list[Json], usage: Json) -> Json:
        return {
            "id": self._answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._recipe.model,
            "content": blocks,
            "stop_reason": self._reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage,
        }

    def _more(self, kind: str, empty: Json, change: str, text: str) -> list[Json]:
        """More text for the last block, or for a new one."""
        events = (
            [] if self._is_open and self._blocks[-1]["type"] == kind else self._begin_block({"type": kind, **empty})
        )
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": change, kind: text})]

    def _more_of_call(self, part: CallPart) -> list[Json]:
        events = []
        if part.index != self._call:
            block_id = f"toolu-{len(self._blocks)}-{self._answer_id}"
            events = self._begin_block({"type": "tool_use", "id": block_id, "name": part.name, "input": {}})
            self._call, self._arguments = part.index, ""
        self._arguments += part.arguments
        if part.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return events

    def _begin_block(self, block: Json) -> list[Json]:
        events = self._end_block()
        self._blocks.append(block)
        self._is_open = True
        # A copy, because the block grows while the event waits to be sent.
        begun = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, begun]

    def _delta(self, change: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": change}

    def _end_block(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        if self._call is not None:
            self._blocks[-1]["input"], self._call = _input(self._arguments), None
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _input(arguments: str) -> Json:
    """Parse the arguments of a call. Those of one that was cut off have no object; their text is kept as it is."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"partial_json": arguments}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
