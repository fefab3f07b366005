"""/v1/completions and /v1/chat/completions: every answer is what plain `generate` returns for the same options."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers import LogitsProcessorList

from hf_paged.serving.processors import OccurrencePenalty
from tests.serving.harness import NAME, Running, ids_of, plain, serving, text_of, tokenizer

PROMPT = "A list is"
QUESTION = [{"role": "user", "content": "What does str.capitalize() do?"}]
NO_EOS = 2048  # no token has this id
BEST = {"length_penalty": -5.0, "early_stopping": True}  # another sequence comes second with it
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.95, "min_p": 0.0}


# name: (fields of the request, options of `generate`)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}), "as_the_checkpoint": ({}, {}),
    "sampled": ({"temperature": 0.9, "top_p": 0.95, "seed": 5}, {**SAMPLED, "seed": 5}),
    "top_k": ({"temperature": 1, "top_k": 7, "seed": -3}, {"do_sample": True, "top_k": 7, "seed": -3}),
    "min_p": (
        {"min_p": 0.05, "seed": 8}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_p": 0.05, "seed": 8},),
    "n": ({"n": 3, "temperature": 0.9, "top_p": 0.95, "seed": 1}, {**SAMPLED, "num_return_sequences": 3, "seed": 1}),
    "beams": ({"use_beam_search": True, "n": 4}, {"num_beams": 4, "num_return_sequences": 4}),
    "best_beams": (
        {"use_beam_search": True, "n": 2, "best_of": 5, "stop_token_ids": [301, 268], **BEST},
        {"num_beams": 5, "num_return_sequences": 2, "eos_token_id": [2, 301, 268], **BEST},
    ),
    "repetition_penalty": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "logit_bias": ({"logit_bias": {"300": 8.5, "301": -100}}, {"sequence_bias": [[[300], 8.5], [[301], -100.0]]}),
    "min_tokens": ({"min_tokens": 12}, {"min_new_tokens": 12}),
    "ignore_eos": ({"ignore_eos": True}, {"eos_token_id": NO_EOS}),
    "stop_token_ids": ({"stop_token_ids": [301, 268]}, {"eos_token_id": [2, 301, 268]}),
    "allowed_token_ids": ({"allowed_token_ids": list(range(2, 600))}, {"suppress_tokens": [0, 1, *range(600, 2048)]}),
}  # fmt: skip
LENGTH = 24


@pytest.mark.smoke_cases("greedy", "n")
@pytest.mark.parametrize("case", CASES)
def test_completions(server: Running, case: str) -> None:
    fields, options = CASES[case]
    given = {"prompt": PROMPT, "extra_body": {"max_tokens": LENGTH, "return_token_ids": True, **fields}, "model": NAME}
    wanted = plain(ids_of(PROMPT), max_new_tokens=LENGTH, **{"do_sample": False, **options})
    answer = server.client.completions.create(**given)
    assert [choice.token_ids for choice in answer.choices] == wanted
    assert answer.choices[0].prompt_token_ids == ids_of(PROMPT)
    for choice, tokens in zip(answer.choices, wanted):
        ends = {2, *fields.get("stop_token_ids", ())} if not fields.get("ignore_eos") else set()
        by_token = tokens[-1] in ends
        assert choice.finish_reason == ("stop" if by_token or len(tokens) < LENGTH else "length")
        assert choice.text == text_of(tokens[:-1] if by_token else tokens)
        assert choice.stop_reason == (tokens[-1] if by_token and tokens[-1] != 2 else None)
    usage = answer.usage
    assert usage.prompt_tokens == len(ids_of(PROMPT)) and usage.completion_tokens == sum(map(len, wanted))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    *chunks, last = server.client.completions.create(**given, stream=True, stream_options={"include_usage": True})
    streamed: list[list[int]] = [[] for _ in wanted]
    texts, reasons = [""] * len(wanted), [None] * len(wanted)
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert reasons[choice.index] is None, "a chunk after the end"
        streamed[choice.index] += choice.token_ids
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert streamed == wanted
    assert texts == [choice.text for choice in answer.choices]
    assert reasons == [choice.finish_reason for choice in answer.choices]
    assert last.choices == [] and last.usage.completion_tokens == usage.completion_tokens


def test_penalties(server: Running) -> None:
    """Against `generate` with the processor, which test_text.py compares with OpenAI's formula."""
    ids = ids_of(PROMPT)
    penalty = OccurrencePenalty(len(ids), presence_penalty=0.7, frequency_penalty=-1.1)
    for seed, options in ((None, {"do_sample": False}), (9, {"do_sample": True, "temperature": 1.5, "top_k": 0})):
        wanted = plain(ids, max_new_tokens=40, logits_processor=LogitsProcessorList([penalty]), seed=seed, **options)
        answer = server.client.completions.create(
            model=NAME, prompt=ids, max_tokens=40, presence_penalty=0.7, frequency_penalty=-1.1, seed=seed,
            temperature=options.get("temperature", 0), extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert answer.choices[0].token_ids == wanted[0]


def test_bad_words(server: Running) -> None:
    without = server.post("/v1/completions", prompt=PROMPT, max_tokens=30).json()["choices"][0]["text"]
    word = max(without.split(), key=len)
    text = server.post("/v1/completions", prompt=PROMPT, max_tokens=30, bad_words=[word]).json()["choices"][0]["text"]
    assert word in without and word not in text.split()


def test_best_of(server: Running) -> None:
    options = {"temperature": 1.3, "seed": 4, "max_tokens": 10}
    every = server.post("/v1/completions", prompt=PROMPT, n=6, logprobs=0, **options).json()["choices"]
    best = server.post("/v1/completions", prompt=PROMPT, n=2, best_of=6, logprobs=0, **options).json()["choices"]

    def mean(choice: Any) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    ranked = sorted(every, key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked]
    refused = server.post("/v1/completions", prompt=PROMPT, n=2, best_of=6, stream=True)
    assert refused.status_code == 422 and "best_of=6" in refused.json()["error"]["message"]


def test_an_event_is_one_line_for_every_client(server: Running) -> None:
    """Also for those that end a line where str.splitlines does, which httpx's iter_lines calls."""
    prompt = "a\x85b\u2028c\u2029d\x0b\x0c\x1c\x1d\x1e"
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "echo": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        *events, end = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert end == "[DONE]" and "".join(texts).startswith(prompt)


def test_stop_strings(server: Running) -> None:
    """Cut out of the text that comes without them, so that they begin and end anywhere within tokens."""
    fields: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40}
    extra = {"ignore_eos": True, "return_token_ids": True}
    whole = server.client.completions.create(**fields, extra_body=extra).choices[0].text
    for start, include, stream in ((10, False, True), (17, True, True), (24, True, False), (31, False, False)):
        stop = whole[start : start + 5]
        extra["include_stop_str_in_output"] = include
        given = {**fields, "stop": ["never seen", stop], "extra_body": extra}
        if stream:
            chunks = [chunk.choices[0] for chunk in server.client.completions.create(**given, stream=True)]
            text, last = "".join(choice.text for choice in chunks), chunks[-1]
        else:
            last = server.client.completions.create(**given).choices[0]
            text = last.text
        assert text == whole[: whole.index(stop) + (len(stop) if include else 0)]
        assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_a_stop_string_ends_samples_one_by_one(server: Running) -> None:
    fields = {"prompt": PROMPT, "n": 4, "temperature": 1.0, "seed": 2, "max_tokens": 30, "return_token_ids": True}
    free = server.post("/v1/completions", **fields).json()["choices"]
    stopped = server.post("/v1/completions", **fields, stop=" a").json()["choices"]
    # The first samples to stop change the draws of the others, so only what precedes the first stop can be compared.
    first = min(len(each["token_ids"]) for each in stopped)
    for before, after in zip(free, stopped):
        assert after["token_ids"][:first] == before["token_ids"][:first]
        assert " a" not in after["text"]
    assert {each["finish_reason"] for each in stopped} >= {"stop"}


