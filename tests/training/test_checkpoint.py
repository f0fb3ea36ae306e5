"""Checkpoints: complete, pruned, refused when damaged, and never half-written."""

import errno
import os
from pathlib import Path

import pytest

from sparse_bitnet import files
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.checkpoint import list_checkpoints
from sparse_bitnet.training.loop import train
from sparse_bitnet.training.run_folder import Interrupted


def stop_after(step):
    def on_step(row):
        if row["step"] == step:
            os.kill(os.getpid(), 2)

    return on_step


def test_the_last_ones_are_kept(small_run):
    config = small_run(steps=7, checkpoint_every=2, keep_checkpoints=2)
    train(config)
    assert [found.step for found in list_checkpoints(Path(config.out))] == [6, 7]


def test_all_are_kept_on_request(small_run):
    config = small_run(steps=5, checkpoint_every=2, keep_checkpoints=0)
    train(config)
    assert [found.step for found in list_checkpoints(Path(config.out))] == [2, 4, 5]


def test_a_damaged_file_is_named(small_run):
    config = small_run()
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(3))
    path = list_checkpoints(Path(config.out))[-1].path / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"optimizer\.safetensors is damaged"):
        train(config)


def test_other_data_is_refused(small_run, prepared, tmp_path):
    config = small_run()
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(3))
    state = list_checkpoints(Path(config.out))[-1].path / "state.json"
    state.write_text(state.read_text().replace('"content": "', '"content": "0'))
    with pytest.raises(UserError, match="other data"):
        train(config)


def test_a_full_disk_while_saving_leaves_the_older_checkpoint(small_run, monkeypatch):
    config = small_run(checkpoint_every=2)
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(2))
    before = sorted(path.name for path in (Path(config.out) / "checkpoints").rglob("*"))

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "_sync_tree", full)
        with pytest.raises(UserError, match="No space left on device") as caught:
            train(config)
    assert "step-00000004" in str(caught.value)
    after = sorted(path.name for path in (Path(config.out) / "checkpoints").rglob("*"))
    assert after == before, "nothing half-written, nothing lost"
    assert train(config).steps == 6


def test_leftovers_of_a_killed_save_are_ignored_and_removed(small_run):
    config = small_run()
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(3))
    leftover = Path(config.out) / "checkpoints" / ".tmp-1-step-00000004"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    train(config)
    assert not leftover.exists()
