# SPDX-License-Identifier: Apache-2.0
"""A small prepared folder of real text, and configs that train on it in a second or two."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import TrainConfig
from world_processes import TINY, Worlds


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest preset, smaller still: a step takes milliseconds."""
    monkeypatch.setitem(PRESETS, "qwen2.5-1m", TINY)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    texts = folder / "texts"
    texts.mkdir()
    package = Path(pytest.__file__).parent.parent / "_pytest"
    for number, source in enumerate(sorted(package.glob("*.py"))[:24]):
        (texts / f"{number:02d}.txt").write_text(source.read_text("utf-8")[:20_000], "utf-8")
    data = folder / "data"
    prepare(parse_source(f"{texts}/*.txt", validation_fraction=0.2), data, vocab_size=300)
    return data


@pytest.fixture
def small_run(prepared: Path, tmp_path: Path) -> Any:
    """`small_run(**changes)`: the config of a tiny model over a few steps, into a fresh folder."""

    def config(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "data": str(prepared),
            "out": str(tmp_path / "run"),
            "steps": 6,
            "batch_size": 4,
            "micro_batch_size": 2,
            "sequence_length": 32,
            "precision": "float32",
            "checkpoint_every": 2,
            "validation_tokens": 256,
            "layer_metrics_every": 3,
            "threads": 1,
        }
        return TrainConfig(**{**values, **changes})

    return config


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of processes that are forked with their imports done."""
    with Worlds() as started:
        yield started


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """This process alone, as a world."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def run_config(small_run: Any, tmp_path: Path) -> Any:
    """`run_config(name, **changes)`: the config of a run that several processes share."""
    shared = {"batch_size": 12, "sequence_length": 16, "validation_tokens": 200}
    return lambda name, **changes: small_run(**{"out": str(tmp_path / name), **shared, **changes})
