"""`hf-paged serve`: an HTTP server with OpenAI's routes for one checkpoint. The work is done in hf_paged.serving."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_paged.cli.common import (
    EXIT_INTERRUPTED,
    Checkpoint,
    Device,
    DType,
    DTypeOption,
    Job,
    Revision,
    TrustRemoteCode,
    UsageError,
    WeightsOption,
    check_tensor_parallel,
    find_checkpoint,
    option,
    show,
    source_of,
)
from hf_paged.cli.ranks import TensorParallel, is_first_rank, is_rank, on_ranks
from hf_paged.cli.replicas import check_replicas, engine_switches, serve_replicas
from hf_paged.cli.serve_values import (
    Policy,
    adapters_of,
    check_one_process,
    configs_of,
    quantization_in,
    settings_of,
    speculative_of,
    weights_of,
)
from hf_paged.policies import EVICTIONS

# As that of a server, so that whoever started it may start it again.
EXIT_ENGINE_DIED = EXIT_FAILED = 1
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
# More than the first rank takes to tell its clients (`server._LAST_SECONDS`), and to end.
_LAST_SECONDS = 20  # from the end of draining until ranks are killed


# Options about clients, of which a file of requests has none.
_OF_CLIENTS = ("host", "port", "api_key", "allow_no_key", "key_weights", "admin_key", "weights_folder", "drain_seconds")


class DefaultsFrom(StrEnum):
    auto = "auto"
    vllm = "vllm"


class Routing(StrEnum):
    prefix = "prefix"
    least_loaded = "least-loaded"
    round_robin = "round-robin"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    host: Annotated[str, option("address to listen on")] = "127.0.0.1",
    port: Annotated[int, option("port to listen on", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, option("key that clients must send; may be given several times", envvar="HF_PAGED_API_KEY")
    ] = None,
    allow_no_key: Annotated[bool, option("listen to other machines without a key", "--allow-no-key")] = False,
    served_model_name: Annotated[
        list[str] | None,
        option("name in /v1/models and in requests (default: CHECKPOINT); may be given several times"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        option("NAME=FOLDER of a PEFT adapter, served as model NAME; repeatable", "--adapter", "--lora-modules"),
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    quantization: Annotated[
        str | None,
        option("weights in int8 by torchao or quanto, or a quantization_config of transformers in JSON"),
    ] = None,
    weights: WeightsOption = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    tensor_parallel_size: TensorParallel = 1,
    replicas: Annotated[int | None, option("engines on Ray Serve, with requests shared out among them", min=1)] = None,
    max_replicas: Annotated[int | None, option("replicas that autoscaling may start (default: none)", min=1)] = None,
    routing: Annotated[
        Routing, option("with --replicas: where the prompt's beginning is cached, to the idlest, or in turn")
    ] = Routing.prefix,
    route_prefix: Annotated[str, option("with --replicas: path before the routes, one for each application")] = "/",
    max_model_len: Annotated[
        int | None, option("tokens of prompt and answer together; with an encoder, of each", min=2)
    ] = None,
    max_num_seqs: Annotated[int | None, option("sequences in a step", min=1)] = None,
    max_num_batched_tokens: Annotated[int | None, option("tokens in a step", min=1)] = None,
    scheduling_policy: Annotated[
        Policy,
        option(
            "requests run in the order of their arrival (fcfs), or of their field `priority`, or API keys (with one "
            "key or none: the field `user`) take turns by tokens (fair)"
        ),
    ] = Policy.fcfs,
    key_weights: Annotated[
        str | None, option("with fair: a weight for each --api-key, such as 1,4; of weight 4 gets four times as many")
    ] = None,
    max_in_flight: Annotated[int, option("requests that run or wait; others get status 429", min=1)] = 1024,
    gpu_memory_utilization: Annotated[
        float | None, option("share of the free memory for the K/V cache", min=0.0, max=1.0)
    ] = None,
    kv_cache_memory: Annotated[str | None, option("size of the K/V cache, such as 4GiB")] = None,
    swap_memory: Annotated[str | None, option("host memory for preempted requests, such as 4GiB")] = None,
    block_size: Annotated[int | None, option("tokens in a block of the cache")] = None,
    kv_cache_dtype: Annotated[
        str, option("K/V in eight bits: int8 or fp8, or keys and values apart, such as int8,auto")
    ] = "auto",
    enable_prefix_caching: Annotated[
        bool | None,
        option(
            "share common prefixes (default: where the model can)", "--enable-prefix-caching/--no-enable-prefix-caching"
        ),
    ] = None,
    prefix_eviction: Annotated[
        str | None, option(f"which cached prefix is given up: {', '.join(EVICTIONS)} (default: the first)")
    ] = None,
    batch_invariant: Annotated[
        bool, option("log-probabilities depend on their request alone, to the last bit (on a CPU)", "--batch-invariant")
    ] = False,
    fuse: Annotated[
        bool | None,
        option(
            "on a GPU: fewer kernels between products and attention (default: where layers are known)",
            "--fuse/--no-fuse",
        ),
    ] = None,
    prepack: Annotated[
        bool | None,
        option("weights in a layout for faster products (default: chosen)", "--prepack/--no-prepack"),
    ] = None,
    speculative_config: Annotated[
        str | None,
        option('draft tokens that a step verifies: JSON, such as {"method": "ngram", "num_speculative_tokens": 5}'),
    ] = None,
    generation_config: Annotated[
        DefaultsFrom, option("options that a request leaves out: the checkpoint's (auto), or sampling at 1.0 (vllm)")
    ] = DefaultsFrom.auto,
    default_max_tokens: Annotated[int, option("tokens of a chat answer where a request has no limit", min=1)] = 1024,
    max_logprobs: Annotated[int, option("alternatives for each token", min=0)] = 20,
    max_request_seconds: Annotated[
        float | None, option("from a request's arrival to its end (default: no limit)", min=0.001)
    ] = None,
    chat_template: Annotated[str | None, option("file with a Jinja template in place of the tokenizer's")] = None,
    response_template: Annotated[
        str | None, option("JSON file with a response template of transformers in place of the tokenizer's")
    ] = None,
    logits_processor: Annotated[
        list[str] | None,
        option(
            "NAME=module:Class of a logits processor, transformers' or your own, that requests may name; repeatable"
        ),
    ] = None,
    max_grammar_seconds: Annotated[
        float,
        option("that a request waits until its schema or grammar is compiled; 0: they are refused", min=0.0),
    ] = 10.0,
    allow_media_urls: Annotated[
        list[str] | None,
        option(
            "hosts from which images, videos and audio in messages are fetched, such as example.org,cdn.example.org",
            "--allow-media-urls",
            "--allowed-media-domains",
        ),
    ] = None,
    allow_private_media_hosts: Annotated[
        list[str] | None, option("likewise, hosts that may have private addresses, such as media.intranet:8080")
    ] = None,
    limit_mm_per_prompt: Annotated[
        str | None, option('media of a request: JSON (default: {"image": 16, "video": 2, "audio": 4})')
    ] = None,
    max_media_bytes: Annotated[
        int, option("of what is made of media for all requests that run; others with media wait", min=1)
    ] = 2**30,
    max_body_bytes: Annotated[int, option("of a request, images in it included", min=1)] = 4 * 2**20,
    max_audio_bytes: Annotated[int, option("of a request with an audio file", min=1)] = 25 * 2**20,
    max_audio_seconds: Annotated[float, option("of audio in a file", min=0.001)] = 3600.0,
    admin_key: Annotated[
        str | None,
        option(
            "key for /pause, /resume, /update_weights, /reset_prefix_cache and the loading of adapters, which are off "
            "without it",
            envvar="HF_PAGED_ADMIN_KEY",
        ),
    ] = None,
    weights_folder: Annotated[
        list[str] | None, option("folder from which /update_weights may read, such as /dev/shm; repeatable")
    ] = None,
    drain_seconds: Annotated[int, option("after SIGTERM, until running requests are aborted", min=0)] = 30,
    log_level: Annotated[LogLevel, option("what is logged", "--log-level", "--uvicorn-log-level")] = LogLevel.info,
) -> Job:
    """Serve a checkpoint over HTTP, with OpenAI's routes.

    Flags have vLLM's names. Different here: --gpu-memory-utilization is a share of the free memory, and
    --generation-config takes no folder. Needs the extra `serve`: pip install -e '.[serve]' in a checkout.
    """
    # Only read here: nothing heavy is imported until the job runs.
    given = dict(context.params)
    return lambda: _serve(given)


def _checked(given: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the settings and the adapters. Raises UsageError or ValueError, before a model is loaded."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}; in a checkout: pip install -e '.[serve]'")
    # What costs least first: mistakes are told before a model is loaded.
    find_checkpoint(given["checkpoint"])
    source = source_of(given["revision"], given["trust_remote_code"])
    check_tensor_parallel(given["tensor_parallel_size"], given["device"], given["checkpoint"], source)
    check_replicas(given)
    # For their errors only: wrong values are told before a model is loaded.
    quantization_in(given)
    weights_of(given)
    speculative_of(given)
    configs_of(given)
    settings = settings_of(given)
    adapters = adapters_of(given["adapter"] or [], settings.names)
    logging.basicConfig(level=given["log_level"].upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log the URLs of media, which may have keys
    return settings, adapters


def _serve(given: dict[str, Any]) -> int:
    settings, adapters = _checked(given)
    from hf_paged.serving.settings import check_exposure
    from hf_paged.serving.sockets import listen

    # Before a socket is bound.
    check_exposure(given["host"], settings.api_keys, allow_no_key=given["allow_no_key"])
    if given["replicas"] is not None:
        return serve_replicas(given, settings, adapters)
    num_ranks = given["tensor_parallel_size"]
    sockets = listen(given["host"], given["port"]) if is_first_rank() else []  # before torch is imported
    if num_ranks > 1 and not is_rank():  # the first rank will listen there
        for each in sockets:
            each.close()
    return on_ranks(
        num_ranks,
        lambda: _run(given, settings, adapters, sockets),
        last_seconds=given["drain_seconds"] + _LAST_SECONDS,
    )


def _run(given: dict[str, Any], settings: Any, adapters: dict[str, str], sockets: list[socket.socket]) -> int:
    from hf_paged.serving.server import run_server

    # The others have no clients: they compute what the first one plans.
    if not is_first_rank():
        with _load(given, adapters)[0] as engine:
            engine.run_worker()
        return 0
    engine, tokenizer = _load(given, adapters)
    return run_server(
        engine,
        tokenizer,
        settings,
        sockets=sockets,
        adapters=adapters,
        **_readers(given, engine.model),
        drain_seconds=given["drain_seconds"],
        log_level=str(given["log_level"]),
    )


def _readers(given: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return what makes the model's inputs of audio, images and videos, where it takes them."""
    from hf_paged.serving.loading import load_extractor, load_processor

    source = source_of(given["revision"], given["trust_remote_code"])
    loaders = {"extractor": load_extractor, "processor": load_processor}
    return {name: load(given["checkpoint"], model, source) for name, load in loaders.items()}


