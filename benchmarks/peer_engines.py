# SPDX-License-Identifier: Apache-2.0
"""The engines that peers.py measures, ours and others, on the same model, each in its own process."""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sparse_bitnet import _cpu
from sparse_bitnet.bench.child import OURS as OUR_CHILD
from sparse_bitnet.bench.child import Child, cache_tokens
from sparse_bitnet.errors import UserError
from sparse_bitnet.provenance import versions

OURS = "sparse-bitnet"
TYPES = ("tq1_0", "tq2_0", "q2_0", "i2_s")
"""GGUF types for the block weights of the exported model."""
NATIVE = _cpu.supported_isas()[0]
"""Best instruction set of this machine, for which peers are built by default."""
LLAMA_CPP = (str(Path(__file__).with_name("llama_cpp_child.py")),)


@dataclass(frozen=True)
class Engine:
    """One row of the result: an engine, its model, and its number of threads."""

    name: str
    type: str
    """Its weights' type or format."""
    isa: str
    """Instruction set that it uses, by our name."""
    threads: int
    measure: Callable[[str, int], float]
    """(phase, tokens) -> seconds of the prompt, or of one decoded token."""


def engines_of(
    folder: Path, exported: Path, options: argparse.Namespace, stack: ExitStack
) -> list[Engine]:
    """Load all engines that the options of peers.py name; `stack` ends them. Others than ours run the
    model in `exported`."""
    return [
        *our_engines(folder, options, stack),
        *llama_cpp_engines(exported, options, stack),
        *other_engines(exported, options),
    ]


def our_engines(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Iterable[Engine]:
    for threads, isa, name in product(options.threads, options.isa, options.weight_format):
        # The variable, as a user would force it, reaches every part of the engine.
        environment = {"SPARSE_BITNET_ISA": isa} if isa else {}
        child = stack.enter_context(Child(OUR_CHILD, environment))
        chosen = {
            "threads": threads,
            "weight_format": name,
            "context_length": max(options.prompt, options.steps),
            "cache_tokens": cache_tokens([options.prompt], [], [1], options.steps),
        }
        loaded = child.ask({"op": "load", "folder": str(folder), "options": chosen})

        def measure(phase: str, tokens: int, child: Child = child) -> float:
            question = {"op": phase, "tokens": tokens, "steps": tokens}
            return child.ask({**question, "context": 0, "batch": 1})["seconds"]

        yield Engine(OURS, loaded["weight_format"], loaded["isa"], threads, measure)


def llama_cpp_engines(
    folder: Path, options: argparse.Namespace, stack: ExitStack
) -> Iterable[Engine]:
    for type in options.type:
        child = stack.enter_context(Child(LLAMA_CPP))
        question = {"op": "load", "path": str(gguf_file(folder, type))}
        child.ask({**question, "context_length": max(options.prompt, options.steps)})

        for threads in options.threads:

            def measure(
                phase: str, tokens: int, child: Child = child, threads: int = threads
            ) -> float:
                question = {"op": phase, "tokens": tokens, "steps": tokens, "context": 0}
                return child.ask({**question, "threads": threads})["seconds"]

            yield Engine("llama.cpp", type.upper(), NATIVE, threads, measure)


def gguf_file(folder: Path, type: str) -> Path:
    """Return the model exported for llama.cpp, beside the packed folder; it is created unless it
    exists."""
    out = folder.with_name(f"{folder.name}-gguf-{type}")
    path = out / f"model-{type.upper()}.gguf"
    if not path.is_file():
        command = [sys.executable, "-m", "sparse_bitnet", "export", str(folder), str(out)]
        stored = json.loads((folder / "config.json").read_text())["quantization_config"]
        tables = "auto" if stored["embeddings"] == "ternary" else "q8_0"
        command += ["--to", f"gguf-{type}", "--embeddings", tables]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not path.is_file():
            raise UserError((done.stderr.strip().splitlines() or ["the export failed"])[-1])
    return path


def other_engines(folder: Path, options: argparse.Namespace) -> Iterable[Engine]:
    for place, binary in enumerate(options.llama_bench):
        given = options.gguf[place]
        gguf = gguf_file(folder, given) if given in TYPES else Path(given)
        arguments = options.llama_bench_args[place] if place < len(options.llama_bench_args) else ""
        isa = options.built_for[place] if place < len(options.built_for) else NATIVE
        for threads in options.threads:

            def measure(
                phase: str,
                tokens: int,
                command: tuple[str, ...] = (str(binary), "-m", str(gguf), "-t", str(threads)),
                more: str = arguments,
            ) -> float:
                sizes = ("-p", str(tokens), "-n", "0")
                if phase == "decode":
                    sizes = ("-p", "0", "-n", str(tokens))
                return llama_bench([*command, *sizes, *shlex.split(more)], phase, tokens)

            type = given.upper() if given in TYPES else gguf.stem
            type = f"{type} {arguments}".strip()
            yield Engine(binary.parent.name or binary.name, type, isa, threads, measure)


def llama_bench(command: list[str], phase: str, tokens: int) -> float:
    """Return the seconds of one prompt or one token, from a llama-bench that runs it once after its
    warm-up."""
    command = [*command, "-r", "1", "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        (result,) = json.loads(done.stdout)
        rate = float(result["avg_ts"])
    except (ValueError, KeyError, TypeError) as error:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{command[0]} gave no JSON result: {last}") from error
    return tokens / rate if phase == "prefill" else 1 / rate


def version_of(engine: str) -> str:
    package = {"llama.cpp": "llama-cpp-python"}.get(engine, engine)
    return versions([package]).get(package, "")
