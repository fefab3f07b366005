"""Kills replicas of `hf-paged serve --replicas` under load, and looks at what every client got. Needs the extra `ray`.

    python benchmarks/replica_kills.py --json benchmarks/results/replica-kills.json

Clients send greedy requests all the time, streamed and whole. A replica's process is killed (SIGKILL) at a random
moment, when all replicas answer; at every fifth kill a second one follows, so that none is left. Every request has to
end in one of these ways: with the whole text, the same as before the first kill; or with an error that OpenAI's client
raises. Anything else is lost: a text that is cut off or wrong without an error, or no end within ten minutes. A machine
that others halt for minutes halts clients and replicas together; such times are reported and not counted as waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.server_process import serving

NAME, REPLICA = "pydoc", "ServeReplica:hf-paged:engine"
QUESTIONS = [
    f"What does {name} do?" for name in ("str.join", "len", "dict.get", "list.sort", "open", "zip", "map", "id")
]
SECONDS = 600  # after which a request counts as hanging


@dataclass
class End:
    """How a request ended. kind: "whole", "error before" (its answer had begun), "error after", or "lost"."""

    kind: str
    streamed: bool
    seconds: float
    error: str = ""
    replica: str = ""


class Load:
    """Clients in threads of their own, and how their requests have ended."""

    def __init__(self, url: str, tokens: int) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
        self._tokens = tokens
        self._expected: dict[str, str] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self.ends: list[End] = []
        self.replicas: set[str] = set()

    def learn(self) -> None:
        for question in QUESTIONS:
            _, self._expected[question] = self._ask(question, streamed=False)

    def start(self, count: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def stop(self) -> None:
        self._is_over = True

    def wait_for_replicas(self, more_than: set[str], count: int, seconds: float) -> bool:
        """Until `count` replicas have answered that are not in `more_than`. False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.replicas - more_than) >= count, seconds)

    def _work(self, number: int) -> None:
        draw = random.Random(number)
        while not self._is_over:
            end = self._request(draw.choice(QUESTIONS), streamed=draw.random() < 0.7)
            with self._changed:
                self.ends.append(end)
                if end.replica:
                    self.replicas.add(end.replica)
                self._changed.notify_all()
            if end.kind == "error before":
                time.sleep(0.5)

    def _request(self, question: str, *, streamed: bool) -> End:
        began, replica, text = time.perf_counter(), "", ""
        parts: list[str] = []

        def end(kind: str, error: str = "") -> End:
            return End(kind, streamed, round(time.perf_counter() - began, 3), error[:300], replica)

        try:
            replica, text = self._ask(question, streamed=streamed, parts=parts)
        except openai.APITimeoutError as error:
            return end("lost", f"no end: {error!r}")
        except openai.OpenAIError as error:
            return end("error after" if parts else "error before", f"{type(error).__name__}: {error}")
        except Exception as error:  # not one of the client's: the answer was cut off
            return end("lost", repr(error))
        is_right = text == self._expected[question]
        return end("whole") if is_right else end("lost", f"without an error: {text!r}")

    def _ask(self, question: str, *, streamed: bool, parts: list[str] | None = None) -> tuple[str, str]:
        """(name of the replica, text). parts: gets the deltas of a stream."""
        raw: Any = self._client.chat.completions.with_raw_response.create(
            model=NAME,
            messages=[{"role": "user", "content": question}],
            max_tokens=self._tokens,
            stream=streamed,
            extra_body={"ignore_eos": True},
        )
        replica, answer = raw.headers.get("x-replica", ""), raw.parse()
        if not streamed:
            return replica, answer.choices[0].message.content or ""
        parts = [] if parts is None else parts
        is_finished = False
        for chunk in answer:
            parts.append(chunk.choices[0].delta.content or "")
            is_finished = is_finished or chunk.choices[0].finish_reason is not None
        return replica, "".join(parts) if is_finished else "(no finish reason)"


def replicas_of(server: int) -> list[int]:
    """Processes of engines among the descendants of the server's process."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
                stat = (folder / "stat").read_text()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])

    def descends(pid: int) -> bool:
        while pid > 1 and pid != server:
            pid = parents.get(pid, 0)
        return pid == server

    return [pid for pid, name in names.items() if REPLICA in name and descends(pid)]


class Halts:
    """Seconds in which this process did not run, although it should have."""

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            time.sleep(1)
            late = time.perf_counter() - began - 1
            self.seconds += late if late > 5 else 0


def kill_all(load: Load, server: int, given: argparse.Namespace, halts: Halts, show: Any) -> list[dict[str, Any]]:
    """One record for each kill."""
    draw, kills = random.Random(given.seed), []
    if not load.wait_for_replicas(set(), 2, given.seconds):
        raise SystemExit(f"only {load.replicas} have answered")
    while len(kills) < given.kills:
        time.sleep(draw.uniform(1, 5))
        before = set(load.replicas)
        count = 2 if len(kills) % 5 == 4 and len(kills) + 1 < given.kills else 1
        victims = draw.sample(replicas_of(server), count)
        began, halted = time.perf_counter(), halts.seconds
        for place, victim in enumerate(victims):
            time.sleep(draw.uniform(0.2, 1.5) if place else 0)
            os.kill(victim, signal.SIGKILL)
        is_back = load.wait_for_replicas(before, count, given.seconds)
        time.sleep(1)  # a halt that has just ended is counted
        seconds = round(time.perf_counter() - began - (halts.seconds - halted) - 1, 1)
        kills += [{"with": count - 1, "seconds_until_new_ones_answer": seconds if is_back else None}] * count
        show(kills)
        if not is_back:
            break
    return kills


def report(load: Load, kills: list[dict[str, Any]], halts: Halts, start_seconds: float) -> dict[str, Any]:
    kinds = Counter(end.kind for end in load.ends)
    return {
        "kills": len(kills),
        "requests": len(load.ends),
        "ends": dict(kinds),
        "streamed": dict(Counter(end.kind for end in load.ends if end.streamed)),
        "errors": dict(Counter(end.error for end in load.ends if end.error and end.kind != "lost").most_common(8)),
        "lost": [asdict(end) for end in load.ends if end.kind == "lost"],
        "longest_request_seconds": max((end.seconds for end in load.ends), default=0),
        "halted_seconds": round(halts.seconds),
        "start_seconds": round(start_seconds, 1),
        "kills_in_order": kills,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=600, help="in which a new replica has to answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, halts = time.perf_counter(), Halts()
    options = ("--served-model-name", NAME, "--dtype", "float32", "--kv-cache-memory", "16MiB")
    with serving("--replicas", "2", *options) as server:
        started = time.perf_counter() - began - halts.seconds
        load = Load(server.url, given.tokens)
        load.learn()
        threads = load.start(given.clients)

        def show(kills: list[dict[str, Any]]) -> None:
            made = report(load, kills, halts, started)
            print(json.dumps({**made, "kills_in_order": kills[-1:]}), flush=True)
            if given.json:
                given.json.write_text(json.dumps(made, indent=2) + "\n")

        kills = kill_all(load, server.pid, given, halts, show)
        time.sleep(3)
        load.stop()
        for thread in threads:
            thread.join(SECONDS)
        hanging = sum(thread.is_alive() for thread in threads)
        show(kills)
    print(f"{hanging} requests hang, the server's status is {server.status}")
    return int(bool(hanging or server.status or len(kills) < given.kills or any(e.kind == "lost" for e in load.ends)))


if __name__ == "__main__":
    sys.exit(main())
