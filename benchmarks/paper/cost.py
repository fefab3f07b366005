"""How long a step takes, from its load: linear layers, attention, copies, swaps, the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.paper.policies.interface import Load

FEW = 16


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds.

    step: any step; weights: the linear layers with few tokens, which is the time to read the weights; token: one token
    in the linear layers where arithmetic is the limit; kv_token: K/V of one position read by one row; pair: one query
    times one key in a prompt; row: host work for one sequence; copied_token: K/V of one position copied within the
    device; swap_call: one transfer of a block between device and host (all layers); swap_token: K/V of one position
    over the bus; request: host work when a request arrives with options that none had before it, known: with options
    that one had. Of a CPU: several: any step of more than one token; few: each of the first FEW tokens, because small
    matrix products take longer for each token; start: a sequence of which nothing is computed yet.
    """

    step: float
    weights: float
    token: float
    kv_token: float
    pair: float = 0.0
    row: float = 0.0
    copied_token: float = 0.0
    swap_call: float = 0.0
    swap_token: float = 0.0
    request: float = 0.0
    known: float = 0.0
    several: float = 0.0
    few: float = 0.0
    start: float = 0.0

    def seconds(self, load: Load, block_size: int = 16) -> float:
        linear = max(self.weights, self.token * load.tokens) if load.tokens else 0.0
        total = self.step + linear + self.kv_token * load.kv_tokens + self.pair * load.pairs + self.row * load.rows
        if load.tokens > 1:
            total += self.several + self.few * min(load.tokens, FEW)
        total += self.start * load.started
        if load.copied_tokens:
            total += self.copied_token * load.copied_tokens
        if load.swapped_blocks:
            total += load.swapped_blocks * (self.swap_call + self.swap_token * block_size)
        return total

    def with_kv_factor(self, factor: float) -> CostModel:
        return replace(self, kv_token=self.kv_token * factor)


@dataclass(frozen=True, slots=True)
class Setup:
    """A model on GPUs: what the paper's Table 1 and the data sheets say, and what is assumed.

    parameters: count; layers, hidden: of the model; gpus; bandwidth: bytes/s of one GPU; flops: fp16 per second of one
    GPU; slots: tokens whose K/V fits (Table 1 of the paper); bus: peak bytes/s between one GPU and the host; longest:
    tokens of a sequence, at most.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    gpus: int
    bandwidth: float
    flops: float
    slots: int
    bus: float
    longest: int = 2048

    @property
    def kv_bytes(self) -> int:
        """Of one token, fp16: a key and a value in every layer."""
        return 2 * 2 * self.layers * self.hidden


A100_40, A100_80, A100_FLOPS = 1.555e12, 2.039e12, 312e12
PCIE_3, PCIE_4 = 15.75e9, 31.5e9  # 16 lanes
# The paper's machines, Google Cloud's A2, have Intel's Cascade Lake, whose PCI Express is of generation 3.

OPT_13B = Setup("OPT-13B", 12.85e9, 40, 5120, 1, A100_40, A100_FLOPS, 15_700, PCIE_3)
OPT_66B = Setup("OPT-66B", 65.7e9, 64, 9216, 4, A100_40, A100_FLOPS, 9_700, PCIE_3)
OPT_175B = Setup("OPT-175B", 174.6e9, 96, 12288, 8, A100_80, A100_FLOPS, 60_100, PCIE_3)
LLAMA_13B = replace(OPT_13B, name="LLaMA-13B", parameters=13.0e9)
# Not of the paper, for longer prompts: a tenth of the memory is left for activations, the rest holds weights and K/V.
LLAMA_13B_80 = Setup("LLaMA-13B, 80 GB", 13.0e9, 40, 5120, 1, A100_80, A100_FLOPS, 60_000, PCIE_4, longest=8192)
SETUPS = {setup.name: setup for setup in (OPT_13B, OPT_66B, OPT_175B, LLAMA_13B, LLAMA_13B_80)}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What no data sheet says. Shares are of the peak.

    reading: bandwidth that linear layers reach while they read weights; kv_reading: that attention of one token per
    row reaches; arithmetic: of the peak operations in large matrix products; copying: of the bus; launch_s: all kernel
    launches of one layer; reduce_s: one all-reduce (two for each layer with several GPUs); host_step_s, host_row_s:
    scheduling and sampling. host_row_s was measured: a step of this package's engine, with a model of one tiny layer,
    takes 20 us longer for each further greedy sequence and 30 us for each further sampled one (AMD EPYC). copy_call_s:
    start of one transfer between device and host memory (K and V of each layer are one each).
    paged_factor: paged attention against attention over contiguous K/V. It is the paper's result (20 to 26 %, section
    7.1), so no figure here is evidence for it. full_block: below it, the paged kernel cannot use the width of the
    device, and its time grows with 1/block size: assumed, and decisive for Figures 18b and 19 with smaller blocks.
    """

    reading: float = 0.7
    kv_reading: float = 0.6
    arithmetic: float = 0.5
    copying: float = 0.8
    launch_s: float = 60e-6
    reduce_s: float = 30e-6
    host_step_s: float = 3e-3
    host_row_s: float = 25e-6
    copy_call_s: float = 4e-6
    paged_factor: float = 1.23
    full_block: int = 8

    def kv_factor(self, block_size: int | None) -> float:
        """Of attention over blocks; 1 for contiguous K/V (None)."""
        return 1.0 if block_size is None else self.paged_factor * max(1.0, self.full_block / block_size)


ASSUMED = Assumptions()


def cost_of(setup: Setup, assumed: Assumptions = ASSUMED) -> CostModel:
    """Coefficients of a set-up, for contiguous K/V."""
    operations = setup.flops * assumed.arithmetic * setup.gpus
    bandwidth = setup.bandwidth * setup.gpus
    reduces = 2 * setup.layers * assumed.reduce_s if setup.gpus > 1 else 0.0
    return CostModel(
        step=assumed.host_step_s + setup.layers * assumed.launch_s + reduces,
        weights=2 * setup.parameters / (bandwidth * assumed.reading),
        token=2 * setup.parameters / operations,
        kv_token=setup.kv_bytes / (bandwidth * assumed.kv_reading),
        pair=4 * setup.layers * setup.hidden / operations,
        row=assumed.host_row_s,
        copied_token=2 * setup.kv_bytes / (bandwidth * assumed.kv_reading),
        swap_call=2 * setup.layers * assumed.copy_call_s,
        swap_token=setup.kv_bytes / (setup.bus * assumed.copying * setup.gpus),
    )
