"""vLLM as a process beside a benchmark: it keeps one engine and answers jobs, one JSON line each.

The benchmark runs in hf_paged's environment and `Vllm` starts this file with the interpreter of vLLM's; that process
imports nothing of ours. Between jobs it waits for its standard input, so that other systems can run in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


class Vllm:
    """vLLM with the weights of `model`. `options` are further arguments of `vllm.LLM`; with a `tokenizer`, jobs may
    have stop strings and bad words. `script`: of another system, which takes the same jobs."""

    def __init__(
        self,
        python: str,
        model: Any,
        *,
        dtype: str,
        threads: int,
        options: dict[str, Any],
        tokenizer: Any = None,
        script: str = __file__,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        if tokenizer is not None:
            tokenizer.save_pretrained(self._folder.name)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        env.pop("PYTHONPATH", None)
        # -P: this folder has modules with the names of packages that vLLM imports.
        self._process = subprocess.Popen(
            [python, "-P", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        settings = {"model": self._folder.name, "dtype": dtype, "skip_tokenizer_init": tokenizer is None, **options}
        started = self._ask(settings)
        self.start_up: float = started["seconds"]
        self.version: str = started["version"]

    def run(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> tuple[float, list[int]]:
        """Seconds for all prompts at once, and the number of tokens of each; `params` are those of `SamplingParams`."""
        answer = self._ask({"prompts": prompts, "params": params})
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output

    import vllm

    llm = None
    for line in sys.stdin:
        job, begin = json.loads(line), time.perf_counter()
        if llm is None:
            llm = vllm.LLM(enable_prefix_caching=False, **job)
            answer = {"version": vllm.__version__}
        else:
            params = [vllm.SamplingParams(**each) for each in job["params"]]
            prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answer = {"tokens": [len(output.outputs[0].token_ids) for output in outputs]}
        answers.write(json.dumps({"seconds": time.perf_counter() - begin, **answer}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
