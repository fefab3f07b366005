"""An inference engine as a process beside a benchmark: it loads a checkpoint, then answers jobs, one JSON line each.

`Peer` in peers.py starts this file with the interpreter of the engine's own environment: `python -P engines.py NAME`.
Nothing of the repository is imported but hf_paged, by the engines that are ours. The first line asks to load
({"folder", "form", "threads", "options"}), the others have {"prompts", "counts", "samples", "beams"}: each prompt gets
so many new tokens, whatever they are, in so many samples, or as the best of so many beams. Only the work itself is
timed. An answer has the process's largest memory since the job began.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Tokens = list[list[list[int]]]
"""Of each prompt, its outputs."""


class Job(NamedTuple):
    """options: of each prompt, arguments of `GenerationConfig`, or of `SamplingParams` for vLLM; others refuse them.
    wants_margins: see `Plain`."""

    prompts: list[list[int]]
    counts: list[int]
    samples: int = 1
    beams: int = 1
    options: list[dict[str, Any]] | None = None
    wants_margins: bool = False


class Engine(Protocol):
    """form: fp32, bf16, int8 or int4, of the weights; of ours also w8a16, w4a16, w8a8 and w4a8. extra: figures of the
    last job."""

    version: str
    extra: dict[str, Any]

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None: ...

    def run(self, job: Job) -> Tokens: ...


class Refused(Exception):
    """The engine has no such thing: the answer says so, and the process goes on."""


class _Transformers:
    """What the engines on a model of transformers share: the model in this form, and configurations without an end."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        dtype = torch.bfloat16 if form == "bf16" else torch.float32
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        # Whatever the checkpoint asks for at the end of a text or in sampling would change the amount of work.
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.version: str = transformers.__version__
        self.extra: dict[str, Any] = {}

    def _config(self, job: Job, count: int) -> Any:
        from transformers import GenerationConfig

        named: dict[str, Any] = {"do_sample": True, "num_return_sequences": job.samples} if job.samples > 1 else {}
        if job.beams > 1:
            named["num_beams"] = job.beams
        named = {"do_sample": False, **named, **(job.options[0] if job.options else {})}
        return GenerationConfig(max_new_tokens=count, eos_token_id=None, pad_token_id=0, **named)

    def _rounded(self, form: str) -> None:
        import hf_paged

        if form not in ("fp32", "bf16"):
            hf_paged.prepack(self._model, form, group_size=32)
        self.version = hf_paged.__version__


class Plain(_Transformers):
    """`generate`, of several prompts in one padded batch. extra: bytes of its K/V at their final length, and with
    `wants_margins` by how much each token's logit is above the second largest one."""

    _cache: str | None = None

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        super().__init__(folder, form, threads, options)
        if form in ("int8", "int4"):
            raise Refused("transformers itself has no weights in int8 or int4")

    def run(self, job: Job) -> Tokens:
        import torch

        longest, count = max(map(len, job.prompts)), max(job.counts)
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in job.prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in job.prompts])
        config = self._config(job, count)
        config.output_scores = config.return_dict_in_generate = job.wants_margins
        given = {} if self._cache is None else {"cache_implementation": self._cache}
        made = self._model.generate(ids, attention_mask=mask, generation_config=config, **given)
        rows = (made.sequences if job.wants_margins else made)[:, longest:].tolist()
        self.extra = {"kv_bytes": len(rows) * job.beams * (longest + count - 1) * self._bytes_per_token()}
        if job.wants_margins:
            best = torch.stack(made.scores).topk(2).values
            self.extra["margins"] = (best[..., 0] - best[..., 1]).T.tolist()
        each = len(rows) // len(job.prompts)
        return [
            [row[:count] for row in rows[i * each : (i + 1) * each]]
            for i, (_, count) in enumerate(zip(job.prompts, job.counts))
        ]

    def _bytes_per_token(self) -> int:
        config = self._model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = int(config.num_key_value_heads * size * self._model.dtype.itemsize)
        return 2 * int(config.num_hidden_layers) * each


class Paged(Plain):
    """Paged `generate`."""

    _cache = "paged"

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        _Transformers.__init__(self, folder, form, threads, options)
        self._rounded(form)

    def run(self, job: Job) -> Tokens:
        import hf_paged

        with hf_paged.record_calls() as records:
            tokens = super().run(job)
        self.extra["kv_bytes"] = records[0].kv_bytes_used
        return tokens


