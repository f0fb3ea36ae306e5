# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet pack`: its files and its output."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.cli import pack as command
from sparse_bitnet.cli.export import ImportConfig
from sparse_bitnet.errors import UserError
from sparse_bitnet.export import verify
from sparse_bitnet.packing.formats import EMBEDDINGS, FORMATS

Trained = Callable[..., Path]


def test_choices_are_those_of_the_package() -> None:
    for config in (command.PackConfig, ImportConfig):
        hints, field = get_type_hints(config), "packed_format"
        choices = [name for each in get_args(hints[field]) for name in get_args(each) or (each,)]
        assert choices[: len(FORMATS) + 1] == ["auto", *FORMATS]
        assert get_args(hints["embeddings"]) == ("auto", *EMBEDDINGS)


def test_packs_and_compares(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    command.main([str(trained()), str(out), "--packed-format", "nm-enum", "--embeddings", "int8"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Packed ternary-6:8 as nm-enum" in printed
    assert "equal the trained model's bit for bit" in printed
    ids = torch.arange(10)[None]
    assert from_pretrained(out)(ids).logits.shape == (1, 10, 96)


def test_no_check_skips_the_comparison(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([str(trained()), str(tmp_path / "out"), "--no-check"])
    assert "bit for bit" not in capsys.readouterr().out


def test_a_difference_is_an_error(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = iter([torch.zeros(1), torch.zeros(1), torch.ones(1)])
    monkeypatch.setattr(verify, "_logits", lambda model, ids: next(ones))
    with pytest.raises(UserError, match=r"would not compute what .*; .*out is removed"):
        command.main([str(trained()), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
