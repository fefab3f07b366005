"""Draw the block tables of a beam search (or of parallel samples) after every step, read from the engine's state.

    python examples/draw_blocks.py                         # text, the shipped checkpoint
    python examples/draw_blocks.py --svg beams.svg --num-beams 4 --steps 8 "The for statement"
    python examples/draw_blocks.py --samples 2             # the paper's Figure 8 instead of its Figure 9

Every beam is a row of blocks. A block that several beams share has the same number and colour in all of their rows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged

SHIPPED = Path(__file__).parent / "pydoc-lm-base"
Tables = list[tuple[list[int], list[int]]]


def record(args: argparse.Namespace, tokenizer: Any) -> list[tuple[Tables, int]]:
    """The block tables after every step, each with the number of block copies so far."""
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).float().eval()
    config = GenerationConfig(
        max_new_tokens=args.steps,
        num_beams=1 if args.samples else args.num_beams,
        num_return_sequences=args.samples or args.num_beams,
        do_sample=bool(args.samples),
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    torch.manual_seed(0)
    frames = []
    with hf_paged.Engine(model, hf_paged.CacheConfig(block_size=args.block_size, num_blocks=256)) as engine:
        request = engine.add_request(tokenizer(args.prompt).input_ids, config)
        while engine.has_unfinished_requests():
            engine.step()
            if tables := engine.block_tables(request):
                frames.append((tables, engine.stats().cow_copies))
    return frames


def pieces(tokens: list[int], table: list[int], block_size: int, tokenizer: Any) -> list[tuple[int, str]]:
    """(block id, text of its tokens) for every block of a row."""
    chunks = [tokens[i : i + block_size] for i in range(0, len(tokens), block_size)]
    return [(block, "|".join(tokenizer.decode([t]) for t in chunk)) for block, chunk in zip(table, chunks)]


def as_text(frames: list[tuple[Tables, int]], block_size: int, tokenizer: Any) -> str:
    lines = []
    for step, (tables, copies) in enumerate(frames, 1):
        counts = Counter(block for _, table in tables for block in table)
        shared = sum(count > 1 for count in counts.values())
        lines.append(f"step {step}: {len(counts)} blocks, {shared} shared, {copies} copied so far")
        for row, (tokens, table) in enumerate(tables):
            cells = [
                f"{block}{'*' if counts[block] > 1 else ''}[{text}]".replace("\n", "\\n")
                for block, text in pieces(tokens, table, block_size, tokenizer)
            ]
            lines.append(f"  {row}: " + " ".join(cells))
    lines.append("number = block id, * = shared by several rows, | between tokens")
    return "\n".join(lines)


def as_svg(frames: list[tuple[Tables, int]], block_size: int, tokenizer: Any) -> str:
    width, height, gap = 150, 30, 26
    columns = max(len(table) for tables, _ in frames for _, table in tables)
    body, y = [], 10
    for step, (tables, copies) in enumerate(frames, 1):
        counts = Counter(block for _, table in tables for block in table)
        body.append(f'<text x="8" y="{y + 14}" class="head">step {step}: {len(counts)} blocks, {copies} copied</text>')
        y += gap
        for tokens, table in tables:
            for column, (block, text) in enumerate(pieces(tokens, table, block_size, tokenizer)):
                x = 8 + column * width
                # One hue per block; shared blocks are saturated, private ones pale.
                colour = f"hsl({block * 47 % 360} 65% {70 if counts[block] > 1 else 93}%)"
                label = escape(text.replace("\n", "\\n"))[:24]
                body.append(f'<rect x="{x}" y="{y}" width="{width - 6}" height="{height - 6}" fill="{colour}"/>')
                body.append(f'<text x="{x + 5}" y="{y + 16}"><tspan class="id">{block}</tspan> {label}</text>')
            y += height
        y += 8
    size = f'width="{columns * width + 16}" height="{y}"'
    style = "text{font:11px monospace}.head{font-weight:bold}.id{font-weight:bold}rect{stroke:#888}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>' + "".join(body) + "</svg>\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default='The "for" statement is used to iterate over the elements')
    parser.add_argument("--checkpoint", default=str(SHIPPED))
    parser.add_argument("--num-beams", type=int, default=3)
    parser.add_argument("--samples", type=int, help="parallel samples instead of beams")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--svg", type=Path, help="also write a picture to this file")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    frames = record(args, tokenizer)
    print(as_text(frames, args.block_size, tokenizer))
    if args.svg:
        args.svg.write_text(as_svg(frames, args.block_size, tokenizer))


if __name__ == "__main__":
    main()
