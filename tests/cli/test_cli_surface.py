# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help, errors, exit codes."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.cli.main import COMMANDS, usage
from sparse_bitnet.cli.train import split_recipe
from sparse_bitnet.errors import UserError


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sparse_bitnet", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_help_is_immediate_and_lists_every_command():
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert done.stdout.strip() == usage().strip()
    assert all(name in done.stdout for name in COMMANDS)
    assert min(seconds) < 0.3, "processor time: parallel tests share the cores"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_every_command_needs_no_torch(command):
    code = (
        "import sys\n"
        "from sparse_bitnet.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    assert "{None}" not in done.stdout
    assert "(default: None)" not in done.stdout


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "unknown command 'trian' (did you mean train?)"),
        (["train", "--steps", "x"], "--steps 'x': not a whole number"),
        (["train", "--recipe", "papr"], "recipe 'papr' is unknown"),
        (["train", "--format", "ternary-9:8"], "9:8: needs 1 <= n <= m"),
        (["train", "--format", "binary"], "write ternary-n:m"),
        (["train", "--data", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "--data", "nowhere"], "nowhere"),
        (["generate", "nowhere"], "nowhere"),
        (["prepare", "nowhere/*.jsonl", "out", "--vocab-size", "300"], "nowhere/*.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("sparse-bitnet: ")
    assert done.stderr.count("\n") == 1
    assert not any(tmp_path.iterdir()), "nothing half-written"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--steps", "0"], "steps=0: must be above 0"),
        (["train", "--stepz", "1"], "--stepz"),
    ],
)
def test_bad_options_say_which_and_exit_with_code_2(arguments, words, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_recipe_is_taken_out_of_the_arguments():
    assert split_recipe(["--recipe", "paper", "--steps", "1"]) == ("paper", ["--steps", "1"])
    assert split_recipe(["--steps", "1", "--recipe=paper"]) == ("paper", ["--steps", "1"])
    assert split_recipe(["--steps", "1"]) == (None, ["--steps", "1"])
    with pytest.raises(UserError, match="recipe '' is unknown"):
        split_recipe(["--recipe"])


def test_env_names_versions_and_kernels():
    done = run("env")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "transformers", "python", "kernels", "cpu", "triton", "cusparselt"):
        assert word in done.stdout


def test_models_lists_the_published_shapes():
    done = run("models", env={"COLUMNS": "200", "PATH": "/usr/bin", "PYTHONPATH": _paths()})
    assert done.returncode == 0, done.stderr
    for word in ("qwen2.5-0.5b", "357,826,560", "1,310,195,712", "2,774,532,096"):
        assert word in done.stdout


def test_models_lists_public_ones(capsys):
    from sparse_bitnet.cli.models import main

    main(["--known"])
    assert "microsoft/bitnet-b1.58-2B-4T" in capsys.readouterr().out


def _paths() -> str:
    return ":".join(path for path in sys.path if path and Path(path).is_dir())
