"""How much of the prompts is cached when two replicas share the memory of one: conversations of several turns, sent to
`hf-paged serve --replicas`. Needs the extra `ray`. Example:

    python benchmarks/replica_routing.py --json benchmarks/results/replica-routing.json

A turn is sent when the one before it has been answered; the next conversation is drawn at random. The hit rate is
the share of prompt tokens that the servers report as cached, over all turns.
"""

from __future__ import annotations

import argparse
import builtins
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.server_process import serving

ONE = "one replica, all the memory"
VARIANTS = {
    ONE: (1, "prefix"),
    "2 replicas, prefix": (2, "prefix"),
    "2 replicas, least loaded": (2, "least-loaded"),
    "2 replicas, round robin": (2, "round-robin"),
}
ANSWER = 24  # tokens
NAME = "pydoc"


@dataclass
class Conversation:
    """Its texts come from Python's documentation, which is where the checkpoint's come from."""

    turns: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


@dataclass
class Tally:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)  # by replica
    latencies: list[float] = field(default_factory=list)
    longest: int = 0  # tokens of a prompt

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def conversations(count: int, turns: int, seed: int) -> list[Conversation]:
    """All have one system prompt, and then nothing in common."""
    draw = random.Random(seed)
    words = " ".join(getdoc(getattr(builtins, name)) or "" for name in dir(builtins)).split()
    system = "You explain Python's standard library. " + " ".join(draw.choices(words, k=40))
    made = []
    for _ in range(count):
        texts = [" ".join(draw.choices(words, k=20)) for _ in range(turns)]
        made.append(Conversation(texts, [{"role": "system", "content": system}]))
    return made


def turn(client: openai.OpenAI, conversation: Conversation, tally: Tally, lock: threading.Lock) -> None:
    conversation.messages.append({"role": "user", "content": conversation.turns[len(conversation.answers)]})
    started = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=NAME,
        messages=conversation.messages,  # type: ignore[arg-type]
        max_tokens=ANSWER,
        extra_body={"ignore_eos": True},
    )
    seconds, answer = time.perf_counter() - started, raw.parse()
    text, usage = answer.choices[0].message.content or "", answer.usage
    conversation.messages.append({"role": "assistant", "content": text})
    conversation.answers.append(text)
    assert usage is not None and usage.prompt_tokens_details is not None
    with lock:
        tally.prompt_tokens += usage.prompt_tokens
        tally.longest = max(tally.longest, usage.prompt_tokens)
        tally.cached_tokens += usage.prompt_tokens_details.cached_tokens or 0
        tally.requests[raw.headers["x-replica"]] += 1
        tally.latencies.append(seconds)


def converse(url: str, talks: list[Conversation], clients: int, seed: int) -> Tally:
    """Each of the clients takes a conversation that waits for its next turn, and sends that turn."""
    tally, lock, draw = Tally(), threading.Lock(), random.Random(seed)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    waiting = list(talks)

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mine = waiting.pop(draw.randrange(len(waiting)))
            turn(client, mine, tally, lock)
            if len(mine.answers) < len(mine.turns):
                with lock:
                    waiting.append(mine)

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(work) for _ in range(clients)]:
            done.result()
    return tally


def run(variant: str, mib: int, given: argparse.Namespace) -> tuple[dict[str, object], list[list[str]]]:
    replicas, routing = VARIANTS[variant]
    talks = conversations(given.conversations, given.turns, given.seed)
    with serving(
        *("--served-model-name", NAME, "--replicas", str(replicas), "--routing", routing, "--dtype", "float32"),
        *("--kv-cache-memory", f"{mib * 1024 // replicas}KiB"),
    ) as server:
        began = time.perf_counter()
        tally = converse(server.url, talks, given.clients, given.seed)
        seconds = time.perf_counter() - began
    record = {
        "variant": variant,
        "memory_mib_in_all": mib,
        "hit_rate": round(tally.hit_rate, 4),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "longest_prompt": tally.longest,
        "requests_by_replica": sorted(tally.requests.values()),
        "mean_latency_seconds": round(sum(tally.latencies) / len(tally.latencies), 3),
        "seconds": round(seconds, 1),
    }
    return record, [talk.answers for talk in talks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--memory", type=int, nargs="+", default=[32, 16], metavar="MIB", help="K/V, over all replicas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records = []
    expected: list[list[str]] | None = None
    for mib in given.memory:
        rate = 0.0
        for variant in VARIANTS:
            record, answers = run(variant, mib, given)
            expected = expected or answers
            differing = sum(one != other for a, b in zip(answers, expected) for one, other in zip(a, b))
            rate = rate or float(str(record["hit_rate"]))
            record |= {"of_one_replica": round(float(str(record["hit_rate"])) / rate, 3), "other_answers": differing}
            records.append(record)
            print(json.dumps(record), flush=True)
            if given.json:
                arguments = {name: value for name, value in vars(given).items() if name != "json"}
                given.json.write_text(json.dumps({"arguments": arguments, "results": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
