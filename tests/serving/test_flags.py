"""Each flag of `hf-paged serve` reaches what it is for."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from hf_paged import CacheConfig, SchedulerConfig
from hf_paged.cli.main import main
from hf_paged.serving import loading, server, sockets
from hf_paged.serving.settings import Limits, Settings
from hf_paged.serving.speculative import SpeculativeConfig
from tests.serving.harness import QA


def started(monkeypatch: pytest.MonkeyPatch, *argv: str) -> dict[str, Any]:
    """What the command starts a server with."""
    load, run, listen = MagicMock(return_value=(MagicMock(), "its tokenizer")), MagicMock(return_value=0), MagicMock()
    monkeypatch.setattr(logging, "basicConfig", MagicMock())
    monkeypatch.setattr(loading, "load_engine", load)
    monkeypatch.setattr(server, "run_server", run)
    monkeypatch.setattr(sockets, "listen", listen)
    assert main(["serve", QA, *argv]) == 0
    engine, tokenizer, settings = run.call_args.args
    assert (engine, tokenizer) == load.return_value and run.call_args.kwargs["sockets"] is listen.return_value
    checkpoint, cache, scheduler = load.call_args.args
    assert checkpoint == QA and run.call_args.kwargs["adapters"] == load.call_args.kwargs["adapters"]
    names = ("drain_seconds", "log_level")
    return {
        "address": listen.call_args.args, "settings": settings, "cache": cache, "scheduler": scheduler,
        **load.call_args.kwargs, **{name: run.call_args.kwargs[name] for name in names},
    }  # fmt: skip


def test_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch) == {
        "address": ("127.0.0.1", 8000), "settings": Settings(names=(QA,), hosts=("127.0.0.1",)), "cache": CacheConfig(),
        "scheduler": SchedulerConfig(), "dtype": "auto", "device": None, "num_ranks": 1, "adapters": {}, "switches": {},
        "source": {}, "quantization": None, "weights": None, "speculative": None, "drain_seconds": 30,
        "log_level": "info",
    }  # fmt: skip


def test_every_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    template, response = tmp_path / "chat.jinja", tmp_path / "response.json"
    template.write_text("{{ messages }}")
    fields: dict[str, Any] = {"start_anchor": "<start>", "fields": {"content": {}}}
    response.write_text(json.dumps(fields))
    flags: dict[str, Any] = {
        "host": "0.0.0.0", "port": 8123, "api-key": "a-key", "served-model-name": "qa", "adapter": f"sql={tmp_path}",
        "dtype": "float32", "device": "cpu", "max-model-len": 500, "max-num-seqs": 7, "max-num-batched-tokens": 70,
        "scheduling-policy": "priority", "max-in-flight": 11, "kv-cache-memory": "8MiB", "swap-memory": "4MiB",
        "block-size": 8, "kv-cache-dtype": "int8,fp8", "quantization": "quanto",
        "speculative-config": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
        "generation-config": "vllm", "default-max-tokens": 13, "max-logprobs": 3, "max-request-seconds": 17.5,
        "chat-template": template, "response-template": response, "max-grammar-seconds": 0.5, "max-audio-bytes": 999,
        "max-audio-seconds": 9.5, "max-media-bytes": 77_000, "max-body-bytes": 2**27,
        "allow-media-urls": "example.org,cdn.example.org:8443", "allow-private-media-hosts": "Media.intranet:8080",
        "limit-mm-per-prompt": '{"image": 2, "video": 0, "audio": 1}', "admin-key": "another", "drain-seconds": 19,
        "log-level": "error", "weights-folder": tmp_path,
        "logits-processor": "top=transformers:TopKLogitsWarper",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    limits = Limits(logprobs=3, in_flight=11, new_tokens=13, request_seconds=17.5, grammar_seconds=0.5, bodies=2**28)
    limits = replace(
        limits, audio_bytes=999, audio_seconds=9.5, body=2**27, media_memory=77_000, images=2, videos=0, recordings=1
    )
    assert started(
        monkeypatch, *words, "--api-key", "b-key", "--prefix-eviction=clock", "--batch-invariant", "--no-fuse",
        "--prepack",
    ) == {
        "address": ("0.0.0.0", 8123),
        "settings": Settings(
            names=("qa",), api_keys=("a-key", "b-key"), max_model_len=500, defaults="vllm",
            chat_template="{{ messages }}", response_template=fields, admin_key="another", priorities=True,
            weights_folders=(str(tmp_path),),
            hosts=("0.0.0.0",), media_hosts=("example.org", "cdn.example.org:8443"),
            private_media_hosts=("media.intranet:8080",), limits=limits,
            logits_processors=(("top", "transformers:TopKLogitsWarper"),),
        ),
        "cache": CacheConfig(block_size=8, memory="8MiB", swap_memory="4MiB", key_dtype="int8", value_dtype="fp8"),
        "scheduler": SchedulerConfig(
            max_num_seqs=7, max_num_batched_tokens=70, prefix_eviction="clock", batch_invariant=True,
        ),
        "dtype": "float32", "device": "cpu", "num_ranks": 1, "adapters": {"sql": str(tmp_path)},
        "switches": {"fuse": False, "prepack": True}, "source": {},
        "quantization": {"quant_method": "quanto", "weights": "int8"}, "weights": None,
        "speculative": SpeculativeConfig("ngram", None, 4, 3), "drain_seconds": 19, "log_level": "error",
    }  # fmt: skip
    given = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    made = started(monkeypatch, "--gpu-memory-utilization", "0.5", "--quantization", json.dumps(given))
    assert made["cache"] == CacheConfig(memory_fraction=0.5) and made["quantization"] == given
    assert started(monkeypatch, "--weights", "int4")["weights"] == "int4"


WRONG = {
    "speculative-config": {
        ("ngram",): "--speculative-config ngram: write JSON such as",
        ('{"method": "eagle"}',): "methods are ngram and draft_model",
        ('{"method": "ngram", "draft_size": 1}',): "draft_size is not known; use",
        ('{"method": "ngram", "num_speculative_tokens": 0}',): "num_speculative_tokens=0: an integer of at least 1",
        ('{"method": "ngram", "num_speculative_tokens": 129}',): "num_speculative_tokens=129: at most 128",
        ('{"method": "ngram", "model": "x"}',): "model is for the method draft_model; leave it out",
        ('{"method": "draft_model"}',): 'method draft_model needs "model"',
        ('{"method": "ngram", "prompt_lookup_min": 9}',): "prompt_lookup_min=9 is more than prompt_lookup_max=2",
        ('{"method": "ngram"}', "--tensor-parallel-size", "2"): "is for one process; leave --tensor-parallel-size 2",
    },
    "logits-processor": {("a",): "write NAME=module:Class", ("a=b:C", "--logits-processor", "a=d:E"): "of its own"},
    "weights": {
        ("int4", "--tensor-parallel-size", "2"): "--weights int4 is for one process; leave --tensor-parallel-size",
        ("int8", "--quantization", "quanto"): "--weights int8 and --quantization both round the weights; leave one out",
    },
    "quantization": {
        ("awq",): "--quantization awq: write torchao or quanto, or a quantization_config in JSON",
        ('{"bits": 8}',): '--quantization {"bits": 8}: write torchao or quanto',
        ("quanto", "--tensor-parallel-size", "2"): "is for one process; leave --tensor-parallel-size 2 out",
    },
}


def test_wrong_speculation_and_quantization(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, cases in WRONG.items():
        for words, message in cases.items():
            assert main(["serve", QA, f"--{flag}", *words]) == 2, words
            assert message in " ".join(capsys.readouterr().err.split()), words


def test_what_drafts_is_loaded() -> None:
    lookup = SpeculativeConfig("ngram", None, 4, 3, 2).load("auto", None, {})
    assert lookup.num_assistant_tokens == 4 and lookup.draft([(0, [5, 6, 7, 5, 6], 2)]) == [[7, 5]]
    model = SpeculativeConfig("draft_model", QA, 6).load("auto", None, {})
    assert model.generation_config.num_assistant_tokens == 6 and model.config.vocab_size == 2048
