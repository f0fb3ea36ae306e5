# SPDX-License-Identifier: Apache-2.0
"""A ternary linear layer that keeps its weight in the forms its products need, and picks one by tokens.

All forms give the same integers, scaled alike, so the choice never changes an output by more than the
rounding of its type; in float32 not at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.ops.int8_linear import int8_linear
from sparse_bitnet.ops.packed_int8_linear import MAX_TOKENS, pack_blocks, packed_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.ops.quantize_windows import quantize_windows
from sparse_bitnet.ops.sparse_int8_linear import compress_windows, sparse_int8_linear
from sparse_bitnet.ops.tuning_cache import LayerShape, Route, TuningCache
from sparse_bitnet.ops.windows import has_windows, window_expand
from sparse_bitnet.pattern import NMPattern


@dataclass(frozen=True, kw_only=True)
class RoutePolicy:
    """How layers choose: always one product where it can be used, or by a table of measured times."""

    table: TuningCache = field(default_factory=TuningCache)
    always: Route | None = None
    """Not by the table: this product, and dense where it is impossible."""

    def routes(self, shape: LayerShape) -> set[Route]:
        """The products that a layer may use."""
        wanted = self.table.routes(shape) if self.always is None else {"dense", self.always}
        return wanted & set(possible_routes(shape.pattern))

    def choose(self, shape: LayerShape, tokens: int) -> Route:
        """The product for this many tokens."""
        route = self.table.choose(shape, tokens) if self.always is None else self.always
        return route if route in possible_routes(shape.pattern, tokens) else "dense"


def possible_routes(pattern: NMPattern, tokens: int = 1) -> list[Route]:
    """The products that a pattern and a token count allow."""
    routes: list[Route] = ["dense"]
    routes += ["sparse"] if has_windows(pattern) else []
    return [*routes, "packed"] if tokens <= MAX_TOKENS else routes


class TernaryLinear(nn.Module):
    """Inference form of ternary layers, one or several that share their input merged into one.

    Buffers: `codes` int8 [out_features, in_features]; `compressed` of `compress_windows` and
    `weight_packed` uint8, each only if a product uses it; `weight_scale` float32 [1] or
    [out_features]; `bias` [out_features] or None. Nothing is trained and nothing is saved.
    """

    codes: Tensor
    compressed: Tensor | None
    weight_packed: Tensor | None
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        pattern: NMPattern,
        policy: RoutePolicy,
        *,
        name: str = "(unnamed)",
    ) -> None:
        """
        Args:
            codes: int8 [out_features, in_features] within the pattern, on the device to compute on.
            weight_scale: float32, one value or [out_features].
            bias: [out_features] or None.
            pattern: of the codes.
            policy: which product for how many tokens.
            name: for error messages.

        Raises `UserError` for codes outside the pattern.
        """
        super().__init__()
        self.out_features, self.in_features = codes.shape
        self.pattern = pattern
        self.shape = LayerShape(self.out_features, self.in_features, pattern)
        forms = {"codes": codes, "weight_scale": weight_scale.reshape(-1).float(), "bias": bias}
        for key, value in {**forms, "compressed": None, "weight_packed": None}.items():
            self.register_buffer(key, None if value is None else value.detach(), persistent=False)
        self.set_policy_(policy, name)

    def set_policy_(self, policy: RoutePolicy, name: str = "(unnamed)") -> None:
        """Choose by a policy from now on, and make the forms of the weight that it lacks."""
        self.policy, routes = policy, policy.routes(self.shape)
        if "sparse" in routes and self.compressed is None:
            self.compressed = compress_windows(window_expand(self.codes, self.pattern, name=name))
        if "packed" in routes and self.weight_packed is None:
            self.weight_packed = pack_blocks(self.codes)

    def drop_unused_(self) -> None:
        """Give back the forms that the policy never chooses; dense is kept."""
        routes = self.policy.routes(self.shape)
        self.compressed = self.compressed if "sparse" in routes else None
        self.weight_packed = self.weight_packed if "packed" in routes else None

    @classmethod
    def merged(
        cls, parts: Sequence["TernaryLinear"], policy: RoutePolicy, name: str
    ) -> "TernaryLinear":
        """One layer that computes several of the same input, outputs side by side, with a scale a row."""
        scale, bias = torch.cat([p.weight_scale.expand(p.out_features) for p in parts]), None
        if any(p.bias is not None for p in parts):
            zero = torch.zeros_like(scale).split([p.out_features for p in parts])
            pairs = zip(parts, zero, strict=True)
            bias = torch.cat([z if p.bias is None else p.bias.float() for p, z in pairs])
        codes = torch.cat([p.codes for p in parts])
        return cls(codes, scale, bias, parts[0].pattern, policy, name=name)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] of the same dtype."""
        return self.after(quantized, input)

    def after(
        self, quantize: Callable[..., tuple[Tensor, Tensor]], input: Tensor, *more: Any
    ) -> Tensor:
        """The product with what a fused operator makes of its input, [..., out_features].

        Args:
            quantize: of (input, *more, windows) the int8 tokens and their scales; `windows` is the
                pattern in whose order they are wanted, None for their own.
            input: float [..., features].
            more: further arguments.
        """
        route = self.policy.choose(self.shape, input.numel() // input.shape[-1])
        x = quantize(input, *more, self.pattern if route == "sparse" else None)
        return self.product(route, *x, input.dtype)

    def product(self, route: Route, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """With int8 tokens, in the order of the windows for "sparse"; the form of the weight is there."""
        end = self.weight_scale, self.bias, dtype
        if route == "sparse":
            assert self.compressed is not None
            return sparse_int8_linear(codes, scale, self.compressed, self.out_features, *end)
        if route == "packed":
            assert self.weight_packed is not None
            return packed_int8_linear(codes, scale, self.weight_packed, *end)
        return int8_linear(codes, scale, self.codes, *end)


def quantized(x: Tensor, windows: NMPattern | None) -> tuple[Tensor, Tensor]:
    """int8 tokens and their scales, in the order of a pattern's windows or in their own."""
    return quantize_int8(x) if windows is None else quantize_windows(x, windows)
