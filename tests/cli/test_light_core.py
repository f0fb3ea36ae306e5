# SPDX-License-Identifier: Apache-2.0
"""Commands and classes that work with only the core installed: no torch, no transformers."""

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from benchmark_scripts import load_script
from one_process import run_commands
from packed_models import make_packed
from serving_thread import TEMPLATE, number_tokenizer
from sparse_bitnet.cli.main import TRAIN_PACKAGES
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig

ROOT = Path(__file__).resolve().parents[2]
WHEEL = os.environ.get("SPARSE_BITNET_TEST_WHEEL", "")

# Asks a server that names its address for a text.
ASK = """
import os, signal, threading, urllib.error, urllib.request

class Output(io.StringIO):
    def write(self, text):
        if "/v1 (" in text and "Ctrl-C" in text:
            threading.Thread(target=ask, args=(self, text.split()[1])).start()
        return super().write(text)

def ask(output, address):
    body = {"model": "packed", "prompt": "1 2 ", "max_tokens": 4}
    formed = {**body, "structured_outputs": {"regex": "[12]"}}
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(address + "/completions", json.dumps(body).encode(), kind)
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=60))
        output.write("answered " + answer["choices"][0]["text"])
        request = urllib.request.Request(address + "/completions", json.dumps(formed).encode(), kind)
        try:
            urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            output.write(f"refused {error.code} {error.read().decode()}")
    finally:
        os.kill(os.getpid(), signal.SIGINT)
"""

# Hides what is not in the core.
EXTRAS = (*TRAIN_PACKAGES, "llguidance")
HIDE = f"""
import importlib.util

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in {EXTRAS} else find(name, *more)
"""


def test_message_names_the_packages_of_the_extra_train():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split("[>=<]", one)[0] for one in project["optional-dependencies"]["train"]]
    assert sorted(names) == sorted(TRAIN_PACKAGES)
    assert not set(TRAIN_PACKAGES) & {re.split("[>=<]", one)[0] for one in project["dependencies"]}


@pytest.mark.slow
def test_a_packed_model_runs_without_torch_and_other_commands_say_what_they_need(tmp_path):
    check_core(tmp_path, sys.executable, HIDE + ASK)


@pytest.mark.skipif(
    "SPARSE_BITNET_TEST_WHEEL" not in os.environ, reason="needs a wheel and an index"
)
def test_installed_wheel_does_the_same(tmp_path_factory):
    """An empty environment with the wheel alone works, and stays within its size."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*install, "--constraint", ROOT / "constraints.txt", WHEEL], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    size = sum(row["code"] for row in load_script("installed").sizes(packages))
    assert not (packages / "torch").exists()
    assert size < 120e6, size
    check_core(tmp_path_factory.mktemp("used"), python, ASK)


def check_core(tmp_path, python, prelude):
    folder = make_packed(tmp_path, vocab_size=257, max_position_embeddings=1024)
    number_tokenizer(257).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    train_tokenizer(["some text " * 100], 257).save_pretrained(folder.parent / "trained")
    export(folder.parent / "trained", tmp_path / "gguf", ExportConfig(format="gguf-tq2_0"))
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    few = ["--threads", "1", "--weight-format", "i2"]
    bench = ["packed", "--rounds", "1", "--steps", "1", "--quick", *few]
    runs = [
        ["models"],
        ["env"],
        ["bench", *bench],
        ["generate", "packed", "--prompt", "1 2", "--max-tokens", "3", *few],
        ["chat", "packed", "--max-tokens", "3", *few],
        ["serve", "packed", "--port", "0", *few],
        ["import", str(file), "imported", "--packed-format", "auto", "--embeddings", "int8"],
        ["generate", "imported", "--prompt", "some text", "--max-tokens", "3", *few],
    ]
    refused = [
        ["prepare", "book.txt", "out", "--vocab-size", "300"],
        ["train", "--out", "run"],
        ["evaluate", "packed", "--data", "book.txt"],
        ["pack", "run", "out"],
        ["generate", "packed", "--prompt", "x", "--engine", "transformers"],
        ["import", str(file), "masters"],
        ["generate", "packed", "--prompt", "x", "--regex", "[12]"],
    ]
    (tmp_path / "book.txt").write_text("some text " * 100)
    told = run_commands(
        [["sparse-bitnet", *arguments] for arguments in [*runs, *refused]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        prelude=prelude,
        python=python,
        stdin="1 2 3\n",
    )
    for arguments, done in zip(runs, told, strict=False):
        assert not done.code, (arguments, done.errors)
        assert done.output, arguments
    assert "without torch" in told[1].output
    assert re.search(r"answered .", told[5].output), told[5]
    assert re.search(r"refused 400 .*pip install .*\[grammar\]", told[5].output), told[5]
    for arguments, done in zip(refused, told[len(runs) :], strict=True):
        assert done.code == 2, (arguments, done.errors)
        assert done.errors.count("\n") == 1, (arguments, done.errors)
        extra = "grammar" if "--regex" in arguments else "train"
        assert done.errors.endswith(f'pip install ".[{extra}]"\n'), arguments
    left = ["book.txt", "gguf", "imported", "packed", "trained"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
