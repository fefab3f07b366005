// The calls of OpenAI's client for Node. It runs in the folder where `npm install openai zod` ran, with the task's file
// as its argument, and reports as calls.py does.

import assert from "node:assert/strict";
import fs from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.cwd()}/`);
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const task = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const client = new OpenAI({ baseURL: `${task.url}/v1`, apiKey: task.key, maxRetries: 0 });
const asked = { model: task.model, messages: task.messages, max_tokens: task.limit };
const formed = { ...asked, max_tokens: task.json_limit };
const written = { model: task.model, prompt: task.prompt, max_tokens: task.limit };
const sampled = { n: task.samples.length, temperature: task.temperature, seed: task.seed };
const Entry = z.object({ kind: z.enum(["function", "class", "statement"]), builtin: z.boolean() });
const tool = {
  type: "function",
  function: {
    name: "look_up",
    parameters: {
      type: "object",
      properties: { kind: { enum: ["function", "class", "statement"] }, builtin: { type: "boolean" } },
      required: ["kind", "builtin"],
      additionalProperties: false,
    },
  },
};

function close(answer, expected) {
  assert.equal(answer.length, expected.length);
  answer.forEach((each, place) => assert.ok(Math.abs(each - expected[place]) < 1e-3, `${answer}, and not ${expected}`));
}

const calls = {
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert.deepEqual(names, [task.model]);
  },
  async chat() {
    const answer = await client.chat.completions.create(asked);
    assert.equal(answer.choices[0].message.content, task.chat);
    assert.equal(answer.usage.completion_tokens, task.chat_tokens);
  },
  async chat_stream() {
    let text = "";
    let usage = null;
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    for await (const part of stream) {
      text += part.choices[0]?.delta.content ?? "";
      usage = part.usage ?? usage;
    }
    assert.equal(text, task.chat);
    assert.equal(usage.completion_tokens, task.chat_tokens);
  },
  async chat_stream_helper() {
    assert.equal(await client.chat.completions.stream(asked).finalContent(), task.chat);
  },
  async chat_n() {
    const answer = await client.chat.completions.create({ ...asked, ...sampled });
    assert.deepEqual(answer.choices.map((choice) => choice.message.content), task.chat_samples);
  },
  async chat_logprobs() {
    const answer = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
    close(answer.choices[0].logprobs.content.map((each) => each.logprob), task.chat_logprobs);
  },
  async chat_stop() {
    const answer = await client.chat.completions.create({ ...asked, stop: task.chat_stop });
    assert.equal(answer.choices[0].message.content, task.chat_stopped);
    assert.equal(answer.choices[0].finish_reason, "stop");
  },
  async completion() {
    const answer = await client.completions.create(written);
    assert.equal(answer.choices[0].text, task.completion);
  },
  async completion_stream() {
    let text = "";
    for await (const part of await client.completions.create({ ...written, stream: true })) {
      text += part.choices[0].text;
    }
    assert.equal(text, task.completion);
  },
  async completion_n() {
    const answer = await client.completions.create({ ...written, ...sampled });
    assert.deepEqual(answer.choices.map((choice) => choice.text), task.samples);
  },
  async completion_logprobs() {
    const answer = await client.completions.create({ ...written, logprobs: 1 });
    close(answer.choices[0].logprobs.token_logprobs, task.logprobs);
  },
  async structured_output() {
    const answer = await client.chat.completions.parse({
      ...formed,
      response_format: zodResponseFormat(Entry, "entry"),
    });
    assert.ok(Entry.safeParse(answer.choices[0].message.parsed).success);
  },
  async tools() {
    const answer = await client.chat.completions.create({
      ...formed,
      tools: [tool],
      tool_choice: "required",
      parallel_tool_calls: false,
    });
    assert.equal(answer.choices[0].finish_reason, "tool_calls");
    const called = answer.choices[0].message.tool_calls[0].function;
    assert.equal(called.name, "look_up");
    Entry.parse(JSON.parse(called.arguments));
  },
  async responses() {
    const options = { model: task.model, input: task.messages, max_output_tokens: task.limit };
    assert.equal((await client.responses.create(options)).output_text, task.chat);
    let text = "";
    for await (const event of await client.responses.create({ ...options, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, task.chat);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...asked, model: "another" }), OpenAI.NotFoundError);
    const other = client.withOptions({ apiKey: "wrong" });
    await assert.rejects(other.chat.completions.create(asked), OpenAI.AuthenticationError);
  },
};

const { version } = JSON.parse(fs.readFileSync("node_modules/openai/package.json", "utf8"));
console.log(JSON.stringify({ version }));
for (const [call, make] of Object.entries(calls)) {
  let error = null;
  try {
    await make();
  } catch (raised) {
    console.error(raised);
    error = String(raised);
    process.exitCode = 1;
  }
  console.log(JSON.stringify({ call, error }));
}
