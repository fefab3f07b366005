"""Engines beside one another on one checkpoint: each in its own process, in turns, with the same prompts and counts.

    python scripts/real_models.py smollm2
    python benchmarks/peers.py build/real/smollm2 --systems engine:fp32,plain:fp32,hf-cb:fp32
    python benchmarks/peers.py build/real/smollm2 --systems engine:int4,llama.cpp:int4 --llama-cpp FOLDER --isa avx2

A system is ENGINE:FORM; engines.py has the engines, a form is fp32, bf16, int8 or int4. An engine's own Python is given
by `--python openvino=env/bin/python`, llama.cpp's libraries by `--llama-cpp`. In each round every system has one turn.
Before the rounds each makes two tokens of the same prompts, which are not timed, as loading is not. A system that waits
is stopped. Each system and case adds a line of JSON to `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
AVX2 = {
    "HF_PAGED_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OV_CPU_MAX_ISA": "AVX2",
}  # fmt: skip
"""What makes the engines leave AVX-512 alone. OpenVINO's products in fp32 (MLAS) heed none of them."""


class Peer:
    """An engine in a process of its own, stopped between jobs. folder: of a checkpoint. own: its Python; None = this
    one. Its figures after `__init__`: `start_up` seconds, `version`, and `peak_bytes` of memory while it loaded.

    Raises SystemExit if the process ends, ValueError with the engine's reason if it refuses.
    """

    def __init__(
        self, engine: str, folder: str, form: str, *, own: str | None = None, threads: int = 1, isa: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **(AVX2 if isa else {})}
        if own is not None:
            env.pop("PYTHONPATH", None)
        # -P: this folder has modules with the names of packages that engines import.
        command = [own or sys.executable, "-P", str(HERE / "engines.py"), engine]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        self._is_stopped = False
        try:
            started = self.ask(folder=folder, form=form, threads=threads, options=options or {})
        except BaseException:
            self.close()  # a stopped process would stay, and whoever reads its output would wait for it
            raise
        self.start_up: float = started["seconds"]
        self.version: str = started["version"]
        self.peak_bytes: int = started["peak_bytes"]

    def ask(self, **job: Any) -> dict[str, Any]:
        """The answer to a job of engines.py: `seconds`, `tokens`, `peak_bytes` and what the engine adds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with exit status {self._process.wait()}")
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer

    def run(self, prompts: list[list[int]], counts: list[int], **job: Any) -> tuple[float, list[int]]:
        """Seconds for all prompts at once, and the number of tokens of each one's first output."""
        answer = self.ask(prompts=prompts, counts=counts, **job)
        return answer["seconds"], [len(outputs[0]) for outputs in answer["tokens"]]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Some engines look for work in a loop, or have processes of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def saved(model: Any, tokenizer: Any = None) -> Iterator[str]:
    """The folder of a checkpoint of this model, for peers."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        yield folder


class Case(NamedTuple):
    """Prompts of such lengths, which get so many new tokens each. is_rate_of_prompt: what is timed is the prompt. task:
    what the prompt asks for, before a piece of text. options: of the job."""

    lengths: list[int]
    counts: list[int]
    samples: int = 1
    beams: int = 1
    is_rate_of_prompt: bool = False
    task: str = ""
    options: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths) if self.is_rate_of_prompt else self.samples * sum(self.counts)


EDIT = Case([256], [128], task="Write this text again, with commas where they are missing:\n\n")


def cases() -> dict[str, Case]:
    """The 64 requests have the lengths of ShareGPT, in a fourteenth: 722 tokens of prompts and 1,514 of answers."""
    sys.path.insert(0, str(HERE))
    import workloads

    requests = workloads.synthesise("sharegpt", 64, scale=0.07)
    return {
        "prompt of 512": Case([512], [1], is_rate_of_prompt=True),
        "one request": Case([32], [64]),
        "64 requests": Case([each.input_length for each in requests], [each.output_length for each in requests]),
        "8 samples": Case([64], [48], samples=8),
        "4 beams": Case([64], [48], beams=4),
        "prompt of 2,048": Case([2048], [1], is_rate_of_prompt=True),
        "edit": EDIT,
        "edit, prompt lookup": EDIT._replace(options={"prompt_lookup_num_tokens": 7}),
    }


def prompts_of(checkpoint: str, case: Case) -> list[list[int]]:
    """Pieces of the pages in docs/, none of which begins like another one; a task asks for something in a chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "".join(file.read_text() for file in sorted((HERE.parent / "docs").glob("*.md")))[:200_000]
    ids = list(tokenizer(text)["input_ids"])
    starts = random.Random(0).sample(range(0, len(ids) - 2048, 64), len(case.lengths))
    pieces = [ids[start : start + length] for start, length in zip(starts, case.lengths)]
    if not case.task:
        return pieces
    chats = [[{"role": "user", "content": case.task + tokenizer.decode(piece)}] for piece in pieces]
    made = (tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats)
    return [list(each["input_ids"]) for each in made]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, family = fields.get("model name", platform.machine()), fields.get("cpu family", "")
    return f"{name}, family {family}, model {fields.get('model', '')}, {os.cpu_count()} cores seen"


