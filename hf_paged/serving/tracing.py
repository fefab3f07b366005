"""OpenTelemetry spans: one for each answer, named and labelled by the semantic conventions for generative AI.

Without the package opentelemetry-api there are none, and without a configured SDK its own spans do nothing. Prompts and
answers are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_paged.serving.answers import Outcome
from hf_paged.serving.recipe import Recipe

try:
    from opentelemetry import propagate, trace
except ImportError:  # it is optional
    propagate = trace = None  # type: ignore[assignment]

_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion", "resp": "chat", "msg": "chat"}


class RequestSpan:
    """The span of one request; does nothing without OpenTelemetry."""

    def __init__(self, form_name: str, headers: Mapping[str, str]) -> None:
        """form_name: how the answer's id begins. headers: may have the caller's trace (traceparent)."""
        self._operation = _OPERATIONS.get(form_name, form_name)
        self._streams = False
        self._span: Any = None
        if trace is not None:
            self._span = trace.get_tracer("hf_paged").start_span(
                self._operation, context=propagate.extract(headers), kind=trace.SpanKind.SERVER
            )

    @property
    def _is_recording(self) -> bool:
        return self._span is not None and self._span.is_recording()

    def accepted(self, recipe: Recipe, response_id: str) -> None:
        """The request has been accepted."""
        self._streams = recipe.stream
        # Attributes cost time, and most servers record no spans.
        if not self._is_recording:
            return
        self._span.update_name(f"{self._operation} {recipe.model}")
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "hf_paged",
            "gen_ai.request.model": recipe.model,
            "gen_ai.response.model": recipe.model,
            "gen_ai.response.id": response_id,
            "gen_ai.request.stream": recipe.stream,
        }
        if recipe.n != 1:
            attributes["gen_ai.request.choice.count"] = recipe.n
        # Of the first one: all prompts of a request have the same options. Tasks without tokens have none.
        config = recipe.submissions[0].options.generation_config if recipe.submissions else None
        if config is not None:
            attributes |= {
                "gen_ai.request.max_tokens": config.max_new_tokens,
                "gen_ai.request.temperature": config.temperature if config.do_sample else 0.0,
                "gen_ai.request.top_p": config.top_p,
                "gen_ai.request.top_k": config.top_k,
                "gen_ai.request.seed": getattr(config, "seed", None),
            }
        if recipe.stops:
            attributes["gen_ai.request.stop_sequences"] = list(recipe.stops)
        self._set(attributes)

    def refused(self, status: int, message: str) -> None:
        self._end({"http.response.status_code": status}, str(status), message)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """seconds: from the request's arrival to the answer's end."""
        attributes = {
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gen_ai.response.finish_reasons": list(outcome.finish_reasons),
            "gen_ai.response.time_to_first_chunk": outcome.first_token_seconds if self._streams else None,
            "gen_ai.latency.time_in_queue": outcome.queue_seconds,
            "gen_ai.latency.time_to_first_token": outcome.first_token_seconds,
            "gen_ai.latency.e2e": seconds,
        }
        is_error = outcome.status != "ok"
        self._end(attributes, outcome.status if is_error else None, outcome.status)

    def _set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def _end(self, attributes: Mapping[str, Any], error: str | None, message: str) -> None:
        if not self._is_recording:
            return
        self._set(attributes)
        if error is not None:
            kind = error if error.isdigit() or error in ("disconnected", "slow") else "generation_failed"
            self._span.set_attribute("error.type", kind)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, message))
        self._span.end()
