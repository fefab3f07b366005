"""User-facing settings of the cache and the scheduler: frozen, validated, standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from hf_paged.policies import EVICTIONS, POLICIES, Eviction, Policy

PreemptionMode = Literal["auto", "recompute", "swap"]
KVDtype = Literal["int8", "fp8"]
KV_DTYPES: tuple[str, ...] = get_args(KVDtype)

# With so many tokens more, a step of one sequence takes about twice as long on a CPU (`StepCost`).
DRAFT_LENGTH = 8
"""`num_assistant_tokens`, where no config has one. The engine shortens drafts that do not pay."""
LOOKUP_NGRAM = 2
"""`max_matching_ngram_size`, where a config has none: as in transformers."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: int | str) -> int:
    """`4 * 2**30`, `"4GiB"` or `"512 MB"` -> bytes. Raises ValueError that names the value."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"memory size {value!r} is neither bytes nor a string such as '4GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f"memory size {value!r} is not understood; write bytes or a string such as '4GiB'")
        # As a float, because "1.5GiB" is usual; it is exact up to 2^53 bytes.
        exact = float(match[1]) * _UNITS[match[2].upper()]
        if not isfinite(exact):
            raise ValueError(f"memory size {value!r} is too large; write bytes or a string such as '4GiB'")
        size = int(exact)
    if size < 0:
        raise ValueError(f"memory size {value!r} is negative")
    return size


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: an integer of at least 1 is needed")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Set the size of the K/V pool and of its blocks, and the dtype of K/V.

    At most one of `num_blocks`, `memory` and `memory_fraction` sizes the pool. By default an engine takes 0.9 of a
    GPU's free memory, or 0.3 of the host memory that the system and the process's cgroups leave, and no more than a
    full batch of sequences of the maximum length needs (4 million tokens at most).

    On a CPU the operating system commits the pool's memory block by block. In a pool of the default size, cached
    prefixes are evicted before more than an eighth of it is committed for them. In a pool of a given size, cached
    prefixes may fill all of it. `EngineStats.kv_bytes_touched` reports the committed memory.

    Attributes:
        block_size: Tokens in a block (PagedAttention, section 4.2), 1 to 4096.
        num_blocks: Blocks of the pool, for each group of layers: models with sliding windows have several groups.
        memory: Size of the pool on all devices together, in bytes or as a string such as "4GiB".
        memory_fraction: Share of the memory of each device that is free when the engine starts, 0 < f <= 1.
        swap_memory: Size of the host pool for swapped sequences (section 4.5), in bytes or as a string; 0 = no swap.
            None = as large as the K/V pool, which is the paper's bound, but at most 0.3 of the free host memory. For a
            GPU it is pinned in parts, each when it is first used. `generate` never preempts and accepts every value.
        key_dtype: "int8" or "fp8" (e4m3) stores keys in eight bits, with a scale in fp32 for each token and head. None
            = the dtype that the model computes. A block then takes about half the bytes of one in bf16, and attention
            reads rounded numbers: outputs differ from those of the exact K/V.
        value_dtype: The same for values.

    Raises:
        ValueError: If a value is out of its range, or two of the sizes are given. The message names the value.

    Example:
        ```python
        from hf_paged import CacheConfig

        config = CacheConfig(block_size=16, memory="512MB", key_dtype="int8", value_dtype="int8")
        assert config.memory_bytes == 512_000_000
        ```
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory: int | str | None = None
    memory_fraction: float | None = None
    swap_memory: int | str | None = None
    key_dtype: KVDtype | None = None
    value_dtype: KVDtype | None = None

    def __post_init__(self) -> None:
        _check_positive("block_size", self.block_size)
        # Far beyond the usual sizes. Chosen without a measurement.
        if self.block_size > 4096:
            raise ValueError(f"block_size={self.block_size}: at most 4096 tokens; 16 is the usual choice")
        if self.num_blocks is not None:
            _check_positive("num_blocks", self.num_blocks)
        sizes = {"num_blocks": self.num_blocks, "memory": self.memory, "memory_fraction": self.memory_fraction}
        # Two of them could contradict each other, and one would be ignored.
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} all size the pool; give one of them")
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.swap_memory is not None:
            parse_bytes(self.swap_memory)
        for name in ("key_dtype", "value_dtype"):
            if (dtype := getattr(self, name)) not in (None, *KV_DTYPES):
                raise ValueError(
                    f"{name}={dtype!r}: use {', '.join(map(repr, KV_DTYPES))} or None, the dtype of the model"
                )
        fraction = self.memory_fraction
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise ValueError(f"memory_fraction={fraction!r}: a number above 0 and at most 1 is needed")

    @property
    def memory_bytes(self) -> int | None:
        """`memory` in bytes; None if it is not given."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def swap_bytes(self) -> int | None:
        """`swap_memory` in bytes; None if it is not given."""
        return None if self.swap_memory is None else parse_bytes(self.swap_memory)


