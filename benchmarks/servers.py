"""Servers as processes beside a benchmark: a checkpoint of random weights, and `hf-paged serve` or vLLM's on it."""

from __future__ import annotations

import itertools
import os
import random
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from hf_paged.load import client

MODEL = "m"


def save_checkpoint(name: str, folder: str) -> None:
    """Random bf16 weights of a shape of throughput.py, and a tokenizer that has text for every token."""
    import torch
    import transformers
    from throughput import SHAPES
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    rng = random.Random(0)
    vocab = {token: place for place, token in enumerate(["<pad>", "<s>", "</s>", *sorted(ByteLevel.alphabet())])}
    while len(vocab) < config.vocab_size:  # a space and letters, as most tokens of a real one
        vocab.setdefault("Ġ" + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))), len(vocab))
    core = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. pid: of its first process."""

    url: str
    pid: int

    @property
    def endpoint(self) -> client.Endpoint:
        """Greedy answers of full length."""
        return client.Endpoint(self.url, MODEL, extra={"ignore_eos": True, "temperature": 0})


def ours(folder: str, *options: str) -> list[str]:
    words = [sys.executable, "-m", "hf_paged.cli", "serve", folder, "--served-model-name", MODEL]
    return [*words, "--log-level", "error", *options]


def vllms(python: str, folder: str, *options: str) -> list[str]:
    """The command of vLLM's server, from the environment of this interpreter."""
    words = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    return [*words, "--served-model-name", MODEL, *options]


@contextmanager
def running(command: Sequence[str], *, seconds: float = 600) -> Iterator[Running]:
    """The server of this command on a free port, with one thread for computing, after it has answered one request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if "hf_paged.cli" not in command:
        env.pop("PYTHONPATH", None)
    process = subprocess.Popen([*command, "--port", str(port)], stdout=sys.stderr, env=env)
    server = Running(f"http://127.0.0.1:{port}", process.pid)
    try:
        until = time.monotonic() + seconds
        for _ in itertools.count():
            try:
                httpx.get(f"{server.url}/health", trust_env=False)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < until, "the server does not run"
                time.sleep(0.2)
        warm = client.run(server.endpoint, [client.Planned(0.0, [5] * 8, 4)])
        assert warm.outcomes[0].error is None, warm.outcomes[0].error
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()  # nothing, if it has ended