class Ours(_Transformers):
    """hf_paged's engine, which gets all prompts at once and remembers none of an earlier job."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        import hf_paged

        super().__init__(folder, form, threads, options)
        self._rounded(form)
        self._engine = hf_paged.Engine(self._model, hf_paged.CacheConfig(memory="1GiB", **options))

    def run(self, job: Job) -> Tokens:
        self._engine.clear_prefix_cache()
        configs = [self._config(job, count) for count in job.counts]
        ids = [self._engine.add_request(prompt, config) for prompt, config in zip(job.prompts, configs)]
        found: dict[str, Any] = {}
        used = 0
        while self._engine.has_unfinished_requests():
            found |= {output.request_id: output for output in self._engine.step() if output.finished}
            used = max(used, self._engine.stats().kv_bytes_used)
        self.extra = {"kv_bytes": used}
        return [[list(output.token_ids) for output in found[each].outputs] for each in ids]


class Batching(_Transformers):
    """transformers' continuous batching."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        super().__init__(folder, form, threads, options)
        if form in ("int8", "int4"):
            raise Refused("transformers itself has no weights in int8 or int4")
        from transformers import ContinuousBatchingConfig

        config = self._config(Job([], []), 1)
        # By default it takes nearly all memory, and the other engines' with it; this is room for 24,576 tokens.
        memory = ContinuousBatchingConfig(num_blocks=96, max_batch_tokens=2048, allow_block_sharing=False, **options)
        self._batching = self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=memory
        )
        self._manager = self._batching.__enter__()

    def run(self, job: Job) -> Tokens:
        if job.samples > 1 or job.beams > 1 or job.options:
            raise Refused("one manager has one set of options; beams and drafts are refused")
        names = [
            self._manager.add_request(prompt, max_new_tokens=count) for prompt, count in zip(job.prompts, job.counts)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            output = self._manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                found[output.request_id] = list(output.generated_tokens)
            elif output is None and not self._manager.is_running():
                raise SystemExit("transformers' continuous batching stopped before the end")
        return [[found[name]] for name in names]


class OpenVino:
    """OpenVINO GenAI's pipeline for many requests; neither weights in fp32 and bf16 nor K/V are quantised.

    The converted checkpoint is kept beside the original one.
    """

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        import openvino_genai

        target = Path(folder) / f"openvino-{'fp32' if form == 'bf16' else form}"
        if not target.exists():
            self._convert(folder, form, target)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 256, False
        precision = "bf16" if form == "bf16" else "f32"
        properties = {
            "INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": threads,
        }  # fmt: skip
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(target), scheduler, "CPU", properties)
        self.version, self.extra = openvino_genai.__version__, {}

    @staticmethod
    def _convert(folder: str, form: str, target: Path) -> None:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        rounded: dict[str, Any] = {
            "int8": {"quantization_config": OVWeightQuantizationConfig(bits=8)},
            "int4": {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=32)},
        }
        given = rounded.get(form, {"load_in_8bit": False})
        OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **given).save_pretrained(target)

    def run(self, job: Job) -> Tokens:
        import numpy
        import openvino
        import openvino_genai

        if job.options:
            raise Refused("drafts by prompt lookup need another pipeline")
        configs = []
        for count in job.counts:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, job.samples > 1
            config.num_return_sequences, config.num_beams = job.samples, job.beams
            config.set_eos_token_id(0)  # without one it is -1, which generate refuses; it is ignored
            configs.append(config)
        prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in job.prompts]
        return [[list(each) for each in out.m_generation_ids] for out in self._pipeline.generate(prompts, configs)]


class Vllm:
    """vLLM. options: further arguments of `vllm.LLM`; those of a job are arguments of `SamplingParams`."""

    def __init__(self, folder: str, form: str, threads: int, options: dict[str, Any]) -> None:
        # In a process of its own, the memory of its engine would not be seen.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        if form not in ("fp32", "bf16"):
            raise Refused("no int8 or int4 of an ordinary checkpoint on a CPU")
        named = {"skip_tokenizer_init": True, "enable_prefix_caching": False, **options}
        self._llm = vllm.LLM(folder, dtype={"fp32": "float32", "bf16": "bfloat16"}[form], **named)
        self.version, self.extra = vllm.__version__, {}

    def run(self, job: Job) -> Tokens:
        import vllm

        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        if job.beams > 1:
            raise Refused("beam search runs outside of vLLM's engine and needs a tokenizer")
        sampled = {"temperature": 1.0, "n": job.samples} if job.samples > 1 else {"temperature": 0.0}
        usual = [{"max_tokens": count, "ignore_eos": True, "detokenize": False, **sampled} for count in job.counts]
        params = [vllm.SamplingParams(**each) for each in job.options or usual]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [[list(each.token_ids) for each in output.outputs] for output in outputs]


ENGINES: dict[str, tuple[str, str]] = {
    "engine": (__name__, "Ours"),
    "paged": (__name__, "Paged"),
    "plain": (__name__, "Plain"),
    "hf-cb": (__name__, "Batching"),
    "openvino": (__name__, "OpenVino"),
    "vllm": (__name__, "Vllm"),
    "llama.cpp": ("engine_llama_cpp", "LlamaCpp"),
    "ctranslate2": ("engine_ctranslate2", "Generator"),
    "ctranslate2-translate": ("engine_ctranslate2", "Translator"),
}


def _class_of(name: str) -> type[Engine]:
    module, kind = ENGINES[name]
    if module == __name__:
        return globals()[kind]  # type: ignore[no-any-return]
    # Not by a path for imports: this folder has modules with the names of packages. They import this one as "engines",
    # whose `Refused` must be the one that is caught here.
    sys.modules["engines"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location(module, Path(__file__).with_name(f"{module}.py"))
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return getattr(found, kind)  # type: ignore[no-any-return]


def memory(*, forget: bool = False) -> int:
    """The largest resident memory of this process in bytes, since the last call that forgot it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    if forget:
        with contextlib.suppress(OSError):  # a container may forbid it; then it is the largest since the start
            Path("/proc/self/clear_refs").write_text("5")
    return peak


def _answers(kind: type[Engine], lines: Any) -> Any:
    """Yield the answer to each line."""
    engine: Engine | None = None
    for line in lines:
        given = json.loads(line)
        memory(forget=True)
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            if engine is None:
                engine = kind(**given)
                answer["version"] = engine.version
            else:
                job = Job(**given)
                begin = time.perf_counter()
                answer["tokens"] = engine.run(job)
        except Refused as refused:
            answer["refused"] = str(refused)
        seconds = time.perf_counter() - begin
        extra = {} if engine is None else engine.extra
        yield {"seconds": seconds, "peak_bytes": memory(), **answer, **extra}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    # A benchmark that is killed leaves this process stopped, so that it would not see the end of its input.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for answer in _answers(_class_of(sys.argv[1]), sys.stdin):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
