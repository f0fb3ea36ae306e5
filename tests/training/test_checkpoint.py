# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: complete, pruned, refused when damaged, and never half-written."""

import dataclasses
import errno
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from small_runs import final_weights, interrupted, logged
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from factories import tiny_model
from sparse_bitnet.checkpoint.open_checkpoint import resolve_checkpoint
from sparse_bitnet.checkpoint.saved_steps import first_reason, list_checkpoints
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import file_crc32
from sparse_bitnet.training import run_folder
from sparse_bitnet.training.trainer import train


@pytest.mark.parametrize(("keep", "kept"), [(2, [6, 7]), (0, [2, 4, 6, 7])])
def test_the_last_checkpoints_are_kept_or_all(small_run, keep, kept):
    config = small_run(steps=7, checkpoint_every=2, keep_checkpoints=keep)
    train(config)
    assert [each.step for each in list_checkpoints(Path(config.out))] == kept


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "missing", "state"])
def test_a_damaged_checkpoint_is_named_and_without_it_the_one_before_continues(
    small_run, tmp_path, damage
):
    whole = small_run(out=str(tmp_path / "whole"))
    train(whole)
    config = small_run()
    newest = interrupted(config, 4)
    path = newest / ("state.json" if damage == "state" else "sharded/__0_0.distcp")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:100] if damage in ("truncated", "state") else content)
    with pytest.raises(UserError, match=rf"{path.name} .*remove this checkpoint to continue"):
        train(config)
    shutil.rmtree(newest)
    train(config)
    assert logged(config) == logged(whole)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"content": "', '"content": "0', "other data"),
        (": null", ": 0", "another teacher"),
        ('"init": null', '"init": 0', "another initial model"),
        ('"data": {', '"data": 0, "none": {', "is damaged"),
        ('"step": 3', '"step": 2', "state.json is not of step 3"),
        ('"version": 2', '"version": 1', "checkpoint version 1, this release reads 2"),
        ('"version": 2', '"version": 3', "checkpoint version 3, this release reads 2"),
    ],
)
def test_a_checkpoint_of_other_data_teacher_or_version_is_refused(small_run, old, new, what):
    config = small_run()
    state = interrupted(config, 3) / "state.json"
    state.write_text(state.read_text().replace(old, new))
    before = (Path(config.out) / "config.json").read_text()
    with pytest.raises(UserError, match=what):
        train(dataclasses.replace(config, validation_every=1))
    assert (Path(config.out) / "config.json").read_text() == before


def test_a_config_edited_after_the_checkpoint_is_refused(small_run):
    config = small_run()
    interrupted(config, 3)
    other = dataclasses.replace(config, learning_rate=0.5)
    (Path(config.out) / "config.json").write_text(other.to_json())
    with pytest.raises(UserError, match=r"of another config \(learning_rate"):
        train(other)


@pytest.mark.parametrize("place", [(run_folder, "sync_tree"), (Path, "write_text")])
def test_a_full_disk_while_saving_leaves_the_older_checkpoint(small_run, monkeypatch, place):
    config = small_run(checkpoint_every=2)
    interrupted(config, 2)
    before = sorted(path.name for path in (Path(config.out) / "checkpoints").rglob("*"))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(*place, full)
        with pytest.raises(UserError, match="No space left on device") as caught:
            train(config)
    assert "step-00000004" in str(caught.value)
    after = sorted(path.name for path in (Path(config.out) / "checkpoints").rglob("*"))
    assert after == before, "nothing half-written, nothing lost"
    assert train(config).steps == 6


def test_a_second_ctrl_c_while_saving_is_no_write_error():
    with pytest.raises(KeyboardInterrupt):
        first_reason(CheckpointException("failed", {0: (KeyboardInterrupt(), None)}))


def test_leftovers_of_a_killed_save_are_ignored_and_removed(small_run):
    config = small_run()
    interrupted(config, 3)
    leftover = Path(config.out) / "checkpoints" / ".tmp-1-step-00000004"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    train(config)
    assert not leftover.exists()


class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)


def of_all(entries, **changes):
    for entry in entries.values():
        entry.__dict__.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: setattr(of, "planner_data", Planted()), "mkdir, which no checkpoint"),
        (lambda of: setattr(of, "planner_data", BytesStorageMetadata()), "no checkpoint"),
        (lambda of: setattr(of, "storage_data", 3), ".metadata is damaged"),
        (lambda of: b"\x80\x02Nr\xff\xff\xff\x03.", "an index beyond its end"),
        (lambda of: of_all(of.storage_data, relative_path="../0"), "not in its folder"),
        (
            lambda of: of_all(of.state_dict_metadata, size=torch.Size([1 << 40, 9])),
            "its tensors have",
        ),
    ],
)
def test_metadata_of_shards_runs_no_code_and_is_checked(
    small_run, tmp_path, monkeypatch, change, message
):
    monkeypatch.chdir(tmp_path)
    config = small_run()
    path = interrupted(config, 3)
    metadata, state = path / "sharded" / ".metadata", path / "state.json"
    described = pickle.loads(metadata.read_bytes())
    before = f"{file_crc32(metadata):08x}"
    metadata.write_bytes(change(described) or pickle.dumps(described))
    state.write_text(state.read_text().replace(before, f"{file_crc32(metadata):08x}"))
    with pytest.raises(UserError, match=f"cannot be read .*{message}"):
        resolve_checkpoint(config.out)
    with pytest.raises(UserError, match="cannot be read"):
        train(config)
    assert not Path("planted").exists()


@pytest.mark.parametrize("name", ["/dev/zero", "../../config.json"])
def test_a_checkpoint_that_lists_files_elsewhere_is_refused(small_run, name):
    config = small_run()
    state = interrupted(config, 3) / "state.json"
    state.write_text(state.read_text().replace("sharded/__0_0.distcp", name))
    with pytest.raises(UserError, match="is not a file in its folder"):
        resolve_checkpoint(config.out)


def test_a_model_with_weights_without_gradient_resumes_to_the_same_bytes(small_run, tmp_path):
    """Bart's decoder alone has attention to an encoder, which gets no gradient."""
    tiny_model("bart", vocab_size=512).save_pretrained(tmp_path / "bart")
    options = {"steps": 4, "init": str(tmp_path / "bart"), "format": "ternary-6:8"}
    whole = small_run(out=str(tmp_path / "whole"), **options)
    train(whole)
    stopped = small_run(**options)
    interrupted(stopped, 2)
    train(stopped)
    assert final_weights(stopped) == final_weights(whole)