def batch_job(arguments: list[str], requests: Path, output: Path) -> Job:
    """Answer a file of requests. arguments: a checkpoint and flags of `serve`, which are read at once.

    Raises UsageError for flags about clients. Those of the environment may be there for a server.
    """
    parser = typer.Typer()
    parser.command()(serve)
    command, quiet = typer.main.get_command(parser), {"log_level": LogLevel.warning}
    context = command.make_context("hf-paged serve", [*arguments], default_map=quiet)
    # By its name: typer has this class of its own, or click's.
    sources = {name: getattr(context.get_parameter_source(name), "name", "") for name in _OF_CLIENTS}
    wrong = [f"--{name.replace('_', '-')}" for name, source in sources.items() if source == "COMMANDLINE"]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: for a server with clients; with --input leave it out")
    given = {**context.params, "api_key": None, "admin_key": None, "weights_folder": None, "allow_no_key": True}
    return lambda: _answer_batch(given, requests, output)


def _progress() -> Callable[[Any], None]:
    """Return what tells how far a file is: after each answer on a terminal, else at each tenth of the file."""
    told: set[int] = set()

    def tell(done: Any) -> None:
        show(str(done))
        tenth = 10 * (done.before + done.answered + done.refused) // done.total
        if tenth not in {*told, 10} and not sys.stderr.isatty():
            told.add(tenth)
            print(f"hf-paged: {done}", file=sys.stderr)

    return tell


