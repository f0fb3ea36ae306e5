# SPDX-License-Identifier: Apache-2.0
"""A run of several processes: the same losses as of one, from any number to any other, and no loss."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import logged, losses

from factories import tiny_model
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, resolve_checkpoint
from sparse_bitnet.checkpoint.saved_steps import STATE, list_checkpoints
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import evaluate, read_text
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.distributed import check_splits, open_world
from sparse_bitnet.training.run_folder import run_lock
from sparse_bitnet.training.trainer import train
from world_processes import Worlds

pytestmark = pytest.mark.timeout(900)

CELLS = ("full-8:8", "full-6:8", "ternary-8:8", "ternary-6:8")
CURVES = ("loss", "gradient_norm", "flip_rate", "zero_fraction", "validation_loss")


def finish(worlds: Worlds, *configs: TrainConfig, **world: Any) -> None:
    for code, output in worlds.run(*configs, **world):
        assert code == 0, output


def refused(worlds: Worlds, config: TrainConfig, message: str, **world: Any) -> str:
    """Require that all of two processes end with exit code 2; return the output of the second."""
    (first, output), (second, other) = worlds.run(config, size=2, **world)
    assert (first, second) == (2, 2), output + other
    assert message in output
    return other


def assert_same_curves(a: TrainConfig, b: TrainConfig, tolerance: float = 2e-5) -> None:
    rows = [logged(config) for config in (a, b)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for one, other in zip(*rows, strict=True):
        # With cached logits the teacher is not there to be scored.
        assert one.keys() - {"teacher_perplexity"} == other.keys() - {"teacher_perplexity"}
        for key in CURVES:
            if one.get(key) is None:
                assert other.get(key) is None
            else:
                assert other[key] == pytest.approx(one[key], rel=tolerance), (key, one["step"])


def test_every_number_of_processes_gives_the_losses_of_one(worlds, run_config):
    short = {"steps": 4, "checkpoint_every": 0}
    references = {}
    for cell in CELLS:
        references[cell] = run_config(f"{cell}-1", format=cell, **short)
        train(references[cell])
    for size, shard, cells in ((2, None, CELLS), (3, None, CELLS[::3]), (4, 2, CELLS[::3])):
        configs = [run_config(f"{cell}-{size}", format=cell, **short) for cell in cells]
        finish(worlds, *configs, size=size, shard=shard)
        for config in configs:
            assert_same_curves(references[config.format], config)
    both = references["ternary-6:8"], config
    first, other = (losses(each)[0] for each in both)
    assert first == pytest.approx(other, rel=1e-9), "the same codes"
    trained = [from_pretrained(Path(each.out) / "final") for each in both]
    for one, other in zip(*(model.parameters() for model in trained), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_int8_forward_over_two_processes_gives_the_losses_of_one(worlds, run_config):
    """In float32 the bits of the other forward; in bfloat16 what it gives in one process."""
    short = {"steps": 3, "checkpoint_every": 0, "format": "ternary-6:8"}
    mixed = {"forward": "int8", "precision": "bf16", "activation_checkpointing": True}
    fake, alone = run_config("fake", **short), run_config("alone", **short, **mixed)
    integer = run_config("int8", **short, forward="int8")
    pair = run_config("pair", **short, **mixed)
    train(fake)
    train(alone)
    finish(worlds, integer, pair, size=2)
    assert_same_curves(fake, integer)
    assert_same_curves(alone, pair, tolerance=2e-3)


def test_distillation_over_two_processes_gives_the_losses_of_one(worlds, run_config):
    """Each holds the teacher; its cache is written once, by the first."""
    teacher = run_config("teacher").out
    tiny_model(vocab_size=2048, tie_word_embeddings=True).save_pretrained(teacher)
    taught = {"teacher": teacher, "init": teacher, "steps": 2, "checkpoint_every": 0}
    taught |= {"format": "ternary-6:8", "learning_rate": 1e-3, "reconstruction_windows": 4}
    alone = run_config("alone", **taught)
    train(alone)
    pair = run_config("pair", **taught)
    cached = run_config("cached", **taught, logit_cache=teacher + "-cache", top_logits=2048)
    finish(worlds, pair, cached, size=2)
    assert_same_curves(alone, pair)
    assert_same_curves(alone, cached, tolerance=1e-3)


def test_bf16_gradients_and_given_weights_give_the_losses_of_one(worlds, run_config):
    """Sums of bf16 gradients stay near; weights to start from reach all processes from the first."""
    short = {"steps": 3, "checkpoint_every": 0, "format": "ternary-6:8"}
    dense = run_config("dense").out
    tiny_model(vocab_size=2048, tie_word_embeddings=True).save_pretrained(dense)
    start = {**short, "init": dense, "learning_rate": 1e-3}
    alone = run_config("alone", **start)
    train(alone)
    pair = run_config("pair", **start)
    reduced = run_config("reduced", **start, gradient_reduction="bf16")
    finish(worlds, pair, reduced, size=2)
    assert_same_curves(alone, pair)
    assert_same_curves(alone, reduced, tolerance=2e-2)
    assert logged(pair)[0]["gradient_norm"] != logged(reduced)[0]["gradient_norm"]


@pytest.mark.slow
def test_ablations_and_checkpointing_give_the_losses_of_one(worlds, run_config):
    options: list[dict[str, Any]] = [
        {"format": "ternary-6:8,mask_gradient=masked,ste=clipped"},
        {"format": "ternary-2:4,scale_source=masked", "activation_checkpointing": True},
        {"format": "full-2:4,activation=int8", "sparse_fraction": 0.5},
        {"format": "ternary-6:8,activation=none", "tensorboard": False, "batch_size": 6},
        {"format": "ternary-6:8,score=wanda,quantizer=twn"},
        {"format": "ternary-6:8,score=sr-ste,quantizer=per-group:size=16,schedule=lambda"},
        {"format": "ternary-2:4,score=random,quantizer=absmax,activation=int4-hadamard"},
    ]
    alone = [run_config(f"alone-{n}", steps=3, **more) for n, more in enumerate(options)]
    pairs = [run_config(f"pair-{n}", steps=3, **more) for n, more in enumerate(options)]
    for config in alone:
        train(config)
    finish(worlds, *pairs, size=2)
    for one, other in zip(alone, pairs, strict=True):
        assert_same_curves(one, other)


@pytest.mark.slow
def test_compiled_blocks_give_the_losses_of_eager_ones(worlds, run_config):
    options = {"steps": 2, "checkpoint_every": 0}
    alone = run_config("alone", **options)
    at_once = run_config("at-once", compile="on", **options)
    blocks = run_config("pair", compile="on", **options)
    train(alone)
    train(at_once)
    finish(worlds, blocks, size=2)
    assert_same_curves(alone, at_once, tolerance=1e-4)
    assert_same_curves(alone, blocks, tolerance=1e-4)


def test_a_run_resumes_with_another_number_of_processes(worlds, run_config):
    whole = run_config("whole", steps=8)
    train(whole)
    parts = run_config("parts", steps=8)
    for size, stop in ((1, 2), (4, 4), (2, 6), (1, 7)):
        fault = {f"{size - 1}:{stop}": "interrupt"}
        outcomes = worlds.run(parts, size=size, faults=fault)
        assert [code for code, _ in outcomes] == [130] * size, outcomes
        assert list_checkpoints(Path(parts.out))[-1].step == stop
    finish(worlds, parts, size=3)
    assert_same_curves(whole, parts)
    assert [saved.step for saved in list_checkpoints(Path(parts.out))] == [7, 8]


def test_a_killed_process_ends_the_run_which_continues(worlds, run_config):
    whole, killed = run_config("whole"), run_config("killed")
    train(whole)
    first = worlds.run(killed, size=3, timeout_seconds=20, faults={"2:4": "kill"})
    assert first[2][0] == -9
    assert {code for code, _ in first[:2]} <= {2, 75}
    assert "another process of the run died or hangs" in first[0][1], first
    finish(worlds, killed, size=3)
    assert_same_curves(whole, killed)


def test_a_frozen_process_ends_the_run_within_the_limit(worlds, run_config):
    outcomes = worlds.run(run_config("run"), size=2, timeout_seconds=6, faults={"1:3": "stop"})
    assert outcomes[0][0] in (2, 75)
    assert "another process of the run died or hangs" in outcomes[0][1], outcomes


def test_an_export_that_takes_longer_than_a_step_may_is_waited_for(worlds, run_config):
    config = run_config("run", steps=2)
    finish(worlds, config, size=2, timeout_seconds=6, faults={"0:export": "slow"})
    assert (Path(config.out) / "final" / "model.safetensors").is_file()


def test_a_full_disk_is_named_and_older_checkpoints_kept(worlds, run_config):
    config = run_config("run")
    refused(worlds, config, "No space left on device (rank 1)", faults={"1:4": "full disk"})
    assert [saved.step for saved in list_checkpoints(Path(config.out))] == [2]
    finish(worlds, config, size=2)


def test_a_damaged_shard_is_refused_by_all(worlds, run_config):
    config = run_config("run")
    assert worlds.run(config, size=2, faults={"0:5": "interrupt"})[0][0] == 130
    newest = list_checkpoints(Path(config.out))[-1].path
    shard = newest / "sharded" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:50])
    refused(worlds, config, "__1_0.distcp is damaged")


def test_bad_launches_are_refused_by_all(worlds, run_config):
    refused(worlds, run_config("run"), "shard=3 does not divide the 2 processes", shard=3)
    odd = run_config("run", batch_size=3, micro_batch_size=1)
    refused(worlds, odd, "does not divide over 2 processes")
    other = refused(worlds, run_config("run", data="missing"), "no prepared data")
    assert other.startswith("ErrorElsewhere")


@pytest.mark.parametrize("given", ["two", "0", "-1"])
def test_an_invalid_world_size_is_one_line(given, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", given)
    with pytest.raises(UserError, match=f"^WORLD_SIZE={given}: the number of processes"):
        open_world(torch.device("cpu")).__enter__()


def test_one_process_is_not_split():
    with pytest.raises(UserError, match="shard=4 does not divide the one process of this run"):
        open_world(torch.device("cpu"), shard=4).__enter__()


def test_a_block_that_shares_a_weight_with_the_rest_of_the_model_is_not_split():
    model = tiny_model(tie_word_embeddings=True)
    check_splits(model)
    decoder = model.get_decoder()
    decoder.norm.weight = decoder.layers[0].input_layernorm.weight
    with pytest.raises(UserError, match=r"blocks of \w+ share weights, .* leave out torchrun$"):
        check_splits(model)


def test_a_model_whose_blocks_share_weights_is_refused_by_all(worlds, run_config):
    shared = run_config("shared").out
    tiny_model("zamba2", vocab_size=2048).save_pretrained(shared)
    run = run_config("run", init=shared, format="ternary-6:8")
    refused(worlds, run, "blocks of Zamba2ForCausalLM share weights")
    assert not Path(run.out).exists()


def test_a_folder_in_use_is_refused_by_all(worlds, run_config):
    config = run_config("run")
    with run_lock(Path(config.out)):
        refused(worlds, config, "in use by another")
    assert not Path(config.out).exists()


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
    same_step = resolve_checkpoint(Path(alone.out) / "checkpoints" / newest.path.name)
    expected, state = (from_pretrained(each).state_dict() for each in (same_step, whole))
    torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-4)
    assert find_checkpoint(whole).trained_context_length == several.sequence_length
    stored, own = (load_tokenizer(each) for each in (whole, several.data))
    assert stored.get_vocab() == own.get_vocab()
    scored = evaluate(*read_text(run, several.data), max_tokens=200)
    assert 1 < scored.perplexity < 400
    dropped = shutil.copytree(newest.path, newest.path.with_name("step-99999999"))
    with monkeypatch.context() as run_that_continues:
        run_that_continues.setattr(
            "sparse_bitnet.checkpoint.saved_steps.damage",
            lambda _: shutil.rmtree(dropped, ignore_errors=True),
        )
        assert resolve_checkpoint(run) == str(whole)
    (newest.path / STATE).write_bytes((newest.path / STATE).read_bytes() + b" ")  # of a later run
    resolve_checkpoint(run)
    assert (whole / STATE).read_bytes() == (newest.path / STATE).read_bytes()
    # Whoever asks for another checkpoint gets that one, and only those of removed ones go.
    (whole.parent / "step-00000001").mkdir()
    assert Path(resolve_checkpoint(older.path)).name == older.path.name
    assert sorted(whole.parent.iterdir()) == [whole.with_name(older.path.name), whole]

    shard = next((newest.path / "sharded").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    shutil.rmtree(whole)
    with pytest.raises(UserError, match="is damaged"):
        resolve_checkpoint(run)
    shutil.rmtree(newest.path)
    shutil.rmtree(older.path / "model")
    shutil.rmtree(run / "consolidated")
    with pytest.raises(UserError, match=r"is damaged|continue the run"):
        resolve_checkpoint(run)
