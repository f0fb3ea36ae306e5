# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model see of some text: for scores that rank weights by their inputs."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.straight_through import InputQuantizer


@torch.no_grad()
def input_norms(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    config: SparseBitConfig,
    batches: Iterable[Tensor],
) -> dict[str, Tensor]:
    """Root mean square of each input feature of some layers, as the model is now, by layer.

    Args:
        model: called with `input_ids`.
        layers: whose inputs; by full name.
        config: whose transform of the inputs, if any, comes first.
        batches: of token ids, int64 [batch, sequence].

    Raises `UserError` for text that is empty, and where an input is not finite.
    """
    inputs = InputQuantizer(config)
    squares: dict[str, Tensor] = {}
    tokens = dict.fromkeys(layers, 0)

    def see(name: str) -> None:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = inputs.transform(args[0].float()).flatten(0, -2)
            squares[name] = squares.get(name, 0) + x.square().sum(0, dtype=torch.float64)
            tokens[name] += len(x)

        hooks.append(layers[name].register_forward_pre_hook(hook))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    was_training = model.training
    model.eval()
    try:
        for name in layers:
            see(name)
        device = next(model.parameters()).device
        for batch in batches:
            model(input_ids=batch.to(device))
    finally:
        for handle in hooks:
            handle.remove()
        model.train(was_training)
    if not squares:
        raise UserError("convert_: the calibration text is empty")
    norms = {name: (total / tokens[name]).sqrt().float() for name, total in squares.items()}
    for name, norm in norms.items():
        if not torch.isfinite(norm).all():
            raise UserError(f"convert_: layer {name} gets calibration inputs that are not finite")
    return norms
