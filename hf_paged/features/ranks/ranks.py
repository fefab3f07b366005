"""The ranks of a tensor-parallel model: the driver's messages to the others, and the end of all if one fails or hangs.

Rank 0 drives: it alone schedules and samples, and broadcasts each step (SOSP'23 section 4.6). torch.distributed
carries the messages, with gloo beside whatever backend the forwards use. Knows messages; never what is in them.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hf_paged.annotations import Model
from hf_paged.errors import RankError, UnsupportedModelError
from hf_paged.model.state import unwrapped
from hf_paged.threads import SteppingThread

# A rank must know the size of what it waits for, so the length travels with the content, in a message of one size.
FIRST_BYTES = 1 << 15
"""A message of up to this size, with its length, takes one broadcast; the rest of a longer one takes a second."""

# More than the second after which `_wait` looks, so that most ranks end by an error and not with their process.
GRACE_SECONDS = 3.0
"""From the failure of another rank until a rank that still waits for it in a collective operation ends its process."""

# Several fit into SILENCE_SECONDS, so that one which is late does not count as the end.
BEAT_SECONDS = 2.0
"""Between two signs of life of a process."""

SILENCE_SECONDS = 15.0
"""Without a sign of life until a process counts as one that hangs. Longer than a thread ever waits for its turn."""

STEP_SECONDS = 600.0
"""A step that takes longer never ends, although all processes are alive: an operation on a device hangs."""

# A kind and a text, of which a reason needs no more: all notices have one size, which the receiver knows.
_NOTICE_BYTES = 1024
_BEAT, _BYE, _FAILURE, _END = b"b", b"e", b"f", b"."
# A message begins with its length and an answer with its number, each of 64 bits.
_HEAD = 8
_FOREVER = timedelta(days=3650)  # an idle driver sends no message

log = logging.getLogger("hf_paged")


def num_ranks(model: Model) -> int:
    """The number of processes over which transformers has spread a model."""
    mesh = getattr(unwrapped(model), "_device_mesh", None)
    return 1 if mesh is None else int(mesh.size())


def check_heads(model: Model, size: int) -> None:
    """Raises UnsupportedModelError if transformers' plan divides K/V heads that so many ranks cannot share."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    divided = any(name.endswith((".k_proj", ".qkv_proj")) and way == "colwise" for name, way in model.tp_plan.items())
    if divided and heads % size:
        raise UnsupportedModelError(
            f"{heads} K/V heads cannot be divided among {size} ranks; use a number of ranks that divides {heads}"
        )


