# SPDX-License-Identifier: Apache-2.0
"""The presets as transformers configs and models."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, unsuited
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.presets import find_preset

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Config


def preset_config(name: str, *, vocab_size: int | None = None) -> "Qwen2Config":
    """Return the transformers config of a preset, with another vocabulary if given.

    Raises `UserError` for an unknown name.
    """
    from transformers import Qwen2Config

    sizes = dataclasses.asdict(find_preset(name))
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
    config: SparseBitConfig | str,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
    init: str | Path | None = None,
    meta: bool = False,
    uniform: bool = False,
) -> "PreTrainedModel":
    """Build a float32 causal LM in the given format, on the CPU.

    Args:
        name: a preset (`sparse-bitnet models` lists them); ignored if `init` is given.
        config: the format, or its text form; a seed gives the same initial weights for every format.
        seed: random seed of the initial weights (std 0.02, biases zero).
        vocab_size: vocabulary size instead of the preset's; with `init` it must be the model's own.
        init: folder or hub id of existing dense weights to start from (dense-to-sparse).
        meta: build on the meta device: shapes without values.
        uniform: initialise the blocks' matrices uniformly in ±1/sqrt(in_features).

    Returns the converted model. Raises `UserError` for an unknown preset, an unreadable `init`, or a
    pattern that does not fit.
    """
    import torch
    from transformers import Qwen2ForCausalLM

    if init is not None:
        stored = find_checkpoint(init)
        if stored.kind == "packed":
            raise UserError(
                f"{init} is packed: training needs the weights, so name the run it was packed from"
            )
        if stored.kind == "foreign" and stored.entry:  # loads, but in layers that are not converted
            raise unsuited(stored, ("trained",))
        model: Any = stored.model.float() if meta else stored.load(dtype=torch.float32)
        embedding: Any = model.get_input_embeddings()
        if vocab_size not in (None, embedding.num_embeddings):
            raise UserError(
                f"vocab_size={vocab_size}: --init {init} has {embedding.num_embeddings} rows, which "
                "training keeps: leave it out"
            )
        return convert_(model, config)
    transformers_config = preset_config(name, vocab_size=vocab_size)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM._from_config(transformers_config, dtype=torch.float32)
        for layer in model.model.modules():
            if uniform and isinstance(layer, torch.nn.Linear):
                bound = layer.in_features**-0.5
                torch.nn.init.uniform_(layer.weight, -bound, bound)
    return convert_(model, config)
