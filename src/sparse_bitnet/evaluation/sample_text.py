# SPDX-License-Identifier: Apache-2.0
"""Text from a trained model, through transformers' `generate`."""

from typing import TYPE_CHECKING, Any

import torch

from sparse_bitnet.nn.convert import selected

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def continue_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """What the model writes after `prompt` (without it), up to its end-of-text token.

    Args:
        temperature: 0 is greedy.
        seed: of the sampling; torch's random state is put back afterwards.
    """
    inputs = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
    with torch.random.fork_rng(), torch.no_grad(), selected(model):
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[operator]
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    text = tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)
    assert isinstance(text, str)
    return text
