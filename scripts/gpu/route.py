"""Whether models run packed with the installed versions: status 1 if not, because then no part of the GPU path is used.

python scripts/gpu/route.py
"""

from __future__ import annotations

import torch
import transformers

import hf_paged


def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    report = str(hf_paged.check(transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {report}")
    if ": native" not in report:
        raise SystemExit("a Llama would not run packed: nothing of the GPU path would be tested or measured")


if __name__ == "__main__":
    main()
