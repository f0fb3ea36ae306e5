# SPDX-License-Identifier: Apache-2.0
"""N:M ternary layers in torchtitan without a change to it, tested with 0.3.

    pip install torchtitan && python examples/torchtitan_nm.py

torchtitan builds models from a tree of configs; a converter replaces configs in that tree before the
model is built. Your run is a function that returns a complete config with the converter:

    def qwen3_nm() -> Trainer.Config:
        run = qwen3_debugmodel()
        converter = NMConverter.Config(format="ternary-6:8")
        run.model_spec = model_registry("debugmodel", converters=[converter])
        return run

Loop, optimiser, FSDP2 and checkpoints stay torchtitan's. FSDP2 sends whole master weights in the type of
its mixed precision, and every forward pass selects the mask again; `sparse-bitnet train` sends 2 bits per
weight and selects once a step. Tensor parallelism is refused, because it can cut groups of the pattern.
"""

from dataclasses import dataclass, field, fields
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.layer import SparseBitLinear


class NMLinear(SparseBitLinear, Module):
    """torchtitan's linear layer with the forward of `SparseBitLinear`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Configuration of a layer, with its format."""

        format: str

    def __init__(self, config: Config) -> None:
        format = SparseBitConfig.parse(config.format)
        sizes = (config.in_features, config.out_features, config.bias)
        SparseBitLinear.__init__(self, *sizes, config=format)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if isinstance(self.weight, DTensor):
            raise UserError("N:M layers are not split by tensor parallelism: set its degree to 1")
        return SparseBitLinear.forward(self, input)


class NMConverter(ModelConfigConverter):
    """Replaces the configs of plain linear layers by those of N:M ternary layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Format of the converted layers, and names of the layers to leave unchanged."""

        format: str = "ternary-6:8"
        """Format of the layers, as `SparseBitConfig.parse` reads it."""
        dense_layers: list[str] = field(default_factory=lambda: ["lm_head", "output"])
        """Globs of the names of layers that stay as they are."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Change the tree in place and return it. Raises `UserError`, naming the layer, if the
        pattern does not divide its width."""
        pattern = SparseBitConfig.parse(self.config.format).pattern
        for name, linear, parent, attribute in list(model_config.traverse(Linear.Config)):
            stays = any(fnmatch(name, glob) for glob in self.config.dense_layers)
            if type(linear) is not Linear.Config or stays:
                continue
            pattern.check_divides(linear.in_features, name)
            given = {one.name: getattr(linear, one.name) for one in fields(linear)}
            sparse = NMLinear.Config(**given, format=self.config.format)
            if isinstance(parent, list):
                parent[attribute] = sparse
            else:
                setattr(parent, attribute, sparse)
        return model_config


if __name__ == "__main__":
    from torchtitan.models.qwen3 import model_registry

    torch.manual_seed(0)
    # Train one block's MLP only, to run on a CPU: torchtitan's attention is compiled for GPUs.
    model = model_registry("debugmodel", converters=[NMConverter.Config()]).model.build()
    model.init_states()
    sparse = [name for name, module in model.named_modules() if isinstance(module, NMLinear)]
    print(f"{len(sparse)} sparse ternary layers: {', '.join(sparse[:3])}, ...")
    mlp = model.layers["0"].feed_forward
    optimizer = torch.optim.AdamW(mlp.parameters(), lr=1e-2)
    x = torch.randn(64, mlp.w1.in_features)
    for step in range(21):
        loss = F.mse_loss(mlp(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
