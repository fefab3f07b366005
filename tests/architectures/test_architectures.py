"""Every kind of decoder in transformers, paged against plain generate: some types in CI, all of them with `-m slow`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_paged
from hf_paged.integration.names import CACHE
from tests.architectures.sweep import examine
from tests.architectures.tiny import WINDOW, tiny_model

SWEEP = Path(__file__).with_name("sweep.py")

# Type -> how it runs: mechanisms of docs/models.md. Those that are no QUICK ones are slow tests.
CI_TYPES = {
    "gemma4_text": "native",  # KV heads that vary by layer, layers that share another layer's K/V
    "llama4_text": "native",  # chunks; temperature by position
    "mimo_v2_flash": "native",  # K and V of different size
    "qwen2_moe": "native",  # experts; a window that only the mask shows
    "deepseek_v3": "native",  # latent attention
    "moshi": "dense view",  # a window that only the cache implements
    "bloom": "dense view",  # ALiBi
    "gpt_neox_japanese": "dense view",  # attention code of its own
    "cpmant": "dense view",  # a cache longer than the tokens
    "mvp": "dense view",  # positions from the cache's length, in a way that has one position for all rows
    "bamba": "dense view",  # recurrent layers beside attention
    "inkling_text": "dense view",  # both in one layer, with a window and a position bias
    "hy_v4": "dense view",  # indexed sparse attention
    "deepseek_v4": "dense view",  # compressed sparse attention
    "minimax": "refused",  # a cache class of its own
    "openai-gpt": "refused",  # no cache
    # Classes that generate and are not causal language models, with text alone.
    "Qwen2VLForConditionalGeneration": "native",  # positions of three dimensions
    "Exaone4_5_ForConditionalGeneration": "native",  # leaves rotary positions to the model
    "Qwen3_5ForConditionalGeneration": "dense view",  # recurrent layers beside attention
    "MistralLarge4ForConditionalGeneration": "dense view",  # values of size 0
    "T5ForConditionalGeneration": "native",  # an encoder-decoder model
    "LEDForConditionalGeneration": "dense view",  # an attention of its own over the encoder's states
}
QUICK = ("llama4_text", "bloom")


def sweep(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """In a subprocess, because the sweep forks and a process with threads should not."""
    jobs = str(min(os.cpu_count() or 1, 4))
    command = [sys.executable, str(SWEEP), *arguments, "--jobs", jobs, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert out.exists(), done.stderr[-2000:]
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


@pytest.mark.quick_cases(*(f"[{name}]" for name in QUICK))
@pytest.mark.parametrize("model_type", CI_TYPES)
def test_type(model_type: str) -> None:
    if not (model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or hasattr(transformers, model_type)):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    result = examine(model_type, engine=False)
    assert result["result"] == ("refused" if CI_TYPES[model_type] == "refused" else "identical"), result
    assert result["mode"] == CI_TYPES[model_type], result["reason"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_other_class(tmp_path: Path) -> None:
    results = sweep(tmp_path / "results.json", "--others", "--engine")
    wrong = [r for r in results if r["result"] in ("different", "crashed")]
    wrong += [r for r in results if r.get("engine", "").startswith(("different", "crashed"))]
    assert not wrong, wrong
    assert sum(r["result"] == "identical" for r in results) >= 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_type(tmp_path: Path) -> None:
    results = sweep(tmp_path / "results.json")
    wrong = [r for r in results if r["result"] in ("different", "crashed")]
    assert not wrong, wrong
    identical = [r for r in results if r["result"] == "identical"]
    assert len(identical) >= 0.94 * sum(r["result"] != "unrunnable" for r in results)


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_a_window_keeps_few_blocks(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.generation import records

    used: list[dict[int | None, set[int]]] = []

    def observe(record: hf_paged.CallRecord, memory: Any) -> None:
        step: dict[int | None, set[int]] = {}
        (seq_id,) = memory.manager.seq_ids
        for group, table in zip(memory.groups, memory.manager.block_tables(seq_id)):
            step.setdefault(group.kind.bounds[0], set()).add(sum(block_id >= 0 for block_id in table))
        used.append(step)

    monkeypatch.setattr(records.CallRecord, "observe", observe)
    model = tiny_model(model_type)
    ids = torch.randint(6, 90, (1, 5))
    with hf_paged.record_calls():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, cache_implementation="paged",
            cache_config={"block_size": 4},
        )  # fmt: skip
    assert len(used) >= 79
    assert max(max(step[WINDOW]) for step in used) <= WINDOW // 4 + 2
    if model_type == "gemma2":
        assert used[-1][None] == {-(-84 // 4)}  # the full layers keep everything


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_attention_free_is_refused(model_type: str) -> None:
    model = tiny_model(model_type)
    ids = torch.tensor([[7, 8, 9]])
    with pytest.raises(
        hf_paged.UnsupportedModelError, match=r"state (of its own|has a fixed size).*call generate without"
    ):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, cache_implementation="paged")


class ScriptConfig(PreTrainedConfig):
    model_type = "script_model"

    def __init__(self, hidden_size: int = 32, num_hidden_layers: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.vocab_size = 96
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = 4, 1, hidden_size // 4


def script_eager_attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the model runs under SDPA here")


class ScriptAttention(nn.Module):
    """Grouped queries, a score scale of its own, no rotary embedding."""

    is_causal = True
    num_key_value_groups = 4

    def __init__(self, config: ScriptConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.scaling = config, layer_idx, 0.7
        self.q = nn.Linear(config.hidden_size, config.hidden_size)
        self.kv = nn.Linear(config.hidden_size, 2 * config.head_dim)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: Any, past: Any, **kwargs: Any) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.config.head_dim)
        query = self.q(x).view(shape).transpose(1, 2)
        key, value = (part.reshape(shape).transpose(1, 2) for part in self.kv(x).chunk(2, dim=-1))
        if past is not None:
            key, value = past.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, script_eager_attention)
        result, _ = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)
        return self.out(result.reshape(*x.shape[:-1], -1))


class ScriptModel(PreTrainedModel, GenerationMixin):
    """A model from a user's script: learned positions, none of transformers' layer classes."""

    config_class = ScriptConfig
    _supports_sdpa = True
    _supports_attention_backend = True
    _tied_weights_keys = None

    def __init__(self, config: ScriptConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(128, config.hidden_size)
        self.attention = nn.ModuleList(ScriptAttention(config, i) for i in range(config.num_hidden_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,  # the same from transformers 5.24 on
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        past = past_key_values if cache is None else cache
        x = self.tokens(input_ids) + self.positions(position_ids)
        mask = create_causal_mask(self.config, x, attention_mask, past, position_ids=position_ids)
        for norm, attention in zip(self.norms, self.attention):
            x = x + attention(norm(x), mask, past)
        return CausalLMOutputWithPast(logits=self.head(x), **{CACHE: past})


def test_custom_code_works_unchanged() -> None:
    torch.manual_seed(0)
    model = ScriptModel(ScriptConfig()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.5)
    report = hf_paged.check(model)
    assert report.native, report
    assert [layer.num_kv_heads for layer in report.layers] == [1, 1, 1]
    ids, mask = torch.randint(6, 90, (3, 17)), torch.ones(3, 17, dtype=torch.int64)
    mask[0, :9] = mask[2, :3] = 0
    options = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0}
    for extra in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        plain = model.generate(**options, **extra)
        assert len(set(plain[0, 17:].tolist())) > 3
        assert torch.equal(model.generate(**options, **extra, cache_implementation="paged"), plain)
