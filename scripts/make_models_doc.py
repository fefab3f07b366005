"""Write docs/models.md from the results of tests/architectures/sweep.py: `make_models_doc.py results.json`.

With `--others results.json`, also the second part, from the results of `sweep.py --others`. A part without new results
is kept.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

DOC = Path(__file__).resolve().parents[1] / "docs" / "models.md"

SPEED = "16 requests: times one by one / times plain"

INTRODUCTION = """\
# Models

<!-- Written by scripts/make_models_doc.py from the results of tests/architectures/sweep.py. Do not edit. -->

Find your model's type, and how it runs. A model that is not in the table, or that you wrote yourself, is treated in the
same way: `hf_paged.check(model)` decides how a model runs by trying it, never by its name.

```python
import hf_paged
from transformers import AutoModelForCausalLM

print(hf_paged.check(AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-qa")))
```

| how | attention |
|---|---|
| **native** | hf_paged's kernels, on sequences packed without padding |
| **dense view** | the model's own, on tensors gathered from the blocks: exact, but slower |
| **refused** | none: `UnsupportedModelError` gives the reason before any token is generated |

In the dense view, other state (recurrent, convolution, indexer) is kept per row and moves with the blocks.

`check` also names the kinds of memory (full, window, chunk, state), with bytes a token and a sequence
([sizing](sizing.md)).

## Causal language models

Every causal language model type of transformers {version} was tested as a tiny random model in fp32 on a CPU: 4 layers
that cover every layer type of its config, windows and chunks of 8 tokens, a left-padded batch of prompts of 5 to 26
tokens, and 24 new tokens. The test compares `generate(cache_implementation="paged")` with plain `generate`: greedy,
greedy with an EOS id, 3 beams with 2 returned, and 2 seeded samples per prompt. *Identical* means that all of them gave
the same tokens, that the K/V was in blocks, and that no block was in use afterwards.

{summary}

Models with recurrent states and K/V whose attention can be routed are *dense view* here, because of the states; yet
their attention reads the blocks in our kernels, in the engine and on the route "packed" of `generate`.

The engine computes models that are not native as the rows of batches, where their logits allow it
([why some are slow](engine.md#models-that-do-not-run-packed)). For these the table says how much faster 16 requests are
at once than one by one, and how many times as fast as plain `generate` of the same rows in one padded batch (16 new
tokens, processor time of one thread of a busy machine, the best of 2, with transformers 5.23, so that newer types have
none; a model this small is mostly the host's work). It
also runs recurrent models without attention (falcon_mamba, mamba, mamba2, rwkv, xlstm), for which `generate` has
nothing to page. It refuses cpmant and recurrent_gemma as models, and requests to phi3 and phimoe that may grow
beyond `original_max_position_embeddings` (32 tokens in these tiny models, 4,096 in the published ones): beyond that
length LongRoPE's factors depend on the longest sequence of the batch, which requests of one step cannot share. Shorter
requests to these models run natively in the engine.
"""


HEADING = "## Models other than causal language models"

OTHERS = """\
{heading}

Every other class of transformers {version} that generates tokens, according to its auto classes (image and text to
text, sequence to sequence, speech, audio), was tested in the same way. Models with an encoder ran 4 beams with 2
returned, 3 samples and beam samples beside greedy search, and the engine got four rows of what their encoder reads in
all four ways at once ([pages](translate.md)). All others were tested with text alone: calls with other inputs take
transformers' own loop over the dense view, and the engine does not accept such inputs.

{summary}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="the file that sweep.py --out wrote")
    parser.add_argument("--others", type=Path, help="the file that sweep.py --others --out wrote")
    parser.add_argument("--version", required=True, help="the version of transformers that gave the results")
    args = parser.parse_args()
    first, _, second = DOC.read_text().partition(HEADING)
    if args.results:
        first = document(json.loads(args.results.read_text()), INTRODUCTION, args.version)
    second = HEADING + second
    if args.others:
        second = document(json.loads(args.others.read_text()), OTHERS, args.version)
    DOC.write_text(first.rstrip() + "\n\n" + second)


def document(results: list[dict[str, Any]], introduction: str, version: str) -> str:
    runnable = [r for r in results if r["result"] != "unrunnable"]
    lines = [introduction.format(heading=HEADING, version=version, summary=_summary(results, runnable))]
    engine, speed = (any(name in r for r in runnable) for name in ("engine", "speed"))
    heads = ["type", "class", "result", "how", *["engine"] * engine, *[SPEED] * speed, "why"]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for result in sorted(runnable, key=lambda r: r["type"]):
        how = result.get("mode", "")
        why = "; ".join(filter(None, ["" if how == "native" else result.get("reason"), result.get("note")]))
        kind, _, told = result.get("engine", "").partition(": ")
        if kind == "refused":
            # The name of the exception says nothing here.
            why = "; ".join(filter(None, [why, f"engine: {told.partition(': ')[2]}"]))
        why = why.replace("|", "\\|")
        cells = [result["type"], result.get("class", ""), result["result"], "" if how == "refused" else how]
        if engine:
            cells.append(kind)
        if speed:
            times = result.get("speed", {})
            cells.append(" / ".join(str(times[name]) for name in ("one by one", "plain") if name in times))
        lines.append("| " + " | ".join([*cells, why]) + " |")
    failed = sorted(r["type"] for r in results if r["result"] == "unrunnable")
    if failed:
        lines += ["", f"Not in the table, because no tiny model of them can be built or run: {', '.join(failed)}."]
    return "\n".join(lines) + "\n"


def _summary(results: list[dict[str, Any]], runnable: list[dict[str, Any]]) -> str:
    counts = Counter((r["result"], r.get("mode")) for r in runnable)
    native, dense = counts["identical", "native"], counts["identical", "dense view"]
    rest = Counter(r["result"] for r in runnable)
    line = (
        f"Of {len(results)} types {len(runnable)} run: **{native + dense} identical** ({native} native, {dense} "
        f"through the dense view), {rest['refused']} refused, {rest['different']} different, {rest['crashed']} crashed."
    )
    engines = Counter(r["engine"].split(":")[0] for r in runnable if "engine" in r)
    if engines:
        told = ", ".join(f"{count} {kind}" for kind, count in engines.most_common())
        line += f" The engine, with requests that arrive at different steps and one that forks: {told}."
    return line


if __name__ == "__main__":
    main()