def test_stop_strings_wait_for_min_tokens(server: Running) -> None:
    whole = server.post("/v1/completions", prompt=PROMPT, max_tokens=40, ignore_eos=True, return_token_ids=True)
    choice = whole.json()["choices"][0]
    early = choice["text"][:4]
    answer = server.post(
        "/v1/completions", prompt=PROMPT, max_tokens=40, ignore_eos=True, stop=early, min_tokens=10
    ).json()["choices"][0]
    assert len(answer["text"]) >= len(text_of(choice["token_ids"][:10])) - len(early)


def test_stop_strings_of_beams(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=PROMPT, use_beam_search=True, n=3, max_tokens=30, stop=[" the"])
    assert all(" the" not in choice["text"] for choice in answer.json()["choices"])


def test_tokens_as_ids(server: Running) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 0, "return_token_ids": True}
    answer = server.post("/v1/completions", **fields, return_tokens_as_token_ids=True).json()["choices"][0]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token}" for token in answer["token_ids"]]


def test_a_conversation_finds_its_prefix(server: Running) -> None:
    messages = [*QUESTION]
    cached = []
    for turn in range(3):
        answer = server.client.chat.completions.create(model=NAME, messages=messages, max_tokens=30)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": f"Explain the if statement, part {turn}."},
        ]
    assert cached[1] >= 16 and cached[2] > cached[1]
    for salt, is_found in (("mine", False), ("yours", False), ("mine", True)):
        other = server.client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=5, extra_body={"cache_salt": salt}
        )
        assert (other.usage.prompt_tokens_details.cached_tokens > 0) == is_found


