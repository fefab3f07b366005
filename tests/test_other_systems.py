"""The package in a process without what Windows lacks: it imports, and `generate` and an engine run through torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIKE_WINDOWS = """
import builtins, os, signal, sys, mmap
import torch, transformers  # they find their own ways
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM  # loads the module

for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix_ipc"):
    sys.modules[name] = None  # an import of it raises ImportError
for name in ("fork", "register_at_fork", "getuid", "geteuid", "sched_getaffinity", "posix_fadvise", "setsid", "killpg"):
    delattr(os, name)
for name in ("SIGKILL", "SIGALRM", "SIGUSR1", "pthread_sigmask", "pthread_kill", "setitimer"):
    delattr(signal, name)
if hasattr(mmap.mmap, "madvise"):
    mmap.mmap = type("mmap", (), {})
opened = builtins.open
def without_proc(file, *args, **kwargs):
    if str(file).startswith(("/proc", "/sys")) and str(file) != "/proc/meminfo":  # psutil's, which Windows has
        raise FileNotFoundError(file)
    return opened(file, *args, **kwargs)
builtins.open = without_proc
"""
RUN = """
import hf_paged
import hf_paged.kernels.native.build as build
from transformers import GenerationConfig

sys.platform = "win32"  # os.name stays: paths depend on it

torch.manual_seed(0)
config = LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.6)
model, ids = LlamaForCausalLM(config).eval(), torch.randint(3, 40, (3, 21))
options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
paged = model.generate(ids, attention_mask=torch.ones_like(ids), **options, cache_implementation="paged")
assert torch.equal(paged, plain)
with hf_paged.Engine(model, hf_paged.CacheConfig(memory="1MiB")) as engine:
    outputs = list(engine.generate(ids.tolist(), GenerationConfig(**options)))
assert [list(output.outputs[0].token_ids) for output in outputs] == plain[:, 21:].tolist()
print(build.status())
"""


def run(code: str, cache: Path) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CC": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_process_without_posix(tmp_path: Path) -> None:
    code = LIKE_WINDOWS + RUN
    assert run(code, tmp_path).startswith("no native kernels: ")
