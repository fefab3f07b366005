"""The ranks of a tensor-parallel model: the driver's messages to the others, and the end of all if one fails.

Rank 0 drives: it alone schedules and samples, and broadcasts each step's plan (SOSP'23 section 4.6). torch.distributed
carries the messages, with gloo beside whatever backend the forwards use. Knows messages; never what is in a plan.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hf_paged.errors import RankError, UnsupportedModelError
from hf_paged.model.state import unwrapped

FIRST_BYTES = 1 << 15
"""A message of up to this size, with its length, takes one broadcast; the rest of a longer one takes a second."""

GRACE_SECONDS = 3.0
"""From the failure of another rank until a rank that still waits for it in a collective operation ends its process."""

_NOTICE_BYTES = 1024
_HEAD = 8
_FOREVER = timedelta(days=3650)  # an idle driver sends nothing; a rank that ends is noticed at once
_BYE = b""

log = logging.getLogger("hf_paged")


def num_ranks(model: Any) -> int:
    """The number of processes over which transformers has spread a model."""
    mesh = getattr(unwrapped(model), "_device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def check_heads(model: Any, size: int) -> None:
    """Raises UnsupportedModelError if transformers' plan divides K/V heads that so many ranks cannot share."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    divided = any(name.endswith((".k_proj", ".qkv_proj")) and way == "colwise" for name, way in model.tp_plan.items())
    if divided and heads % size:
        raise UnsupportedModelError(
            f"{heads} K/V heads cannot be divided among {size} ranks; use a number of ranks that divides {heads}"
        )


def ranks_of(model: Any) -> Ranks | None:
    """The ranks over which a model is spread, None for a model on one. All of them must call this at the same time.

    Raises UnsupportedModelError for a model that is not spread by tensor parallelism alone.
    """
    if num_ranks(model) == 1:
        return None
    mesh = unwrapped(model)._device_mesh
    names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
    sizes = {name: mesh.size(dim) for dim, name in enumerate(names)}
    if others := {name: size for name, size in sizes.items() if name != "tp" and size > 1}:
        raise UnsupportedModelError(
            f"the model is spread by {', '.join(f'{name}={size}' for name, size in others.items())}; the engine "
            "runs tensor parallelism only: DistributedConfig(tp_size=...)"
        )
    return Ranks(mesh.get_group("tp" if mesh.ndim > 1 else None))