def test_continue_final_message(server: Running) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Return a copy"}]
    fields = {"messages": messages, "max_tokens": 8, "continue_final_message": True}
    text = server.post("/v1/chat/completions", **fields, add_generation_prompt=False).json()["choices"][0]["message"]
    rendered = tokenizer().apply_chat_template(messages, continue_final_message=True, tokenize=False)
    ids = list(tokenizer()(rendered, add_special_tokens=False)["input_ids"])
    assert text["content"] == text_of(plain(ids, max_new_tokens=8)[0])
    assert server.post("/v1/chat/completions", **fields).status_code == 422


def test_parts_of_a_message(server: Running) -> None:
    whole = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a\nb"}], max_tokens=8).json()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    again = server.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=8).json()
    assert again["choices"] == whole["choices"]


def test_a_model_of_an_encoder_reads_the_prompt() -> None:
    torch.manual_seed(3)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=len(tokenizer()), pad_token_id=0, eos_token_id=1, **size)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.6 if parameter.dim() > 1 else 1.0)
    with serving(model=model) as server:
        for text in ("ab", "cde"):
            options = {"max_tokens": 6, "temperature": 0, "repetition_penalty": 3.0, "return_token_ids": True}
            answer = server.post("/v1/completions", prompt=text, **options)
            biased = server.post("/v1/completions", prompt=text, **options, presence_penalty=-2, frequency_penalty=-2)
            assert biased.json()["choices"][0]["token_ids"] != answer.json()["choices"][0]["token_ids"]
            ids = torch.tensor([tokenizer()(text)["input_ids"]])
            same = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 3.0}
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), **same)
            (choice,) = answer.json()["choices"]
            assert choice["token_ids"] == plain[0, 1:].tolist() and len(set(choice["token_ids"])) > 1
            assert answer.json()["usage"]["prompt_tokens"] == ids.shape[1]
        refused = server.post("/v1/completions", prompt="ab", echo=True)
        assert refused.status_code == 400 and "echo=true" in refused.json()["error"]["message"]


def test_the_positions_of_an_encoder_and_its_decoder_are_counted_apart() -> None:
    torch.manual_seed(3)
    size = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
    marks = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.BartConfig(vocab_size=len(tokenizer()), max_position_embeddings=40, **size, **heads, **marks)
    model = transformers.BartForConditionalGeneration(config).eval()
    for most, options in ((40, {}), (24, {"max_model_len": 24})):
        with serving(model=model, **options) as server:
            assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == most
            longest = {"prompt": [5] * most, "max_tokens": most - 1, "ignore_eos": True}
            answer = server.post("/v1/completions", **longest)
            assert answer.json()["usage"] == {
                **answer.json()["usage"], "prompt_tokens": most, "completion_tokens": most - 1,
            }  # fmt: skip
            for changed, message in (
                ({"prompt": [5] * (most + 1)}, f"go beyond the {most} of the model's encoder"),
                ({"max_tokens": most}, f"lower max_tokens to {most - 1}"),
            ):
                refused = server.post("/v1/completions", **{**longest, **changed})
                assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    with pytest.raises(ValueError, match="the model's 40 positions"), serving(model=model, max_model_len=41):
        pass
