# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet VERB ...`: a table of verbs and nothing else, so that `--help` is immediate."""

import importlib
import importlib.util
import os
import sys
from typing import NoReturn

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("sparse_bitnet.cli.quickstart:main", "the paper's four models in four minutes"),
    "prepare": ("sparse_bitnet.cli.prepare:main", "tokenise text into memory-mapped shards"),
    "train": ("sparse_bitnet.cli.train:main", "train a model, or continue a run"),
    "distill": (
        "sparse_bitnet.cli.distill:main",
        "train from a pretrained model, with it as teacher",
    ),
    "evaluate": ("sparse_bitnet.cli.evaluate:main", "held-out perplexity of a checkpoint"),
    "generate": ("sparse_bitnet.cli.generate:main", "continue a prompt with a checkpoint"),
    "chat": ("sparse_bitnet.cli.chat:main", "talk with a chat model in the terminal"),
    "serve": ("sparse_bitnet.cli.serve:main", "serve a checkpoint as OpenAI's API"),
    "pack": ("sparse_bitnet.cli.pack:main", "write a trained model as a small, exact file"),
    "export": ("sparse_bitnet.cli.export:main", "write a model in a format other tools read"),
    "import": ("sparse_bitnet.cli.import_:main", "read a ternary checkpoint of another tool"),
    "sizes": ("sparse_bitnet.cli.sizes:main", "bits a weight and megabytes of packed models"),
    "bench": (
        "sparse_bitnet.cli.bench:main",
        "speed of the CPU engine, beside the machine's limits",
    ),
    "reproduce": ("sparse_bitnet.cli.reproduce:main", "the paper's experiments at a chosen scale"),
    "report": ("sparse_bitnet.cli.report:main", "tables, figures and claims from their results"),
    "analyze": ("sparse_bitnet.cli.analyze:main", "weight statistics and figures of checkpoints"),
    "plan": ("sparse_bitnet.cli.plan:main", "memory, time and traffic of a run on GPUs"),
    "models": ("sparse_bitnet.cli.models:main", "list the model presets"),
    "env": ("sparse_bitnet.cli.env:main", "versions, devices, and which kernels are in use"),
}


OF_TRAIN = (
    *("torch", "transformers", "safetensors", "datasets", "pyarrow", "scipy", "rensa"),
    *("gguf", "markupsafe", "matplotlib"),
)
"""What `pip install 'sparse-bitnet[train]'` adds; running a packed model needs none of it."""

ONLY_WITH_TRAIN = (
    *("quickstart", "prepare", "train", "pack", "export"),
    *("sizes", "reproduce", "report", "analyze"),
)
"""Commands that always need it; others where their checkpoint or their options do."""


def usage() -> str:
    """The list of all commands."""
    lines = ["usage: sparse-bitnet COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "`sparse-bitnet COMMAND --help` lists a command's options."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb. Exit codes: 0 done, 2 bad input (one line on stderr), 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] in ("-V", "--version"):
        from sparse_bitnet import __version__

        print(__version__)
        return
    verb, *rest = arguments
    if verb not in COMMANDS:
        from sparse_bitnet.errors import did_you_mean

        hint = did_you_mean(verb, COMMANDS)
        _fail(f"unknown command {verb!r}{hint}; `sparse-bitnet --help` lists them")
    # Downloads' progress bars and advice of libraries would drown our own output.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Idle threads of numpy's BLAS are to sleep: by default each spins for 2^26 cycles first.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if verb in ONLY_WITH_TRAIN and not {"-h", "--help"} & set(rest):
        # First: nothing is to be left half-written.
        for package in OF_TRAIN:
            if importlib.util.find_spec(package) is None:
                _fail_without(verb, package)
    module, _, function = COMMANDS[verb][0].partition(":")
    from sparse_bitnet.errors import UserError

    try:
        getattr(importlib.import_module(module), function)(rest)
    except UserError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OF_TRAIN:
            raise
        _fail_without(verb, package)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); a second error at exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _fail_without(verb: str, package: str) -> NoReturn:
    _fail(f"{verb} needs {package}, which is not installed: pip install 'sparse-bitnet[train]'")


def _fail(message: str) -> NoReturn:
    # A name that a file gives is not to write lines of its own or to steer the terminal.
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in message)
    print(f"sparse-bitnet: {shown}", file=sys.stderr)
    sys.exit(2)
