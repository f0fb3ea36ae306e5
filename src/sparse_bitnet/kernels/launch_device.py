"""Kernels are launched on the current device, so the current one has to be that of the tensors."""

from collections.abc import Callable
from typing import Any

import torch


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, run while the device of its first argument, a CUDA tensor, is the current one."""

    def op(*arguments: Any) -> Any:
        with torch.cuda.device(arguments[0].device):
            return kernel(*arguments)

    return op
