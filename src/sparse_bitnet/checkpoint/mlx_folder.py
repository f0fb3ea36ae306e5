# SPDX-License-Identifier: Apache-2.0
"""MLX's folders of 2 bits: words of 16 codes q, with value = q * scale + bias for each group of a row.

The values are ternary, (q - 1) * scale, where bias = -scale. Qwen3.5's heads are in transformers' order,
but its norms hold the whole factor, 1 more than there, and its convolutions are [channels, kernel, 1].

Rotated folders (Bonsai 2) declare it three times: hadamard.json has the keys of GGUF files, config.json
lists the rotated modules, and each of these has a tensor of signs.
"""

from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import StoredModel
from sparse_bitnet.checkpoint.config_fields import QWEN35, QWEN35_TYPES, check_fields
from sparse_bitnet.checkpoint.declared_rotation import MLX_KEYS, PREFIX, with_prefix
from sparse_bitnet.checkpoint.foreign import ForeignFolder
from sparse_bitnet.checkpoint.gguf_architectures import ARCHITECTURES
from sparse_bitnet.checkpoint.model_folder import read_config, read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import GATES
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales
from sparse_bitnet.packing.two_bits import CODES_PER_WORD, unpack_words

_DECLARED = {
    "model_type": QWEN35_TYPES[2],
    "base_model_type": QWEN35_TYPES[1],
    "schema_version": 2,
    "tensor_namespace": "mlx-vlm-qwen3_5",
    "gdn_activation_layout": "grouped",
    "hadamard_config": MLX_KEYS,
}
"""Fields of a rotated folder's config.json -> the one value that is read."""
_OUTER = {*_DECLARED, "modules", "components", "requires_runtime", "model_file"} - {"model_type"}
_ENDS = ("weight", "scales", "biases")
_QWEN35 = next(row for row in ARCHITECTURES if row.model_type == QWEN35)


class MlxFolder(ForeignFolder):
    """A folder of MLX's 2-bit format; `quantised` are the names of its modules of words."""

    tool = "MLX 2-bit"

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` also unless the rotated modules are the same wherever they are declared."""
        super().__init__(stored)
        if (rotation := self.rotation) is None:
            return
        tables = rotation.tables(self.embeddings)
        rotated = [*self.layers, *(name.removesuffix(".weight") for name in tables)]
        record = {"block": rotation.block, "dtype": "float16"}
        ours = [
            {**record, "path": n, "embedding": f"{n}.weight" == self.embeddings[0]} for n in rotated
        ]
        given = self.outer.get("modules")
        given = given if isinstance(given, list) else [given]
        odd = [each for each in (*ours, *given) if (each in ours) != (each in given)]
        if odd or len(ours) != len(given):
            raise UserError(
                f"{self.folder}/config.json: modules does not fit {MLX_KEYS} and the tensors: see "
                f"{odd[0] if odd else 'one that it has twice'}"
            )

    def prepare(self) -> None:
        """Raises `UserError` for words, scales and biases that do not match."""
        self.outer = read_config(self.folder)
        declared = {key: self.outer.get(key) for key in _DECLARED}
        has_keys = (self.folder / MLX_KEYS).exists() or declared["hadamard_config"]
        self.is_rotated = has_keys or declared["model_type"] == _DECLARED["model_type"]
        if self.is_rotated:
            check_fields(declared, (), f"{self.folder}/config.json", _DECLARED)
            self.config = {k: v for k, v in self.config.items() if k not in _OUTER}
        shapes, dtypes = self.files.shapes, self.files.dtypes
        self.quantised = {n.removesuffix(".scales") for n in shapes if n.endswith(".scales")}
        self.shapes = shapes = dict(shapes)
        for name in self.quantised:
            words, scales, biases = (shapes.get(f"{name}.{end}", ()) for end in _ENDS)
            are_words = dtypes.get(f"{name}.weight") in ("U32", "I32") and len(words) == 2
            are_words &= dtypes[f"{name}.scales"] in ("F32", "F16", "BF16")
            runs = scales[1] if len(scales) == 2 and are_words and scales[0] == words[0] else 0
            if scales != biases or not runs or CODES_PER_WORD * words[1] % runs:
                raise UserError(
                    f"layer {name} of {self.folder}: its words {list(words)}, scales {list(scales)} and "
                    f"biases {list(biases)} do not match"
                )
            shapes[f"{name}.weight"] = (words[0], CODES_PER_WORD * words[1])
            del shapes[f"{name}.scales"], shapes[f"{name}.biases"]
            if self.is_rotated:
                shapes.pop(f"{name}.signs", None)
        shapes |= {n: shape[:1] + shape[:0:-1] for n, shape in shapes.items() if self._is_kernel(n)}

    def declared_rotation(self) -> tuple[dict[str, Any], str, str] | None:
        if not self.is_rotated:
            return None
        path = self.folder / MLX_KEYS
        values = read_json(path)
        check_fields({k: v for k, v in values.items() if not k.startswith(PREFIX)}, (), str(path))
        heads, shared = (self.config.get(f"linear_num_{n}_heads") for n in ("value", "key"))
        if heads != shared and values.get(grouped := f"{PREFIX}gdn_v_grouped") is not True:
            raise UserError(f"{path}: {grouped} is not true, but config.json groups the heads")
        return with_prefix(values), f"{path}: {PREFIX}", "language_model."

    def _is_kernel(self, name: str) -> bool:
        return self.config.get("model_type") == QWEN35 and name.endswith("conv1d.weight")

    def has_codes(self, name: str, shape: tuple[int, int]) -> bool:
        is_layer = name in self.quantised and name != "lm_head" and not name.endswith(GATES)
        return is_layer and self.shapes[f"{name}.weight"] == shape

    def ternary(self, layer: str) -> TernaryWeight:
        if (rows := self.ternary_rows(f"{layer}.weight", slice(None))) is None:
            raise UserError(f"layer {layer} of {self.folder} is not ternary: a bias is not -scale")
        return rows

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        module = name.removesuffix(".weight")
        if module not in self.quantised:
            return ternary_of_floats(self.files.read(name, part), name)
        codes, scales, biases = self._affine(module, part)
        return with_fewest_scales(codes, scales, module) if torch.equal(biases, -scales) else None

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        module = name.removesuffix(".weight")
        if module in self.quantised:
            codes, scales, biases = (each.float() for each in self._affine(module, part))
            runs = (codes + 1).reshape(*scales.shape, -1)
            return (runs * scales[..., None] + biases[..., None]).reshape(codes.shape)
        values = super().stored_values(name, part)
        if self._is_kernel(name):
            return values.swapaxes(1, -1)
        offset = _QWEN35.offset_of(name) if self.config.get("model_type") == QWEN35 else 0
        return values.float() - offset if offset else values

    def _affine(self, name: str, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes q - 1, int8, scales and biases of some rows of a module that has words."""
        words, scales, biases = (self.files.read(f"{name}.{end}", part) for end in _ENDS)
        width = CODES_PER_WORD * words.shape[1]
        if self.rotation is not None:
            signs = self.files.read(f"{name}.signs").float()
            if not torch.equal(signs, torch.from_numpy(self.rotation.values(width))):
                raise UserError(f"{self.folder}: {name}.signs are not those of {MLX_KEYS}")
        # `unpack_words` returns q - 2, which compressed-tensors' words stand for.
        return unpack_words(words.view(torch.int32), width) + 1, scales, biases
