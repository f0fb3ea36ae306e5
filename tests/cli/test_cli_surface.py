# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help, errors, exit codes."""

import os
import re
import subprocess
import sys

import pytest

from one_process import Done, run_commands
from sparse_bitnet.cli.main import COMMANDS, main, usage


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sparse_bitnet", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_version_is_printed():
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run("--version").stdout)


NEEDS_TORCH = [
    (["train", "--data", "nowhere"], "nowhere"),
    (["evaluate", "nowhere", "--data", "nowhere"], "nowhere"),
    (["generate", "nowhere"], "nowhere"),
    (["prepare", "nowhere/*.jsonl", "out", "--vocab-size", "300"], "nowhere/*.jsonl"),
    (["evaluate", "x", "--data", "x", "--limit", "5"], "--limit 5 is not used here: it has no"),
    (["evaluate", "x", "--tasks", "x", "--max-tokens", "5"], "--max-tokens 5 is not used here: it"),
    (["evaluate", "x", "--data", "x", "--out", "no/folder.json"], "cannot write no/folder.json"),
    (["import", "nowhere", "out", "--embeddings", "int8"], "without --packed-format"),
    (["reproduce", "all", "tabel2", "--dry-run"], "experiment 'tabel2' is unknown"),
    (["reproduce", "search", "--scale", "paper", "--dry-run"], "scale paper has no runs of search"),
    (["reproduce", "--dry-run", "--workers", "0"], "--workers 0: must be at least 1"),
    (["reproduce", "search", "--scale", "smoke", "--out", "/dev/null"], "cannot write /dev/null"),
    (["bench", "--weight-format"], "--weight-format: expected at least one argument"),
    (
        ["generate", "x", "--prompt", "x", "--threads", "3000000000"],
        "--threads 3000000000: must be at most",
    ),
    (["serve", "x", "--api-key", ""], "--api-key: it is empty; see"),
    (["export", "x", "y", "--to", "dense", "--text", "z"], "--text z is not used here: only"),
    (["bench", "qwen"], "'qwen' is neither a packed folder nor one of qwen2.5-0.3m"),
    (["bench", "--out", "."], "cannot write .: it is a folder"),
    (["bench", "--out", os.devnull], "not a regular file; name a file"),
    (["bench", "gpu", "--rounds", "0"], "--rounds 0: must be at least 1"),
    (["prepare", "python-stdlib", "out", "--tokenizer", "."], "it has no tokenizer.json"),
]
NEEDS_NO_TORCH = [
    (["trian"], "unknown command 'trian' (did you mean train?)"),
    (["train", "--steps", "x"], "--steps: 'x' is not a whole number"),
    (["train", "--recipe", "papr"], "--recipe 'papr': choose one of"),
    (["train", "--format", "ternary-9:8"], "9:8: needs 1 <= n <= m"),
    (["train", "--format", "binary"], "write ternary-n:m"),
    (["train", "--steps", "0"], "--steps 0: must be above 0"),
    (["generate", "x", "--top-p", "2"], "--top-p 2.0: must be 0 to 1; see sparse-bitnet generate"),
    (["pack", "run", "--out", "x"], "--out is not an option: write OUT without it"),
    (["pack", "run", "--format", "b3"], "not an option (did you mean --packed-format?)"),
    (["export", "run", "--format", "x"], "--format is not an option (did you mean --to?)"),
    (["export", "run", "out"], "--to is missing; see sparse-bitnet export --help"),
    (["train", "--resume", "run"], "--resume is not an option (did you mean --out?)"),
    (["train", "--lr", "1"], "--lr is not an option (did you mean --learning-rate?)"),
    (["train", "--recip", "paper"], "--recip is not an option (did you mean --recipe?)"),
    (["generate", "--model", "x"], "--model is not an option: write CHECKPOINT without it"),
    (["serve", "x", "-n", "y"], "--max-tokens: 'y' is not a whole number"),
    (["chat", "x", "-p", "y"], "-p is not an option (did you mean --system?)"),
    (["serve", "x", "-p", "1"], "-p is not an option (did you mean --port?)"),
    (["bench", "--model", "x"], "--model is not an option: write MODEL without it"),
    (["bench", "-m", "x", "-p", "y"], "--prefill: 'y' is not a whole number"),
    (["help", "generat"], "unknown command 'generat' (did you mean generate?)"),
    (["help", "nonsense"], "unknown command 'nonsense'; "),
    (["eval", "x"], "unknown command 'eval' (did you mean evaluate?)"),
    (["TRAIN"], "unknown command 'TRAIN' (did you mean train?)"),
    ([""], "unknown command ''; "),
    (["distill", "--steps", "1", "teacher"], "OUT is missing; see sparse-bitnet distill --help"),
    (["distill", "x", "out", "--model", "x"], "--model is not an option: write TEACHER without it"),
]
LIGHT = "import sys; assert not {'torch', 'transformers'} & {*sys.modules}"


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[tuple[str, ...], Done]:
    """Output of this module's commands, all from one process: those that need no torch run first."""
    light = [["--help"], ["models"], *([command, "--help"] for command in sorted(COMMANDS))]
    light += [arguments for arguments, _ in NEEDS_NO_TORCH]
    commands = [["sparse-bitnet", *arguments] for arguments in light]
    commands = [each for one in commands for each in (one, ["python", "-c", LIGHT])]
    later = [arguments for arguments, _ in NEEDS_TORCH] + [["env"]]
    commands += [["sparse-bitnet", *arguments] for arguments in later]
    folder = tmp_path_factory.mktemp("commands")
    done = run_commands(commands, cwd=folder, env={**os.environ, "COLUMNS": "200"})
    assert not any(folder.iterdir()), "nothing half-written"
    for number in range(1, 2 * len(light), 2):
        assert done[number].code == 0, commands[number - 1]
    return {tuple(one[1:]): end for one, end in zip(commands, done, strict=True)}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_every_command_needs_no_torch(told, command):
    done = told[command, "--help"]
    assert not done.code, done.errors
    assert command in done.output
    assert "{None}" not in done.output
    assert "(default: None)" not in done.output


