# SPDX-License-Identifier: Apache-2.0
"""Pooling: how a text's hidden states become one vector. Default: the state of the last token."""

from pathlib import Path
from typing import Any, Literal

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError

Pooling = Literal["lasttoken", "mean"]
"""Supported poolings, by their names in sentence-transformers."""


def read_pooling(folder: str | Path) -> Pooling:
    """Return the pooling in 1_Pooling/config.json; "lasttoken" without that file.

    Raises `UserError` for an unsupported pooling, and for layers that follow it (N_Dense).
    """
    path = Path(folder) / "1_Pooling" / "config.json"
    for layer in sorted(Path(folder).glob("[2-9]_*")):
        if not layer.name.endswith("_Normalize"):
            raise UserError(f"{layer} follows the pooling: layers after it are not supported")
    if not path.is_file():
        return "lasttoken"
    config = read_json_if_there(path)
    switches = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in switches]
    chosen: list[Any] = [config["pooling_mode"]] if config.get("pooling_mode") else modes
    if len(chosen) == 1 and chosen[0] in ("lasttoken", "mean"):
        return chosen[0]
    what = ", ".join(map(str, chosen)) or "nothing"
    raise UserError(f"{path}: pooling by {what}: supported are lasttoken, mean")
