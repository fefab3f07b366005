"""Random JSON schemas and regular expressions: every random answer has to be valid for `jsonschema` or `re`.

    python scripts/check_grammars.py --schemas 10000 --regexes 1000

Each constraint is refused with a ValueError, or its answers are judged. Says what was refused, and how often; exits
with status 1 if an answer is wrong. A constraint is made from its number alone, so that one can be repeated: --first,
--schemas 1. More formats of strings are judged with rfc3339-validator, rfc3986-validator, fqdn and isoduration.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from transformers import AutoTokenizer

from hf_paged.generation.sampling import constraints
from tests.generation import random_constraints
from tests.generation.random_constraints import Answers, bytes_tokenizer

QA = str(Path(__file__).parent.parent / "examples" / "pydoc-lm-qa")


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


def check(kind: str, numbers: range, count: int) -> int:
    """Returns how many answers are wrong."""
    vocabularies = [Answers(AutoTokenizer.from_pretrained(QA)), Answers(bytes_tokenizer(0))]
    refused: Counter[str] = Counter()
    wrong = unjudged = asked = 0
    for number in numbers:
        rnd = Random(number)
        judge: Callable[[str], str | None]
        if kind == "schemas":
            given: Any = random_constraints.schema(rnd)
            strict = rnd.random() < 0.5
            constraint = constraints.json_schema(given, strict=strict)
            judge = lambda text, schema=given: random_constraints.fault(schema, text)  # noqa: E731
        else:
            given = random_constraints.regex(rnd)
            try:
                pattern = re.compile(given)
                constraint = constraints.regex(given)
            except (re.error, ValueError):  # no regular expression, or an empty one
                continue
            judge = lambda text, pattern=pattern: random_constraints.fault_of_text(pattern, text)  # noqa: E731
        asked += 1
        try:
            texts = vocabularies[number % 2].some(constraint, rnd, count)
        except UnicodeDecodeError as error:
            print(f"{kind} {number}: {error}: {json.dumps(given)}")
            wrong += 1
            continue
        except ValueError as error:
            refused[re.sub(r"\(at .*?\)|\d+|/.*/|constant .*|\{.*|'[^a-zA-Z$]*?'", "_", str(error))[:100]] += 1
            continue
        for text in texts:
            try:
                with limited(3):
                    fault = judge(text)
            except TimeoutError:
                unjudged += 1
                continue
            if fault:
                wrong += 1
                print(f"{kind} {number}: {fault}\n  {json.dumps(given, ensure_ascii=False)}\n  {text!r}")
    finished, cut = (sum(getattr(each, name) for each in vocabularies) for name in ("finished", "cut"))
    print(
        f"{asked} {kind}, {refused.total()} refused; {finished} answers finished, {cut} too long, {unjudged} not judged"
    )
    print(f"{wrong} wrong")
    for why, times in refused.most_common(40):
        print(f"  {times:5d} refused: {why}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=0)
    parser.add_argument("--regexes", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--answers", type=int, default=4, help="to each of them")
    given = parser.parse_args()
    wrong = 0
    for kind in ("schemas", "regexes"):
        numbers = range(given.first, given.first + getattr(given, kind))
        wrong += check(kind, numbers, given.answers) if numbers else 0
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
