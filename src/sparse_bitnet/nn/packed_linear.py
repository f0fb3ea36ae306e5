# SPDX-License-Identifier: Apache-2.0
"""A linear layer that holds packed bytes: the forward of the trained layer, without its masters."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.nn.layer import KeepsBufferTypes, SparseBitConfig
from sparse_bitnet.nn.straight_through import (
    InputQuantizer,
    several_scales_linear,
    ternary_int8_linear,
)
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.packing.formats import row_bytes
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.ternary import TernaryWeight


class PackedSparseBitLinear(KeepsBufferTypes):
    """Inference form of a `SparseBitLinear`; its output equals that layer's bit for bit.

    Buffers: `weight_packed` uint8; `weight_scale` float32 [1], [out_features, 1] or [out_features,
    groups]. `bias` is a parameter or None. `decode_` decodes the codes (int8 [out_features,
    in_features]) from the bytes.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    codes: Tensor | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        *,
        config: SparseBitConfig,
        packed_format: str,
        scale_shape: tuple[int, ...] = (1,),
        norm: nn.Module | None = None,
        rotation: Rotation | None = None,
        name: str = "(unnamed)",
        device: torch.device | str | None = None,
    ) -> None:
        """`norm`, then `rotation`, that of the weights: applied to the input before it is quantised."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.config, self.packed_format, self.name = config, packed_format, name
        self.inputs = InputQuantizer(config)
        shape = out_features, row_bytes(packed_format, config.pattern, in_features)
        self.register_buffer("weight_packed", torch.empty(shape, dtype=torch.uint8, device=device))
        scale = torch.empty(scale_shape, dtype=torch.float32, device=device)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("codes", None, persistent=False)
        self.register_parameter("bias", bias)
        self.norm, self.rotation = norm, rotation

    @property
    def weight(self) -> Tensor:
        """An empty tensor, which the initialisation of some families fills."""
        return self.weight_scale.new_empty(0, self.in_features)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.codes = None
        super()._load_from_state_dict(*args)

    def decode_(self) -> Self:
        """Decode the codes, once.

        Raises `UserError`, naming the layer, for bytes that are not of this format and pattern.
        """
        codes = unpack(
            self.weight_packed,
            self.packed_format,
            self.config.pattern,
            (self.out_features, self.in_features),
            name=f"{self.name}.weight_packed",
        )
        self.codes = codes.to(self.weight_packed.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.codes is None:
            self.decode_()
        assert self.codes is not None
        x = input if self.norm is None else self.norm(input)
        x = self.inputs.transform(x if self.rotation is None else self.rotation.inputs(x))
        if self.config.activation == "none":
            weight = TernaryWeight(self.codes, self.weight_scale).values()
            return F.linear(x, weight.to(x.dtype), self.bias)
        scale, quantized = self.weight_scale, self.inputs.codes(x)
        if scale.dim() == 2:
            return several_scales_linear(x, self.bias, self.codes, scale, quantized)
        return ternary_int8_linear(x, self.codes, self.bias, self.codes, scale, quantized=quantized)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"format={self.config}, packed_format={self.packed_format}"
        )
