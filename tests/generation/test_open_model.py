# SPDX-License-Identifier: Apache-2.0
"""The engine that is chosen for each model; the CPU engine's path imports no torch."""

import json
import os
import shutil
from pathlib import Path

import pytest

from factories import edit_json
from one_process import Done, run_commands
from small_models import CHAT_TEMPLATE, write_models
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.engine.protocol import ContextFull
from sparse_bitnet.errors import Unsupported, UserError
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


def without(module: str, *commands: list[str]) -> list[Done]:
    """Run commands in one process that must not import a module."""
    check = ["python", "-c", f"import sys; assert not {{*{module!r}.split()}} & {{*sys.modules}}"]
    *told, checked = run_commands(
        [*commands, check], cwd=Path(), env=dict(os.environ), stdin="some words\n"
    )
    assert checked.code == 0, checked.errors
    return told


def test_a_damaged_packed_folder_is_not_left_to_transformers(folder, tmp_path):
    names = ("config.json", "model.safetensors", "tokenizer.json")
    for name in names:
        damaged = shutil.copytree(folder / "packed", tmp_path / name) / name
        if name == "config.json":
            edit_json(damaged, rms_norm_eps=float("nan"))
        else:
            damaged.write_bytes(damaged.read_bytes()[:-100])
    command = ["sparse-bitnet", "generate", "--prompt", "some words"]
    told = without("transformers", *([*command, str(tmp_path / name)] for name in names))
    for name, done in zip(names, told, strict=True):
        assert (done.code, done.output) == (2, "")
        assert done.errors.startswith(f"sparse-bitnet: {tmp_path / name / name}")
        assert done.errors.count("\n") == 1


@pytest.mark.parametrize("ids", [..., [0, 10**9]])
def test_the_end_token_of_the_tokenizer_ends_a_text_too(folder, tmp_path, ids):
    copy = shutil.copytree(folder / "packed", tmp_path / "packed")
    edit_json(copy / "tokenizer_config.json", eos_token={"content": "a"})
    edit_json(copy / "config.json", eos_token_id=ids)
    (copy / "generation_config.json").unlink(missing_ok=True)
    opened = open_model(copy, EngineOptions())
    assert opened.end_tokens == {*(() if ids is ... else (0,)), opened.tokenizer.token_id("a")}
    opened.engine.close()


def test_generating_with_the_cpu_engine_imports_no_torch(folder):
    """Python gives the text that the command prints."""
    packed, options = str(folder / "packed"), ["--max-tokens", "20", "--seed", "3"]
    code = (
        "import sparse_bitnet as sb\n"
        f"model = sb.open_model({packed!r}, sb.EngineOptions(context_length=64))\n"
        "assert isinstance(model.engine, sb.Engine)\n"
        "print('some words' + model.generate('some words', max_tokens=20, seed=3))\n"
    )
    told = without(
        "torch transformers datasets pyarrow matplotlib rich",
        ["sparse-bitnet", "generate", packed, "--prompt", "some words", "--stats", *options],
        ["python", "-c", code],
        ["sparse-bitnet", "chat", packed, "--max-tokens", "4"],
    )
    assert [done.code for done in told] == [0] * 3, told
    assert (told[0].output, told[1].errors) == (told[1].output, "")
    assert told[2].output


def test_a_prompt_is_continued_in_python(folder):
    model = open_model(folder / "packed")
    text = model.generate("some words", temperature=0)
    assert text == model.generate("some words", temperature=0)
    cut = model.generate("some words", temperature=0, stop=text[5:8])
    assert cut == text[: text.find(text[5:8])]
    assert isinstance(model.generate("", max_tokens=1), str)
    for wrong, words in (({"max_tokens": 0}, "max_tokens=0"), ({"top_p": 2}, "top_p=2")):
        with pytest.raises(UserError, match=words):
            model.generate("some words", **wrong)
    with pytest.raises(ContextFull, match="request fewer"):
        model.generate("some words", max_tokens=10_000)
    model.engine.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_experts_and_other_layers_are_named(tmp_path: Path, family: str) -> None:
    """The error recommends another engine, not packing, whether the folder is packed or not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(Unsupported, match=f"not '{family}'; use --engine transformers"):
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
