# SPDX-License-Identifier: Apache-2.0
"""Hostile model folders: code that must not run, paths that lead outside, files without end."""

import contextlib
import io
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import edit_json, edit_tensors
from small_models import write_models
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.model_folder import check_folder, file_inside, local_folder, read_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint, resolve_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.generation.text import TextTokenizer

SOURCE = Path(__file__).parents[2] / "src" / "sparse_bitnet"
CODE = """from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM
Path({mark!r}).touch()
class Config(PretrainedConfig): model_type = "planted"
class Model(Qwen2ForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("models"))
    export(folder / "trained", folder / "bitnet", ExportConfig(format="bitnet"))
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"{number} words and some more\n" * 40)
    source = parse_source(str(folder / "text" / "*.txt"), validation_fraction=0.3)
    prepare(source, folder / "data", tokenizer=folder / "trained")
    return folder


@pytest.fixture(params=["unknown architecture", "known architecture"])
def plant(request: pytest.FixtureRequest, models: Path, tmp_path: Path):
    """`plant("trained")`: a copy of a model folder whose code, once run, leaves `mark`."""

    def make(kind: str) -> Path:
        folder = tmp_path / kind
        shutil.copytree(models / kind, folder)
        (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
        code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        kind = {"model_type": "planted"} if request.param.startswith("unknown") else {}
        edit_json(folder / "config.json", auto_map=code, **kind)
        own = {"auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}
        edit_json(folder / "tokenizer_config.json", **own, tokenizer_class="Tokenizer")
        return folder

    return make


@pytest.mark.parametrize("kind", ["trained", "packed", "bitnet"])
@pytest.mark.parametrize(
    "command",
    [
        "generate {model} --max-tokens 2",
        "generate {model} --max-tokens 2 --engine transformers",
        "chat {model} --max-tokens 2",
        "serve {model} --port 999999",
        "serve {model} --port 999999 --engine transformers",
        "evaluate {model} --data {text} --max-tokens 20",
        "train --init {model} --data {data} --out {out} --steps 1 --device cpu --sequence-length 16",
        "prepare --input {text} --tokenizer {model} --out {out}",
        "pack {model} {out}",
        "export {model} {out} --to bitnet --verify",
        "import {model} {out}",
        "analyze {model}",
        "pack {model} --dry-run",
    ],
)
def test_no_command_runs_a_folders_code(
    command: str, kind: str, plant, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = models / "text" / "0.txt"
    out, data = tmp_path / "out", models / "data"
    names = {"model": plant(kind), "text": text, "out": out, "data": data}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 50))
    arguments = [part.format(**names) for part in command.split()]
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("target", ["/dev/zero", "../other/config.json"])
def test_links_that_lead_out_are_refused(folder: Path, name: str, target: str) -> None:
    (folder / name).symlink_to(target)
    for check in (check_folder, lambda folder: read_json(folder / name)):
        with pytest.raises(UserError, match="out of its folder: copy the file there"):
            check(folder)


def test_a_model_larger_than_its_file_is_not_built(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "trained", tmp_path / "large")
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    edit_json(tmp_path / "large" / "config.json", vocab_size=size // 2)
    with pytest.raises(UserError, match=r"config.json needs [\d,]+ values, more than"):
        from_pretrained(tmp_path / "large")


@pytest.mark.parametrize("name", ["1_Pooling", "additional_chat_templates"])
def test_sub_folders_are_checked_too(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text("{}")
    (folder / name / "copy.json").symlink_to("config.json")
    (folder / name / "other.json").symlink_to("../other.json")
    (folder / "other.json").write_text("{}")
    check_folder(folder)
    os.mkfifo(folder / name / "pipe")
    with pytest.raises(UserError, match=f"{name}/pipe is not a regular file"):
        check_folder(folder)
    (folder / name / "pipe").unlink()
    (folder / name / "out.jinja").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="out of its folder"):
        check_folder(folder)
    shutil.rmtree(folder / name)
    (folder / name).symlink_to("../other")
    with pytest.raises(UserError, match=f"{name}/config.json is a link .* out of its folder"):
        check_folder(folder)


def test_pipes_and_endless_files_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "config.json")
    for check in (check_folder, lambda folder: read_json(folder / "config.json")):
        with pytest.raises(UserError, match="is not a regular file"):
            check(folder)
    (folder / "config.json").unlink()
    with open(folder / "trainer_state.json", "wb") as file:  # which nobody reads
        file.truncate(129 << 20)
    check_folder(folder)
    with open(folder / "generation_config.json", "wb") as file:
        file.truncate(129 << 20)
    with pytest.raises(UserError, match="more than the maximum of 134,217,728"):
        check_folder(folder)


def test_links_within_the_folder_and_the_hubs_cache_are_read(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0")
    (snapshot / "copy.json").symlink_to("config.json")
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/0")
    check_folder(snapshot)
    assert read_json(snapshot / "copy.json") == read_json(snapshot / "1_Pooling/config.json") == {}
    (tmp_path / "blobs" / "1").symlink_to("/dev/zero")
    (snapshot / "other.json").symlink_to("../../blobs/1")
    with pytest.raises(UserError, match="out of its folder"):
        check_folder(snapshot)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/config.json", "a/../../b", "", 3, None])
def test_an_index_names_files_of_its_folder(folder: Path, name: object) -> None:
    with pytest.raises(UserError, match="is not a file in its folder"):
        file_inside(folder, name)


def test_lone_surrogates_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"name": "\\ud83d\\ude42"}')
    assert read_json(folder / "config.json") == {"name": "\N{SLIGHTLY SMILING FACE}"}
    (folder / "config.json").write_text('{"name": "\\ud83d"}')
    with pytest.raises(UserError, match="not readable as JSON"):
        read_json(folder / "config.json")


@pytest.mark.parametrize(
    "name", ["norun", "runs/norun", "a/b/c", "~/x", "/x/y", "-x/y", "./x", "../x", "a b"]
)
def test_a_mistyped_folder_never_goes_to_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=f"no such folder: {name}"):
        local_folder(name)
    with pytest.raises(UserError, match=f"no such checkpoint: no folder or file {name};"):
        resolve_checkpoint(name)


def test_an_adapter_names_no_other_model(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "trained", tmp_path / "model")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    for read in (from_pretrained, open_checkpoint):
        with pytest.raises(UserError, match=r"holds an adapter \(adapter_config.json\)"):
            read(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hadamard_config": "h.json"}, "hadamard_config says that"),
        ({"model_type": "prism_hadamard_qwen2"}, "in a rotated basis"),
        ({"text_config": {"online_had": True}}, "online_had says"),
        ({"quantization": {"bits": 2, "rotation": "r1"}}, "rotation says that its weights"),
        ({"own": {"rotation": True}}, "rotation says .* stored in a rotated basis"),
        ({"own": {"scales": "own"}}, "scales = 'own' is not supported and may change"),
        ({}, "hadamard_packing.json says that its weights are stored in a rotated basis"),
    ],
)
def test_weights_in_another_basis_are_refused(
    models: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """`own`: changes of the config's quantization_config; without any change, a file says it."""
    folder = shutil.copytree(models / "bitnet", tmp_path / "model")
    if not changes:
        (folder / "hadamard_packing.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text("utf-8")) | changes
    config["quantization_config"] |= config.pop("own", {})
    (folder / "config.json").write_text(json.dumps(config))
    for read in (from_pretrained, open_checkpoint):
        with pytest.raises(UserError, match=message):
            read(folder)


def test_quantization_that_transformers_would_skip_is_refused(models: Path, tmp_path: Path) -> None:
    """transformers uses the weights of an unknown method unchanged, and drops unknown tensors."""
    folder = shutil.copytree(models / "trained", tmp_path / "model")
    part = "model.layers.0.mlp.up_proj"
    edit_tensors(folder, {"v_head.weight": torch.ones(64)})
    from_pretrained(folder)
    edit_tensors(folder, {f"{part}.pre_quant_scale": torch.ones(64)})
    with pytest.raises(UserError, match=f"tensor {part}.pre_quant_scale is not part"):
        from_pretrained(folder)
    edit_tensors(folder, {f"{part}.pre_quant_scale": None})
    edit_json(folder / "config.json", quantization_config={"quant_method": "frobnicate"})
    with pytest.raises(
        UserError, match=r"neither sparse-bitnet nor transformers reads .*'frobnicate'"
    ):
        from_pretrained(folder)


@pytest.mark.parametrize("rest", [[], [95]])
def test_a_size_for_each_layer_is_read_where_all_are_the_same(
    models: Path, tmp_path: Path, rest: list[int]
) -> None:
    folder = shutil.copytree(models / "trained", tmp_path / "model")
    edit_json(folder / "config.json", intermediate_size=[96, *rest] if rest else [96, 96])
    with pytest.raises(UserError, match="intermediate_size") if rest else nullcontext():
        pack_checkpoint(folder, tmp_path / "out")
        packed = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
        assert packed["intermediate_size"] == 96


def test_a_panic_of_the_tokenizer_library_is_one_line(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "trained", tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["model"]["continuing_subword_prefix"] = "auto"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no readable tokenizer"):
        load_tokenizer(folder)
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        TextTokenizer.load(folder)
