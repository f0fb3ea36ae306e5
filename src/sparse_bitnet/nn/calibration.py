# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model see of some text: for scores that rank weights by their inputs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.straight_through import InputQuantizer


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode inside; then each of its modules in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def input_norms(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    config: SparseBitConfig,
    batches: Iterable[Tensor],
) -> dict[str, Tensor]:
    """Root mean square of each input feature of the layers that the text reaches, as the model is now.

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
    try:
        for name in layers:
            see(name)
        device = next(model.parameters()).device
        with evaluation_mode(model):
            for batch in batches:
                model(input_ids=batch.to(device))
    finally:
        for handle in hooks:
            handle.remove()
    if not any(tokens.values()):
        raise UserError("convert_: the calibration text is empty")
    # No token reaches some, an expert that is never chosen for one.
    norms = {name: (squares[name] / n).sqrt().float() for name, n in tokens.items() if n}
    for name, norm in norms.items():
        if not torch.isfinite(norm).all():
            raise UserError(f"convert_: layer {name} gets calibration inputs that are not finite")
    return norms
