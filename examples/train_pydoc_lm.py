"""Train the two small Llama checkpoints of this folder on a CPU, without any download.

    python examples/train_pydoc_lm.py                 # examples/pydoc-lm-base and examples/pydoc-lm-qa
    python examples/train_pydoc_lm.py --out /some/dir --base-steps 20 --qa-steps 10

The text is Python's own documentation, which is part of the standard library (`pydoc_data.topics`). The script trains a
byte-level BPE tokenizer and a base model on it, then fine-tunes the base model on questions and answers extracted from
the same text. The models memorise that text and know nothing else.

All random numbers are seeded: the same Python version, library versions and thread count give the same checkpoints.

The shipped checkpoints were trained with `--threads 1` on a shared x86-64 machine with Python 3.11.7, torch 2.13.0 and
transformers 5.23.0 in 848 seconds. The mean loss of the last tenth of the steps was 0.224 (base) and 0.008 (fine-tuned,
answers only).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
PAD, BOS, EOS, USER, ASSISTANT = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 2048
CONTEXT = 1024
TOKENS_PER_STEP = 4096
WRAP = 70  # the column at which the documentation text is wrapped

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# -- the text ----------------------------------------------------------------------------------------------------------


def blocks_of(text: str) -> Iterator[tuple[int, str]]:
    """(indentation, text) of every paragraph, heading, signature and listing; wrapped prose is joined into one line."""
    for block in re.split(r"\n[ \t]*\n", text.replace("’", "'")):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        if len(lines) == 2 and re.fullmatch(r"(\*+|=+|-+|~+|\^+)", lines[1]):
            yield 0, lines[0]
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        if _is_wrapped(lines):
            prose = re.sub(r"\s+", " ", " ".join(line.strip() for line in lines))
            # Remove the emphasis marks of the markup, but not the stars in signatures and listings.
            yield indent, re.sub(r"(?<![\w*])\*(\w[\w ]*?)\*(?![\w*])", r"\1", prose)
        else:
            yield indent, "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def _is_wrapped(lines: list[str]) -> bool:
    """Whether the lines of a paragraph end only because they are full."""
    if any(re.search(r">>>|::=|\|--|  +\S.*  +\S", line.strip()) for line in lines) or lines[0].lstrip().startswith(
        "|"
    ):
        return False
    return all(len(line) + 1 + len(after.split()[0]) > WRAP for line, after in itertools.pairwise(lines))


def documents() -> list[str]:
    """One text per topic, longest first, without topics that another one contains."""
    seen: set[str] = set()
    texts = []
    for text in sorted(topics.topics.values(), key=lambda text: (-len(text), text)):
        blocks = [block for _, block in blocks_of(text)]
        if sum(len(block) for block in blocks if block in seen) > 0.8 * sum(map(len, blocks)):
            continue
        seen.update(blocks)
        texts.append("\n\n".join(blocks))
    return texts


def questions_and_answers() -> list[tuple[list[str], str]]:
    """(equivalent questions, answer) pairs, extracted from the text by its layout."""
    found: dict[str, tuple[list[str], str]] = {}

    def add(subject: str, questions: list[str], answer: str) -> None:
        if subject not in found and 40 <= len(answer) <= 700 and not answer.endswith(":"):
            found[subject] = (questions, answer)

    for text in sorted(topics.topics.values()):
        blocks = list(blocks_of(text))
        for index, (indent, block) in enumerate(blocks):
            body = [after for depth, after in blocks[index + 1 : index + 3] if depth > indent or index == 0]
            names = [re.match(r"(?:class |await )?([A-Za-z_][\w.]*)\s*[\[(]", line) for line in block.split("\n")]
            signature = all(names) and blocks[index + 1 : index + 2] and blocks[index + 1][0] > indent
            if signature and body and body[0][0].isupper():
                for name in (match[1] for match in names if match):
                    add(
                        name,
                        [
                            f"What does {name}() do?",
                            f"Explain {name}.",
                            f"What is {name} for?",
                            f"How does {name} work?",
                        ],
                        _answer(body),
                    )
            for rule in re.finditer(r"^(\w+) *::= *(.+(?:\n +.+)*)", block, re.M):
                rule_text = f"{rule[1]} ::= " + re.sub(r"\s+", " ", rule[2])
                add(
                    rule[1] + " (grammar)",
                    [f"What is the grammar of {rule[1]}?", f"Show me the grammar rule {rule[1]}."],
                    rule_text,
                )
            defined = re.match(r"(A|An|The) ((?:\"\w+\"|[a-z][\w-]*)(?: [a-z-]+){0,2}) (is|are) ", block)
            if defined and "\n" not in block:
                subject = defined[2].replace('"', "")
                article = defined[1].lower()
                add(
                    subject,
                    [f"What is {article} {subject}?", f"Explain {article} {subject}.", f"Tell me about {subject}."],
                    _answer([block, *(after for _, after in blocks[index + 1 : index + 2])]),
                )
        title = blocks[0][1].replace('"', "")
        subject = title[0].lower() + title[1:] if title[1:2].islower() else title
        add(
            title,
            [f"Tell me about {subject}.", f"What does the documentation say about {subject}?", f"Explain {subject}."],
            _answer([block for _, block in blocks[1:3]]),
        )
    return [found[subject] for subject in sorted(found)]


def _answer(blocks: list[str]) -> str:
    """The first paragraph, and the second if the first is short prose."""
    blocks = [block for block in blocks if not block.startswith(("Changed in", "New in", "Deprecated"))]
    if len(blocks) > 1 and len(blocks[0]) < 150 and blocks[0].endswith((".", ":")):
        return "\n\n".join(blocks[:2])
    return blocks[0] if blocks else ""


# -- tokenizer and model -----------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=416,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


# -- training ----------------------------------------------------------------------------------------------------------


def windows(
    stream: torch.Tensor, paragraphs: torch.Tensor, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the text, (input_ids, labels) [batch, length]; every fourth step uses the full context length.

    Half of them consist of BOS and the text from the start of a paragraph, because that is how people prompt.
    """
    step = 0
    while True:
        step += 1
        length = CONTEXT if step % 4 == 0 else CONTEXT // 4
        fitting = paragraphs[paragraphs < len(stream) - length]
        rows = []
        for number in range(TOKENS_PER_STEP // length):
            if number % 2:
                start = int(fitting[torch.randint(len(fitting), (), generator=generator)])
                rows.append(torch.cat([torch.tensor([BOS]), stream[start : start + length - 1]]))
            else:
                start = int(torch.randint(len(stream) - length, (), generator=generator))
                rows.append(stream[start : start + length])
        ids = torch.stack(rows)
        yield ids, ids


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """All texts, each followed by EOS, as one stream int64 [num_tokens], and the offsets of its paragraphs."""
    stream: list[int] = []
    paragraphs: list[int] = []
    for text in texts:
        starts = {0, *(match.end() for match in re.finditer("\n\n", text))}
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        paragraphs += [len(stream) + i for i, (first, _) in enumerate(encoded["offset_mapping"]) if first in starts]
        stream += [*encoded["input_ids"], EOS]
    return torch.tensor(stream), torch.tensor(paragraphs)


def chats(
    pairs: list[tuple[list[str], str]], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chats of one or two turns, padded on the right; only the answers have labels."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = [([encode(question) for question in questions], encode(answer)) for questions, answer in pairs]
    while True:
        rng.shuffle(encoded)
        batch: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = 0
        pending = list(encoded)
        while pending:
            turns = [pending.pop() for _ in range(min(len(pending), 2 if rng.random() < 0.2 else 1))]
            ids, labels = [BOS], [-100]
            for questions, answer in turns:
                asked = [USER, *rng.choice(questions), ASSISTANT]
                ids += [*asked, *answer, EOS]
                labels += [*[-100] * len(asked), *answer, EOS]
            batch.append((torch.tensor(ids[:CONTEXT]), torch.tensor(labels[:CONTEXT])))
            size += len(ids)
            if size >= TOKENS_PER_STEP or not pending:
                yield (
                    pad_sequence([ids for ids, _ in batch], batch_first=True, padding_value=PAD),
                    pad_sequence([labels for _, labels in batch], batch_first=True, padding_value=-100),
                )
                batch, size = [], 0


def train(
    model: LlamaForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    learning_rate: float,
    name: str,
) -> float:
    """Train with AdamW, warm-up and cosine decay to zero; returns the mean loss of the last tenth of the steps."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)
    warmup = max(1, min(100, steps // 10))
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    for step in range(steps):
        progress = max(0, step - warmup) / max(1, steps - warmup)
        rate = learning_rate * min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, labels = next(batches)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps - 1:
            elapsed = time.perf_counter() - started
            print(f"{name}: step {step + 1}/{steps}  loss {losses[-1]:.3f}  {elapsed:.0f} s", flush=True)
    model.eval()
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save in half precision to keep the file small; `dtype` in the config makes it load and compute in float32."""
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False, max_length=None
    )
    model.half().save_pretrained(folder)
    model.float()
    tokenizer.save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["dtype"] = "float32"
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    tokenizer_file = folder / "tokenizer.json"
    tokenizer_file.write_text(json.dumps(json.loads(tokenizer_file.read_text()), ensure_ascii=False) + "\n")


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, *, chat: bool) -> str:
    if chat:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, max_new_tokens=60)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two checkpoints")
    parser.add_argument("--base-steps", type=int, default=1000)
    parser.add_argument("--qa-steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    started = time.perf_counter()
    texts, pairs = documents(), questions_and_answers()
    tokenizer = train_tokenizer(texts)
    stream, paragraphs = tokenize(texts, tokenizer)
    model = new_model()
    print(
        f"{len(texts)} documents, {sum(map(len, texts))} characters, {len(stream)} tokens, {len(pairs)} answers, "
        f"{sum(p.numel() for p in model.parameters())} parameters"
    )

    generator = torch.Generator().manual_seed(args.seed)
    loss = train(model, windows(stream, paragraphs, generator), steps=args.base_steps, learning_rate=4e-3, name="base")
    save(model, tokenizer, args.out / "pydoc-lm-base")
    print(f"base: loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
    print(complete(model, tokenizer, 'The "if" statement is used', chat=False))

    batches = chats(pairs, tokenizer, random.Random(args.seed))
    loss = train(model, batches, steps=args.qa_steps, learning_rate=2e-3, name="qa")
    tokenizer.chat_template = CHAT_TEMPLATE
    save(model, tokenizer, args.out / "pydoc-lm-qa")
    print(f"qa: loss {loss:.3f}, {time.perf_counter() - started:.0f} s")
    for question in ("What does str.capitalize() do?", "What is the grammar of assert_stmt?"):
        print(question, "->", complete(model, tokenizer, question, chat=True))


if __name__ == "__main__":
    main()
