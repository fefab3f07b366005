"""OpenVINO GenAI as a process beside a benchmark, with the jobs and answers of `vllm_peer`.

`Vllm` there starts this file with the interpreter of an environment that has `openvino-genai` and
`optimum-intel[openvino]`. The weights keep their dtype; `INFERENCE_PRECISION_HINT` is the dtype of the model. Neither
weights nor K/V are quantised.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def load(job: dict[str, Any]) -> Any:
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        exported = OVModelForCausalLM.from_pretrained(job["model"], export=True, load_in_8bit=False, compile=False)
        exported.save_pretrained(folder)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 4, 256, False
        precision = PRECISIONS[job["dtype"]]
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
        }
        return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def run(pipeline: Any, job: dict[str, Any]) -> list[int]:
    """The number of tokens of each prompt's output."""
    import numpy
    import openvino
    import openvino_genai

    prompts = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in job["prompts"]]
    configs = []
    for params in job["params"]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = params["max_tokens"], True, False
        config.set_eos_token_id(0)  # without one it is -1, which generate refuses; it is ignored
        configs.append(config)
    return [len(result.m_generation_ids[0]) for result in pipeline.generate(prompts, configs)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output

    import openvino_genai

    pipeline = None
    for line in sys.stdin:
        job, begin = json.loads(line), time.perf_counter()
        if pipeline is None:
            pipeline = load(job)
            answer: dict[str, Any] = {"version": openvino_genai.__version__}
        else:
            answer = {"tokens": run(pipeline, job)}
        answers.write(json.dumps({"seconds": time.perf_counter() - begin, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
