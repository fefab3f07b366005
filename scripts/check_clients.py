"""Starts `hf-paged serve` on the shipped checkpoint and lets the clients that people use make their ordinary calls:
each client in an environment of its own, each answer compared with what plain `generate` of transformers returns.

    .venv/bin/python scripts/check_clients.py --environments /some/folder --json clients.json
    .venv/bin/python scripts/check_clients.py --only openai-python,openai-npm
    .venv/bin/python scripts/check_clients.py --only openai-python --options "--replicas 2"

The calls of a client are in scripts/clients/. Environments that exist in the folder are used again as they are.
Without `--environments` they are made in a temporary folder. A client that cannot be installed is reported as "not
installed", which is a failure like a wrong answer: the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.server_process import CHECKPOINT, ROOT, serving

NAME, KEY = "pydoc", "a-key-of-the-clients"
SECONDS = 600  # for the calls of one client


@dataclass(frozen=True)
class Client:
    name: str
    script: str
    # Each is installed by a command of its own, in this order.
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai-python", "use_openai.py", ("openai",)),
    Client("anthropic", "use_anthropic.py", ("anthropic",)),
    Client("cohere", "use_cohere.py", ("cohere",)),
    Client("openai-npm", "use_openai.mjs", ("openai zod",)),
    Client("langchain-openai", "use_langchain.py", ("langchain-openai",)),
    # LiteLLM's tools and responses import what is in its extra.
    Client("litellm", "use_litellm.py", ("litellm[mcp]",)),
    Client("instructor", "use_instructor.py", ("instructor",)),
    Client("openai-agents", "use_openai_agents.py", ("openai-agents",)),
    Client("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Client("smolagents", "use_smolagents.py", ("smolagents[openai]",)),
    Client("autogen", "use_autogen.py", ("autogen-ext[openai] autogen-agentchat",)),
    Client("crewai", "use_crewai.py", ("crewai",)),
    Client("llama-index", "use_llama_index.py", ("llama-index-llms-openai-like",)),
    # Pinned, because an unpinned torch may install gigabytes of CUDA libraries.
    Client("lm-eval", "use_lm_eval.py", ("torch==2.13.0", "lm_eval[api] transformers")),
)


@dataclass
class Result:
    client: str
    version: str = ""
    # Each call, and its error if it failed.
    calls: dict[str, str | None] = field(default_factory=dict)
    # Why there are no calls, or not all.
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.calls) and not any(self.calls.values())

    @property
    def summary(self) -> str:
        failed = [f"{call}: {error}" for call, error in self.calls.items() if error]
        if self.error:
            failed.append(self.error)
        return "passed" if self.passed else " ".join("; ".join(failed).split()) or "no call was made"


# -- what plain `generate` answers -------------------------------------------------------------------------------------


def make_task() -> dict[str, Any]:
    """Prompts, options and the expected answers, without any of this package's code."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    limit, seed, temperature, samples = 24, 7, 1.5, 3
    messages = [{"role": "user", "content": "What does str.capitalize() do?"}]
    prompt = "A function definition"

    def answer(ids: list[int], **options: Any) -> tuple[list[str], list[float]]:
        """The texts, and the log-probabilities of the first one's tokens."""
        torch.manual_seed(seed)
        rows = torch.tensor([ids])
        made = model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=limit,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        tokens = made.sequences[:, len(ids) :]
        logprobs = [step[0].log_softmax(-1)[token].item() for step, token in zip(made.logits, tokens[0])]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in tokens], logprobs

    def likelihood(context: str, continuation: str) -> float:
        ids, start = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(scores[place - 1, ids[place]].item() for place in range(start, len(ids)))

    @torch.inference_mode()
    def vector(text: str) -> Any:
        state = model.base_model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(state, dim=0)

    query, documents = "What is a list?", ["Files are closed.", "A list is a sequence.", "A dict is a mapping."]
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "num_return_sequences": samples}
    chat_ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ids = tokenizer(prompt)["input_ids"]
    (chat,), chat_logprobs = answer(chat_ids)
    (completion,), logprobs = answer(ids)
    chat_stop, stop = (text.split()[len(text.split()) // 2] for text in (chat, completion))
    choices = [" is a statement", " zebra"]
    choice_logprobs = [likelihood(prompt, choice) for choice in choices]
    return {
        "model": NAME,
        "key": KEY,
        "checkpoint": str(CHECKPOINT),
        **{"limit": limit, "seed": seed, "temperature": temperature},
        "json_limit": 200,
        **{"messages": messages, "chat": chat, "chat_logprobs": chat_logprobs, "chat_tokens": len(chat_logprobs)},
        **{"chat_stop": chat_stop, "chat_stopped": chat[: chat.index(chat_stop)]},
        "chat_samples": answer(chat_ids, **drawn)[0],
        **{"prompt": prompt, "completion": completion, "logprobs": logprobs},
        **{"stop": stop, "stopped": completion[: completion.index(stop)]},
        "samples": answer(ids, **drawn)[0],
        **{"choices": choices, "choice_logprobs": choice_logprobs},
        **{"query": query, "documents": documents},
        "cosines": [float(vector(query) @ vector(each)) for each in documents],
        "gold": choice_logprobs.index(max(choice_logprobs)),
    }


# -- the server --------------------------------------------------------------------------------------------------------


def template_with_tools() -> str:
    """The checkpoint's chat template ignores tools, so that the server would refuse them: here they stand before its
    text as JSON, which changes nothing without them."""
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + (CHECKPOINT / "chat_template.jinja").read_text()


@contextmanager
def checked_server(options: list[str]) -> Iterator[str]:
    """The address of a server, which has to end without an error. options: further ones."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(template_with_tools())
        template.flush()
        named = ("--api-key", KEY, "--served-model-name", NAME, "--chat-template", template.name)
        with serving(*named, *options) as server:
            yield server.url
    faults = [line for line in server.lines if "Traceback" in line]
    if server.status or faults:
        log = "".join(server.lines[-50:])
        raise SystemExit(f"the server's exit status was {server.status}, with {len(faults)} faults:\n{log}")


# -- the clients -------------------------------------------------------------------------------------------------------


def install(client: Client, folder: Path) -> str | None:
    """Make the client's environment, unless a complete one is there. Returns an error, or None."""
    complete = folder / "installed"
    if complete.exists():
        return None
    if folder.exists():
        return f"not installed: {folder} is not a complete environment of this script; remove it"
    folder.mkdir(parents=True)
    python = folder / "bin" / "python"
    if client.is_node:
        commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *client.packages[0].split()]]
    else:
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands += [[str(python), "-m", "pip", "install", "--quiet", *each.split()] for each in client.packages]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=clean_environment())
            error = done.stderr if done.returncode else None
        except FileNotFoundError as missing:
            error = str(missing)
        if error is not None:
            shutil.rmtree(folder)
            return f"not installed: {last_line(error)}"
    complete.touch()
    return None


