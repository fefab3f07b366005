"""What the scripts of this folder share: the task, which scripts/check_clients.py writes, and the report of each call.

A script gets the task's file as its argument. It prints a line of JSON with the client's version, then one for each
call, and its exit status is 1 if an answer was wrong. This module needs nothing but Python's own library.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# url, key, model, and what plain `generate` answers (check_clients.make_task).
task = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
base_url = f"{task.url}/v1"


def same(answer: Any, expected: Any) -> None:
    if answer != expected:
        raise ValueError(f"the answer is {answer!r}, and not {expected!r}")


def close(answer: Sequence[float], expected: Sequence[float]) -> None:
    """Log-probabilities: equal but for the last bits."""
    if len(answer) != len(expected) or any(abs(a - b) > 1e-3 for a, b in zip(answer, expected)):
        raise ValueError(f"the log-probabilities are {list(answer)}, and not {list(expected)}")


def fails(error: type[Exception], call: Callable[[], Any]) -> None:
    """The call raises this error."""
    try:
        call()
    except error:
        return
    raise ValueError(f"no {error.__name__}")


def run(package: str, *calls: Callable[[], None]) -> None:
    """Make every call, report each, and end the process."""
    print(json.dumps({"version": version(package)}), flush=True)
    failed = 0
    for call in calls:
        error = None
        try:
            call()
        except Exception as raised:  # any error of a client is a result
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
            failed += 1
        print(json.dumps({"call": call.__name__, "error": error}), flush=True)
    sys.exit(1 if failed else 0)
