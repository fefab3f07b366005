"""The calls of LiteLLM, with the server as a provider of the kind `openai`."""

from __future__ import annotations

import asyncio

import litellm
from calls import base_url, close, fails, run, same, task
from entry import TOOL, Entry

server = {"api_base": base_url, "api_key": task.key, "max_retries": 0}
asked = {**server, "model": f"openai/{task.model}", "messages": task.messages, "max_tokens": task.limit}
written = {
    **server,
    "model": f"text-completion-openai/{task.model}",
    "prompt": task.prompt,
    "max_tokens": task.limit,
}
sampled = {"n": len(task.samples), "temperature": task.temperature, "seed": task.seed}
formed = {**asked, "max_tokens": task.json_limit}


def chat() -> None:
    answer = litellm.completion(**asked)
    same((answer.choices[0].message.content, answer.usage.completion_tokens), (task.chat, task.chat_tokens))


def chat_async() -> None:
    same(asyncio.run(litellm.acompletion(**asked)).choices[0].message.content, task.chat)


def chat_stream() -> None:
    parts = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    same("".join(part.choices[0].delta.content or "" for part in parts if part.choices), task.chat)


def chat_n() -> None:
    answer = litellm.completion(**asked, **sampled)
    same([choice.message.content for choice in answer.choices], task.chat_samples)


def chat_logprobs() -> None:
    answer = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    close([each["logprob"] for each in answer.choices[0].logprobs["content"]], task.chat_logprobs)


def chat_stop() -> None:
    same(litellm.completion(**asked, stop=[task.chat_stop]).choices[0].message.content, task.chat_stopped)


def completion() -> None:
    same(litellm.text_completion(**written).choices[0].text, task.completion)


def completion_stream() -> None:
    parts = litellm.text_completion(**written, stream=True)
    same("".join(part.choices[0].text or "" for part in parts), task.completion)


def structured_output() -> None:
    answer = litellm.completion(**formed, response_format=Entry)
    Entry.model_validate_json(answer.choices[0].message.content)


def tools() -> None:
    answer = litellm.completion(**formed, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    call, finish_reason = answer.choices[0].message.tool_calls[0].function, answer.choices[0].finish_reason
    same((call.name, finish_reason), ("look_up", "tool_calls"))
    Entry.model_validate_json(call.arguments)


def responses() -> None:
    answer = litellm.responses(
        **server, model=f"openai/{task.model}", input=task.messages, max_output_tokens=task.limit
    )
    same("".join(part.text for item in answer.output for part in item.content), task.chat)


def errors() -> None:
    fails(litellm.NotFoundError, lambda: litellm.completion(**{**asked, "model": "openai/another"}))
    fails(litellm.AuthenticationError, lambda: litellm.completion(**{**asked, "api_key": "wrong"}))


run(
    "litellm",
    *(chat, chat_async, chat_stream, chat_n, chat_logprobs, chat_stop),
    *(completion, completion_stream, structured_output, tools, responses, errors),
)
