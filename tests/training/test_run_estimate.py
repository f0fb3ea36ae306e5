# SPDX-License-Identifier: Apache-2.0
"""The planner against what a model really holds, and against known totals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparse_bitnet.checkpoint.build_model import PRESETS, Shape, build_model
from sparse_bitnet.cli.plan import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import selected, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.packing.two_bits import pack_codes, unpack_codes
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast
from sparse_bitnet.training.footprint import activation_bytes, parameter_counts
from sparse_bitnet.training.job import GPUS, Job
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.optimizer import build_optimizer
from sparse_bitnet.training.run_estimate import UNPACKING_BYTES, fitted, plan

SMALL = Shape(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=320,
)


def measured(config: SparseBitConfig, dtype: torch.dtype, rows: int) -> tuple[int, int]:
    """Bytes of all state after a step, and of what autograd saved for the backward pass."""
    model = build_model("qwen2.5-small-for-a-test", config, seed=0).train()
    optimizer = build_optimizer(model, TrainConfig())
    tokens = torch.randint(0, 320, (rows, 33))
    with selected(model):
        held = [part for layer in sparse_layers(model).values() for part in layer.state.current]
        own = {part.data_ptr() for part in (*held, *model.parameters()) if part is not None}
        saved: dict[int, int] = {}
        kept = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, autocast("cpu", dtype):
            loss = SummedLoss(model)(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        state = [part for part in held if part is not None]
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        state += [parameter, parameter.grad, moments["exp_avg"], moments["exp_avg_sq"]]
    return sum(part.nbytes for part in state), sum(saved.values())


@pytest.mark.parametrize("format", ["ternary-6:8", "full-6:8", "ternary-8:8", "full-8:8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_a_model_holds(monkeypatch, format, dtype):
    monkeypatch.setitem(PRESETS, "qwen2.5-small-for-a-test", SMALL)
    config = SparseBitConfig.parse(format)
    (state, few), (_, many) = (measured(config, dtype, rows) for rows in (2, 6))
    job = Job(model="qwen2.5-small-for-a-test", format=format, gpus=1, batch_size=2)
    held = [
        plan(job).memory[part] for part in ("masters (float32)", "AdamW moments", "mask, codes")
    ]
    gradients = 4 * sum(parameter_counts(SMALL))
    assert sum(held) + gradients == pytest.approx(state, rel=0.01)

    def planned(rows: int) -> int:
        size = activation_bytes(
            SMALL, config, rows * 32, compute_bytes=dtype.itemsize, chunk_tokens=0
        )
        return size

    # The difference leaves out what does not grow with the tokens: the head's gradient, weights' copies.
    assert planned(6) - planned(2) == pytest.approx(many - few, rel=0.1)


def test_more_gpus_need_less_memory_each_and_take_less_time():
    eight, many = (plan(Job(gpus=gpus, micro_batch_size=2)) for gpus in (8, 64))
    for part in ("masters (float32)", "AdamW moments", "mask, codes"):
        assert many.memory[part] == pytest.approx(eight.memory[part] / 8)
    assert many.days < eight.days
    assert many.checkpoint_bytes == eight.checkpoint_bytes == pytest.approx(37e9, rel=0.02)


def test_packed_codes_are_an_eighth_and_gathered_once():
    job = Job(gpus=64, micro_batch_size=1)
    found = plan(job)
    part = "gather of linear layers"
    assert found.traffic_bf16[part] == 8 * 2 * job.micro_steps * found.traffic[part]
    full = plan(Job(gpus=64, micro_batch_size=1, format="full-6:8"))
    assert full.traffic == full.traffic_bf16


def test_replicas_trade_gathers_for_all_reduces():
    split, replicated = (plan(Job(gpus=64, shard=shard)) for shard in (64, 8))
    assert replicated.traffic["gradients, between replicas"] > 0
    assert split.traffic["gradients, between replicas"] == 0
    assert replicated.memory_bytes > split.memory_bytes


def test_the_micro_batch_is_chosen_to_fit():
    job = fitted(Job(gpus=8, gpu="a100", batch_size=512))
    assert job.micro_batch_size is not None
    assert plan(job).memory_bytes <= GPUS["a100"].memory
    assert fitted(Job(micro_batch_size=3, batch_size=192)).micro_batch_size == 3


def test_time_is_at_least_that_of_the_products():
    job = Job(gpus=64)
    weights, tokens = 3.09e9, job.batch_size * job.sequence_length
    least = 6 * weights * tokens / (64 * GPUS["h100"].flops)
    assert least < plan(job).step_seconds < 10 * least


def test_the_command_prints_the_plan(capsys):
    main(["--model", "qwen2.5-3b", "--gpus", "64", "--gpu", "h100"])
    text = capsys.readouterr().out
    for words in ("AdamW moments", "gather of linear layers", "tokens/s", "days", "a checkpoint:"):
        assert words in text
    assert "NOT fit" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "gpt"}, "not a preset"),
        ({"gpu": "z80"}, "unknown"),
        ({"gpus": 3}, "does not divide over 3"),
        ({"shard": 5}, "shard=5 does not divide"),
        ({"gpus": 0}, "must be a number above 0"),
        ({"tokens": float("nan")}, "must be a number above 0"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Job(**options)


def test_unpacking_moves_the_bytes_that_the_plan_counts():
    class Moved(TorchDispatchMode):
        """Bytes that operations read and write; views move none."""

        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            if result.data_ptr() not in [one.data_ptr() for one in tensors]:
                Moved.total += result.nbytes + sum(one.nbytes for one in tensors)
            return result

    packed = pack_codes(torch.randint(-1, 2, (1024, 4096), dtype=torch.int8))
    with Moved():
        codes = unpack_codes(packed, 4096).to(torch.bfloat16)
    assert Moved.total / codes.numel() == pytest.approx(UNPACKING_BYTES, rel=0.001)
