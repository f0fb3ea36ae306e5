# SPDX-License-Identifier: Apache-2.0
"""Exports and imports of small models, and what each of them must have."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.verify import Verification


def export_gguf(folder: Path, out: Path, type: str, **options: Any) -> Path:
    """Return the only GGUF file of an export."""
    export(folder, out, ExportConfig(format=f"gguf-{type}", **options))
    (file,) = out.glob("*.gguf")
    return file


def verified_export(folder: Path, out: Path, format: Any, **options: Any) -> Verification:
    """Return the verification of an export, which must not fail."""
    verification = export(
        folder, out, ExportConfig(format=format, verify=True, **options)
    ).verification
    assert verification is not None
    assert verification.failures == []
    return verification


def assert_import_refused(folder: Path, out: Path, message: str, **options: Any) -> None:
    """Require a refusal with this message, and that it leaves nothing."""
    with pytest.raises(UserError, match=message):
        import_checkpoint(folder, out, **options)
    assert not out.exists()


def assert_same_layers(before: Checkpoint, after: Checkpoint, *, rtol: float = 0) -> None:
    """Require the same shapes and codes, and the same scales up to `rtol`."""
    assert before.layers == after.layers
    for name in before.layers:
        ours, theirs = before.ternary(name), after.ternary(name)
        assert torch.equal(ours.codes, theirs.codes), name
        torch.testing.assert_close(ours.weight_scale, theirs.weight_scale, rtol=rtol, atol=0)