def ranks_of(model: Model) -> Ranks | None:
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

    A rank that fails, hangs, or whose process ends, ends the engine on all: `failure` says why, and `send`, `receive`
    and `guard` raise RankError from then on. The driver exchanges signs of life with each other rank: a thread speaks,
    another one listens. A process that is not heard of for SILENCE_SECONDS hangs; the driver kills it if it is on the
    same machine, because nothing else ends an operation of gloo that waits for it.
    """

    def __init__(self, group: Any) -> None:
        """group: the process group of the forwards."""
        self._forwards = group
        members = distributed.get_process_group_ranks(group)
        self.rank, self.size = distributed.get_rank(group), len(members)
        # All ranks of the world take part, unless the model is on some of them: the name of a group that only its
        # members make depends on the groups that each of them has.
        is_part = self.size < distributed.get_world_size()
        # Two groups, because an idle driver may send no message for days, while a sign of life must come in time.
        self._messages, self._notices = (
            distributed.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=is_part)
            for timeout in (_FOREVER, timedelta(seconds=SILENCE_SECONDS))
        )
        self.failure: str | None = None
        self._callbacks: list[Callable[[str], Any]] = []
        self._is_over = threading.Event()  # a failure, or the end
        self._lock = threading.Lock()
        self._is_closed = False
        self._began: float | None = None  # an operation that ends only if the other ranks take part
        self._sent: list[Any] = []  # operations and buffers of the last message
        self._last, self._count = b"", 0  # the last message, and how many there have been
        # The driver must know whom to kill if one hangs.
        self._processes = self._gather(_this_process())
        self._speakers, self._listeners = (
            [
                SteppingThread(partial(work, peer), f"hf-paged-rank-{peer}", self._end_with_program)
                for peer in (range(1, self.size) if self.is_driver else (0,))
            ]
            for work in (self._speak, self._listen)
        )
        for thread in (*self._speakers, *self._listeners):
            thread.start()

    @property
    def is_driver(self) -> bool:
        return self.rank == 0

    # -- agreement ----------------------------------------------------------------------------------------------

    def smallest(self, call: Callable[[], int]) -> int:
        """The smallest of the values that `call` returns on the ranks. If it raises on one of them, all raise."""
        value, error = 0, None
        try:
            value = call()
        except Exception as raised:  # whatever it is, the other ranks must not wait for this one
            error = raised
        text = b"" if error is None else _FAILURE + str(error).encode()
        answers = self._gather(struct.pack("=q", value) + text)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if text := answer[_HEAD:]:
                raise ValueError(f"rank {rank}: {text[1:].decode(errors='replace')}")
        return min(int(struct.unpack_from("=q", answer)[0]) for answer in answers)

    def check_same_messages(self) -> None:
        """On every rank: raises AssertionError on the driver unless all have got the same messages."""
        seen = self._gather(struct.pack("=qq", self._count, zlib.crc32(self._last)))
        assert not self.is_driver or len(set(seen)) == 1, f"the ranks have got different messages: {seen}"

    def _gather(self, data: bytes) -> list[bytes]:
        """The first bytes, about a thousand, of the data of each rank."""
        # The mark shows where a text ends that ends in zeros itself, as numbers do.
        own = _notice(data + _END)
        answers = torch.zeros(self.size, _NOTICE_BYTES, dtype=torch.uint8, device="cpu")
        self._wait(distributed.all_gather(list(answers), own, group=self._messages, async_op=True))
        return [bytes(memoryview(answer.numpy())).rstrip(b"\0")[:-1] for answer in answers]

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Send a message to the other ranks, without waiting until they have it."""
        with self.guard():
            self._finish_sending()
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

    def receive(self) -> bytearray:
        """The next message of the driver."""
        with self.guard():
            # Of one size, whatever follows: see FIRST_BYTES.
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8, device="cpu")
            self._wait(self._broadcast(first))
            content = first.numpy().data
            length = int.from_bytes(content[:_HEAD], "little")
            data = bytearray(content[_HEAD : _HEAD + length])
            if length > len(data):
                rest = torch.empty(length - len(data), dtype=torch.uint8, device="cpu")
                self._wait(self._broadcast(rest))
                data += rest.numpy().data
            self._note(data)
        return data

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
                # A time-out is a RuntimeError too, but leaves the operation in progress.
                if work.is_completed():
                    raise
                self.check()
            else:
                return

    def _finish_sending(self) -> None:
        for work, _ in self._sent:
            self._wait(work)
        self._sent = []

    def _note(self, data: bytes | bytearray) -> None:
        self._last, self._count = data, self._count + 1  # type: ignore[assignment]

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
        """Guard work that every rank does: an error in it, Ctrl-C included, ends the engine on all ranks."""
        self.check()
        # Within another guard the time counts from the beginning of the outer one.
        before = self._began
        self._began = before or time.monotonic()
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):  # perhaps from an operation with a rank that has failed and says why
                self._is_over.wait(GRACE_SECONDS / 2)
            if self.failure is None:
                self.fail(f"rank {self.rank}: {type(error).__name__}: {error}")
                raise
            raise RankError(self._ended) from error
        finally:
            self._began = before

    def when_failed(self, call: Callable[[str], Any]) -> None:
        """`call` gets the reason when a rank has failed, in any thread."""
        with self._lock:
            self._callbacks.append(call)
        # A failure just before has not seen this call.
        if self.failure is not None:
            call(self._ended)

    def fail(self, reason: str) -> None:
        """End the engine on all ranks; the first reason counts."""
        with self._lock:
            if self.failure is not None or self._is_closed:
                return
            self.failure = reason
        self._is_over.set()
        log.error("the engine ends on rank %d: %s", self.rank, reason)
        # Without the lock, because a callback may ask for it.
        for call in self._callbacks:
            call(self._ended)
        if distributed.get_backend(self._forwards) != "gloo":
            self._forwards.abort()  # gloo's operations cannot be ended
        threading.Thread(target=self._end_process, name="hf-paged-end", daemon=True).start()

    def _end_with_program(self) -> None:
        self.fail(f"the program of rank {self.rank} ends without closing its engine")

    def _end_process(self) -> None:
        """An operation of gloo that waits for a rank which does not take part ends only with its process, or with this
        one: the driver's, which others wait for, ends later."""
        time.sleep(2 * GRACE_SECONDS if self.is_driver else GRACE_SECONDS)
        if self._began is not None:
            log.error("rank %d ends its process, because it waits for a rank that has failed", self.rank)
            os._exit(1)

    def _speak(self, peer: int) -> None:
        """Signs of life, and at the end how it is."""
        with suppress(RuntimeError, ValueError):  # that rank has ended; ValueError: the groups are being destroyed
            while not self._is_over.wait(BEAT_SECONDS):
                distributed.send(_notice(_BEAT), group_dst=peer, group=self._notices)
                if self.is_driver and self._began is not None and time.monotonic() - self._began > STEP_SECONDS:
                    self.fail(f"a step has not ended within {STEP_SECONDS:g} seconds")
            last = _BYE if self.failure is None else _FAILURE + self.failure.encode()
            distributed.send(_notice(last), group_dst=peer, group=self._notices)

    def _listen(self, peer: int) -> None:
        notice = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8, device="cpu")
        heard = time.monotonic()
        try:
            while True:
                distributed.recv(notice, group_src=peer, group=self._notices)
                heard = time.monotonic()
                text = bytes(notice.numpy().data).rstrip(b"\0")
                if text[:1] == _BYE:
                    return
                if text[:1] == _FAILURE:
                    self.fail(text[1:].decode(errors="replace"))
                    return
        except (RuntimeError, ValueError):
            # A connection that was closed fails at once; silence ends in the time-out of the operation.
            if time.monotonic() - heard < SILENCE_SECONDS / 2:
                self.fail(f"rank {peer} has ended without closing its engine")
                return
        self.fail(f"rank {peer} hangs: nothing has been heard of it for {SILENCE_SECONDS:g} seconds")
        if self.is_driver and not self._is_closed:
            _kill(self._processes[peer])

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, *, is_done: bool) -> None:
        """is_done: whether the driver has sent its last message, or this rank has got it. Otherwise all end."""
        if not is_done:
            self.fail(f"rank {self.rank} has closed its engine before the driver")
        with suppress(RuntimeError):  # a rank has ended meanwhile
            self._finish_sending()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._is_over.set()
        # Speakers first: listeners end when they have heard the other side's end.
        for thread in self._speakers:
            thread.join(GRACE_SECONDS)
        if self.failure is not None:
            return  # the groups may be in use by threads that wait
        for thread in self._listeners:
            thread.join(GRACE_SECONDS)
        if not any(thread.is_alive() for thread in (*self._speakers, *self._listeners)):
            distributed.destroy_process_group(self._messages)
            distributed.destroy_process_group(self._notices)


def _notice(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text[:_NOTICE_BYTES].ljust(_NOTICE_BYTES, b"\0")), dtype=torch.uint8)


def _this_process() -> bytes:
    """Names this process, and the place in which its number means it."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.getpid()} {machine} {os.stat('/proc/self/ns/pid').st_ino}".encode()
    except OSError:  # not on this system
        return b""


def _kill(process: bytes) -> None:
    """Nothing if it runs elsewhere, or has ended."""
    number, *place = process.split()
    if place == _this_process().split()[1:]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(number), signal.SIGKILL)