def _answer_batch(given: dict[str, Any], requests: Path, output: Path) -> int:
    settings, adapters = _checked(given)
    check_one_process("--input", given)
    from hf_paged.serving.batch import STANDARD, OutputError, answer_file
    from hf_paged.serving.problems import Problem
    from hf_paged.serving.service import Service

    def service() -> Service:
        engine, tokenizer = _load(given, adapters)
        return Service(engine, tokenizer, settings, adapters, **_readers(given, engine.model))

    try:
        done = answer_file(requests, output, service, _progress())
    except (Problem, OutputError, KeyboardInterrupt) as error:
        what = f"{output} cannot be written: " if isinstance(error, OutputError) else ""
        is_interrupted = isinstance(error, KeyboardInterrupt)
        print("\nhf-paged: interrupted" if is_interrupted else f"\nhf-paged: error: {what}{error}", file=sys.stderr)
        # From anything else no run can continue.
        if output != STANDARD:
            print(f"hf-paged: {output} has the answers so far; the same command answers the others", file=sys.stderr)
        elif not is_interrupted:
            print("hf-paged: run the same command again", file=sys.stderr)
        return EXIT_INTERRUPTED if is_interrupted else EXIT_ENGINE_DIED
    show("")
    failed = f"; {done.failed} failed ({done.reason}); the same command asks them again" if done.failed else ""
    print(f"hf-paged: {done}{failed}", file=sys.stderr)
    return EXIT_FAILED if done.failed else 0


def _load(given: dict[str, Any], adapters: dict[str, str]) -> tuple[Any, Any]:
    from hf_paged.serving.loading import load_engine

    cache, scheduler = configs_of(given)
    show("loading the model ...")
    engine, tokenizer = load_engine(
        given["checkpoint"],
        cache,
        scheduler,
        dtype=given["dtype"].value,
        device=given["device"],
        num_ranks=given["tensor_parallel_size"],
        adapters=adapters,
        switches=engine_switches(given),
        source=source_of(given["revision"], given["trust_remote_code"]),
        quantization=quantization_in(given),
        weights=weights_of(given),
        speculative=speculative_of(given),
    )
    show("")
    print(f"hf-paged: {engine!r}", file=sys.stderr)
    return engine, tokenizer
