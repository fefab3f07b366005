"""llama.cpp for engines.py: its shared libraries by ctypes, as npm's `@node-llama-cpp/linux-x64` has them.

All prompts of a job are read together, then each step gives every sequence a token: continuous batching without a
server's work. Of the structures that the C interface takes by value, only the fields that are set here are named, and
their defaults are compared first, since a release may move them (this is the layout of llama.cpp 0.5.0).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from engines import Job, Refused, Tokens

F32, F16, Q8_0, Q4_1 = 0, 1, 8, 3
"""Numbers of ggml's types."""
FORMS = {"fp32": F32, "int8": Q8_0, "int4": Q4_1}


class ModelParams(ctypes.Structure):
    _fields_ = [("rest", ctypes.c_ubyte * 256)]


class ContextParams(ctypes.Structure):
    _fields_ = [
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32), ("n_seq_max", c_uint32),
        ("between", c_int32 * 22), ("type_k", c_int32), ("type_v", c_int32), ("callbacks", c_void_p * 2),
        ("embeddings", c_bool), ("offload_kqv", c_bool), ("no_perf", c_bool), ("op_offload", c_bool),
        ("swa_full", c_bool), ("kv_unified", c_bool), ("rest", ctypes.c_ubyte * 256),
    ]  # fmt: skip


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    ]  # fmt: skip


