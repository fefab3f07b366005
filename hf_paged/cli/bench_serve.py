"""`hf-paged bench serve`: load on an OpenAI endpoint. The work is done in hf_paged.load."""

from __future__ import annotations

import json
import random
import time
from bisect import bisect_right
from dataclasses import replace
from enum import StrEnum
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_paged.cli.common import Job, UsageError, option, show

# Not 0, so that a script notices requests that have failed.
EXIT_ERRORS = 1


class Workload(StrEnum):
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    azure_conv = "azure-conv"
    azure_code = "azure-code"


class Route(StrEnum):
    completions = "completions"
    chat = "chat/completions"


class Prompts(StrEnum):
    tokens = "tokens"
    text = "text"


def serve(
    context: typer.Context,
    base_url: Annotated[str, option("address of the server, without /v1")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, option("name for the requests (default: the first of /v1/models)")] = None,
    api_key: Annotated[str | None, option("key of the server", envvar="OPENAI_API_KEY")] = None,
    endpoint: Annotated[Route, option("route below /v1")] = Route.completions,
    workload: Annotated[Workload, option("lengths of prompts and answers")] = Workload.sharegpt,
    scale: Annotated[float, option("lengths are multiplied by this", min=0.001)] = 1.0,
    num_prompts: Annotated[int, option("number of requests", min=1)] = 100,
    request_rate: Annotated[
        float | None, option("Poisson arrivals a second (default: all at the start)", min=0.000001)
    ] = None,
    trace: Annotated[
        Path | None, option("recorded requests: JSON lines with timestamp (ms), input_length, output_length")
    ] = None,
    prompts: Annotated[
        Prompts, option("random token ids, or random words (the server's usage says how many tokens they are)")
    ] = Prompts.tokens,
    vocab_size: Annotated[int, option("token ids of prompts are 3 and more, below this", min=4)] = 512,
    ignore_eos: Annotated[bool, option("answers of full length; a field of vLLM and hf-paged")] = True,
    temperature: Annotated[float, option("of the requests", min=0.0)] = 0.0,
    extra_body: Annotated[str, option("further fields of the requests, as JSON")] = "{}",
    goodput: Annotated[
        list[str] | None,
        option("METRIC:MS, most milliseconds of a good request; ttft, itl, tpot, norm or e2e; repeatable"),
    ] = None,
    disconnect: Annotated[float, option("share of the clients that go away in mid-stream", min=0.0, max=1.0)] = 0.0,
    warmups: Annotated[int, option("requests before the measurement, one after the other", min=0)] = 1,
    timeout: Annotated[float, option("seconds a request may take", min=0.001)] = 600.0,
    seed: Annotated[int, option("of lengths, prompts, arrivals and disconnects")] = 0,
    json_file: Annotated[Path | None, option("write summary and requests to this file", "--json")] = None,
    plot: Annotated[Path | None, option("draw latencies into this file (.png, .svg); needs matplotlib")] = None,
) -> Job:
    """Put load on an OpenAI endpoint (hf-paged serve, vLLM, transformers serve) and measure what its clients see.

    Requests are sent when they are due, whether or not earlier ones have been answered. Latencies count from then on.
    The exit status is 1 if a request failed.
    """
    # Only those that were typed: defaults contradict nothing.
    for name in ("request_rate", "scale", "workload") if trace is not None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise UsageError(f"--trace has arrivals and lengths of its own; leave --{name.replace('_', '-')} out")
    given = dict(context.params)
    return lambda: _serve(given)


def _serve(given: dict[str, Any]) -> int:
    if given["plot"] is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib; pip install matplotlib, or leave --plot out")
    from hf_paged.load import client, report

    objectives = objectives_of(given["goodput"] or [])
    endpoint, longest = _endpoint(given)
    drawn = planned(given)
    # Before the run, because a refused request would count as an error of the server.
    requests = [clamped(request, longest) for request in drawn]
    shorter = sum(request is not former for request, former in zip(requests, drawn))
    if shorter:
        print(f"{shorter} of {len(requests)} requests were longer than the {longest} tokens of {endpoint.model}: cut")
    for request in requests[: given["warmups"]]:
        # Not the request itself: its prompt would then be in the server's prefix cache.
        warm = client.run(endpoint, [client.Planned(0.0, _reversed(request.prompt), request.output_length)])
        if warm.outcomes[0].error is not None:
            raise UsageError(f"{endpoint.base_url} does not serve the first request: {warm.outcomes[0].error}")
    ended = 0

    def count(outcome: object) -> None:
        nonlocal ended
        ended += 1
        show(f"{ended} of {len(requests)} requests have ended")

    # After the warm-up, whose requests are no part of the measurement.
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    run = client.run(endpoint, requests, count)
    summary = report.summarise(run, objectives)
    show("")
    print(report.table(summary))
    if given["json_file"] is not None:
        _write(given, started, requests, run, summary)
    if given["plot"] is not None:
        from hf_paged.load.plot import draw

        draw(run, given["plot"], f"{endpoint.model}, {_load(given)}")
    return EXIT_ERRORS if summary.errors else 0


