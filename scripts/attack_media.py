"""Send files that take long to read, and patterns that take long to match, to `hf-paged serve`, while a neighbour asks
a small question each second.

    python scripts/attack_media.py --log benchmarks/results/attack-media.json

Two servers with tiny random models: one sees, one hears. For each attack the answers by status, the seconds until the
last one, what the neighbour waited (median, p99, longest), how often its answer was another one than before, and the
peak of the memory of all the server's processes. Exits with 1 if the neighbour waited for longer than `--patience`, or
got another answer.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import numpy as np
import psutil
import soundfile
from PIL import Image

from scripts.server_process import serving
from tests.serving import hearing, seeing

FULL = 24 * 2**20  # a MiB less than the server takes
ADMIN, STRANGER, NEIGHBOUR = "an-admin-key-1", "a-strangers-key", "a-neighbours-key"
Ask = Callable[[httpx.Client], httpx.Response]


# -- what is sent ----------------------------------------------------------------------------------------------------


def heard(data: bytes, client: httpx.Client) -> httpx.Response:
    form: dict[str, Any] = {"files": {"file": ("a", data)}, "data": {"model": "m", "language": "en"}}
    return client.post("/v1/audio/transcriptions", **form)


def seen(data: bytes, client: httpx.Client) -> httpx.Response:
    body = {"model": "m", "messages": seeing.messages(seeing.url(data)), "max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def constrained(fields: dict[str, Any], client: httpx.Client) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 40, "seed": 1, **fields})


def adapter(folder: Path, pattern: str, client: httpx.Client) -> httpx.Response:
    """Load an adapter whose config names its modules by this pattern."""
    folder = folder / str(abs(hash(pattern)))
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": pattern, "base_model_name_or_path": "m"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    body = {"lora_name": folder.name, "lora_path": str(folder)}
    return client.post("/v1/load_lora_adapter", json=body, headers={"authorization": f"Bearer {ADMIN}"})


@cache
def silence() -> bytes:
    """119 seconds of 192,000 samples a second in 8 channels: 366 MB in 188 KB."""
    data = io.BytesIO()
    with soundfile.SoundFile(data, "w", 192_000, 8, format="FLAC", subtype="PCM_16") as file:
        for _ in range(119):
            file.write(np.zeros((192_000, 8), np.int16))
    return data.getvalue()


def wav_of_empty_chunks() -> bytes:
    head = b"RIFF" + (FULL - 8).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\1\0\1\0" + b"\x80>\0\0\0}\0\0\2\0\x10\0"
    return head + b"junk\0\0\0\0" * ((FULL - len(head)) // 8)


def flac_of_empty_metadata() -> bytes:
    head = silence()[:42]
    return head + b"\1\0\0\0" * ((FULL - len(head)) // 4)


@cache
def scans() -> bytes:
    """A progressive JPEG of 16 megapixels and 1.4 MB that draws its last scan again and again."""
    shades = np.zeros((4096, 4096, 3), np.uint8)
    shades[:400] = np.random.default_rng(0).integers(0, 256, (400, 4096, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "JPEG", progressive=True, quality=1)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * min(85, (1_400_000 - len(data)) // len(last)) + data[-2:]


BACKTRACKING = ("(.*)*(.*)*(.*)*(.*)*x", "(a|aa)+b|((.+)+)+q", r"(\w+\.?)+\w+X")
PATTERNS = ("(a+)+(a+)+(a+)+b", "((a|aa)+)+b", "(x+x+)+y", "(a?){60}a{60}", "((a{1,100}){1,100}){1,100}", ".*a.{20}b")


def structured(pattern: str) -> list[dict[str, Any]]:
    """The pattern alone, and in a schema."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}, "required": ["x"]}
    return [{"structured_outputs": {"regex": pattern}}, {"structured_outputs": {"json": schema}}]