def _library(folder: Path, isa: str) -> Any:
    """The C interface. isa: "avx2" loads the kernels for it, "" the best ones for this CPU."""
    (base,), (ggml,), (llama,) = (sorted(folder.glob(f"lib{name}.*so*"))[:1] or sorted(folder.glob(f"lib{name}.so"))
                                  for name in ("ggml-base", "ggml", "llama"))  # fmt: skip
    ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL)
    backends = ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL)
    if isa == "avx2":
        backends.ggml_backend_load.restype = c_void_p
        assert backends.ggml_backend_load(str(folder / "libggml-cpu-haswell.so").encode())
    else:
        backends.ggml_backend_load_all_from_path(str(folder).encode())
    library = ctypes.CDLL(str(llama))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "model_default_params": (ModelParams, []),
        "context_default_params": (ContextParams, []),
        "model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
        "init_from_model": (c_void_p, [c_void_p, ContextParams]),
        "free": (None, [c_void_p]),
        "set_n_threads": (None, [c_void_p, c_int32, c_int32]),
        "get_memory": (c_void_p, [c_void_p]),
        "memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
        "batch_init": (Batch, [c_int32, c_int32, c_int32]),
        "batch_free": (None, [Batch]),
        "decode": (c_int32, [c_void_p, Batch]),
        "sampler_init_greedy": (c_void_p, []),
        "sampler_init_dist": (c_void_p, [c_uint32]),
        "sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32]),
        "sampler_free": (None, [c_void_p]),
        "log_set": (None, [c_void_p, c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class LlamaCpp:
    """options: "library", the folder of the shared libraries.

    The checkpoint's folder has a `model.gguf` in Q4_1, from which files in fp32 and Q8_0 are made beside it. K/V is in
    fp32 beside fp32 weights, otherwise in fp16, llama.cpp's default.
    """

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        if form not in FORMS:
            raise Refused("bf16 files were not made")
        self._llama = _library(Path(options["library"]), os.environ.get("HF_PAGED_ISA", ""))
        self._silence = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *given: None)
        self._llama.llama_log_set(ctypes.cast(self._silence, c_void_p), None)
        file = _file(Path(folder), form)
        self._model = self._llama.llama_model_load_from_file(
            str(file).encode(), self._llama.llama_model_default_params()
        )
        assert self._model, f"llama.cpp could not load {file}"
        self._threads, self._type = threads, F32 if form == "fp32" else F16
        self.version, self.extra = Path(options["library"]).name, {}
        self.version = next(Path(options["library"]).glob("libllama.*so")).name.removeprefix("libllama.v")[:-3]

    def run(self, job: Job) -> Tokens:
        if job.beams > 1 or job.options:
            raise Refused("llama.cpp's library has no beam search and no drafts by prompt lookup")
        context = self._context(job)
        sampler = self._llama.llama_sampler_init_dist(0) if job.samples > 1 else self._llama.llama_sampler_init_greedy()
        try:
            return _Loop(self._llama, context, sampler, job).tokens()
        finally:
            self._llama.llama_sampler_free(sampler)
            self._llama.llama_free(context)

    def _context(self, job: Job) -> Any:
        params = self._llama.llama_context_default_params()
        seen = (params.n_ctx, params.n_batch, params.n_ubatch, params.type_k, params.type_v, params.offload_kqv)
        assert seen == (512, 2048, 512, F16, F16, True), f"another layout of llama_context_params: {seen}"
        count = len(job.prompts) * job.samples
        places = sum(len(prompt) + job.samples * new for prompt, new in zip(job.prompts, job.counts))
        params.n_ctx, params.n_seq_max = -(-places // 256) * 256 + 256, count
        params.type_k = params.type_v = self._type
        params.kv_unified = True  # sequences of their own lengths, and samples that share a prompt
        context = self._llama.llama_init_from_model(self._model, params)
        assert context, "llama.cpp made no context"
        self._llama.llama_set_n_threads(context, self._threads, self._threads)
        return context


class _Loop:
    """One job: prompts in batches of up to 2,048 tokens, then one token of each sequence a step."""

    def __init__(self, llama: Any, context: Any, sampler: Any, job: Job) -> None:
        self._llama, self._context, self._sampler, self._job = llama, context, sampler, job
        self._batch = llama.llama_batch_init(2048, 0, 1)
        self._made: list[list[int]] = [[] for _ in range(len(job.prompts) * job.samples)]
        self._wanted: list[tuple[int, int]] = []  # index in the batch, sequence

    def tokens(self) -> Tokens:
        job, each = self._job, self._job.samples
        for index, prompt in enumerate(job.prompts):
            for place, token in enumerate(prompt):
                self._add(token, place, index * each, is_last=place == len(prompt) - 1)
        self._decode()
        while running := [s for s, made in enumerate(self._made) if len(made) < job.counts[s // each]]:
            for sequence in running:
                made = self._made[sequence]
                self._add(made[-1], len(job.prompts[sequence // each]) + len(made) - 1, sequence, is_last=True)
            self._decode()
        self._llama.llama_batch_free(self._batch)
        return [self._made[i * each : (i + 1) * each] for i in range(len(job.prompts))]

    def _add(self, token: int, place: int, sequence: int, *, is_last: bool) -> None:
        if self._batch.n_tokens == 2048:
            self._decode()
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, is_last
        batch.seq_id[i][0] = sequence
        if is_last:
            self._wanted.append((i, sequence))
        batch.n_tokens += 1

    def _decode(self) -> None:
        """Compute the batch, and give each sequence whose last token it has its next one."""
        failed = self._llama.llama_decode(self._context, self._batch)
        assert not failed, f"llama_decode: {failed}"
        for index, sequence in self._wanted:
            is_first = not self._made[sequence]
            self._made[sequence].append(self._drawn(index))
            if is_first:  # its samples share the prompt
                for other in range(sequence + 1, sequence + self._job.samples):
                    memory = self._llama.llama_get_memory(self._context)
                    self._llama.llama_memory_seq_cp(memory, sequence, other, -1, -1)
                    self._made[other].append(self._drawn(index))
        self._wanted.clear()
        self._batch.n_tokens = 0

    def _drawn(self, index: int) -> int:
        return int(self._llama.llama_sampler_sample(self._sampler, self._context, index))


def _file(folder: Path, form: str) -> Path:
    """The checkpoint in this form; Q4_1 is what it was made from."""
    if form == "int4":
        return folder / "model.gguf"
    target = folder / f"model-{form}.gguf"
    if not target.exists():
        _rewrite(folder / "model.gguf", target, FORMS[form])
    return target


def _rewrite(source: Path, target: Path, kind: int) -> None:
    """Write the file with its quantised tensors in another type."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if is_array else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = gguf.GGMLQuantizationType(kind if tensor.tensor_type != F32 else F32)
        writer.add_tensor(tensor.name, gguf.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