class Ranks:
    """The processes of one engine. Each has one object, made by all of them together.

    A rank that fails, or whose process ends, ends the engine on all: `failure` says why, and `send`, `receive` and
    `guard` raise RankError from then on. A thread for each other rank (on the driver; elsewhere for the driver) waits
    for its notice, so that the end of a process is noticed without a message from it.
    """

    def __init__(self, group: Any) -> None:
        """group: the process group of the forwards."""
        self._forwards = group
        members = distributed.get_process_group_ranks(group)
        self.rank, self.size = distributed.get_rank(group), len(members)
        # All ranks of the world take part, unless the model is on some of them: the name of a group that only its
        # members make depends on the groups that each of them has.
        is_part = self.size < distributed.get_world_size()
        self._messages, self._notices = (
            distributed.new_group(members, timeout=_FOREVER, backend="gloo", use_local_synchronization=is_part)
            for _ in range(2)
        )
        self.failure: str | None = None
        self._has_failed = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_waiting = False  # in an operation that ends only if the other ranks take part
        self._sent: list[Any] = []  # operations and buffers of the last message
        self._last, self._count = b"", 0  # the last message, and how many there have been
        peers = range(1, self.size) if self.is_driver else (0,)
        self._watchers = [
            threading.Thread(target=self._watch, args=(peer,), name=f"hf-paged-rank-{peer}", daemon=True)
            for peer in peers
        ]
        for thread in self._watchers:
            thread.start()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    # -- agreement ----------------------------------------------------------------------------------------------

    def smallest(self, call: Callable[[], int]) -> int:
        """The smallest of the values that `call` returns on the ranks. If it raises on one of them, all raise."""
        value, error = None, None
        try:
            value = call()
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        answers: list[Any] = [None] * self.size
        distributed.all_gather_object(answers, (value, None if error is None else str(error)), group=self._messages)
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise ValueError(f"rank {rank}: {text}")
        return min(answer for answer, _ in answers)

    def check_same_messages(self) -> None:
        """On every rank: raises AssertionError on the driver unless all have got the same messages."""
        seen = (self._count, zlib.crc32(self._last))
        answers: list[Any] | None = [None] * self.size if self.is_driver else None
        distributed.gather_object(seen, answers, group_dst=0, group=self._messages)
        assert answers is None or answers == [seen] * self.size, f"the ranks have followed different plans: {answers}"

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """Send a message to the other ranks, without waiting until they have it."""
        with self.guard():
            self._finish_sending()
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._note(data)
            first = bytearray(FIRST_BYTES)
            first[:_HEAD] = len(data).to_bytes(_HEAD, "little")
            head = data[: FIRST_BYTES - _HEAD]
            first[_HEAD : _HEAD + len(head)] = head
            buffers = [first]
            if len(data) > len(head):
                buffers.append(bytearray(data[len(head) :]))
            tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in buffers]
            self._sent = [(self._broadcast(tensor), tensor) for tensor in tensors]

    def receive(self) -> Any:
        """The next message of the driver."""
        with self.guard():
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
            self._wait(self._broadcast(first))
            content = memoryview(first.numpy())
            length = int.from_bytes(content[:_HEAD], "little")
            data = bytes(content[_HEAD : _HEAD + length])
            if length > len(data):
                rest = torch.empty(length - len(data), dtype=torch.uint8, device="cpu")
                self._wait(self._broadcast(rest))
                data += bytes(memoryview(rest.numpy()))
            self._note(data)
        return pickle.loads(data)

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        # The group's own method: `distributed.broadcast` takes 0.1 ms more on either side, in every step.
        options = distributed.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        return self._messages.broadcast([tensor], options)

    def _wait(self, work: Any) -> None:
        """Wait for an operation, and look every second for failures and Ctrl-C."""
        while True:
            try:
                work.wait(timedelta(seconds=1))
            except RuntimeError:
                if work.is_completed():
                    raise
                self.check()
            else:
                return

    def _finish_sending(self) -> None:
        for work, _ in self._sent:
            self._wait(work)
        self._sent = []

    def _note(self, data: bytes) -> None:
        self._last, self._count = data, self._count + 1

    # -- failures -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises RankError if a rank has failed."""
        if self.failure is not None:
            raise RankError(self._ended)

    @property
    def _ended(self) -> str:
        return f"{self.failure}; this engine has ended on all ranks"

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is done inside, every rank does: an error in it, Ctrl-C included, ends the engine on all ranks."""
        self.check()
        self._is_waiting = True
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):  # perhaps from an operation with a rank that has failed and says why
                self._has_failed.wait(GRACE_SECONDS / 2)
            if self.failure is None:
                self.fail(f"rank {self.rank}: {type(error).__name__}: {error}")
                raise
            raise RankError(self._ended) from error
        finally:
            self._is_waiting = False

    def fail(self, reason: str) -> None:
        """End the engine on all ranks; the first reason counts."""
        with self._lock:
            if self.failure is not None or self._is_closed:
                return
            self.failure = reason
        self._has_failed.set()
        log.error("the engine ends on rank %d: %s", self.rank, reason)
        self._notify(reason.encode()[:_NOTICE_BYTES])
        if distributed.get_backend(self._forwards) != "gloo":
            self._forwards.abort()  # gloo's operations cannot be ended
        if not self.is_driver:
            threading.Thread(target=self._end_process, name="hf-paged-end", daemon=True).start()

    def _end_process(self) -> None:
        """An operation of gloo that waits for a rank which does not take part ends only with its process."""
        time.sleep(GRACE_SECONDS)
        if self._is_waiting:
            log.error("rank %d ends its process, because it waits for a rank that has failed", self.rank)
            os._exit(1)

    def _notify(self, text: bytes) -> None:
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8, device="cpu")
        notice[: len(text)] = torch.frombuffer(bytearray(text) or bytearray(1), dtype=torch.uint8)[: len(text)]
        for peer in range(1, self.size) if self.is_driver else (0,):
            with suppress(RuntimeError):  # that rank has ended
                distributed.send(notice, group_dst=peer, group=self._notices)

    def _watch(self, peer: int) -> None:
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8, device="cpu")
        try:
            distributed.recv(notice, group_src=peer, group=self._notices)
            reason = bytes(memoryview(notice.numpy())).rstrip(b"\0").decode(errors="replace")
        except (RuntimeError, ValueError):  # ValueError: the process groups are being destroyed
            reason = f"rank {peer} has ended without closing its engine"
        if reason:
            self.fail(reason)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, *, is_done: bool) -> None:
        """is_done: whether the driver has sent its last message, or this rank has got it. Otherwise all end."""
        if not is_done:
            self.fail(f"rank {self.rank} has closed its engine before the driver")
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self.failure is not None:
            return  # the groups may be in use by threads that wait
        with suppress(RuntimeError):  # a rank has ended meanwhile
            self._finish_sending()
        self._notify(_BYE)
        for thread in self._watchers:
            thread.join(GRACE_SECONDS)
        if not any(thread.is_alive() for thread in self._watchers):
            distributed.destroy_process_group(self._messages)
            distributed.destroy_process_group(self._notices)
