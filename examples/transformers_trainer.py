# SPDX-License-Identifier: Apache-2.0
"""Train a small sparse ternary Qwen2 under `transformers.Trainer`, on text that every machine has.

    pip install ".[train]" accelerate && python examples/transformers_trainer.py

The text is source files of Python's standard library, with one token per byte. Trainer prints loss, flip
rate of the masks and zero fraction of the codes during training, then the loss on a held-out file.
"""

import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from sparse_bitnet import SparseBitCallback, convert_

TRAINING_FILES = ("argparse.py", "inspect.py", "tarfile.py", "typing.py")
VALIDATION_FILE = "textwrap.py"
SEQUENCE_LENGTH = 128


class Bytes(Dataset):
    """Non-overlapping windows of text files, with one token per byte."""

    def __init__(self, *names: str) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / name).read_bytes() for name in names)
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        whole = len(tokens) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
        self.windows = tokens[:whole].view(-1, SEQUENCE_LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main(steps: int = 60) -> Trainer:
    """Train; return the trainer, whose `state.log_history` holds the printed metrics."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    convert_(model, "ternary-6:8")

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                lr_scheduler_type="cosine",
                warmup_steps=steps // 10,
                logging_steps=max(1, steps // 6),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=not torch.cuda.is_available(),
            ),
            train_dataset=Bytes(*TRAINING_FILES),
            eval_dataset=Bytes(VALIDATION_FILE),
            callbacks=[SparseBitCallback()],
        )
        trainer.train()
        trainer.evaluate()
    return trainer


if __name__ == "__main__":
    main()
