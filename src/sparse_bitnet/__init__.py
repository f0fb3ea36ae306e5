"""1.58-bit language models with N:M semi-structured sparsity.

Importing this package imports neither torch nor transformers. Two things are arranged for later, when
those modules are first imported by whoever needs them: our kernels register with torch's dispatcher,
and our checkpoints become loadable by transformers' `from_pretrained`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.1.0"

_PUBLIC = {
    "NMPattern": "pattern",
    "nm_mask": "sparsity",
    "mask_flip_rate": "sparsity",
    "absmean": "quantizer",
    "quantize_ternary": "quantizer",
    "quantize_int8": "quantizer",
    "fake_quantize_ternary": "quantizer",
    "fake_quantize_int8": "quantizer",
    "SparseBitConfig": "layer_config",
    "SparseBitLinear": "layer",
    "convert_": "convert",
    "sparse_layers": "convert",
    "selected": "convert",
    "build_model": "models",
    "save_pretrained": "hub",
    "from_pretrained": "hub",
    "SparseBitCallback": "training.callback",
    "UserError": "errors",
}

__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604

# Module -> each "module:function" of ours to call once it has been imported.
_AFTER_IMPORT = {
    "sparse_bitnet.quantizer": ("sparse_bitnet.kernels:load",),
    "transformers.quantizers.auto": (
        "sparse_bitnet.hub:register",
        "sparse_bitnet.packing.loading:register",
    ),
}


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sparse_bitnet' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sparse_bitnet.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _call_after(name: str) -> None:
    for target in _AFTER_IMPORT[name]:
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function of ours right after a module named in `_AFTER_IMPORT` has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _AFTER_IMPORT:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _call_after(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _arrange() -> None:
    sys.meta_path.insert(0, _AfterImport())
    for name in _AFTER_IMPORT:
        if name in sys.modules and not name.startswith("sparse_bitnet."):
            _call_after(name)


_arrange()