def about() -> dict[str, Any]:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "commit": commit}


@contextlib.contextmanager
def opened(system: str, args: argparse.Namespace) -> Iterator[Peer | None]:
    """The system of a command; None if it refuses, after its reason was printed."""
    engine, form = system.split(":")
    own = dict(each.split("=", 1) for each in args.python).get(engine)
    options = {"library": args.llama_cpp} if engine == "llama.cpp" else json.loads(args.options).get(engine)
    try:
        peer = Peer(engine, args.checkpoint, form, own=own, threads=args.threads, isa=args.isa, options=options)
    except ValueError as refused:
        print(f"{system}: {refused}", flush=True)
        yield None
        return
    try:
        yield peer
    finally:
        peer.close()


def write(args: argparse.Namespace, figures: dict[str, Any], peer: Peer) -> None:
    """Print figures of a system, and append them with what they depend on to the results."""
    print(json.dumps(figures), flush=True)
    if args.out:
        shared = {"checkpoint": Path(args.checkpoint).name, "threads": args.threads, "isa": args.isa or "all"}
        line = {
            **figures,
            "version": peer.version,
            "load_peak_mib": round(peer.peak_bytes / 2**20),
            **shared,
            **about(),
        }
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measured(peers: dict[str, Peer], case: Case, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """System -> its figures of this case: medians of the rounds."""
    job: dict[str, Any] = {
        "prompts": prompts_of(args.checkpoint, case), "samples": case.samples, "beams": case.beams,
        "options": case.options and [case.options] * len(case.counts),
    }  # fmt: skip
    answers: dict[str, list[dict[str, Any]]] = {}
    for system, peer in peers.items():
        try:
            peer.ask(**job, counts=[min(count, 2) for count in case.counts])
            answers[system] = []
        except ValueError as refused:
            print(f"{system}: {refused}", flush=True)
    for _ in range(args.rounds):
        for system, found in answers.items():
            found.append(peers[system].ask(**job, counts=case.counts))
    return {system: _figures(case, found) for system, found in answers.items()}


def _figures(case: Case, found: list[dict[str, Any]]) -> dict[str, Any]:
    lengths = [[len(each) for each in outputs] for outputs in found[-1]["tokens"]]
    assert lengths == [[count] * case.samples for count in case.counts], f"another number of tokens: {lengths}"
    seconds = [each["seconds"] for each in found]
    median = statistics.median(seconds)
    figures = {
        "tokens_per_s": round(case.tokens / median, 1), "seconds": round(median, 3),
        "all_seconds": [round(each, 3) for each in seconds],
        "peak_mib": round(max(each["peak_bytes"] for each in found) / 2**20),
    }  # fmt: skip
    if "kv_bytes" in found[-1]:
        figures["kv_mib"] = round(found[-1]["kv_bytes"] / 2**20, 1)
    return figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every benchmark with peers."""
    parser.add_argument("checkpoint")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["engine:fp32", "plain:fp32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=["", "avx2"], default="", help="avx2: without AVX-512 and AMX")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    parser.add_argument("--llama-cpp", help="the folder of llama.cpp's shared libraries")
    parser.add_argument("--options", default="{}", help="JSON: engine -> options of its own")
    parser.add_argument("--out", type=Path, help="a file that gets a line of JSON for each figure")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--cases", type=lambda text: text.split(";"), default=list(cases())[:5], help="separated by semicolons"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        found = {system: stack.enter_context(opened(system, args)) for system in args.systems}
        peers = {system: peer for system, peer in found.items() if peer is not None}
        for name in args.cases:
            for system, figures in measured(peers, cases()[name], args).items():
                write(args, {"case": name, "system": system, **figures}, peers[system])


if __name__ == "__main__":
    main()
