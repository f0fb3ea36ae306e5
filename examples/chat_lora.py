# SPDX-License-Identifier: Apache-2.0
"""Chat fine-tuning of a sparse ternary model with TRL: LoRA on frozen ternary weights, then merged.

    pip install ".[fine-tuning]" --constraint constraints.txt
    python examples/chat_lora.py

The model is tiny and random and the conversations are made up: the example shows how the parts fit
together. peft's adapters run beside each layer, and only the assistant's tokens count in the loss.
Merging adds an adapter to the weight, which is then quantised. This rounds the adapter, so the script
prints the loss before and after.
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from sparse_bitnet import SparseBitCallback, convert_, save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template; training learns only the text inside {% generation %} blocks."""


def conversations(count: int = 64) -> list[dict]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {a} and {b}?"},
                {"role": "assistant", "content": f"{a} and {b} is {a + b}"},
            ]
        }
        for a, b in ((i % 8, i // 8 % 8) for i in range(count))
    ]


def tiny(rows: list[dict]) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    text = "\n".join(message["content"] for row in rows for message in row["messages"])
    tokenizer = train_tokenizer(iter([text + "<|user|><|assistant|>"]), 300)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    )
    return convert_(model, "ternary-6:8"), tokenizer


def main(steps: int = 20) -> tuple[float, float, float]:
    """Return the loss before training, with the adapters, and after merging them."""
    rows = conversations()
    model, tokenizer = tiny(rows)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=1e-2,
                assistant_only_loss=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
            ),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:16]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            callbacks=[SparseBitCallback()],
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        beside = trainer.evaluate()["eval_loss"]
        trainer.model = merged = trainer.model.merge_and_unload()
        after = trainer.evaluate()["eval_loss"]
        print(
            f"loss {before:.3f}, with adapters {beside:.3f}, merged and quantised again {after:.3f}"
        )
        save_pretrained(merged, f"{folder}/merged", tokenizer)
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
    ids = torch.arange(8)[None]
    same = torch.equal(loaded(ids).logits, merged.eval()(ids).logits)
    print(f"saved and loaded: {'the same' if same else 'DIFFERENT'} logits")
    return before, beside, after


if __name__ == "__main__":
    main()
