# SPDX-License-Identifier: Apache-2.0
"""Our formats as quantizers of transformers, with which `from_pretrained` loads our folders. They are at
the top of a module, so that loaded models can be pickled."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparse_bitnet.checkpoint.model_folder import WITHOUT_IMPORT
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.packed import PackedCheckpoint, finish_model_, prepare_model_
from sparse_bitnet.checkpoint.trained import converted_filter, read_format
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.packing.formats import QUANT_METHOD


class Entry(QuantizationConfigMixin):
    """The `quantization_config` entry as transformers passes it around."""

    def __init__(self, **entry: Any) -> None:
        self.__dict__.update(entry)


class MastersQuantizer(HfQuantizer):
    """Converts the empty model before its weights are read."""

    is_trainable = is_qat_trainable = is_compileable = True

    def update_attn_implementation(self, config: Any) -> Any:
        # `finish_folder` put this there, to make loading without this quantizer fail.
        if config._attn_implementation in WITHOUT_IMPORT.values():
            config._attn_implementation = None
        return config

    update_tp_plan = update_attn_implementation  # for releases without the other

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the model can be saved as a transformers folder."""
        return self.is_trainable

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        entry, files = self.quantization_config.to_dict(), kwargs.get("checkpoint_files")

        def stored() -> Iterable[str]:
            return WeightFiles(list(map(Path, files))).shapes if files else model.state_dict()

        convert_(model, read_format(entry), converted_filter(model, entry, stored))


class PackedQuantizer(MastersQuantizer):
    """Replaces the layers of the empty model and decodes them when they are loaded.

    It saves nothing, which would lack checksums and metadata: copy the folder instead.
    """

    requires_calibration = True
    is_trainable = is_qat_trainable = is_compileable = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        folder = Path(kwargs["checkpoint_files"][0]).parent
        prepare_model_(model, PackedCheckpoint(find_checkpoint(folder)))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        finish_model_(model)


def register() -> None:
    """Enter our two methods in transformers' registry of quantizers; a second call does nothing."""
    from transformers.quantizers import auto

    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    for method, kind in (("sparse_bitnet", MastersQuantizer), (QUANT_METHOD, PackedQuantizer)):
        auto.register_quantization_config(method)(Entry)
        auto.register_quantizer(method)(kind)


register()
