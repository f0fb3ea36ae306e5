# SPDX-License-Identifier: Apache-2.0
"""1.58-bit language models with N:M semi-structured sparsity.

Importing this package imports neither torch nor transformers. Once transformers is imported too, its
`from_pretrained` loads our checkpoints.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.1.0"

_PUBLIC = {
    "NMPattern": "pattern",
    "nm_mask": "ops.nm_mask",
    "mask_flip_rate": "ops.mask_words",
    "absmean": "ops.select_ternary",
    "quantize_ternary": "ops.select_ternary",
    "quantize_int8": "ops.quantize_int8",
    "SparseBitConfig": "layer_config",
    "SparseBitLinear": "nn.layer",
    "convert_": "nn.convert",
    "sparse_layers": "nn.convert",
    "selected": "nn.convert",
    "build_model": "checkpoint.build_model",
    "save_pretrained": "checkpoint.trained",
    "from_pretrained": "checkpoint.load",
    "register_score": "variants.registry",
    "register_quantizer": "variants.registry",
    "register_activation": "variants.registry",
    "register_schedule": "variants.registry",
    "Engine": "engine.engine",
    "EngineOptions": "engine.engine_options",
    "OpenModel": "generation.open_model",
    "open_model": "generation.open_model",
    "SparseBitCallback": "training.callback",
    "UserError": "errors",
}

__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604

_REGISTRY = "transformers.quantizers.auto"


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sparse_bitnet' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparse_bitnet.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _register() -> None:
    importlib.import_module("sparse_bitnet.checkpoint.quantizers")  # it registers itself


class _AfterRegistry(importlib.abc.MetaPathFinder):
    """Registers our quantizers as soon as transformers' own registry has been imported.

    transformers has no entry point for quantizers. Registering at once would import transformers and
    torch with this package, and the engine needs neither.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterRegistry())
if _REGISTRY in sys.modules:
    _register()
