"""Calls with one malformed argument each, each of which must raise ValueError. `main` prints the name of each call
before making it, because an access outside a tensor may end the process. "torch.ops": operators of torch.library."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hf_paged.kernels import ops
from tests.kernels.cases import Case, attention_of, make_batch, unwritten, write_new

Arguments = dict[str, Any]
Mutation = Callable[[Arguments, random.Random], None]


def metadata(**changes: Callable[[torch.Tensor], Any]) -> Mutation:
    """A mutation that changes copies of some fields of the metadata."""

    def mutate(arguments: Arguments, _: random.Random) -> None:
        old = arguments["metadata"]
        new = {name: change(getattr(old, name)) for name, change in changes.items()}
        arguments["metadata"] = replace(old, **new, scratch={})

    return mutate


def argument(name: str, change: Callable[[Any], Any]) -> Mutation:
    def mutate(arguments: Arguments, _: random.Random) -> None:
        arguments[name] = change(arguments.get(name))

    return mutate


def put(index: Any, value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = value
        return x

    return change


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0]


def short_out(arguments: Arguments, rng: random.Random) -> None:
    shape = list(arguments["query"].shape)
    shape[rng.randrange(3)] -= 1
    arguments["out"] = torch.empty(shape, dtype=arguments["query"].dtype)


def other_out(arguments: Arguments, _: random.Random) -> None:
    arguments["out"] = torch.empty_like(arguments["query"], dtype=torch.float16)


ATTENTION: dict[str, Mutation] = {
    "block beyond the cache": metadata(block_tables=put((0, 0), 10_000)),
    "block far beyond the cache": metadata(block_tables=put((-1, 0), 2**31 - 1)),
    "negative block": metadata(block_tables=put((1, 1), -1)),
    "very negative block": metadata(block_tables=put((0, 0), -(2**31))),
    "length beyond the table": metadata(seq_lens=put(0, 5_000), max_seq_len=lambda _: 5_000),
    "enormous length": metadata(seq_lens=put(-1, 2**31 - 1), max_seq_len=lambda _: 2**31),
    "length below the query's": metadata(seq_lens=put(2, 3)), "negative length": metadata(seq_lens=put(0, -5)),
    "starts beyond the query": metadata(query_start_loc=put(-1, 900), max_query_len=lambda _: 900),
    "starts that descend": metadata(query_start_loc=put(1, 60)), "negative start": metadata(query_start_loc=put(0, -1)),
    "too few starts": metadata(query_start_loc=lambda x: x[:-1].clone()),
    "too few lengths": metadata(seq_lens=lambda x: x[:-1].clone()),
    "too few tables": metadata(block_tables=lambda x: x[:-1].clone()),
    "narrow tables": metadata(block_tables=lambda x: x[:, :1].clone()),
    "flat tables": metadata(block_tables=lambda x: x.flatten()),
    "int64 tables": metadata(block_tables=torch.Tensor.long), "int64 lengths": metadata(seq_lens=torch.Tensor.long),
    "int64 starts": metadata(query_start_loc=torch.Tensor.long), "strided tables": metadata(block_tables=strided),
    "strided lengths": metadata(seq_lens=strided), "max_query_len too small": metadata(max_query_len=lambda _: 1),
    "max_seq_len too small": metadata(max_seq_len=lambda _: 2), "short out": short_out,
    "out of another dtype": other_out, "flat query": argument("query", lambda x: x.flatten(1)),
    "query of other heads": argument("query", lambda x: x[:, :3].clone()),
    "query of another size": argument("query", lambda x: x[..., :-1].clone()),
    "query of another dtype": argument("query", lambda x: x.double()),
    "fewer rows than starts": argument("query", lambda x: x[:-1].clone()),
    "fewer values than keys": argument("value_cache", lambda x: x[:-1].clone()),
    "values of other heads": argument("value_cache", lambda x: x[:, :, :1].clone()),
    "values of another dtype": argument("value_cache", lambda x: x.half()),
    "small cache": argument("key_cache", lambda x: x[:2].clone()), "strided keys": argument("key_cache", strided),
    "strided values": argument("value_cache", strided), "short sinks": argument("sinks", lambda _: torch.zeros(1)),
    "integer sinks": argument("sinks", lambda _: torch.zeros(4, dtype=torch.int64)),
    "short slopes": argument("alibi_slopes", lambda _: torch.zeros(3)),
    "slopes of two dimensions": argument("alibi_slopes", lambda _: torch.zeros(4, 1)),
    "no window": argument("sliding_window", lambda _: 0), "negative chunk": argument("chunk_size", lambda _: -3),
    "negative softcap": argument("softcap", lambda _: -1.0),
    "softcap that is no number": argument("softcap", lambda _: float("nan")),
}  # fmt: skip
WITH_KV: dict[str, Mutation] = {
    "key of other heads": argument("key", lambda x: x[:, :1].clone()),
    "short value": argument("value", lambda x: x[..., :-1].clone()),
    "fewer keys than slots": argument("key", lambda x: x[1:].clone()),
    "slot beyond the cache": metadata(slot_mapping=put(3, 10**6)),
    "slot far beyond the cache": metadata(slot_mapping=put(3, 2**62)),
    "slot -2": metadata(slot_mapping=put(0, -2)), "int32 slots": metadata(slot_mapping=torch.Tensor.int),
    "short slots": metadata(slot_mapping=lambda x: x[:-1].clone()),
}  # fmt: skip
WRITES: dict[str, Mutation] = {
    "slot beyond the cache": argument("slot_mapping", put(0, 10**6)),
    "slot just beyond the cache": argument("slot_mapping", put(0, 6 * 8)),
    "slot -2": argument("slot_mapping", put(1, -2)), "int32 slots": argument("slot_mapping", torch.Tensor.int),
    "short slots": argument("slot_mapping", lambda x: x[:-1].clone()),
    "slots of two dimensions": argument("slot_mapping", lambda x: x[:, None]),
    "key of other heads": argument("key", lambda x: x[:, :1].clone()),
    "long key": argument("key", lambda x: torch.cat([x, x], dim=2)),
    "flat value": argument("value", lambda x: x.flatten(1)),
    "fewer values than keys": argument("value", lambda x: x[:-1].clone()),
    "caches of other blocks": argument("value_cache", lambda x: x[:-1].clone()),
    "strided cache": argument("key_cache", strided),
}  # fmt: skip
COPIES: dict[str, Mutation] = {
    "source beyond the cache": argument("copies", put((0, 0), 6)),
    "destination beyond the cache": argument("copies", put((1, 1), 2**40)),
    "negative source": argument("copies", put((0, 0), -1)), "negative destination": argument("copies", put((0, 1), -1)),
    "int32 copies": argument("copies", torch.Tensor.int),
    "triples": argument("copies", lambda x: torch.cat([x, x[:, :1]], dim=1)),
    "flat copies": argument("copies", torch.Tensor.flatten), "a destination twice": argument("copies", put((1, 1), 3)),
    "a source that is a destination": argument("copies", put((1, 0), 3)),
    "one short cache": argument("caches", lambda x: [*x, torch.zeros(2, 3)]),
}  # fmt: skip
INTO: dict[str, Mutation] = {
    "fewer targets": argument("into", lambda x: x[:1]),
    "targets of another size": argument("into", lambda x: [x[0][:, :-1].clone(), x[1]]),
    "targets of another dtype": argument("into", lambda x: [x[0].double(), x[1]]),
    "a short target": argument("into", lambda x: [x[0], x[1][:2].clone()]),
}


def attention_arguments(rng: random.Random, *, with_kv: bool) -> Arguments:
    dtype = rng.choice([torch.float32, torch.bfloat16])
    lens = ((1, 40), (1, 300), (5, 18), (70, 90))
    batch = make_batch(Case(lens, heads=(4, 2), head_dim=32, dtype=dtype, seed=rng.randrange(1000)))
    new_kv: dict[str, torch.Tensor] = {}
    if with_kv:
        batch, new_kv = unwritten(batch)
    return {
        "query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache,
        "metadata": batch.metadata, **batch.options, **new_kv,
    }  # fmt: skip


def attend(impl: str, arguments: Arguments) -> None:
    if impl != "torch.ops":
        attention_of(**arguments, impl=impl)
        return
    m = arguments["metadata"]
    new_kv = [arguments.get(name) for name in ("key", "value")]
    if new_kv != [None, None]:
        torch.ops.hf_paged.write_kv(*new_kv, arguments["key_cache"], arguments["value_cache"], m.slot_mapping)
    options = [arguments.get(name) for name in ("sliding_window", "chunk_size", "softcap", "sinks", "alibi_slopes")]
    torch.ops.hf_paged.paged_attention(
        arguments["query"], arguments["key_cache"], arguments["value_cache"], m.block_tables, m.seq_lens,
        m.query_start_loc, m.slot_mapping, m.max_query_len, m.max_seq_len, arguments["scale"], *options, False,
    )  # fmt: skip


def write_arguments(rng: random.Random) -> Arguments:
    slots = torch.tensor(rng.sample(range(48), 5))
    caches = {"key_cache": torch.zeros(6, 8, 2, 16), "value_cache": torch.zeros(6, 8, 2, 24)}
    return {"key": torch.randn(5, 2, 16), "value": torch.randn(5, 2, 24), **caches, "slot_mapping": slots}


def write(impl: str, arguments: Arguments) -> None:
    if impl == "torch.ops":
        torch.ops.hf_paged.write_kv(*arguments.values())
    else:
        write_new(**arguments, impl=impl)


def copy_arguments(rng: random.Random, *, into: bool) -> Arguments:
    caches = [torch.randn(6, 8, 2, 16), torch.randn(6, 5)]
    arguments: Arguments = {"caches": caches, "copies": torch.tensor([[0, 3], [1, 5]])}
    if into:
        arguments["into"] = [torch.zeros_like(cache) for cache in caches]
    return arguments


def copy(impl: str, arguments: Arguments) -> None:
    ops.copy_blocks(**arguments, impl=impl)


NOT_OPERATORS = {"short out", "out of another dtype"}  # torch.ops has no such arguments


def main(impls: list[str]) -> None:
    rng = random.Random(0)
    groups: list[tuple[str, dict[str, Mutation], Callable[[], Arguments], Callable[[str, Arguments], None]]] = [
        ("attention", ATTENTION, lambda: attention_arguments(rng, with_kv=False), attend),
        ("attention with K/V", ATTENTION | WITH_KV, lambda: attention_arguments(rng, with_kv=True), attend),
        ("write_kv", WRITES, lambda: write_arguments(rng), write),
        ("copy_blocks", COPIES, lambda: copy_arguments(rng, into=False), copy),
        ("copy_blocks into", INTO, lambda: copy_arguments(rng, into=True), copy),
    ]
    for impl in impls:
        for group, mutations, make, call in groups:
            if impl == "torch.ops" and group.startswith("copy_blocks"):
                continue
            call(impl, make())  # well-formed: it runs
            for name, mutate in mutations.items():
                if impl == "torch.ops" and name in NOT_OPERATORS:
                    continue
                arguments = make()
                mutate(arguments, rng)
                print(f"{impl}, {group}: {name}", flush=True)
                try:
                    call(impl, arguments)
                except ValueError:
                    continue
                raise AssertionError("no error")
