# SPDX-License-Identifier: Apache-2.0
"""The engine that is chosen for each model; the CPU engine's path imports no torch."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_models import CHAT_TEMPLATE, write_models
from sparse_bitnet.cli.main import main
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import EngineLacks, UserError
from sparse_bitnet.generation.open_model import end_tokens, open_engine, open_model

pytest.importorskip("sparse_bitnet._cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"), chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize(
    ("model", "engine", "expected"),
    [
        ("packed", "auto", "cpu"),
        ("packed", "cpu", "cpu"),
        ("packed", "transformers", "transformers"),
        ("trained", "auto", "transformers"),
    ],
)
def test_auto_chooses_the_fastest_engine_that_supports_the_model(folder, model, engine, expected):
    opened = open_model(folder / model, EngineOptions(engine=engine, context_length=100))
    assert opened.engine_name == expected
    assert opened.engine.context_length == 100
    assert opened.end_tokens == {opened.tokenizer.token_id("<|endoftext|>")}
    opened.engine.close()


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("trained", {"engine": "cpu"}, "pack it first"),
        ("trained", {"head": "int8"}, "--head int8 is not used here"),
        ("packed", {"engine": "transformers", "kv_cache": "int8"}, "--kv-cache int8 is not used"),
        ("packed", {"context_length": 1024}, "512"),
        ("nowhere", {}, "nowhere"),
    ],
)
def test_explicit_choices_that_cannot_be_honoured_are_refused(folder, model, options, words):
    with pytest.raises(UserError, match=words):
        open_model(folder / model, EngineOptions(**options))


def test_an_architecture_that_the_engine_lacks_falls_back_and_says_so(tmp_path, capsys):
    neox = write_models(tmp_path / "neox", "gpt_neox") / "packed"
    engine = open_engine(str(neox), EngineOptions())
    assert not engine.batch_invariant
    assert "not 'gpt_neox'" in capsys.readouterr().err
    engine.close()
    with pytest.raises(UserError, match="--engine transformers"):
        open_engine(str(neox), EngineOptions(engine="cpu"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_packed_folder_is_not_left_to_transformers(folder, tmp_path, name):
    copy = shutil.copytree(folder / "packed", tmp_path / "packed")
    if name == "config.json":
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(content | {"rms_norm_eps": float("nan")}))
    else:
        (copy / name).write_bytes((copy / name).read_bytes()[:-100])
    code = (
        "import sys\n"
        "from sparse_bitnet.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    assert 'transformers' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, "generate", str(copy), "--prompt", "some words"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"sparse-bitnet: {copy / name}")
    assert done.stderr.count("\n") == 1


def test_the_end_token_can_come_from_the_tokenizer(folder, tmp_path):
    copy = shutil.copytree(folder / "packed", tmp_path / "packed")
    for name in ("config.json", "generation_config.json"):
        if (copy / name).exists():
            content = json.loads((copy / name).read_text())
            content.pop("eos_token_id", None)
            (copy / name).write_text(json.dumps(content))
    opened = open_model(copy, EngineOptions())
    assert opened.end_tokens == {opened.tokenizer.token_id("<|endoftext|>")}
    opened.engine.close()


def test_a_text_ends_too_where_only_the_tokenizer_says_so(folder, tmp_path):
    copy = shutil.copytree(folder / "packed", tmp_path / "packed")
    for name, more in (
        ("tokenizer_config.json", {"eos_token": {"content": "a"}}),
        ("config.json", {"eos_token_id": [0, 10**9]}),
    ):
        content = json.loads((copy / name).read_text())
        (copy / name).write_text(json.dumps(content | more))
    (copy / "generation_config.json").unlink(missing_ok=True)
    opened = open_model(copy, EngineOptions())
    assert opened.end_tokens == {0, opened.tokenizer.token_id("a")}
    opened.engine.close()


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "some words", "--stats"], ["chat", "--max-tokens", "4"]]
)
def test_generating_with_the_cpu_engine_imports_no_torch(folder, command):
    code = (
        "import sys\n"
        "from sparse_bitnet.cli.main import main\n"
        f"main({[command[0], str(folder / 'packed'), *command[1:]]!r})\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'matplotlib', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="some words\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_generate_continues_a_prompt_in_python(folder, capsys):
    """The same text as `generate` prints, without torch."""
    packed, options = str(folder / "packed"), ["--max-tokens", "20", "--seed", "3"]
    main(["generate", packed, "--prompt", "some words", *options])
    code = (
        "import sys, sparse_bitnet as sb\n"
        f"model = sb.open_model({packed!r}, sb.EngineOptions(context_length=64))\n"
        "assert isinstance(model.engine, sb.Engine)\n"
        "print('some words' + model.generate('some words', max_tokens=20, seed=3))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (capsys.readouterr().out, "")
    model = open_model(packed)
    text = model.generate("some words", temperature=0)
    assert text == model.generate("some words", temperature=0)
    cut = model.generate("some words", temperature=0, stop=[text[5:8]])
    assert cut == text[: text.find(text[5:8])]
    assert isinstance(model.generate("", max_tokens=1), str)
    for wrong, words in (({"max_tokens": 0}, "max_tokens=0"), ({"top_p": 2}, "top_p=2")):
        with pytest.raises(UserError, match=words):
            model.generate("some words", **wrong)
    with pytest.raises(ContextFull, match="ask for fewer"):
        model.generate("some words", max_tokens=10_000)
    model.engine.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_experts_and_other_layers_are_named(tmp_path: Path, family: str) -> None:
    """The error recommends another engine, not packing, whether the folder is packed or not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(EngineLacks, match=f"not '{family}'; use --engine transformers"):
        open_engine(tmp_path, EngineOptions(engine="cpu"))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, set()),
        (None, {}, set()),
        (None, {"eos_token_id": 3}, {3}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2}),
        ({"eos_token_id": None}, {"eos_token_id": 3}, {3}),
    ],
)
def test_end_tokens_are_the_generation_configs_before_the_models(
    tmp_path, generation, config, expected
):
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == expected


@pytest.mark.parametrize("content", ['{"eos_token_id": "x"}', '{"eos_token_id": [true]}', "[]"])
def test_damaged_end_tokens_are_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        end_tokens(tmp_path)
