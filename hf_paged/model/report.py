"""The way in which a model runs with a paged cache, as a record that prints itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch

from hf_paged.cache.layers import FULL, Kind, kind_of
from hf_paged.kernels.bounds import Bounds
from hf_paged.versions import describe

Mode = Literal["native", "dense view", "state", "none"]


class Positions(NamedTuple):
    """The most tokens of the decoder and of the encoder's text; None: no limit is known."""

    decoder: int | None = None
    text: int | None = None


NO_LIMITS = Positions()


@dataclass(frozen=True, slots=True)
class LayerSupport:
    """The way in which one layer's cache is kept, why, and where.

    Sizes and device are None if the layer keeps no K/V of its own. bytes_per_token: of its K/V.
    """

    index: int
    mode: Mode
    reason: str
    sliding_window: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    device: torch.device | None = None
    chunk_size: int | None = None
    bytes_per_token: int = 0

    @property
    def kind(self) -> Kind:
        """The kind of the layer by the tokens whose K/V it keeps, if it keeps any."""
        return kind_of(Bounds(self.sliding_window, self.chunk_size))

    @property
    def kv_values_per_token(self) -> int:
        """Elements (not bytes) of K and V of one token."""
        return (self.num_kv_heads or 0) * ((self.head_dim or 0) + (self.v_head_dim or 0))


@dataclass(frozen=True, slots=True)
class KindOfMemory:
    """Memory that the layers of one kind take.

    name: "full" (K/V of all tokens), "window" or "chunk" (of the last ones), "state" (of a fixed size, or growing with
    the tokens). size: of a window or chunk in tokens. bytes_per_token: of each token that is kept.
    bytes_per_sequence: what a sequence takes besides, or at most in a window or chunk.
    """

    name: Literal["full", "window", "chunk", "state"]
    size: int | None
    bytes_per_token: int
    bytes_per_sequence: int

    def __str__(self) -> str:
        name = self.name if self.size is None else f"{self.name} of {self.size} tokens"
        parts = [f"{self.bytes_per_token:,} bytes a token"] if self.bytes_per_token else []
        most = "at most " if self.size is not None else ""
        parts += [f"{most}{self.bytes_per_sequence:,} bytes a sequence"] if self.bytes_per_sequence else []
        return f"{name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, repr=False)
