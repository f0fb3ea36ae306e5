# SPDX-License-Identifier: Apache-2.0
"""`SparseBitLinear`, and the conversion of a model's linear layers to it."""

import torch

# The first call of one of these functions of MKL in a process, if several threads make it at once, can be
# off by 1e-4 (pytorch issue 188792): the rotary embedding of a forward pass, the root of an AdamW step.
for _function in (torch.cos, torch.erf, torch.exp, torch.log, torch.sin, torch.sqrt, torch.tanh):
    _function(torch.ones(1, dtype=torch.float32, device="cpu"))
