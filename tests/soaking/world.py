"""Models whose weights change, and the result of `generate` for a request with any version of the weights.

All in fp64: in fp32 the order of a sum depends on the number of rows in a step, and in one of 10^5 requests two logits
differ only in the last bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests import models
from tests.architectures.tiny import redraw, tiny_config
from tests.soaking.options import options

KINDS = {"llama": 6, "mistral": 3, "gemma3": 3, "gpt2": 3, "bloom": 1, "lfm2": 1, "lora": 5}
KINDS |= {"llama4_text": 1, "deepseek_v3": 1, "qwen3_next": 1, "falcon_h1": 1, "mamba2": 1}
KINDS |= {"t5": 2, "bart": 2}
"""Kinds of models and their weights in the random choice: windows, chunks, latents, states with K/V and without, and
decoders beside an encoder, which reads the prompt."""

ENCODERS = ("t5", "bart")

NUM_VERSIONS = 3
NUM_PROMPTS = 14
ADAPTERS = {"x": ["q_proj", "v_proj", "down_proj"], "y": ["k_proj", "o_proj", "up_proj"]}
BASE = "__base__"
STEP = 0.25
"""A power of two: the fused AdamW rounds its learning rate to fp32."""

Known = tuple[tuple[int, ...], ...] | None
"""Token ids of each sequence of a request; None: plain generate raises."""


def build(kind: str) -> Any:
    model = _build(kind)
    # transformers sets this row to zero, and norms blow up what an optimizer's rounding makes of zero.
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[models.PAD] = embedding[models.BOS] + embedding[models.EOS]
    return model


def _build(kind: str) -> Any:
    if kind in models.FAMILIES:
        return models.build(kind, num_hidden_layers=2 if kind == "gemma3" else 1, **_extras(kind)).double()
    torch.manual_seed(0)
    if kind == "lora":
        return _with_adapters(_build("llama"))
    if kind in ENCODERS:
        return _beside_encoder(kind).double()
    if kind in ("bloom", "lfm2"):
        return _row_by_row(kind).double().eval()
    return _tiny(kind).double()


def _tiny(kind: str) -> Any:
    """A model of two layers, the first of a kind of its own where the type has two kinds."""
    import transformers

    config = tiny_config(kind)
    config.vocab_size, config.eos_token_id = models.VOCAB, models.EOS
    config._experts_implementation = "eager"  # the others have no fp64
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    redraw(model, 0)
    return model


def _beside_encoder(kind: str) -> Any:
    import transformers

    sizes = {"vocab_size": models.VOCAB, "d_model": 32, "eos_token_id": models.EOS, "pad_token_id": models.PAD}
    sizes |= {"decoder_start_token_id": models.BOS, "tie_word_embeddings": False}
    if kind == "t5":
        config: Any = transformers.T5Config(**sizes, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    else:
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
        widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 80}
        config = transformers.BartConfig(**sizes, **heads, **widths, forced_eos_token_id=None)
    made = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
    redraw(made, 0)
    return made


def columns(kind: str, prompt: Sequence[int]) -> int:
    """Columns of what `generate` returns before the new tokens."""
    return 1 if kind in ENCODERS else len(prompt)


def _extras(kind: str) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma3" else {}


def _with_adapters(model: Any) -> Any:
    from tests.model.adapted import add, lora

    for name, targets in ADAPTERS.items():
        add(model, lora(targets), name)
    return model.double().eval()


def _row_by_row(kind: str) -> Any:
    """A model that is served through the dense view, without or with a recurrent state."""
    import transformers

    sizes = {"vocab_size": models.VOCAB, "hidden_size": 32, "initializer_range": 0.6, "eos_token_id": models.EOS}
    if kind == "bloom":
        config = transformers.BloomConfig(**sizes, n_layer=1, n_head=4)
        return transformers.BloomForCausalLM(config)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    types = ["conv", "full_attention"]
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(**sizes, **heads, num_hidden_layers=2, layer_types=types, tie_word_embeddings=False)
    )


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Prompts, some of which are prefixes of others over several blocks."""
    rng = random.Random("prompts")
    system = [rng.randrange(3, models.VOCAB) for _ in range(20)]
    made = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(3, models.VOCAB) for _ in range(rng.randrange(1, 14))]
        made.append(tuple(system[: rng.choice((0, 4, 9, 16, 20))] + own if index % 3 else own))
    return tuple(made)


