"""Random JSON schemas and regular expressions: every random answer has to be valid for `jsonschema` or `re`.

    python scripts/check_grammars.py --schemas 10000 --regexes 1000
    python scripts/check_grammars.py --schemas 10000 --regexes 1000 --door engine

Each constraint is refused with a ValueError that names a keyword of it, or its answers are judged. Says what was
refused, and how often; exits with status 1 if an answer or a refusal is wrong. The doors: "matcher" draws tokens from
the masks alone; "generate", "engine" and "server" have a tiny model, samples and beams. The server's memory is printed
after each tenth; with --times 5 it gets each constraint five times, in turns.

A constraint is made from its number alone, so that one can be repeated: --first, --schemas 1. More formats of strings
are judged with rfc3339-validator, rfc3986-validator, fqdn and isoduration.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import jsonschema

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts import grammar_doors as doors
from scripts.grammar_doors import Answers, Question
from tests.generation import random_constraints

CHECKED_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """`re` may take for ever to judge an answer."""

    def end(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def questions_of(kind: str, numbers: Iterable[int]) -> Iterator[Question]:
    for number in numbers:
        rnd = Random(number)
        if kind == "json_schema":
            yield Question(number, kind, random_constraints.schema(rnd), strict=rnd.random() < 0.5)
            continue
        given = random_constraints.regex(rnd)
        try:
            re.compile(given)
        except re.error:
            continue
        if given:
            yield Question(number, kind, given)


def fault(question: Question, text: str) -> str | None:
    if question.kind == "regex":
        return None if re.fullmatch(question.given, text) else "no match"
    return random_constraints.fault(question.given, text)


def an_answer(schema: Any, rnd: Random) -> Any:
    """A value that is valid for the schema, if one is found among its own constants and some simple values; or None.
    None too if the schema has a format that `jsonschema` does not check here."""
    if any(
        f'"format": "{name}"' in json.dumps(schema)
        for name in random_constraints.FORMATS
        if name not in CHECKED_FORMATS
    ):
        return None
    tried = [
        *_constants(schema),
        *([], {}, "", "a", "aa", 0, 1, 5, -3, 2.5, True),
        *(random_constraints._value(rnd) for _ in range(100)),
    ]
    for value in tried:
        if value is not None and random_constraints.fault_of_value(schema, value) is None:
            return value
    return None


def _constants(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield from schema["enum"] if isinstance(schema.get("enum"), list) else ()
        yield from [schema["const"]] if "const" in schema else ()
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _constants(each)


def fault_of_refusal(question: Question, why: str) -> str | None:
    """A refusal names a keyword of the schema, or what a regular expression has, or there is no answer (to a schema
    that it refers to, which need not be used)."""
    if "has no answer" in why or "has no finite answer" in why:
        found = an_answer(question.given, Random(question.number)) if question.kind != "regex" else None
        is_closed = question.strict and isinstance(found, dict)
        return (
            None
            if found is None or is_closed or '"$ref":' in json.dumps(question.given)
            else f"there is an answer: {json.dumps(found)}"
        )
    if question.kind == "regex":
        return None if "cannot be followed: " in why else "it names nothing"
    named = re.findall(r"'([^']+)'", why.partition("the schema's keyword")[2])
    if not any(f'"{each}":' in json.dumps(question.given) for each in named):
        return "it names no keyword of the schema"
    return None


class Tally:
    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.finished = self.cut = self.unjudged = self.wrong = self.num_refused = 0

    def add(self, question: Question, answers: Answers) -> None:
        self.asked[question.kind] += 1
        self.cut += answers.cut
        self.finished += len(answers.texts)
        if answers.refused is not None:
            self.num_refused += 1
            why = answers.refused
            self.refused[re.sub(r"\(at .*?\)|\d+|/.*/|constant .*|\{.*|'[^a-zA-Z$]*?'", "_", why)[:80]] += 1
            if found := fault_of_refusal(question, why):
                self._is_wrong(question, f"refused, but {found}", why)
        if answers.failed is not None:
            self.failed[answers.failed[:100]] += 1
            if "takes too long" not in answers.failed:
                self._is_wrong(question, "failed", answers.failed)
        for text in answers.texts:
            try:
                with limited(3):
                    found = fault(question, text)
            except TimeoutError:
                self.unjudged += 1
                continue
            if found:
                self._is_wrong(question, found, text)

    def _is_wrong(self, question: Question, why: str, text: str) -> None:
        self.wrong += 1
        given = json.dumps(question.given, ensure_ascii=False)
        print(f"{question.kind} {question.number} {question.mode}: {why}\n  {given}\n  {text!r}", flush=True)

    def report(self) -> str:
        asked = ", ".join(f"{count} {kind}" for kind, count in self.asked.items())
        return (
            f"{asked}: {self.num_refused} refused, {self.failed.total()} failed; {self.finished} answers finished, "
            f"{self.cut} too long, {self.unjudged} not judged\n{self.wrong} wrong"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--regexes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--times", type=int, default=1, help="how often each of them is asked for")
    parser.add_argument("--door", choices=("matcher", "generate", "engine", "server"), default="matcher")
    parser.add_argument("--vocabulary", choices=doors.VOCABULARIES, help="default: each for half of the constraints")
    given = parser.parse_args()
    counts = {"json_schema": given.schemas, "regex": given.regexes}
    tally, began = Tally(), time.monotonic()
    for place, vocabulary in enumerate(doors.VOCABULARIES):
        if given.vocabulary not in (None, vocabulary):
            continue
        step = len(doors.VOCABULARIES) if given.vocabulary is None else 1
        asked = [
            question
            for kind, count in counts.items()
            for question in questions_of(kind, range(given.first, given.first + count))
            if step == 1 or question.number % step == place
        ]
        Random(0).shuffle(asked)
        door = getattr(doors, given.door)
        for question, answers in door(doors.repeated(asked, given.times), vocabulary):
            tally.add(question, answers)
    print(f"{given.door}, {time.monotonic() - began:.0f} s: {tally.report()}")
    for name, found in (("refused", tally.refused), ("failed", tally.failed)):
        for why, times in found.most_common(40):
            print(f"  {times:5d} {name}: {why}")
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
