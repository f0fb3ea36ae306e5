# SPDX-License-Identifier: Apache-2.0
"""Metadata of a packed checkpoint, in its tensor file and in its config.json."""

from dataclasses import dataclass
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.formats import FORMATS, VERSION
from sparse_bitnet.pattern import NMPattern

QUANT_METHOD = "sparse_bitnet_packed"

EMBEDDINGS = ("bf16", "int8", "float32", "ternary")
"""Storage of embedding and output head: int8 with a float32 scale for each row; ternary as rows of i2
with a scale for every group of weights (`formats.SCALE_GROUPS`). If only one of the two is ternary, the
other is stored in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class PackedMetadata:
    """Format, pattern and layers of a packed checkpoint."""

    packed_format: str
    """A name in `formats.FORMATS`."""

    format: SparseBitConfig
    """Training format of the layers; its pattern is that of the packed codes."""

    embeddings: str
    """One of `EMBEDDINGS`."""

    layers: dict[str, tuple[int, int]]
    """Packed layers: full name -> (out_features, in_features)."""

    @property
    def pattern(self) -> NMPattern:
        """Pattern of the packed codes."""
        return self.format.pattern

    @property
    def weights(self) -> int:
        """Number of ternary weights."""
        return sum(rows * columns for rows, columns in self.layers.values())

    def table_form(self, dtype: str | None) -> str:
        """Return how an embedding or head is stored, one of `EMBEDDINGS`, from its dtype in the file."""
        return "bf16" if (self.embeddings, dtype) == ("ternary", "BF16") else self.embeddings

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as the tensor file stores it."""
        return {
            "version": VERSION,
            "packed_format": self.packed_format,
            "pattern": str(self.pattern),
            "format": self.format.to_dict(),
            "embeddings": self.embeddings,
            "layers": {name: list(shape) for name, shape in self.layers.items()},
        }

    def config_entry(self) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        values = {"quant_method": QUANT_METHOD, **self.to_json()}
        return {key: value for key, value in values.items() if key != "layers"}

    def check_config_entry(self, entry: dict[str, Any], where: str) -> None:
        """Raise `UserError` if a `quantization_config` contradicts the tensor file."""
        own = self.config_entry()
        for key in sorted(own.keys() | entry.keys()):
            if entry.get(key) != own.get(key):
                raise UserError(
                    f"{where}: its {key} is {own.get(key)!r}, config.json says {entry.get(key)!r}; "
                    "they are of different checkpoints"
                )

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str) -> "PackedMetadata":
        """Inverse of `to_json`. Raises `UserError` for another version or anything unreadable."""
        check_version(values, where)
        try:
            format = SparseBitConfig.from_dict(values["format"])
            layers = {name: (rows, columns) for name, (rows, columns) in values["layers"].items()}
            if values["packed_format"] not in FORMATS or values["embeddings"] not in EMBEDDINGS:
                raise UserError("an unknown packed format or embedding type")
            if values["pattern"] != str(format.pattern) or format.weight != "ternary":
                raise UserError("its pattern and its layers' format contradict each other")
            if not all(
                type(size) is int and size > 0 for sizes in layers.values() for size in sizes
            ):
                raise UserError("a layer's shape is not two positive sizes")
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{where}: its metadata is incomplete ({error!r})") from None
        return cls(
            packed_format=values["packed_format"],
            format=format,
            embeddings=values["embeddings"],
            layers=layers,
        )


def check_version(values: dict[str, Any], where: str) -> None:
    """Raise `UserError` for a version other than ours."""
    version = values.get("version")
    if version != VERSION or isinstance(version, bool):
        raise UserError(
            f"{where}: packed format version {version!r} is not readable by this release (it reads "
            f"{VERSION}); upgrade sparse-bitnet or pack the model again"
        )
