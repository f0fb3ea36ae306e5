# SPDX-License-Identifier: Apache-2.0
"""Models whose logits or attention are not those of a causal language model are refused."""

import pytest
import torch
import transformers

from factories import tiny_model
from sparse_bitnet import convert_
from sparse_bitnet.errors import UserError
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.logits import check_logits, keeps_apart
from sparse_bitnet.training.model import build_optimizer

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 1, "initializer_range": 0.5, "max_position_embeddings": 32}


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2", "qwen3_5_text"])
def test_causal_models_pass(family: str) -> None:
    model = tiny_model(family)
    check_logits(model)
    check_logits(convert_(model, "ternary-6:8"))


def test_models_with_states_pass_in_bf16_with_conversations() -> None:
    config = transformers.MambaConfig(**{key: SIZES[key] for key in ("vocab_size", "hidden_size")})
    check_logits(transformers.MambaForCausalLM._from_config(config, dtype=torch.bfloat16), True)


def test_models_with_other_logits_or_attention_are_refused() -> None:
    torch.manual_seed(0)
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**SIZES))
    with pytest.raises(UserError, match=r"BertLMHeadModel .*: layers lie between its decoder and"):
        check_logits(bert)
    config = transformers.BertGenerationConfig(**SIZES)
    with pytest.raises(UserError, match=r"BertGenerationDecoder .*: its tokens see later ones"):
        check_logits(transformers.BertGenerationDecoder(config))


def test_attention_that_ignores_positions_is_found() -> None:
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **{"vocab_size": 96, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "init_std": 0.5, "word_embed_proj_dim": 32},
    )
    opt = transformers.OPTForCausalLM(config)
    assert not keeps_apart(opt)
    with pytest.raises(UserError, match="teacher opt, OPTForCausalLM takes no account of posi"):
        check_logits(opt, True, "teacher opt, ")
    assert keeps_apart(tiny_model("qwen2", initializer_range=0.5))


def test_no_embedding_decays() -> None:
    model = tiny_model("gpt2")
    decayed = {id(each) for each in build_optimizer(model, TrainConfig()).param_groups[0]["params"]}
    tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
    assert len(tables) == 2
    assert not any(id(each.weight) in decayed for each in tables)
