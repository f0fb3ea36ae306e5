# SPDX-License-Identifier: Apache-2.0
"""Error messages for the JSON files of a model folder."""

from pathlib import Path

import pytest

from sparse_bitnet.checkpoint.model_folder import read_config, read_json_if_there
from sparse_bitnet.errors import UserError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as JSON"),
        (b"{", "not readable as JSON"),
        (b"\xff{}", "not readable as JSON"),
        (b"[" * 100_000, "not readable as JSON"),
        (b"[1]", "not a JSON object"),
    ],
)
def test_a_file_without_a_json_object_is_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (lambda: read_config(tmp_path), lambda: read_json_if_there(path)):
        with pytest.raises(UserError, match=rf"config\.json is damaged: {message}"):
            read()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*config\.json: Is a directory"):
        read_config(tmp_path)
