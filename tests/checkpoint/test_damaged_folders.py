# SPDX-License-Identifier: Apache-2.0
"""Any JSON in a model folder is read or refused in one line, within limits of memory and time.

`SPARSE_BITNET_FUZZ=5000` tries 5,000 changes of each kind of folder, instead of 25.
"""

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factories import edit_json
from small_models import write_models
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint

EXAMPLES = int(os.environ.get("SPARSE_BITNET_FUZZ", "25"))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 7, 1 << 24, (1 << 31) - 1, 1 << 62, 10**400, 1e308, -0.0]),
    st.floats(),
    st.sampled_from(["", "float32", "float99", "a" * 100_000, "\u0000", "auto", "../x", "yarn"]),
    st.sampled_from([[], {}, [None], [[1]], {"": 0}, {"rope_type": "yarn", "rope_theta": 1}]),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("models"))
    for format in ("bitnet", "compressed-tensors-w2a8"):
        export(folder / "trained", folder / format, ExportConfig(format=format))
    return folder


def places(content: Any, prefix: tuple = ()) -> list[tuple]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    listed = []
    for key, value in items:
        listed.append((*prefix, key))
        if isinstance(value, dict | list) and len(listed) < 500:
            listed += places(value, (*prefix, key))
    return listed


def changed(content: Any, place: tuple, value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def open_packed_model(folder: Path) -> None:
    from sparse_bitnet.engine.engine_model import open_engine_model

    open_engine_model(folder)


def into(write: Callable[[Path, Path], object]) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        write(folder, folder.with_name("out"))

    return read


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "open trained": ("trained", open_checkpoint),
    "load trained": ("trained", from_pretrained),
    "pack": ("trained", into(pack_checkpoint)),
    "engine": ("packed", open_packed_model),
    "import bitnet": ("bitnet", into(import_checkpoint)),
    "import words": ("compressed-tensors-w2a8", into(import_checkpoint)),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_any_change_is_read_or_refused_in_one_line(
    reader: str, file: str, models: Path, tmp_path: Path
) -> None:
    kind, read = READERS[reader]
    folder = shutil.copytree(models / kind, tmp_path / "folder")
    if not (folder / file).is_file():
        pytest.skip(f"{kind} has none")
    content = json.loads((folder / file).read_text())

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(place=st.sampled_from(places(content)), value=VALUES)
    def attempt(place: tuple, value: Any) -> None:
        (folder / file).write_text(json.dumps(changed(content, place, value)))
        with contextlib.suppress(UserError):
            read(folder)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

    attempt()


@pytest.mark.parametrize("size", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
@pytest.mark.parametrize("reader", READERS)
def test_sizes_are_compared_with_the_file_first(
    reader: str, size: str, models: Path, tmp_path: Path
) -> None:
    kind, read = READERS[reader]
    folder = shutil.copytree(models / kind, tmp_path / "folder")
    edit_json(folder / "config.json", **{size: (1 << 31) - 1})
    # The engine's own check names the tensor that is not of that size.
    with pytest.raises(
        UserError, match="is missing|the model needs|needs|expected|overflow|" + size
    ):
        read(folder)


def test_layers_without_end_are_refused_without_weights(models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "trained" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    with pytest.raises(UserError, match=r"num_hidden_layers is 1,000,000,000, more than the 4,096"):
        open_checkpoint(tmp_path)