class World:
    """The live model of each kind, which engines serve, and the expected results for each version of its weights."""

    def __init__(self) -> None:
        self.live: dict[str, Any] = {}
        self.version: dict[str, int] = {}
        self._twins: dict[tuple[str, int], Any] = {}
        self._known: dict[tuple[Any, ...], Known] = {}
        self.num_solo_runs = 0

    def model(self, kind: str) -> Any:
        if kind not in self.live:
            self.live[kind] = build(kind)
            self.version[kind] = 0
        return self.live[kind]

    def weights(self, kind: str, version: int) -> dict[str, torch.Tensor]:
        """Version n is version 0 with about half of the weights moved by STEP, up or down. Between any two versions,
        none moves by more: the first step of Adam has the same size for every gradient."""
        base = dict(self._twin(kind, 0).named_parameters())
        if version == 0:
            return {name: p.detach() for name, p in base.items()}
        signs, moves = (torch.Generator().manual_seed(seed) for seed in (0, version))
        drawn = functools.partial(torch.randint, 0, 2)
        return {
            name: p.detach() + STEP * (2 * drawn(p.shape, generator=signs) - 1) * drawn(p.shape, generator=moves)
            for name, p in base.items()
        }

    def _twin(self, kind: str, version: int) -> Any:
        twin = self._twins.get((kind, version))
        if twin is None:
            twin = build(kind)
            if version:
                with torch.no_grad():
                    for name, value in self.weights(kind, version).items():
                        twin.get_parameter(name).copy_(value)
            self._twins[kind, version] = twin
        return twin

    def change(self, kind: str, rng: random.Random) -> str:
        """Give the live model other weights by a random method; returns the method's name."""
        return self.set_version(kind, rng.choice([v for v in range(NUM_VERSIONS) if v != self.version[kind]]), rng)

    def set_version(self, kind: str, version: int, rng: random.Random) -> str:
        name = rng.choice(list(WAYS))
        if version != self.version[kind]:
            WAYS[name](self.live[kind], self.weights(kind, version))
            self.version[kind] = version
        return name

    # -- what a request must yield ---------------------------------------------------------------------------------

    def known(self, kind: str, version: int, adapter: str | None, prompt: int, option: int) -> Known:
        key = (kind, version, adapter, prompt, option)
        if key not in self._known:
            self._known[key] = self.solo(kind, version, adapter, prompts()[prompt], option)
        return self._known[key]

    def solo(self, kind: str, version: int, adapter: str | None, prompt: Any, option: int, **changes: Any) -> Known:
        self.num_solo_runs += 1
        twin, made = self._twin(kind, version), options()[option]
        config = made.config(columns(kind, prompt))
        for name, value in changes.items():
            setattr(config, name, value)
        if adapter is not None:
            _activate(twin, adapter)
        if made.seed is not None:
            torch.manual_seed(made.seed)
        ids = torch.tensor([prompt])
        try:
            result = twin.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=models.tokenizer(),
                logits_processor=made.processors(), stopping_criteria=made.criteria(),
            )  # fmt: skip
        except (RuntimeError, ValueError):
            return None  # for example because every token is forbidden
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        rows = []
        for row in result[:, columns(kind, prompt) :].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            rows.append(tuple(row[:end]))
        return tuple(rows)

    def activate(self, kind: str, adapter: str) -> None:
        _activate(self.live[kind], adapter)


def _activate(model: Any, adapter: str) -> None:
    from tests.model.adapted import activate, switch

    if adapter == BASE:
        switch(model, False)
    else:
        activate(model, adapter)


Weights = dict[str, torch.Tensor]


def _copy(model: Any, weights: Weights) -> None:
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name).copy_(value)


def _load_state_dict(model: Any, weights: Weights) -> None:
    model.load_state_dict(weights, strict=False)
    model.tie_weights()


def _write_data(model: Any, weights: Weights) -> None:
    for name, value in weights.items():
        model.get_parameter(name).data.copy_(value)


def _set_data(model: Any, weights: Weights) -> None:
    for name, value in weights.items():
        model.get_parameter(name).data = value.clone()


def _vector(model: Any, weights: Weights) -> None:
    named = dict(model.named_parameters())
    vector = torch.cat([weights[name].flatten() for name in named])
    nn.utils.vector_to_parameters(vector, named.values())


def _twice(model: Any, weights: Weights) -> None:
    """Replace the weights twice: the second copy may get the address of the first."""
    for value in (0.0, None):
        for name, target in weights.items():
            model.get_parameter(name).data = target.clone() if value is None else torch.zeros_like(target)


def _optimizer(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: Any, weights: Weights) -> None:
    """One step from these weights to those, except for rounding."""
    parameters = dict(model.named_parameters())
    optimizer = make(list(parameters.values()))
    flags = {name: p.requires_grad for name, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.requires_grad_(True)
        difference = parameter.detach() - weights[name]
        step = torch.round(difference / STEP) if isinstance(optimizer, torch.optim.AdamW) else difference
        parameter.grad = step
    optimizer.step()
    for name, parameter in parameters.items():
        parameter.grad = None
        parameter.requires_grad_(flags[name])


_adamw = functools.partial(torch.optim.AdamW, lr=STEP, eps=1e-18, weight_decay=0.0)


WAYS: dict[str, Callable[[Any, Weights], None]] = {
    "copy_": _copy, "load_state_dict": _load_state_dict, "data.copy_": _write_data, "data =": _set_data,
    "vector_to_parameters": _vector, "replaced twice": _twice,
    "SGD": functools.partial(_optimizer, functools.partial(torch.optim.SGD, lr=1.0)),
    "AdamW": functools.partial(_optimizer, functools.partial(_adamw, fused=False)),
    "AdamW, fused": functools.partial(_optimizer, functools.partial(_adamw, fused=True)),
}  # fmt: skip

UNNOTICED = {"data.copy_"}
"""Methods that an engine need not notice: the caller must report them."""