def kv_dtypes(text: str) -> dict[str, str]:
    """The fields of CacheConfig of "int8", or of keys and values apart: "int8,auto". "auto" is the model's dtype.

    Raises ValueError that names the text.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) > 2 or not {*names} <= {"auto", *KV_DTYPES}:
        raise ValueError(
            f"{text!r}: use one of {', '.join(map(repr, ('auto', *KV_DTYPES)))}, for keys and values alike or apart, "
            "such as 'int8,auto'"
        )
    return {field: name for field, name in zip(("key_dtype", "value_dtype"), (names[0], names[-1])) if name != "auto"}


# On a CPU the activations of a step must fit into its caches (see `max_num_batched_tokens`).
_TOKEN_BUDGET, _CPU_TOKEN_BUDGET = 8192, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Set the limits of one step of an engine, and what happens when memory runs out.

    Attributes:
        max_num_seqs: Sequences of a step, at most. A request with samples or beams has several.
        max_num_batched_tokens: Tokens of a step, at most: prompt chunks and decoded tokens together. None = 512 on a
            CPU, so that the activations of a step fit into its caches, else 8192.
        preemption: What happens to the K/V of a preempted request (PagedAttention, section 4.5). "recompute": it is
            dropped and computed again when the request resumes. "swap": it is copied to host memory
            (`CacheConfig.swap_memory`) and back. "auto": a single sequence that one step can recompute is recomputed,
            and any other request is swapped. A request that does not fit into the swap memory is recomputed in every
            mode; the first such request causes a warning.
        prefix_caching: Whether requests share the blocks of common prefixes, and continue from copies of recurrent
            states. None = where the model can do it, True = raise where it cannot. A request finds what earlier steps
            have computed: requests that begin in the same step each compute their prefix.
        watermark: Share of the blocks that stay free when a request is admitted or swapped in beside running ones, so
            that those can grow without an immediate preemption; 0 <= watermark < 1.
        max_waiting: Requests that may wait before `Engine.add_request` raises QueueFull. None = any number.
        async_scheduling: Whether a step is prepared while the device computes the one before, so that the host learns
            each token a step later; the tokens are the same. None = only on a CUDA device, because other devices gain
            nothing; True = raise where the model does not run packed.
        batch_invariant: Whether the logits of a token depend on its sequence alone, to the last bit: not on the other
            requests of a step, nor on how its prompt was divided, on cached prefixes, preemption or the number of
            threads. Prompts then take longer (docs/training.md has figures). An engine refuses it where that cannot be
            had.
        policy: Which request runs next, and which is preempted. "fcfs": by priority, then by arrival, and the last one.
            "fair": clients take turns (`hf_paged.policies.Fair`, which also takes weights). Or an object of a subclass
            of `hf_paged.sockets.Policy`, for one engine.
        prefix_eviction: Which cached block of a prefix is given up for a new one. "lru": that used least recently.
            "clock": the same, but blocks are passed over as often as requests have found them, at most 3 times, so that
            a flood of other prompts leaves them. Or a function (`hf_paged.sockets.Eviction`).

    Raises:
        ValueError: If a value is out of its range. The message names it.

    Example:
        ```python
        from hf_paged import SchedulerConfig

        config = SchedulerConfig(max_num_seqs=64, preemption="recompute", max_waiting=1000)
        assert config.for_device("cpu").max_num_batched_tokens == 512
        ```
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    preemption: PreemptionMode = "auto"
    prefix_caching: bool | None = None
    watermark: float = 0.01
    max_waiting: int | None = None
    async_scheduling: bool | None = None
    batch_invariant: bool = False
    policy: Policy | Literal["fcfs", "fair"] = "fcfs"
    prefix_eviction: Eviction | Literal["lru", "clock"] = "lru"

    def __post_init__(self) -> None:
        _check_positive("max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(f"preemption={self.preemption!r}: use 'auto', 'recompute' or 'swap'")
        if self.prefix_caching is not None and not isinstance(self.prefix_caching, bool):
            raise ValueError(f"prefix_caching={self.prefix_caching!r}: use True, False or None")
        if not (_is_number(self.watermark) and 0 <= self.watermark < 1):
            raise ValueError(f"watermark={self.watermark!r}: a share of the blocks, 0 <= watermark < 1")
        if self.max_waiting is not None:
            _check_positive("max_waiting", self.max_waiting)
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ValueError(f"async_scheduling={self.async_scheduling!r}: use True, False or None")
        if not isinstance(self.batch_invariant, bool):
            raise ValueError(f"batch_invariant={self.batch_invariant!r}: use True or False")
        if not isinstance(self.policy, Policy) and self.policy not in tuple(POLICIES):
            names = ", ".join(map(repr, POLICIES))
            raise ValueError(f"policy={self.policy!r}: use {names} or an object that is a hf_paged.sockets.Policy")
        if not callable(self.prefix_eviction) and self.prefix_eviction not in tuple(EVICTIONS):
            names = ", ".join(map(repr, EVICTIONS))
            raise ValueError(f"prefix_eviction={self.prefix_eviction!r}: use {names} or a function (sockets.Eviction)")
        if self.prefix_eviction != "lru" and self.prefix_caching is False:
            raise ValueError(f"prefix_eviction={self.prefix_eviction!r}: no prefix is kept; leave it out")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or 8192 where it is None."""
        return _TOKEN_BUDGET if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def for_device(self, kind: str) -> SchedulerConfig:
        """Return a copy with the defaults of a kind of device in place of None.

        Args:
            kind: The type of a torch.device, such as "cpu" or "cuda".

        Returns:
            The config that an engine on such a device begins with, before it looks at the model.
        """
        budget = _CPU_TOKEN_BUDGET if kind == "cpu" else _TOKEN_BUDGET
        return replace(
            self,
            max_num_batched_tokens=self.max_num_batched_tokens or budget,
            prefix_caching=self.prefix_caching is not False,
            async_scheduling=kind == "cuda" if self.async_scheduling is None else self.async_scheduling,
        )


