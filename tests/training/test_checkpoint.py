"""Checkpoints: complete, pruned, refused when damaged, and never half-written."""

import errno
import os
from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.errors import UserError
from sparse_bitnet.training import checkpoint
from sparse_bitnet.training.run_folder import Interrupted
from sparse_bitnet.training.train import train


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


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "missing", "state"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_continued(
    small_run, tmp_path, capsys, damage
):
    whole = small_run(out=str(tmp_path / "whole"))
    train(whole)
    config = small_run()
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(4))
    newest = list_checkpoints(Path(config.out))[-1].path
    path = newest / ("state.json" if damage == "state" else "sharded/__0_0.distcp")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:100] if damage in ("truncated", "state") else content)
    train(config)
    said = capsys.readouterr().err
    assert path.name in said
    assert "going on from step-00000002" in said
    assert (newest.parent / "damaged-step-00000004").is_dir()
    metrics = [Path(run) / "metrics.jsonl" for run in (whole.out, config.out)]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()


def test_a_run_without_an_intact_checkpoint_is_not_started_over(small_run):
    config = small_run(checkpoint_every=0)
    with pytest.raises(Interrupted):
        train(config, on_step=stop_after(3))
    path = list_checkpoints(Path(config.out))[-1].path / "sharded" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"__0_0\.distcp is damaged .* no checkpoint .* intact"):
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
        patched.setattr(checkpoint, "sync_tree", full)
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
