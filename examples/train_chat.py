# SPDX-License-Identifier: Apache-2.0
"""Chat fine-tuning with the commands: conversations to a packed model that answers.

    pip install ".[train]" && python examples/train_chat.py

The model is tiny and random and learns to add. The same steps work for your model, and with `--lora 8`,
which trains adapters alone. In a shell, the last step would be `sparse-bitnet chat packed` or
`sparse-bitnet serve packed`.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_bitnet import convert_, save_pretrained
from sparse_bitnet.cli.main import main as sparse_bitnet
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.generation.conversation import Conversation
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.sampling_options import SamplingOptions

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """Write a stand-in for your own chat model: weights, and a tokenizer with a chat template."""
    tokenizer = train_tokenizer(iter(["0 and 1 is 2 3 4 5 6 7 8 9<|user|><|assistant|>"] * 3), 300)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    model = convert_(LlamaForCausalLM(config), "ternary-6:8")
    save_pretrained(model, folder, tokenizer)


def main(steps: int = 150) -> str:
    """Train, pack and run the model; return its answer to "2 and 3"."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        with open(folder / "chats.jsonl", "w") as file:
            for a, b in ((n % 8, n // 8 % 8) for n in range(512)):
                said = {"role": "user", "content": f"{a} and {b}"}
                answer = {"role": "assistant", "content": f"{a} and {b} is {a + b}"}
                file.write(json.dumps({"messages": [said, answer]}) + "\n")
        sparse_bitnet(
            f"train --chat {folder}/chats.jsonl --init {folder}/model --data {folder}/data "
            f"--out {folder}/run --steps {steps} --batch-size 8 --sequence-length 64 --threads 1".split()
        )
        sparse_bitnet(f"pack {folder}/run {folder}/packed".split())
        greedy = SamplingOptions(temperature=0)
        model = open_model(folder / "packed")
        chat = Conversation(model, sampling=greedy, max_tokens=12)
        answer = chat.answer("2 and 3", on_text=str).text
        model.engine.close()
    print(f"2 and 3? {answer}")
    return answer


if __name__ == "__main__":
    main()
