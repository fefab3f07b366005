"""Tiny random models of six families, made once per process, whose greedy text is no repeated token, and prompts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCAB = 96
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8
MAX_POSITIONS = 160

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.6, "pad_token_id": PAD, "bos_token_id": BOS,
    "eos_token_id": EOS,
}  # fmt: skip
_ROTARY = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48}


def _llama() -> Any:
    return transformers.LlamaConfig(**_ROTARY)


def _qwen3() -> Any:
    return transformers.Qwen3Config(**_ROTARY, head_dim=16)


def _mistral() -> Any:
    return transformers.MistralConfig(**_ROTARY, sliding_window=WINDOW)


def _gemma3() -> Any:
    # With tied, scaled embeddings the model would repeat the last token forever.
    sizes = {**_ROTARY, "num_hidden_layers": 3, "tie_word_embeddings": False}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(**sizes, head_dim=8, sliding_window=WINDOW, layer_types=types)


def _gpt2() -> Any:
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    names["max_position_embeddings"] = "n_positions"
    return transformers.GPT2Config(**{names.get(name, name): value for name, value in _SIZES.items()})


def _opt() -> Any:
    sizes = {name: value for name, value in _SIZES.items() if name != "initializer_range"}
    return transformers.OPTConfig(**sizes, init_std=0.6, ffn_dim=48, word_embed_proj_dim=32)


_CONFIGS = {"llama": _llama, "qwen3": _qwen3, "mistral": _mistral, "gemma3": _gemma3, "gpt2": _gpt2, "opt": _opt}
FAMILIES = tuple(_CONFIGS)
FEW = ("llama", "gemma3", "opt")
"""Those that differ most: equal layers, layers with windows beside full ones, learned positions that count the mask."""


def build(family: str, *, seed: int = 0, attn_implementation: str = "sdpa", **changes: Any) -> Any:
    """A new fp32 model in eval mode, the same weights every time; `changes` go to its config."""
    config = _CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    config._attn_implementation = attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        if family in ("gpt2", "opt"):
            # Learned positions of this size would dominate the tokens, and every prompt would give the same text.
            for name, parameter in model.named_parameters():
                if "wpe" in name or "embed_positions" in name:
                    parameter.data.mul_(0.3)
    return model


_shared: dict[tuple[str, str], Any] = {}


def shared(family: str, attn_implementation: str = "sdpa") -> Any:
    """The process's model of that family. Do not change it."""
    name = (family, attn_implementation)
    if name not in _shared:
        _shared[name] = build(family, attn_implementation=attn_implementation)
    return _shared[name]


def is_shared(model: Any) -> bool:
    """Whether `shared` made it."""
    return any(model is each for each in _shared.values())


def prompts(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random prompts int64 [length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in lengths]


def batch(*lengths: int, seed: int = 0, side: str = "left", padding: int | None = None) -> dict[str, torch.Tensor]:
    """A padded batch of random prompts, int64 [rows, longest]; padding is random, so that an ignored mask shows."""
    return padded(prompts(*lengths, seed=seed), seed=seed + 1000, side=side, padding=padding)


def padded(
    rows: list[torch.Tensor], *, seed: int = 77, side: str = "left", padding: int | None = None
) -> dict[str, torch.Tensor]:
    """The same for these prompts."""
    longest = max(map(len, rows))
    ids = torch.stack(prompts(*[longest] * len(rows), seed=seed))
    if padding is not None:
        ids.fill_(padding)
    mask = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def ragged(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask int64 [rows, 9] for models of `tiny_model`, the second row left-padded."""
    ids = torch.randint(6, 90, (rows, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return ids * mask, mask


def ending(model: Any, inputs: dict[str, torch.Tensor], step: int = 3) -> int:
    """Row 0's greedy token at `step`: as an EOS id it ends row 0 there, and other rows at other steps or never."""
    length = inputs["input_ids"].shape[1]
    text = model.generate(**inputs, max_new_tokens=step + 1, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    return int(text[0, length + step])


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of single ASCII characters with exactly the models' vocabulary; pads on the left."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    letters = [c for c in sorted(ByteLevel.alphabet()) if c.isascii()][: VOCAB - len(special) - 1]
    vocab = {token: i for i, token in enumerate([*special, "Ġ", *letters])}
    core = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
