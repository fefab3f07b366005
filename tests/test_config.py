"""The settings: wrong values are refused with an error that names value and remedy; instances are immutable."""

from __future__ import annotations

import dataclasses

import pytest

from hf_paged.config import CacheConfig, SchedulerConfig, kv_dtypes, parse_bytes

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        (" 1.5 KiB ", 1536),
        ("2GB", 2 * 10**9),
        ("512 MB", 512 * 10**6),
        ("1TiB", 2**40),
    ],
)
def test_parse_bytes(value: int | str, expected: int) -> None:
    assert parse_bytes(value) == expected


def test_dtypes_of_keys_and_values() -> None:
    assert kv_dtypes("auto") == kv_dtypes("auto,auto") == {}
    assert kv_dtypes("int8") == {"key_dtype": "int8", "value_dtype": "int8"}
    assert kv_dtypes("int8, auto") == {"key_dtype": "int8"}
    assert kv_dtypes("auto,fp8") == {"value_dtype": "fp8"}
    for wrong in ("", "int4", "int8,int8,int8", "bf16"):
        with pytest.raises(ValueError, match="use one of 'auto', 'int8', 'fp8'"):
            kv_dtypes(wrong)


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "4 Gi", "-4GiB", "4GiB!", "1e9", "nan", "4,5GB", -1, 1.5, True, None, b"4", f"{10**308}GiB"],
)
def test_parse_bytes_names_what_it_does_not_understand(value: object) -> None:
    with pytest.raises(ValueError, match="memory size") as error:
        parse_bytes(value)  # type: ignore[arg-type]
    assert repr(value) in str(error.value)


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


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 16.0},
        {"block_size": True},
        {"block_size": "16"},
        {"block_size": 5000},
        {"num_blocks": 0},
        {"num_blocks": 1.5},
        {"memory": "many"},
        {"memory": -1},
        {"swap_memory": "4Gi"},
        {"memory_fraction": 0},
        {"memory_fraction": 1.1},
        {"memory_fraction": float("nan")},
        {"memory_fraction": "0.5"},
        {"memory_fraction": True},
    ],
)
def test_wrong_cache_settings_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:
        CacheConfig(**options)  # type: ignore[arg-type]
    assert repr(next(iter(options.values()))) in str(error.value)


def test_one_size_only() -> None:
    with pytest.raises(ValueError, match="num_blocks and memory all size the pool"):
        CacheConfig(num_blocks=4, memory="1GiB")
    with pytest.raises(ValueError, match="memory and memory_fraction"):
        CacheConfig(memory="1GiB", memory_fraction=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": False},
        {"max_num_batched_tokens": 0},
        {"max_num_batched_tokens": 1e3},
        {"preemption": "kick"},
        {"preemption": None},
        {"prefix_caching": 1},
        {"watermark": -0.1},
        {"watermark": 1},
        {"watermark": float("nan")},
        {"watermark": False},
        {"max_waiting": 0},
    ],
)
def test_wrong_scheduler_settings_are_named(options: dict[str, object]) -> None:
    with pytest.raises(ValueError) as error:
        SchedulerConfig(**options)  # type: ignore[arg-type]
    assert repr(next(iter(options.values()))) in str(error.value)


@pytest.mark.parametrize("config", [CacheConfig(), SchedulerConfig()])
def test_settings_are_frozen_and_keyword_only(config: CacheConfig | SchedulerConfig) -> None:
    field = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 1)
    with pytest.raises(TypeError):
        type(config)(16)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unknown"):
        type(config)(unknown=1)  # type: ignore[call-arg]