def test_help_has_groups_and_every_option_of_the_command(told):
    train, distill = told["train", "--help"].output, told["distill", "--help"].output
    headings = ["options:", "distillation:", "model:", "optimiser:", "precision and speed:"]
    places = [train.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)
    first = re.findall(r"--[\w-]+", train[places[0] : places[1]])
    assert {"--data", "--out", "--format", "--steps", "--learning-rate"} <= set(first)
    assert "--steps N" in train
    assert "--learning-rate RATE" in train
    assert re.search(r"TEACHER +Model to start from", distill)
    assert re.search(r"OUT +Run folder", distill)
    assert not {"--model", "--out", "--teacher"} & set(re.findall(r"--[a-z-]+ [A-Z]", distill))
    shown = told["generate", "--help"].output
    for line in (
        "prompt:",
        "sampling:",
        "engine:",
        "-p PROMPT, --prompt PROMPT",
        "{auto,cpu,cuda}",
    ):
        assert line in shown


@pytest.mark.parametrize("words", [["help", "pack"], ["--help", "pack"], ["pack", "-x", "--help"]])
def test_every_spelling_of_help_prints_the_help(told, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert (stop.value.code, capsys.readouterr().out) == (0, told["pack", "--help"].output)


@pytest.mark.parametrize("words", [[], ["help"], ["-h"], ["help", "help"]])
def test_every_spelling_of_help_lists_all_commands(told, words, capsys):
    main(words)
    assert capsys.readouterr().out == told["--help",].output == usage() + "\n"
    assert all(name in usage() for name in COMMANDS)


@pytest.mark.train
@pytest.mark.parametrize(("arguments", "words"), [*NEEDS_NO_TORCH, *NEEDS_TORCH])
def test_bad_input_is_one_line_and_exit_code_2(told, arguments, words):
    assert_one_line(told[tuple(arguments)], words)


@pytest.mark.train
def test_bad_input_ends_a_process_with_exit_code_2(tmp_path):
    done = run("train", "--data", "nowhere", cwd=tmp_path)
    assert_one_line(Done(done.returncode, done.stdout, done.stderr), "nowhere")
    assert not any(tmp_path.iterdir()), "nothing half-written"


def assert_one_line(done: Done, words: str) -> None:
    assert done.code == 2, done.errors
    assert words in done.errors
    assert done.errors.startswith("sparse-bitnet: ")
    assert done.errors.count("\n") == 1


@pytest.mark.train
def test_env_names_versions_and_kernels(told):
    done = told["env",]
    assert done.code == 0, done.errors
    for word in ("torch", "transformers", "python", "kernels", "cpu", "triton", "cusparselt"):
        assert word in done.output


def test_models_lists_the_published_shapes(told):
    done = told["models",]
    assert done.code == 0, done.errors
    for word in ("qwen2.5-0.5b", "357,826,560", "1,310,195,712", "2,774,532,096"):
        assert word in done.output
