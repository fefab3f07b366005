"""The calls of OpenAI's Python client."""

from __future__ import annotations

import asyncio
import json

import openai
from calls import base_url, close, fails, run, same, task
from entry import TOOL, Entry

client = openai.OpenAI(base_url=base_url, api_key=task.key, max_retries=0)
asked = {"model": task.model, "messages": task.messages, "max_tokens": task.limit}
written = {"model": task.model, "prompt": task.prompt, "max_tokens": task.limit}
sampled = {"n": len(task.samples), "temperature": task.temperature, "seed": task.seed}
formed = {**asked, "max_tokens": task.json_limit}


def models() -> None:
    same([model.id for model in client.models.list()], [task.model])
    same(client.models.retrieve(task.model).id, task.model)


def chat() -> None:
    answer = client.chat.completions.create(**asked)
    same(answer.choices[0].message.content, task.chat)
    same(answer.usage.completion_tokens, task.chat_tokens)


def chat_async() -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=task.key, max_retries=0) as each:
            answers = await asyncio.gather(*(each.chat.completions.create(**asked) for _ in range(3)))
        return [answer.choices[0].message.content for answer in answers]

    same(asyncio.run(ask()), [task.chat] * 3)


def chat_stream() -> None:
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    same("".join(part.choices[0].delta.content or "" for part in parts if part.choices), task.chat)
    same(parts[-1].usage.completion_tokens, task.chat_tokens)


def chat_stream_helper() -> None:
    with client.chat.completions.stream(**asked) as stream:
        answer = stream.until_done().get_final_completion()
    same(answer.choices[0].message.content, task.chat)


def chat_n() -> None:
    answer = client.chat.completions.create(**asked, **sampled)
    same([choice.message.content for choice in answer.choices], task.chat_samples)


def chat_logprobs() -> None:
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    close([each.logprob for each in content], task.chat_logprobs)
    same([each.top_logprobs[0].token for each in content], [each.token for each in content])


def chat_stop() -> None:
    answer = client.chat.completions.create(**asked, stop=[task.chat_stop])
    same((answer.choices[0].message.content, answer.choices[0].finish_reason), (task.chat_stopped, "stop"))


def completion() -> None:
    answer = client.completions.create(**written)
    same(answer.choices[0].text, task.completion)


def completion_stream() -> None:
    parts = client.completions.create(**written, stream=True)
    same("".join(part.choices[0].text for part in parts), task.completion)


def completion_n() -> None:
    answer = client.completions.create(**written, **sampled)
    same([choice.text for choice in answer.choices], task.samples)


def completion_logprobs() -> None:
    answer = client.completions.create(**written, logprobs=1)
    close(answer.choices[0].logprobs.token_logprobs, task.logprobs)


def structured_output() -> None:
    answer = client.chat.completions.parse(**formed, response_format=Entry)
    same(type(answer.choices[0].message.parsed), Entry)


def tools() -> None:
    answer = client.chat.completions.create(**formed, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    same((call.function.name, answer.choices[0].finish_reason), ("look_up", "tool_calls"))
    Entry.model_validate_json(call.function.arguments)


def tools_stream() -> None:
    named = {"type": "function", "function": {"name": "look_up"}}
    parts = client.chat.completions.create(**formed, tools=[TOOL], tool_choice=named, stream=True)
    calls = [call for part in parts for choice in part.choices for call in choice.delta.tool_calls or ()]
    same(calls[0].function.name, "look_up")
    Entry.model_validate(json.loads("".join(call.function.arguments or "" for call in calls)))


def responses() -> None:
    options = {"model": task.model, "input": task.messages, "max_output_tokens": task.limit}
    same(client.responses.create(**options).output_text, task.chat)
    events = client.responses.create(**options, stream=True)
    same("".join(event.delta for event in events if event.type == "response.output_text.delta"), task.chat)


def errors() -> None:
    fails(openai.NotFoundError, lambda: client.chat.completions.create(**{**asked, "model": "another"}))
    fails(openai.BadRequestError, lambda: client.chat.completions.create(**{**asked, "max_tokens": 10**6}))
    fails(openai.AuthenticationError, lambda: client.with_options(api_key="wrong").chat.completions.create(**asked))


run(
    "openai",
    models,
    *(chat, chat_async, chat_stream, chat_stream_helper, chat_n, chat_logprobs, chat_stop),
    *(completion, completion_stream, completion_n, completion_logprobs),
    *(structured_output, tools, tools_stream, responses, errors),
)
