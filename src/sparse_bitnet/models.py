"""Qwen2.5 shapes, the published ones and small ones for CPUs, as transformers configs.

Small presets keep the family's form (grouped-query attention, SwiGLU, RMSNorm, biases on q, k, v, tied
embeddings) and take any vocabulary; every linear of their blocks divides by 32, so any pattern with m
in 2, 4, 8, 16, 32 fits.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.convert import convert_
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer import SparseBitConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Config


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one Qwen2.5-shaped model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = 151936
    max_position_embeddings: int = 32768
    published: bool = False
    """A published model keeps its vocabulary; a small preset takes the tokenizer's."""

    @property
    def block_weights(self) -> int:
        """Weights of all linears of the blocks, biases and norms not counted."""
        head = self.hidden_size // self.num_attention_heads
        kv = head * self.num_key_value_heads
        attention = 2 * self.hidden_size * (self.hidden_size + kv)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


def _shape(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Shape:
    return Shape(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **more,
    )


PRESETS: dict[str, Shape] = {
    # Block weights 0.2 M to 30 M, the vocabulary adds hidden * vocab_size: their sum is the name.
    "qwen2.5-0.3m": _shape(96, 256, 2, 3, 1, vocab_size=1024, max_position_embeddings=2048),
    "qwen2.5-0.5m": _shape(128, 352, 2, 4, 2, vocab_size=1024, max_position_embeddings=2048),
    "qwen2.5-1m": _shape(128, 352, 4, 4, 2, vocab_size=2048, max_position_embeddings=2048),
    "qwen2.5-3m": _shape(192, 544, 6, 6, 2, vocab_size=4096, max_position_embeddings=2048),
    "qwen2.5-10m": _shape(320, 896, 8, 5, 1, vocab_size=8192, max_position_embeddings=4096),
    "qwen2.5-30m": _shape(512, 1408, 10, 8, 2, vocab_size=16384, max_position_embeddings=4096),
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, published=True),
    "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, published=True),
    "qwen2.5-3b": _shape(2048, 11008, 36, 16, 2, published=True),
}


def preset_config(name: str, *, vocab_size: int | None = None) -> "Qwen2Config":
    """The transformers config of a preset, with another vocabulary if given.

    Raises `UserError` for an unknown name.
    """
    from transformers import Qwen2Config

    if name not in PRESETS:
        raise UserError(f"model {name!r} is not a preset: choose one of {', '.join(PRESETS)}")
    sizes = dataclasses.asdict(PRESETS[name])
    del sizes["published"]
    if vocab_size is not None:
        sizes["vocab_size"] = vocab_size
    return Qwen2Config(
        **sizes,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def build_model(
    name: str,
    config: SparseBitConfig,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    init: str | Path | None = None,
) -> "PreTrainedModel":
    """A float32 causal LM in the given format, on the CPU.

    Args:
        name: a preset; ignored when `init` is given.
        config: the format; the same seed gives the same initial weights for every format.
        seed: of the random initial weights (std 0.02, biases zero).
        vocab_size: replaces the preset's.
        init: folder or hub id of existing dense weights to start from (dense-to-sparse).

    Raises `UserError` for an unknown preset, an unreadable `init`, or a pattern that does not fit.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    if init is not None:
        model = load_causal_lm(init, dtype=torch.float32)
        embedding: Any = model.get_input_embeddings()
        if vocab_size is not None and embedding.num_embeddings < vocab_size:
            raise UserError(
                f"--init {init}: its vocabulary of {embedding.num_embeddings} is smaller than the "
                f"tokenizer's {vocab_size}; prepare the data with its own tokenizer"
            )
        return convert_(model, config)
    transformers_config = preset_config(name, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM._from_config(transformers_config, dtype=torch.float32)
    return convert_(model, config)


def load_causal_lm(path_or_id: str | Path, **kwargs: Any) -> "PreTrainedModel":
    """A causal LM from a folder or hub id, through transformers.

    Args:
        path_or_id: folder or hub id.
        kwargs: those of `AutoModelForCausalLM.from_pretrained`.

    Raises `UserError`, one line, for whatever keeps it from loading, a missing weight included
    (transformers alone would leave it random).
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if str(path_or_id).startswith(("/", ".", "~")) and not Path(path_or_id).is_dir():
        raise UserError(f"cannot load a model from {path_or_id}: no such folder")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path_or_id, output_loading_info=True, **kwargs
        )
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load a model from {path_or_id}: {reason}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path_or_id} lacks {missing[0]}{more}: the files are incomplete")
    return model
