# SPDX-License-Identifier: Apache-2.0
"""N:M masks for the BitNet training of torchao (torchao.prototype.quantized_training), tested with 0.18.

    pip install torchao && python examples/torchao_nm.py

torchao keeps the master weight in a tensor subclass whose product quantises it in every forward; this one
subclasses it and masks the codes, so the optimiser, FSDP2 with 2 bits a weight on the wire, and
checkpoints stay torchao's. The gradient of the effective weight goes to every master, pruned ones too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.prototype.quantized_training.bitnet import (
    BitNetTrainingLinearWeight,
    _pack_i2_in_i8,
    get_bitnet_scale,
)

from sparse_bitnet.nn.straight_through import ternary_int8_linear
from sparse_bitnet.ops.select_ternary import select_ternary
from sparse_bitnet.pattern import NMPattern


class NMWeight(BitNetTrainingLinearWeight):
    """Master weight whose products use only n of every m weights along `in_features`."""

    pattern = NMPattern(6, 8)
    """N:M pattern of all instances; a subclass sets another pattern."""

    def masked_codes(self, scale: Tensor) -> Tensor:
        """Return int8 codes [out_features, in_features] in {-1, 0, 1}."""
        codes, _ = select_ternary(self._data, scale, self.pattern.n, self.pattern.m)
        return codes

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return packed codes and their scale. Codes include the mask: no group spans two shards."""
        scale = self._precomputed_scale
        if scale is None:
            scale = get_bitnet_scale(self._data)
            torch.distributed.all_reduce(scale, op=torch.distributed.ReduceOp.AVG)
        scale = scale.clamp_min(1e-5)
        return (_pack_i2_in_i8(self.masked_codes(scale)),), (scale,)


@NMWeight.implements_torch_function(F.linear)
def _(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Tensor:
    input, weight, bias = (*args, None)[:3]
    scale = get_bitnet_scale(weight._data).clamp_min(1e-5)
    return ternary_int8_linear(input, weight, bias, weight.masked_codes(scale), scale)


def apply_nm_(model: nn.Module, weight_class: type[NMWeight] = NMWeight) -> nn.Module:
    """Give every linear layer of a model, except its head, an `NMWeight`; return `model`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            weight_class.pattern.check_divides(module.in_features, name)
            module.weight = nn.Parameter(weight_class(module.weight.detach()))
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    model = apply_nm_(nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(256, 64)
    for step in range(51):
        loss = F.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