def clamped(request: Any, longest: int | None) -> Any:
    """Shorten a request to `longest` tokens: its answer gets at most half of these, its prompt the rest.
    (Each byte of a text counts as a token, and one more begins it: no tokenizer makes more of it.)"""
    is_text = isinstance(request.prompt, str)
    parts = request.prompt.split() if is_text else request.prompt
    ends = list(accumulate((len(part.encode()) + 1 if is_text else 1) for part in parts))
    size = ends[-1] if ends else 0
    if longest is None or size + request.output_length <= longest:
        return request
    # A prompt without room for an answer measures nothing.
    output_length = min(request.output_length, max(longest // 2, longest - size))
    kept = parts[: bisect_right(ends, longest - output_length)]
    leaves_after = request.leaves_after and min(request.leaves_after, output_length)
    return replace(
        request, prompt=" ".join(kept) if is_text else kept, output_length=output_length, leaves_after=leaves_after
    )


def _reversed(prompt: str | list[int]) -> str | list[int]:
    """A prompt with the same tokens, or words, in another order."""
    return " ".join(reversed(prompt.split())) if isinstance(prompt, str) else prompt[::-1]


def _endpoint(given: dict[str, Any]) -> tuple[Any, int | None]:
    """The endpoint, and the tokens that a request may have there (None: unknown)."""
    from hf_paged.load.client import Endpoint, served_model

    try:
        extra = json.loads(given["extra_body"])
    except ValueError as error:
        raise UsageError(f"--extra-body {given['extra_body']} is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError(f"--extra-body {given['extra_body']}: a JSON object is needed, such as '{{\"top_k\": 5}}'")
    options = {"temperature": given["temperature"], **({"ignore_eos": True} if given["ignore_eos"] else {})}
    url = given["base_url"].rstrip("/").removesuffix("/v1")
    name, longest = served_model(url, given["model"], given["api_key"])
    key, timeout = given["api_key"], given["timeout"]
    return Endpoint(url, name, given["endpoint"].value, key, {**options, **extra}, timeout), longest


def planned(given: dict[str, Any]) -> list[Any]:
    """The requests in the order of their arrival; the same for the same options."""
    from hf_paged.load import workloads
    from hf_paged.load.client import Planned

    count, seed = given["num_prompts"], given["seed"]
    if given["trace"] is not None:
        try:
            recorded = workloads.read_trace(given["trace"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--trace {given['trace']}: every line is a JSON object with timestamp, input_length and output_length "
                f"({type(error).__name__}: {error})"
            ) from None
        # In order of arrival, because recorded traces need not be.
        lengths = sorted(recorded, key=lambda request: request.arrival)[:count]
    else:
        lengths = workloads.synthesise(
            given["workload"].value, count, scale=given["scale"], rate=given["request_rate"], seed=seed
        )
    if given["prompts"] is Prompts.text or given["endpoint"] is Route.chat:
        prompts: list[Any] = workloads.texts_for(lengths, seed)
    else:
        prompts = workloads.prompts_for(lengths, given["vocab_size"], seed)
    # A generator of its own: with another share of disconnects, lengths and arrivals stay the same.
    rng = random.Random(f"disconnects {seed}")
    leaving = [
        rng.randint(1, max(1, each.output_length - 1)) if rng.random() < given["disconnect"] else None
        for each in lengths
    ]
    return [
        Planned(each.arrival, prompt, each.output_length, leaves_after)
        for each, prompt, leaves_after in zip(lengths, prompts, leaving)
    ]


def objectives_of(words: list[str]) -> dict[str, float]:
    """["ttft:500"] -> {"ttft": 0.5}: seconds. Raises UsageError."""
    from hf_paged.load.report import METRICS

    objectives = {}
    for word in words:
        name, _, limit = word.partition(":")
        try:
            objectives[name] = float(limit) / 1000
        # No limit that could be met, so that the next lines refuse it like a number out of range.
        except ValueError:
            objectives[name] = -1.0
        if name not in METRICS or not 0 <= objectives[name] < float("inf"):
            raise UsageError(f"--goodput {word}: write METRIC:MILLISECONDS; metrics are {', '.join(METRICS)}")
    return objectives


def _load(given: dict[str, Any]) -> str:
    if given["trace"] is not None:
        return str(given["trace"])
    rate = "all at the start" if given["request_rate"] is None else f"{given['request_rate']:g} requests/s"
    return f"{given['workload'].value} x {given['scale']:g}, {rate}"


def _write(given: dict[str, Any], started: str, requests: list[Any], run: Any, summary: Any) -> None:
    # Result files are shown to others, so they hold no API key.
    hidden = {"api_key", "json_file", "plot"}
    options = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items() if name not in hidden
    }
    rows = [
        {
            "arrival": outcome.arrival,
            "sent": outcome.sent,
            "first": outcome.pieces[0] if outcome.pieces else None,
            "end": outcome.end,
            "pieces": len(outcome.pieces),
            "asked_tokens": request.output_length,
            "prompt_tokens": outcome.prompt_tokens,
            "completion_tokens": outcome.completion_tokens,
            "left": outcome.has_left,
            "error": outcome.error,
        }
        for request, outcome in zip(requests, run.outcomes)
    ]
    answer = {"date": started, "options": options, "summary": summary.as_dict(), "requests": rows}
    given["json_file"].parent.mkdir(parents=True, exist_ok=True)
    given["json_file"].write_text(json.dumps(answer, indent=1) + "\n")
