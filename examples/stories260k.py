# SPDX-License-Identifier: Apache-2.0
"""Convert a pretrained model of 260,000 weights to a transformers folder, and sample stories from it.

python examples/stories260k.py stories260K.bin tok512.bin OUT [STORIES]

The files are those of karpathy/tinyllamas (stories260K), in the format of llama2.c. The script writes the
model and its tokenizer to OUT/model, and STORIES sampled stories (2,000) to OUT/stories.jsonl. To distil
the model on them:

    sparse-bitnet prepare OUT/stories.jsonl OUT/data --tokenizer OUT/model
    sparse-bitnet distill OUT/model OUT/run --data OUT/data --format ternary-6:8 --steps 400
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BATCH = 250
LENGTH = 256
MULTIPLE = 8


def read_model(path: Path) -> LlamaForCausalLM:
    """Read llama2.c's first format: seven int32 sizes, then float32 matrices, grouped by kind."""
    raw = path.read_bytes()
    hidden, inner, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", raw)
    values = np.frombuffer(raw, "<f4", offset=28)
    done, head = 0, hidden // heads

    def take(*shape: int) -> torch.Tensor:
        nonlocal done
        count = int(np.prod(shape))
        done += count
        return torch.tensor(values[done - count : done].reshape(shape))

    def halves(weights: torch.Tensor) -> torch.Tensor:
        """Rotated pairs lie side by side there, and half a head apart here."""
        pairs = weights.view(layers, -1, head // 2, 2, hidden)
        return pairs.transpose(2, 3).reshape(weights.shape)

    keys, wide = head * kv_heads, -(-inner // MULTIPLE) * MULTIPLE

    def padded(weights: torch.Tensor, dim: int) -> torch.Tensor:
        """Neurons of zeros, which change nothing, so that groups of eight fill a row."""
        shape = list(weights.shape)
        shape[dim] = wide - inner
        return torch.cat([weights, torch.zeros(shape)], dim)

    state = {"model.embed_tokens.weight": take(vocab, hidden)}
    stacks = {
        "input_layernorm": take(layers, hidden),
        "self_attn.q_proj": halves(take(layers, hidden, hidden)),
        "self_attn.k_proj": halves(take(layers, keys, hidden)),
        "self_attn.v_proj": take(layers, keys, hidden),
        "self_attn.o_proj": take(layers, hidden, hidden),
        "post_attention_layernorm": take(layers, hidden),
        "mlp.gate_proj": padded(take(layers, inner, hidden), 1),
        "mlp.down_proj": padded(take(layers, hidden, inner), 2),
        "mlp.up_proj": padded(take(layers, inner, hidden), 1),
    }
    for name, stack in stacks.items():
        for layer, weight in enumerate(stack):
            state[f"model.layers.{layer}.{name}.weight"] = weight
    state["model.norm.weight"] = take(hidden)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    return model.eval()


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Read a score, a length and the bytes of every token; merges are derived from the scores."""
    raw, position = path.read_bytes(), 4
    vocab: dict[str, int] = {}
    scores: dict[str, float] = {}
    while position < len(raw):
        score, length = struct.unpack_from("<fi", raw, position)
        text = raw[position + 8 : position + 8 + length].decode()
        text = {"\n<s>\n": "<s>", "\n</s>\n": "</s>"}.get(text, text).replace(" ", "▁")
        vocab[text], scores[text] = len(vocab), score
        position += 8 + length
    merges = [
        (scores[whole], whole[:cut], whole[cut:])
        for whole in vocab
        for cut in range(1, len(whole))
        if whole[:cut] in vocab and whole[cut:] in vocab and not whole.startswith("<")
    ]
    ordered = [(left, right) for _, left, right in sorted(merges, key=lambda each: -each[0])]
    tokenizer = Tokenizer(BPE(vocab, ordered, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """Return stories sampled from the model's own distribution."""
    torch.manual_seed(0)
    texts: list[str] = []
    while len(texts) < count:
        start = torch.full((min(BATCH, count - len(texts)), 1), tokenizer.bos_token_id)
        # A story ends where the next begins; the model knows no other end.
        ids = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=0,
            max_length=LENGTH,
            eos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def main(model_file: str, tokenizer_file: str, out: str, stories: str = "2000") -> None:
    folder = Path(out)
    model, tokenizer = read_model(Path(model_file)), read_tokenizer(Path(tokenizer_file))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    texts = sample(model, tokenizer, int(stories))
    with open(folder / "stories.jsonl", "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    print(
        f"{folder}/model, and {len(texts):,} stories in {folder}/stories.jsonl, such as\n{texts[0]}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
