"""Compile for sm90, without a device, the kernels that an engine with a Llama launches, into Triton's cache.

    TRITON_CACHE_DIR=FOLDER python scripts/gpu/compile_kernels.py [--small]

Triton's key of a kernel names neither path nor machine, so that another machine with the same Triton finds them; but
the files of a kernel name each other by absolute paths: the folder must be the same there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
import transformers
import triton
from offline import gpu_target
from serving import record_launches

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.kernels.triton import launch as triton_launch
from hf_paged.kernels.triton import ops as triton_ops
from hf_paged.kernels.triton.launch import Launch, Target

TARGET = Target("cuda", 90, 132)
# One layer of Llama-3-8B.
LAYER: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Driver:
    """What Triton's just-in-time compiler asks of a device."""

    def get_current_target(self) -> Any:
        return gpu_target(TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> None:
        return None


compiled: dict[str, str] = {}
"""The kernel's name, by the hash of its machine code."""


def compile_launch(launch: Launch, device: torch.device) -> None:
    start = time.time()
    made = launch.kernel.warmup(**launch.args, grid=launch.grid, **launch.options)
    if made.hash not in compiled:
        compiled[made.hash] = launch.kernel.fn.__name__
        print(f"{launch.kernel.fn.__name__}: {time.time() - start:.1f} s", flush=True)


def install(patch: pytest.MonkeyPatch) -> None:
    """From here on engines on a CPU launch what they would launch on TARGET, and torch computes the results."""
    patch.setattr(triton.runtime.driver, "_active", Driver())
    for module in (triton_launch, triton_ops):
        patch.setattr(module, "target_of", lambda device: TARGET)
    record_launches(patch, compile_launch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small model: the kernels of another one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(**LAYER | (SMALL if args.small else {}))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=640)
        with Engine(model, CacheConfig(num_blocks=170), scheduler, prepack=None):
            pass
    print(f"{len(compiled)} kernels")
    if len(compiled) < 18:
        raise SystemExit("fewer kernels than a warm-up compiles: parts of the model were left to torch")


if __name__ == "__main__":
    main()
