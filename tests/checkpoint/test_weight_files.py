# SPDX-License-Identifier: Apache-2.0
"""The safetensors files of a folder, whole and in parts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparse_bitnet.checkpoint.model_folder import INDEX_FILE
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError

TENSORS = {
    "a": torch.arange(12.0).view(4, 3),
    "b": torch.tensor(5, dtype=torch.bfloat16),
    "c": torch.ones(2, dtype=torch.int8),
}


def split(folder: Path) -> None:
    save_file({"a": TENSORS["a"]}, folder / "model-1.safetensors")
    save_file({name: TENSORS[name] for name in "bc"}, folder / "model-2.safetensors")


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("has_index", [True, False])
def test_tensors_are_read_from_several_files(tmp_path: Path, has_index: bool) -> None:
    split(tmp_path)
    if has_index:
        index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    files = WeightFiles.in_folder(tmp_path)
    assert files.shapes == {name: tuple(value.shape) for name, value in TENSORS.items()}
    assert files.dtypes == {"a": "F32", "b": "BF16", "c": "I8"}
    for name, value in TENSORS.items():
        assert name in files
        assert torch.equal(files.read(name), value)
        assert files.read(name).dtype == value.dtype
    assert torch.equal(files.read("a", slice(1, 3)), TENSORS["a"][1:3])
    assert "d" not in files
    with pytest.raises(UserError, match="lacks d: the files are incomplete"):
        files.read("d")


def test_a_whole_file_is_preferred_to_a_stale_index(tmp_path: Path) -> None:
    index(tmp_path, {"a": "model-1.safetensors"})
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    assert torch.equal(WeightFiles.in_folder(tmp_path).read("a"), TENSORS["a"])


def test_incomplete_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no model\*\.safetensors"):
        WeightFiles.in_folder(tmp_path)
    split(tmp_path)
    files = WeightFiles.in_folder(tmp_path)
    index(tmp_path, {"a": "model-1.safetensors", "b": "model-3.safetensors"})
    with pytest.raises(UserError, match=rf"model-3\.safetensors is named in {INDEX_FILE} but"):
        WeightFiles.in_folder(tmp_path)
    index(tmp_path, ["model-1.safetensors"])
    with pytest.raises(UserError, match=rf"{INDEX_FILE} is damaged: no weight_map"):
        WeightFiles.in_folder(tmp_path)
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"model-1\.safetensors is damaged"):
        files.read("a")
    path.unlink()
    with pytest.raises(UserError, match=r"model-1\.safetensors"):
        files.read("a")
