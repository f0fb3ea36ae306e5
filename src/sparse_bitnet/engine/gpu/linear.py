# SPDX-License-Identifier: Apache-2.0
"""A ternary linear layer that keeps its weight in the forms its products need, and picks one by tokens.

All forms give the same integers, scaled alike, so the choice never changes an output by more than the
rounding of its type; in float32 not at all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparse_bitnet.ops.backends import choice_of_kernel
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

    table: TuningCache = field(default_factory=lambda: TuningCache(machine=""))
    always: Route | None = None
    """Not by the table: this product, and dense where it is impossible."""

    @classmethod
    def from_environment(cls, table: TuningCache) -> "RoutePolicy":
        """By the table, or what SPARSE_BITNET_KERNEL=triton (packed) or cusparselt (sparse) asks for."""
        always: dict[str, Route] = {
            "triton": "packed",
            "cusparselt": "sparse",
            "reference": "dense",
        }
        return cls(table=table, always=always.get(choice_of_kernel()))

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


@dataclass(frozen=True, eq=False)
class QuantizedTokens:
    """int8 activations for one product, in the place of the float tensor that they stand for."""

    codes: Tensor
    """int8 [..., in_features], or [..., K'] in the order of windows."""
    scale: Tensor
    """float32 [..., 1]."""
    route: Route
    """The product that takes them."""
    shape: torch.Size
    """Of the float tensor."""
    dtype: torch.dtype
    """Of the float tensor, and of the product's output."""


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
            expanded, _ = window_expand(self.codes, self.pattern, padded=True, name=name)
            self.compressed = compress_windows(expanded)
        if "packed" in routes and self.weight_packed is None:
            self.weight_packed = pack_blocks(self.codes)

    def drop_unused_(self) -> None:
        """Give back the forms that the policy never chooses; dense is kept."""
        routes = self.policy.routes(self.shape)
        self.compressed = self.compressed if "sparse" in routes else None
        self.weight_packed = self.weight_packed if "packed" in routes else None

    @classmethod
    def merged(cls, layers: Iterable["TernaryLinear"], policy: RoutePolicy) -> "TernaryLinear":
        """One layer that computes several of the same input, outputs side by side, with a scale a row."""
        parts = list(layers)
        scale = [part.weight_scale.expand(part.out_features) for part in parts]
        bias = None
        if any(part.bias is not None for part in parts):
            zeros = [part.weight_scale.new_zeros(part.out_features) for part in parts]
            bias = torch.cat(
                [
                    z if part.bias is None else part.bias.float()
                    for z, part in zip(zeros, parts, strict=True)
                ]
            )
        codes = torch.cat([part.codes for part in parts])
        return cls(codes, torch.cat(scale), bias, parts[0].pattern, policy)

    def route(self, tokens: int) -> tuple[Route, NMPattern | None]:
        """The product for this many tokens, and the windows in which it takes activations, if it does."""
        route = self.policy.choose(self.shape, tokens)
        if route == "sparse" and self.compressed is not None:
            return route, self.pattern
        if route == "packed" and self.weight_packed is not None:
            return route, None
        return "dense", None

    def quantize(self, input: Tensor) -> "QuantizedTokens":
        """Float [..., in_features] as the product for this many tokens takes it."""
        route, windows = self.route(input.numel() // self.in_features)
        codes, scale = quantize_int8(input) if windows is None else quantize_windows(input, windows)
        return QuantizedTokens(codes, scale, route, input.shape, input.dtype)

    def forward(self, input: "Tensor | QuantizedTokens") -> Tensor:
        """[..., in_features] -> [..., out_features] of the same dtype."""
        x = self.quantize(input) if isinstance(input, Tensor) else input
        scale, bias = self.weight_scale, self.bias
        if x.route == "sparse":
            assert self.compressed is not None
            return sparse_int8_linear(
                x.codes, x.scale, self.compressed, self.out_features, scale, bias, x.dtype
            )
        if x.route == "packed":
            assert self.weight_packed is not None
            return packed_int8_linear(x.codes, x.scale, self.weight_packed, scale, bias, x.dtype)
        return int8_linear(x.codes, x.scale, self.codes, scale, bias, x.dtype)

    def extra_repr(self) -> str:
        """Sizes, pattern and the forms kept, for `print`."""
        forms = ["dense"]
        forms += ["sparse"] if self.compressed is not None else []
        forms += ["packed"] if self.weight_packed is not None else []
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"pattern={self.pattern}, forms={'+'.join(forms)}"
        )
