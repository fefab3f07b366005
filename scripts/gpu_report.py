"""What scripts/gpu_check.sh reports: the device, the layers that our kernels compute, the outcome of the tests, and one
table of all results.

    python scripts/gpu_report.py device --out device.json [--dry-run]
    python scripts/gpu_report.py layers --out layers.json [--dry-run]
    python scripts/gpu_report.py tests tests.xml --out tests.json
    python scripts/gpu_report.py table FOLDER

`device` exits with status 1 if torch sees no device, `layers` if a part of Llama's is left to torch, `tests` if a test
failed or none ran. `table` adds the device, the versions and the commit to every JSON file of the folder and prints
Markdown for docs/gpu.md. `--dry-run` is for a machine without a device. The commit is that of the environment variable
COMMIT, because a copy of the files may have no `.git`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "peft", "vllm", "flashinfer-python", "flash-attn")


def device(*, dry: bool = False) -> dict[str, Any]:
    """The device and the software; raises SystemExit if torch sees no device, unless this is a dry run."""
    import torch

    if dry:
        return {"device": "none (a dry run)", "versions": _versions(), "commit": _commit()}
    if not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no CUDA device: run this on a machine with one, with a CUDA build of torch "
            f"(this is torch {torch.__version__})"
        )
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "versions": _versions(),
        "commit": _commit(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    if given := os.environ.get("COMMIT"):
        return given
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


# Of a Llama of two layers: two norms in each and one at the end.
LLAMA_PARTS = {"norm": 5, "attention": 2, "MLP": 2, "layer": 2}


def layers(device: str = "cuda") -> dict[str, Any]:
    """Which parts of a small Llama in bf16 our kernels compute on the device, and which are left to torch."""
    import torch
    import transformers

    from hf_paged.fused.gpu.model import fused_parts, obstacle

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    reason = obstacle(model)
    parts = fused_parts(model) if reason is None else None
    found = {} if parts is None else parts.counts()
    left = {kind: count - found.get(kind, 0) for kind, count in LLAMA_PARTS.items() if found.get(kind, 0) < count}
    return {"summary": str(parts or reason), "left_to_torch": left}


def layers_without_a_device() -> dict[str, Any]:
    """The same on a CPU, where torch computes what our kernels would."""
    import pytest

    sys.path.insert(0, str(ROOT))
    from tests.fused import fewer

    with pytest.MonkeyPatch.context() as patch:
        fewer.on_cpu(patch, by_torch=True)
        return layers("cpu")


def outcome(reports: list[Path]) -> dict[str, Any]:
    """Counts of JUnit reports, and the message of each test that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures: dict[str, str] = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            problem = next((child for child in case if child.tag in ("failure", "error")), None)
            if problem is not None:
                failures[f"{case.get('classname')}::{case.get('name')}"] = (problem.get("message") or "")[:500]
                counts["failed"] += 1
            else:
                counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return {**counts, "failures": failures}


def table(folder: Path) -> str:
    """Markdown with one line for each result in the folder. Every file gets the device's record first."""
    about = json.loads((folder / "device.json").read_text())
    lines = [
        f"{about['device']}, {', '.join(f'{name} {version}' for name, version in about['versions'].items())}, "
        f"commit {about['commit']}",
        "",
        "| what | result |",
        "|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        if path.name == "device.json":
            continue
        result = json.loads(path.read_text())
        path.write_text(json.dumps({**result, "measured_on": about}, indent=1) + "\n")
        lines += _lines(path.stem, result)
    return "\n".join(lines)


def _lines(name: str, result: dict[str, Any]) -> list[str]:
    if name == "tests":
        return [f"| tests marked `gpu` | {result['passed']} passed, {result['failed']} failed |"]
    if name == "layers":
        left = ", ".join(f"{count} {kind}" for kind, count in result["left_to_torch"].items())
        return [f"| parts of a Llama of two layers left to torch | {left or 'none'} |"]
    if name == "smoke":
        return [f"| checks of the first contact | {result['checks']}, {result['bad']} bad |"]
    if name.startswith("kernels"):
        ours = [row for row in result["rows"] if row.get("kernel", "").startswith("hf_paged")]
        return [
            f"| {row['case']}, {row['dtype']}{row['kernel'].removeprefix('hf_paged triton')} | "
            + ", ".join(
                f"{row[unit]} {unit}"
                for unit in ("us", "GB/s", "time / read", "TFLOP/s", "time / SDPA", "differs")
                if unit in row
            )
            + " |"
            for row in ours
        ]
    if name == "tiles":
        return [
            f"| prompt of {result['tokens']} tokens, heads of {row['head_dim']}, tile {row['tile']} | "
            + (f"{row['us']:.0f} us, {row['TFLOP/s']:.0f} TFLOP/s |" if "us" in row else f"{row['error']} |")
            for row in result["tiles"]
        ]
    if name.startswith("throughput"):
        return [
            f"| {name}: {row['system']}, offline | {row['tokens_per_s']:.0f} tokens/s |" for row in result["results"]
        ]
    torch_layers = ", layers left to torch" if name.endswith("no-fuse") else ""
    torch_layers += ", weights left apart" if name.endswith("no-prepack") else ""
    torch_layers += ", layers by Liger" if name.endswith("liger") else ""
    return [
        f"| decode step{torch_layers}, batch {row['batch']} x {row['context']} tokens | {row['step_ms']:.2f} ms, "
        f"{row['step_over_read']:.2f} x reading weights and K/V |"
        for row in result.get("rows", [])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("device", "layers"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--dry-run", action="store_true")
    tests = commands.add_parser("tests")
    tests.add_argument("reports", type=Path, nargs="+")
    tests.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(args.folder))
        return 0
    if args.command == "tests":
        result = outcome(args.reports)
    elif args.command == "layers":
        result = layers_without_a_device() if args.dry_run else layers()
    else:
        result = device(dry=args.dry_run)
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.command == "layers":
        return int(bool(result["left_to_torch"]))
    return int(args.command == "tests" and (result["failed"] > 0 or result["passed"] == 0))


if __name__ == "__main__":
    sys.exit(main())