def clean_environment() -> dict[str, str]:
    """This process's, without what would change a client's settings, and without the hub."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("OPENAI_", "ANTHROPIC_", "CO_", "PYTHON", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "VIRTUAL_ENV")
        )
    }
    # LiteLLM would fetch its table of prices.
    return {**kept, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "TOKENIZERS_PARALLELISM": "false"}


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def check(client: Client, interpreter: str, task: dict[str, Any], folder: Path) -> Result:
    """Run the client's script in `folder`."""
    result = Result(client.name)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(task, file)
        file.flush()
        script = ROOT / "scripts" / "clients" / client.script
        try:
            done = subprocess.run(
                [interpreter, str(script), file.name],
                capture_output=True,
                text=True,
                cwd=folder,
                env=clean_environment(),
                timeout=SECONDS,
            )
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            result.error = str(error)
            return result
    for line in done.stdout.splitlines():
        if line.startswith('{"version": ') or line.startswith('{"version":"'):
            result.version = json.loads(line)["version"]
        elif line.startswith('{"call":'):
            made = json.loads(line)
            result.calls[made["call"]] = made["error"]
    if done.returncode and not any(result.calls.values()):
        result.error = f"exit status {done.returncode}: {last_line(done.stderr)}"
    if not result.passed:
        sys.stderr.write(done.stderr)
    return result


def install_and_check(client: Client, environments: Path, task: dict[str, Any]) -> Result:
    folder = environments / client.name
    if error := install(client, folder):
        return Result(client.name, error=error)
    return check(client, "node" if client.is_node else str(folder / "bin" / "python"), task, folder)


# -- the command -------------------------------------------------------------------------------------------------------


def show(results: list[Result]) -> None:
    rows = [("client", "version", "calls", "")]
    rows += [(each.client, each.version, str(len(each.calls)), each.summary) for each in results]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip())


def chosen(names: str | None) -> list[Client]:
    if names is None:
        return list(CLIENTS)
    by_name = {client.name: client for client in CLIENTS}
    if unknown := [name for name in names.split(",") if name not in by_name]:
        raise SystemExit(f"--only {unknown[0]}: the clients are {', '.join(by_name)}")
    return [by_name[name] for name in names.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, help="folder for the clients' environments")
    parser.add_argument("--only", metavar="NAME,...", help=", ".join(client.name for client in CLIENTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--options", default="", help="further options of `hf-paged serve`, such as '--replicas 2'")
    given = parser.parse_args()
    clients = chosen(given.only)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as temporary, checked_server(given.options.split()) as url:
        environments = (given.environments or Path(temporary)).resolve()
        task = {"url": url, **make_task()}
        for client in clients:
            results.append(install_and_check(client, environments, task))
            print(f"{client.name}: {results[-1].summary}", file=sys.stderr, flush=True)
    show(results)
    if given.json:
        records = [{**asdict(each), "passed": each.passed} for each in results]
        given.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each.passed for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
