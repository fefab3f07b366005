"""Sends random requests to `hf-paged serve`, as its own /openapi.json describes them, and checks every answer with
schemathesis: no status 5xx, no status or content that is not described, every body and every event of a stream as its
schema says.

    python -m venv fuzz && fuzz/bin/pip install schemathesis
    .venv/bin/python scripts/fuzz_api.py --schemathesis fuzz/bin/schemathesis --cases 10000

Schemathesis has an environment of its own, because its dependencies may not suit the project's. The seed of a run that
finds something is printed; `--seed` repeats it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.server_process import serving

ADMIN = "the-admin-key"
OPTIONS = (
    *("--api-key", "a-key", "--admin-key", ADMIN),
    # Small, so that a random request ends soon.
    *("--max-model-len", "96", "--default-max-tokens", "8", "--log-level", "info"),
)
EXCLUDED = (
    # A field may be fine alone and contradict another one, which a JSON schema cannot say.
    *("--exclude-checks", "positive_data_acceptance"),
    # Everything else would wait for /resume.
    *("--exclude-path", "/pause"),
)
# It would stop reading a stream after 20 events.
CONFIG = "max-stream-events = 1000000\n"
HOOKS = """
import json
import random

import jsonschema_rs
import schemathesis

SIMPLE = {
    "messages": [{"role": "user", "content": "What is a list?"}],
    "prompt": "A list is",
    "input": [{"role": "user", "content": "What is a list?"}],
}
LEAST = ("tokens", "lora_name", "lora_path")

@schemathesis.hook
def before_call(context, case, kwargs):
    # A body with every field at once is always refused. Half of the valid ones keep a few, and often a simple prompt.
    body = case.body
    if not isinstance(body, dict) or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    draw = random.Random(json.dumps(body, sort_keys=True, default=str))
    if draw.random() < 0.5:
        return
    names = sorted(name for name in body if name not in SIMPLE and name not in LEAST and name != "model")
    kept = set(draw.sample(names, min(len(names), draw.randrange(6))))
    case.body = {name: value for name, value in body.items() if name in kept or name in SIMPLE or name in LEAST}
    for name, value in SIMPLE.items():
        if name in case.body and draw.random() < 0.7:
            case.body[name] = value
    if case.operation.path.startswith("/v1/") and "lora_name" not in body and draw.random() < 0.5:
        case.body["stream"] = True

@schemathesis.check
def events_match_their_schema(ctx, response, case):
    if response.status_code != 200 or "text/event-stream" not in response.headers["content-type"][0]:
        return
    raw = case.operation.schema.raw_schema
    described = raw["paths"][case.operation.path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    data = described["properties"]["data"]
    ending = data["anyOf"][0]["const"] if "anyOf" in data else None
    content = (data["anyOf"][1] if ending else data)["contentSchema"]
    validator = jsonschema_rs.Draft202012Validator({**content, "components": raw["components"]})
    *events, rest = response.content.decode().split("\\n\\n")
    assert rest == "" and events, "a stream that ends within an event"
    data = [event.splitlines()[-1].removeprefix("data: ") for event in events]
    if ending:
        assert data.pop() == ending
    parsed = [json.loads(each) for each in data]
    for each in parsed:
        validator.validate(each)
    if "sequence_number" in parsed[0]:
        assert [each["sequence_number"] for each in parsed] == list(range(len(parsed)))
"""


def fuzz(schemathesis: str, url: str, hooks: Path, examples: int, seed: int) -> tuple[int, bool]:
    """The number of cases, and whether all answers were as described."""
    command = [schemathesis, "run", f"{url}/openapi.json", "--checks", "all", *EXCLUDED]
    command += ["-n", str(examples), "--seed", str(seed), "-H", f"Authorization: Bearer {ADMIN}"]
    command += [
        "--request-timeout",
        "60",
        "--max-response-time",
        "60",
        "--continue-on-failure",
        "--warnings",
        "off",
        "--no-color",
    ]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=hooks.parent,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(hooks), "PYTHONPATH": ""},
    )
    found = re.search(r"([\d,]+) generated", done.stdout)
    if done.returncode:
        print(done.stdout)
    return int(found[1].replace(",", "")) if found else 0, done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default="schemathesis", help="its command")
    parser.add_argument("--cases", type=int, default=10_000, help="requests at least")
    parser.add_argument("--examples", type=int, default=300, help="requests for each route and round")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    command = shutil.which(given.schemathesis)
    if command is None:
        parser.error(f"--schemathesis {given.schemathesis}: there is no such command")
    command = os.path.abspath(command)  # it runs in another folder
    total, seed, is_good = 0, given.seed, True
    with serving(*OPTIONS) as server, tempfile.TemporaryDirectory() as folder:
        hooks = Path(folder) / "hooks.py"
        hooks.write_text(HOOKS)
        (Path(folder) / "schemathesis.toml").write_text(CONFIG)
        while is_good and total < given.cases:
            cases, is_good = fuzz(command, server.url, hooks, given.examples, seed)
            total += cases
            print(f"seed {seed}: {cases} cases, {'all' if is_good else 'not all'} answers as described", flush=True)
            if not cases:
                is_good = False
            seed += 1
    faults = [line for line in server.lines if "Traceback" in line or " failed" in line]
    print(f"{total} cases; {len(faults)} faults in the server's log; its exit status was {server.status}")
    print("".join(faults[:20]), end="")
    return 0 if is_good and not faults and server.status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
