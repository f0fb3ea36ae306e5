# SPDX-License-Identifier: Apache-2.0
"""Dense weights, codes * scale: for tools that know no ternary format.

Such a tool multiplies with unquantised activations, so its logits differ from ours by the rounding of
activations that ours does. One that quantises the weights to ternary again gets the scale wrong,
because the zeros enter its mean (a factor of 0.65 for a 6:8 Gaussian); hence the warning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.export.deferred import DeferredTensors
from sparse_bitnet.export.hf_folder import plan_tensors
from sparse_bitnet.packing.tensor_writer import TensorSpec

WARNING = (
    "these are the effective weights, codes x scale: tools that quantise them again to ternary "
    "(online bitnet mode, converters to GGUF ternary types) get a wrong scale; export to their "
    "format from the trained checkpoint instead"
)


def plan(source: Checkpoint, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of the export, all in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        def make() -> Sequence[Tensor]:
            return (source.effective(name).to(dtype),)

        return DeferredTensors((TensorSpec(f"{name}.weight", dtype, shape),), make)

    return list(plan_tensors(source, dtype, layer_tensors))