def attacks(folder: Path) -> dict[str, dict[str, list[Ask]]]:
    """By server and name: what is sent at once."""
    return {
        "sees": {
            "twelve JPEGs of 1.4 MB with repeated scans": [partial(seen, scans())] * 12,
            "adapters whose patterns backtrack": [partial(adapter, folder, each) for each in BACKTRACKING],
            "patterns of answers that backtrack": [
                partial(constrained, fields) for each in PATTERNS for fields in structured(each)
            ],
        },
        "hears": {
            "three files of OggS, 24 MiB": [partial(heard, b"OggS" * (FULL // 4))] * 3,
            "six FLACs of 119 s, 192 kHz, 8 channels": [partial(heard, silence())] * 6,
            "three WAVs of empty chunks, 24 MiB": [partial(heard, wav_of_empty_chunks())] * 3,
            "three FLACs of empty metadata, 24 MiB": [partial(heard, flac_of_empty_metadata())] * 3,
        },
    }


# -- servers ---------------------------------------------------------------------------------------------------------


def save(kind: str, folder: Path) -> Ask:
    """Write the checkpoint of a server, and return the neighbour's question."""
    if kind == "sees":
        seeing.model().save_pretrained(folder)
        seeing.processor().save_pretrained(folder)
        return partial(seen, seeing.picture())
    model = hearing.model()
    model.generation_config._from_model_config = False  # else its fields are not read again
    model.save_pretrained(folder)
    hearing.tokenizer().save_pretrained(folder)
    hearing.extractor().save_pretrained(folder)
    data = io.BytesIO()
    soundfile.write(data, hearing.noise(0.5), hearing.RATE, format="WAV")
    return partial(heard, data.getvalue())


def memory_of(pid: int) -> int:
    found = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss
    return found


@contextmanager
def neighbour(ask: Ask, client: httpx.Client, pid: int) -> Iterator[dict[str, Any]]:
    """Asks each second within the block; the record is complete after it."""
    first, ended = ask(client).raise_for_status(), threading.Event()
    found: dict[str, Any] = {"others": 0, "memory": 0}
    waited: list[float] = []

    def run() -> None:
        while not ended.wait(max(1 - (waited[-1] if waited else 0), 0)):
            start = time.perf_counter()
            answer = ask(client)
            waited.append(time.perf_counter() - start)
            found["others"] += text_of(answer) != text_of(first)

    def watch() -> None:
        while not ended.wait(0.1):
            found["memory"] = max(found["memory"], memory_of(pid))

    threads = [threading.Thread(target=each) for each in (run, watch)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        time.sleep(1.5)
        ended.set()
        for thread in threads:
            thread.join()
    waited.sort()
    found |= {"asked": len(waited), "median": waited[len(waited) // 2], "p99": waited[int(len(waited) * 0.99)]}
    found["longest"] = waited[-1]


def text_of(answer: httpx.Response) -> Any:
    body = answer.json()
    return body.get("text", body.get("choices"))


def attack(url: str, pid: int, ask: Ask, sent: list[Ask]) -> dict[str, Any]:
    of = [
        {"base_url": url, "timeout": 600, "headers": {"authorization": f"Bearer {key}"}}
        for key in (STRANGER, NEIGHBOUR)
    ]
    client, other, pool = httpx.Client(**of[0]), httpx.Client(**of[1]), ThreadPoolExecutor(len(sent))
    with client, other, pool, neighbour(ask, other, pid) as found:
        start = time.perf_counter()
        answers = list(pool.map(lambda each: each(client), sent))
        found["seconds"] = time.perf_counter() - start
    found["statuses"] = dict(Counter(answer.status_code for answer in answers))
    errors = (answer.json() for answer in answers if answer.status_code != 200)
    found["errors"] = sorted({str(error.get("error", error))[:200] for error in errors})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--only", default="", help="attacks with this in their names")
    parser.add_argument("--patience", type=float, default=1.0, help="seconds that the neighbour may wait")
    options = parser.parse_args()
    records: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        for kind, each in attacks(Path(made)).items():
            chosen = {name: sent for name, sent in each.items() if options.only in name}
            if not chosen:
                continue
            folder = Path(made) / kind
            ask = save(kind, folder)
            flags = ("--served-model-name", "m", "--admin-key", ADMIN, "--kv-cache-memory", "64MiB")
            flags += ("--api-key", STRANGER, "--api-key", NEIGHBOUR)
            with serving(*flags, checkpoint=folder) as server:
                for name, sent in chosen.items():
                    records[name] = attack(server.url, server.pid, ask, sent)
                    print(json.dumps({name: records[name]}), flush=True)
    if options.log:
        options.log.write_text(json.dumps(records, indent=1) + "\n")
    return int(any(record["p99"] > options.patience or record["others"] for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
