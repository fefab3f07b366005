"""The settings: wrong values are refused with an error that names value and remedy; instances are immutable."""

from __future__ import annotations

import dataclasses

import pytest

from hf_paged.config import CacheConfig, SchedulerConfig, kv_dtypes, parse_bytes

pytestmark = pytest.mark.smoke


SIZES = {
    0: 0, 17: 17, "17": 17, "17B": 17, "4GiB": 4 * 2**30, "4 gib": 4 * 2**30, " 1.5 KiB ": 1536, "2GB": 2 * 10**9,
    "512 MB": 512 * 10**6, "1TiB": 2**40,
}  # fmt: skip
NO_SIZES = ("", "GiB", "4 Gi", "-4GiB", "4GiB!", "1e9", "nan", "4,5GB", -1, 1.5, True, None, b"4", f"{10**308}GiB")


def test_parse_bytes() -> None:
    for value, expected in SIZES.items():
        assert parse_bytes(value) == expected, value
    for wrong in NO_SIZES:
        with pytest.raises(ValueError, match="memory size") as error:
            parse_bytes(wrong)  # type: ignore[arg-type]
        assert repr(wrong) in str(error.value)


def test_dtypes_of_keys_and_values() -> None:
    assert kv_dtypes("auto") == kv_dtypes("auto,auto") == {}
    assert kv_dtypes("int8") == {"key_dtype": "int8", "value_dtype": "int8"}
    assert kv_dtypes("int8, auto") == {"key_dtype": "int8"}
    assert kv_dtypes("auto,fp8") == {"value_dtype": "fp8"}
    for wrong in ("", "int4", "int8,int8,int8", "bf16"):
        with pytest.raises(ValueError, match="use one of 'auto', 'int8', 'fp8'"):
            kv_dtypes(wrong)


def test_defaults() -> None:
    cache, scheduler = CacheConfig(), SchedulerConfig()
    assert (cache.block_size, cache.num_blocks, cache.memory_bytes, cache.swap_bytes) == (16, None, None, None)
    assert (scheduler.max_num_seqs, scheduler.token_budget) == (256, 8192)
    assert [scheduler.for_device(kind).max_num_batched_tokens for kind in ("cpu", "cuda")] == [512, 8192]
    assert SchedulerConfig(max_num_batched_tokens=7).for_device("cpu").token_budget == 7
    assert (scheduler.preemption, scheduler.prefix_caching) == ("auto", None)


def test_sizes_are_bytes() -> None:
    config = CacheConfig(memory="1MiB", swap_memory="2KiB")
    assert (config.memory_bytes, config.swap_bytes) == (2**20, 2**11)
    assert CacheConfig(swap_memory=0).swap_bytes == 0


NAN = float("nan")
WRONG: dict[type[CacheConfig] | type[SchedulerConfig], dict[str, tuple[object, ...]]] = {
    CacheConfig: {"block_size": (0, -16, 16.0, True, "16", 5000), "num_blocks": (0, 1.5), "memory": ("many", -1),
        "swap_memory": ("4Gi",), "memory_fraction": (0, 1.1, NAN, "0.5", True)},
    SchedulerConfig: {"max_num_seqs": (0, False), "max_num_batched_tokens": (0, 1e3), "preemption": ("kick", None),
        "prefix_caching": (1,), "watermark": (-0.1, 1, NAN, False), "max_waiting": (0,)},
}  # fmt: skip


def test_wrong_settings_are_named() -> None:
    for kind, fields in WRONG.items():
        for name, values in fields.items():
            for value in values:
                with pytest.raises(ValueError) as error:
                    kind(**{name: value})  # type: ignore[arg-type]
                assert repr(value) in str(error.value), (name, value)


def test_one_size_only() -> None:
    with pytest.raises(ValueError, match="num_blocks and memory all size the pool"):
        CacheConfig(num_blocks=4, memory="1GiB")
    with pytest.raises(ValueError, match="memory and memory_fraction"):
        CacheConfig(memory="1GiB", memory_fraction=0.5)


def test_settings_are_frozen_and_keyword_only() -> None:
    for config in (CacheConfig(), SchedulerConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, dataclasses.fields(config)[0].name, 1)
        with pytest.raises(TypeError):
            type(config)(16)  # type: ignore[misc]
        with pytest.raises(TypeError, match="unknown"):
            type(config)(unknown=1)  # type: ignore[call-arg]
