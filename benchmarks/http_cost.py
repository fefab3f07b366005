"""What HTTP costs: the throughput of `hf-paged serve`, with answers as streams and whole, and of the engine alone.

Both run the same requests, all at the start, greedy and at full length, in processes of their own and in turns. Random
weights of the given shape; a synthetic tokenizer with the model's vocabulary, so that every token has text.

    python benchmarks/http_cost.py --model 135m --workload sharegpt --scale 0.25 --requests 64 --runs 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))

import servers
import throughput

from hf_paged.load import client, workloads

OFFLINE = """
import json, sys, time
folder, job = sys.argv[1], json.loads(open(sys.argv[2]).read())
import torch, transformers, hf_paged
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
def config(n):
    none = model.config.vocab_size  # no token ends a text
    return transformers.GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=[none])
with hf_paged.Engine(model) as engine:
    engine.generate([[5] * 8], config(4), progress=False)
    start, cpu = time.perf_counter(), time.process_time()
    outputs = engine.generate(job["prompts"], [config(n) for n in job["lengths"]], progress=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}))
"""


def run_offline(folder: str, job: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", OFFLINE, folder, str(job)], capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def streamed(endpoint: client.Endpoint, requests: list[client.Planned]) -> int:
    """Answers as server-sent events. The client reads them without parsing: on a machine with few cores its own work
    would count as the server's."""
    host, port = endpoint.base_url.removeprefix("http://").split(":")

    async def one(request: client.Planned) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(endpoint.body(request)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        parts = []
        while part := await reader.read(1 << 16):
            parts.append(part)
        writer.close()
        return b"".join(parts)

    tokens = 0
    for answer in await asyncio.gather(*map(one, requests)):
        assert answer.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in answer, answer[-500:]
        tokens += int(re.findall(rb'"completion_tokens":\s*(\d+)', answer)[-1])
    return tokens


async def whole(endpoint: client.Endpoint, requests: list[client.Planned]) -> int:
    """Answers in one piece."""
    async with httpx.AsyncClient(base_url=endpoint.base_url, timeout=600, limits=httpx.Limits()) as http:
        bodies = [{**endpoint.body(request), "stream": False, "stream_options": None} for request in requests]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    return sum(answer.raise_for_status().json()["usage"]["completion_tokens"] for answer in answers)


def run_served(folder: str, requests: list[client.Planned], *, streams: bool) -> dict[str, float]:
    with servers.running(servers.ours(folder)) as server:
        before, started = cpu_seconds(server.pid), time.perf_counter()
        tokens = asyncio.run((streamed if streams else whole)(server.endpoint, requests))
        seconds, cpu = time.perf_counter() - started, cpu_seconds(server.pid) - before
        return {"seconds": seconds, "cpu": cpu, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="135m", help="a shape of throughput.py")
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    lengths = workloads.synthesise(args.workload, args.requests, scale=args.scale)
    prompts = workloads.prompts_for(lengths, 512 if args.model == "tiny" else 49152)
    runs: dict[str, list[dict[str, float]]] = {"offline": [], "streamed": [], "whole": []}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        servers.save_checkpoint(args.model, folder)
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"prompts": prompts, "lengths": [each.output_length for each in lengths]}))
        planned = [client.Planned(0.0, prompt, each.output_length) for prompt, each in zip(prompts, lengths)]
        for _ in range(args.runs):
            runs["offline"].append(run_offline(folder, job))
            runs["streamed"].append(run_served(folder, planned, streams=True))
            runs["whole"].append(run_served(folder, planned, streams=False))
            loads.append(os.getloadavg()[0])
    report(runs, loads)
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": throughput.machine(argparse.Namespace(device="cpu")),
            "options": options,
        }
        args.json.write_text(json.dumps({**about, "loads": loads, "runs": runs}, indent=1) + "\n")


def report(runs: dict[str, list[dict[str, Any]]], loads: list[float]) -> None:
    medians = {}
    for system, each in runs.items():
        medians[system] = {name: statistics.median(run[name] for run in each) for name in ("seconds", "cpu", "tokens")}
        m = medians[system]
        rate = m["tokens"] / m["seconds"]
        print(
            f"{system:8} {m['tokens']:.0f} tokens in {m['seconds']:.2f} s = {rate:.1f} tokens/s, {m['cpu']:.2f} s CPU"
        )
        print("        ", {name: [round(run[name], 2) for run in each] for name in ("seconds", "cpu")})
    for system in ("streamed", "whole"):
        costs = {name: medians[system][name] / medians["offline"][name] - 1 for name in ("seconds", "cpu")}
        print(f"{system}: HTTP costs {costs['seconds']:+.1%} of the time, {costs['cpu']:+.1%} of the server's CPU time")
    print(f"load of the machine: {', '.join(f'{load:.2f}' for load in loads)}")


if __name__ == "__main__":
    main()