class SupportReport:
    """The way in which a model runs with a paged cache, and why. `hf_paged.check` makes it; print it to read it.

    Attributes:
        model: Name of the model's class.
        supported: Whether it runs, with the results of plain `generate`.
        native: Whether it runs with packed sequences in our kernels. Otherwise it runs through the dense view (K/V in
            blocks, gathered for the model's own attention), which is exact but slower.
        reason: Why it runs so, or why it is refused.
        layers: How each layer's cache is kept, why, and where.
        kernels: The implementation that computes its attention; "" where none of ours does.
        native_length: Maximum length in tokens of sequences that run natively. None = no limit.
        counts_padding: Whether the positions of a left-padded batch include the padding, which packed rows do not have.
            Of a model with an encoder: whether such a decoder prompt has other logits on packed rows.
        fused: On a GPU, what lies between products and attention that our kernels compute; "" elsewhere.
        int8_layers: On a CPU, how many linear layers native kernels compute with weights in eight bits.
        int4_layers: The same, with weights in four bits.
        engine_only: Whether it keeps states of a fixed size and no K/V: the engine computes it, `generate` has nothing
            to page.
        has_encoder: Whether it is an encoder-decoder model: requests of the engine have `inputs`.
        encodes: Whether each token attends to its whole prompt: the engine computes prompts whole and without K/V.
        gathers: Of a model with an encoder that is not native: whether its rows are computed like packed ones, but
            layers gather their K/V for attention of their own.
        positions: Of a model with an encoder whose rows are computed: how many it has, of the decoder and of the text.
        together: How the engine computes it where it is not native, or "refused: " and why the engine does not.
        state_bytes: Bytes of a sequence's states in the engine, and by how many they grow with each token.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        report = hf_paged.check(AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base"))
        for kind in report.memory:
            print(kind.name, kind.bytes_per_token, "bytes a token")
        ```
    """

    model: str
    supported: bool
    native: bool
    reason: str
    layers: tuple[LayerSupport, ...]
    kernels: str = ""
    native_length: int | None = None
    counts_padding: bool = False
    fused: str = ""
    int8_layers: int = 0
    int4_layers: int = 0
    engine_only: bool = False
    has_encoder: bool = False
    encodes: bool = False
    gathers: bool = False
    positions: Positions = NO_LIMITS
    together: str = ""
    state_bytes: tuple[int, int] = (0, 0)

    @property
    def memory(self) -> tuple[KindOfMemory, ...]:
        """The memory that a sequence takes in an engine, by kind. (Only packed models keep just their windows.)"""
        sizes: dict[tuple[Any, int | None], int] = {}
        for layer in self.layers:
            if layer.bytes_per_token:
                window, chunk = (layer.kind if self.native else FULL).bounds
                kind = ("window", window) if window else ("chunk", chunk) if chunk else ("full", None)
                sizes[kind] = sizes.get(kind, 0) + layer.bytes_per_token
        kinds = [KindOfMemory(name, size, each, (size or 0) * each) for (name, size), each in sizes.items()]
        fixed, growth = self.state_bytes
        return (*kinds, *([KindOfMemory("state", None, growth, fixed)] if fixed or growth else []))

    @property
    def kv_values_per_token(self) -> int:
        """Elements (not bytes) of K and V that the cache keeps for one token, over all layers."""
        return sum(self.kv_values_by_device.values())

    @property
    def kv_values_by_device(self) -> dict[torch.device, int]:
        """Elements of K and V for one token on each device; a `device_map` places K/V beside its layer."""
        values: dict[torch.device, int] = {}
        for layer in self.layers:
            if layer.device is not None:
                values[layer.device] = values.get(layer.device, 0) + layer.kv_values_per_token
        return values

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def __str__(self) -> str:
        verdict = "native" if self.native else "dense view" if self.supported else "refused"
        verdict = "engine only" if self.engine_only else verdict
        lines = [f"{self.model}: {verdict}: {self.reason}"]
        for first, last in _runs(self.layers):
            layer = self.layers[first]
            where = f"layer {first}" if first == last else f"layers {first}-{last}"
            sizes = ""
            if layer.num_kv_heads is not None:
                dims = f"{layer.head_dim}" + (f"/{layer.v_head_dim}" if layer.v_head_dim != layer.head_dim else "")
                sizes = f", {layer.num_kv_heads} KV heads of size {dims}"
            window = f", sliding window {layer.sliding_window}" if layer.sliding_window is not None else ""
            window += f", chunks of {layer.chunk_size}" if layer.chunk_size is not None else ""
            # On one device each line would say the same.
            device = f", on {layer.device}" if len(self.kv_values_by_device) > 1 and layer.device is not None else ""
            lines.append(f"  {where}: {layer.mode}{sizes}{window}{device}: {layer.reason}")
        if self.native_length is not None:
            lines.append(
                f"  beyond {self.native_length} tokens: dense view: the rotary embedding changes with the length there"
            )
        if self.together:
            lines.append(f"  engine: {self.together}")
        lines += [f"  memory: {kind}" for kind in self.memory]
        if self.kernels:
            lines.append(f"  kernels: {self.kernels}")
        for count, dtype in ((self.int8_layers, "int8"), (self.int4_layers, "int4")):
            if count:
                lines.append(f"  weights: {count} linear layers in {dtype}, in native kernels")
        if self.fused:
            lines.append(f"  between attentions: {self.fused}")
        lines.append(f"  versions: {describe()}")
        return "\n".join(lines)


def _runs(layers: tuple[LayerSupport, ...]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive layers with equal descriptions."""
    alike = attrgetter("mode", "reason", "kind", "num_kv_heads", "head_dim", "v_head_dim", "device")
    runs = [[index for index, _ in run] for _, run in itertools.groupby(enumerate(layers), lambda own: alike(own[1]))]
    return [(run[0], run[-1]) for run in runs]
