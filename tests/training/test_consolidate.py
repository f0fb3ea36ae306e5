# SPDX-License-Identifier: Apache-2.0
"""An unfinished run of several processes can be read by commands that read models."""

import shutil
from pathlib import Path

import pytest
import torch

from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, resolve_checkpoint
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import evaluate, read_text
from sparse_bitnet.training.trainer import train


def test_the_newest_checkpoint_of_several_processes_is_put_together(
    worlds, run_config, monkeypatch
):
    alone, several = run_config("alone", checkpoint_every=5), run_config("several")
    train(alone)
    outcomes = worlds.run(several, size=3, faults={"1:5": "interrupt"})
    assert [code for code, _ in outcomes] == [130] * 3, outcomes
    run = Path(several.out)
    older, newest = list_checkpoints(run)
    whole = Path(resolve_checkpoint(run))
    assert whole == run / "consolidated" / newest.path.name
    assert resolve_checkpoint(newest.path) == str(whole)
    expected = from_pretrained(
        resolve_checkpoint(Path(alone.out) / "checkpoints" / newest.path.name)
    )
    for one, other in zip(
        expected.state_dict().items(), from_pretrained(whole).state_dict().items(), strict=True
    ):
        assert one[0] == other[0]
        torch.testing.assert_close(one[1], other[1], rtol=1e-3, atol=1e-4)
    assert find_checkpoint(whole).trained_context_length == several.sequence_length
    assert (
        load_tokenizer(whole).get_vocab()
        == load_tokenizer(Path(several.data) / "tokenizer").get_vocab()
    )
    scored = evaluate(*read_text(run, several.data), max_tokens=200)
    assert 1 < scored.perplexity < 400
    dropped = shutil.copytree(newest.path, newest.path.with_name("step-99999999"))
    with monkeypatch.context() as run_that_continues:
        run_that_continues.setattr(
            "sparse_bitnet.checkpoint.saved_steps.damage",
            lambda _: shutil.rmtree(dropped, ignore_errors=True),
        )
        assert resolve_checkpoint(run) == str(whole)
    # Whoever asks for another checkpoint gets that one, and only that is kept.
    assert Path(resolve_checkpoint(older.path)).name == older.path.name
    assert not whole.exists()

    shard = next((newest.path / "sharded").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        resolve_checkpoint(run)
    shutil.rmtree(newest.path)
    shutil.rmtree(older.path / "model")
    shutil.rmtree(run / "consolidated")
    with pytest.raises(UserError, match=r"is damaged|continue the run"):
        resolve_checkpoint(run)
