# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet VERB ...`: a table of verbs and nothing else, so that `--help` is immediate."""

import errno
import importlib
import importlib.util
import io
import os
import sys
import warnings
from typing import NoReturn

COMMANDS = {
    "quickstart": ("paper.quickstart", "train and compare the paper's four models in four minutes"),
    "prepare": ("prepare.main", "tokenise text into memory-mapped shards"),
    "train": ("train.main", "train a model, or resume a run"),
    "distill": ("train.distill", "train a ternary student of a pretrained model"),
    "evaluate": ("evaluate.main", "measure perplexity on held-out text, or score lm-eval's tasks"),
    "generate": ("generate.main", "continue a prompt with a checkpoint"),
    "chat": ("generate.chat", "talk with a chat model in the terminal"),
    "serve": ("serve.main", "serve a checkpoint with OpenAI's HTTP API"),
    "pack": ("pack.main", "write a trained model as a small folder for the CPU engine"),
    "export": ("export.main", "write a trained model in a format of another tool"),
    "import": ("export.import_", "convert a ternary checkpoint of another tool"),
    "bench": ("bench.main", "measure the speed of the CPU engine; `bench gpu`: of a GPU"),
    "reproduce": ("paper.reproduce", "run the paper's experiments at a chosen scale"),
    "report": ("paper.report", "write tables, figures and verdicts from `reproduce`'s results"),
    "analyze": ("paper.analyze", "write weight statistics and figures of checkpoints"),
    "models": ("env.models", "list the model presets and their sizes"),
    "env": ("env.main", "print versions, devices, and the kernels in use"),
}
"""Each verb with its function in this package, which takes the words after the verb, and a summary."""

TRAIN_PACKAGES = (
    *("torch", "transformers", "safetensors", "datasets", "pyarrow", "scipy", "pandas"),
    *("statsmodels", "rensa", "zstandard", "gguf", "markupsafe", "matplotlib"),
)
"""Packages that the extra `train` adds; running a packed model needs none of them."""

TRAIN_COMMANDS = (
    *("quickstart", "prepare", "train", "pack", "export"),
    *("reproduce", "report", "analyze"),
)
"""Commands that always need the extra `train`; others need it for some checkpoints or options."""


def usage() -> str:
    """Return the list of all commands."""
    lines = ["usage: sparse-bitnet COMMAND [OPTIONS]", "", "commands:"]
    lines += [f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "`sparse-bitnet COMMAND --help` lists a command's options."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb. Exit codes: 0 done, 2 bad input or full disk (one line on stderr), 130 interrupted,
    141 closed pipe."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["-h"], ["--help"], ["help"]) and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if arguments[0] in ("-V", "--version", "version"):
        from sparse_bitnet import __version__

        print(__version__)
        return
    verb, *rest = arguments
    if verb not in COMMANDS:
        from sparse_bitnet.errors import did_you_mean

        hint = did_you_mean(verb.lower(), COMMANDS)
        _fail(f"unknown command {verb!r}{hint}; `sparse-bitnet --help` lists them")
    # Progress bars of downloads and advice from libraries would drown our own output.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Let idle threads of numpy's BLAS sleep: by default each spins for 2^26 cycles first.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model's text has characters of any script
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    module, _, function = COMMANDS[verb][0].partition(".")
    from sparse_bitnet.errors import UserError, install
    from sparse_bitnet.host import limit_library_threads

    limit_library_threads()
    try:
        needs_train = verb in TRAIN_COMMANDS and {"-h", "--help"}.isdisjoint(rest)
        for package in TRAIN_PACKAGES if needs_train else ():  # before anything is written
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        getattr(importlib.import_module(f"sparse_bitnet.cli.{module}"), function)(rest)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TRAIN_PACKAGES:
            raise
        _fail(f"{verb} needs {package}, which is not installed: {install('train')}")
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":  # under torchrun, the first process speaks for all
            print(f"\n{str(stop) or 'stopped'}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        try:
            sys.stdout.flush()
        except OSError:  # a second error at exit would be noise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # the reader of our output has gone (`| head`)
            sys.exit(141)
        _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}")


def _fail(message: str) -> NoReturn:
    # Names from files must not add lines or control the terminal.
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in message)
    print(f"sparse-bitnet: {shown}", file=sys.stderr)
    sys.exit(2)
