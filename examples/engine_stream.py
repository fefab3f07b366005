"""Continuous batching: requests with different options share steps, and their outputs are streamed.

python examples/engine_stream.py
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged

CHECKPOINT = Path(__file__).parent / "pydoc-lm-qa"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    questions = ["What does str.join() do?", "What is the grammar of assert_stmt?", "Explain the if statement."]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in questions
    ]
    # Three requests with three decoding modes in one batch.
    configs = [
        GenerationConfig(max_new_tokens=48),
        GenerationConfig(max_new_tokens=48, num_beams=3),
        GenerationConfig(max_new_tokens=48, do_sample=True, temperature=0.7, num_return_sequences=2),
    ]
    for config in configs:
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id

    with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=256)) as engine:
        for output in engine.generate(prompts, configs):
            texts = [tokenizer.decode(one.token_ids, skip_special_tokens=True) for one in output.outputs]
            print(output.request_id, *(repr(text) for text in texts), sep="\n  ")

        shown = 0
        for output in engine.stream(prompts[:1], configs[0]):
            text = tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
            print(text[shown:], end="", flush=True)
            shown = len(text)
        stats = engine.stats()
    print(f"\n{stats.steps} steps, {stats.generated_tokens} tokens, {stats.prefix_cache_hit_tokens} found in the cache")


if __name__ == "__main__":
    main()