_ARGUMENTS = {
    "block_size": "block_size",
    "kv_cache_memory": "memory",
    "gpu_memory_utilization": "memory_fraction",
    "swap_memory": "swap_memory",
    "key_dtype": "key_dtype",
    "value_dtype": "value_dtype",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "prefix_caching",
    "prefix_eviction": "prefix_eviction",
    "batch_invariant": "batch_invariant",
}
"""Names that the command line and lm-eval have for fields of CacheConfig and SchedulerConfig."""


def configs_of_arguments(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of CacheConfig and of SchedulerConfig that these arguments set, which are taken out of `given`. None
    stands for a default."""
    found = {field: given.pop(name) for name, field in _ARGUMENTS.items() if name in given}
    chosen = [
        {each.name: found[each.name] for each in fields(kind) if found.get(each.name) is not None}
        for kind in (CacheConfig, SchedulerConfig)
    ]
    return chosen[0], chosen[1]


class Switches(NamedTuple):
    """The optional parts of an engine (see `Engine`): True, False, or None for where they pay."""

    prepack: bool | None = None
    cuda_graphs: bool | None = None
    warmup: bool | None = None
    fuse: bool | None = None


def refuse_fields(given: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of an engine that it does not have. Fields of a config are told where they go."""
    for name, value in given.items():
        for argument, kind in (("cache_config", CacheConfig), ("scheduler_config", SchedulerConfig)):
            if name in (field.name for field in fields(kind)):
                raise TypeError(
                    f"{name}={value!r} is a field of {kind.__name__}; give "
                    f"{argument}=hf_paged.{kind.__name__}({name}={value!r})"
                )
        raise TypeError(
            f"Engine got an unexpected argument {name}={value!r}; help(hf_paged.Engine) names those it takes"
        )


_Config = TypeVar("_Config", CacheConfig, SchedulerConfig)


def as_config(kind: type[_Config], given: _Config | Mapping[str, Any] | None, name: str) -> _Config:
    """Convert `given` to a `kind`: it may be one, a dict of its fields, or None for the defaults.

    `name` is the argument's name in messages. Raises ValueError that names the unknown field or the wrong value.
    """
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    known = [field.name for field in fields(kind)]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}={given!r}: give a hf_paged.{kind.__name__} or a dict with some of {', '.join(known)}")
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"{name}={dict(given)!r}: there is no field {key!r}; {hint}It takes {', '.join(known)}")
    return kind(**given)
