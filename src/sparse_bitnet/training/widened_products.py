# SPDX-License-Identifier: Apache-2.0
"""bfloat16 products for a CPU that multiplies float32 faster."""

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


class WidenProducts(CustomGraphPass):
    """Has the bfloat16 products of inductor's graphs multiply float32 operands, whose products are exact.

    As everywhere in inductor's loops, a value that is not stored in between keeps its float32 digits: an
    operand may be more precise than bfloat16, never less.
    """

    def __call__(self, graph: Graph) -> None:
        for node in list(graph.nodes):
            if node.target not in _PRODUCTS or node.meta["val"].dtype != torch.bfloat16:
                continue
            users = list(node.users)
            with graph.inserting_before(node):
                wide = [
                    _converted(graph, a, torch.float32) if isinstance(a, Node) else a
                    for a in node.args
                ]
            node.args = tuple(wide)
            with graph.inserting_after(node):
                rounded = _converted(graph, node, torch.bfloat16)
            for user in users:
                user.replace_input_with(node, rounded)
            node.meta["val"] = node.meta["val"].float()

    def uuid(self) -> Any:
        """What inductor's cache tells other code by."""
        return get_hash_for_files((__file__,))


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    result = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    result.meta["val"] = node.meta["val"].to(dtype)
    return result


class WideProducts(TorchDispatchMode):
    """The same outside compiled code: operands are read as float32, results are rounded to bfloat16.

    With torch's own, on a processor with AVX2 alone, evaluation takes nearly six times as long.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        wide = (a.float() if isinstance(a, Tensor) else a for a in args)
        return func(*wide, **(kwargs or {})).bfloat16()
