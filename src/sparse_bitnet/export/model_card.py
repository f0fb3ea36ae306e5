# SPDX-License-Identifier: Apache-2.0
"""The README.md of an export: what the model is, how it was trained, how to load it in each tool."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet import __version__
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_config import FORMATS
from sparse_bitnet.packing.gguf_blocks import BLOCK_TYPES, block_for

Row = tuple[str, str]

_MOST_FILES = 8


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """What a run folder tells about a checkpoint in it; empty for a checkpoint by itself."""

    folder: Path
    config: dict[str, Any]
    """The run's TrainConfig as JSON."""
    result: dict[str, Any]
    """result.json, for the finished model only."""

    @property
    def data(self) -> dict[str, Any]:
        """`source` entry of the prepared data's settings, where the data still exists."""
        folder = self.data_folder
        settings = _optional(folder / "manifest.json").get("settings") if folder else None
        source = settings.get("source") if isinstance(settings, dict) else None
        return source if isinstance(source, dict) else {}

    @property
    def data_folder(self) -> Path | None:
        """Where the prepared data is, if it still is there: the path was relative to where `train` ran,
        which is above the run wherever the export is made."""
        name = self.config.get("data")
        if not isinstance(name, str) or not 0 < len(name) < 1000:
            return None
        places = [Path(name), *(above / name for above in self.folder.resolve().parents)]
        return next((place for place in places if (place / "manifest.json").is_file()), None)


def read_record(folder: Path) -> TrainingRecord:
    """The record of the run that `folder` (its `final`, or a checkpoint) belongs to."""
    config = _optional(folder / "train_config.json")
    result: dict[str, Any] = {}
    if not config and folder.name == "final":
        config = _optional(folder.parent / "config.json")
        result = _optional(folder.parent / "result.json") if config else {}
    return TrainingRecord(folder=folder, config=config, result=result)


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}


def model_card(source: Checkpoint, format: str, embeddings: str, *, checked: list[Row]) -> str:
    """The whole card as Markdown with a YAML head.

    Args:
        source: the trained model.
        format: a name of `FORMATS`.
        embeddings: precision of embeddings and head.
        checked: what `verify` found, as rows; empty when it was not run.
    """
    sections = [
        _head(source, format),
        f"# {source.title}",
        f"A language model with ternary weights (1.58 bits) and {source.format.pattern} sparsity, "
        f"exported as {FORMATS[format].summary}."
        if source.format.weight == "ternary"
        else f"A language model with {source.format.pattern} sparsity and full-precision weights.",
        "## Model",
        _table(_model_rows(source, format, embeddings)),
    ]
    try:
        training = _training_rows(read_record(source.folder))
    except (AttributeError, KeyError, TypeError, ValueError):
        training = []  # what lies there was not written by a run
    if training:
        sections += ["## Training", _table(training)]
    if checked:
        sections += ["## Checked against the trained model", _table(checked)]
    sections += ["## How to load it", _loading(format), "## Notes", _notes(format)]
    return "\n\n".join(sections) + "\n"


def _head(source: Checkpoint, format: str) -> str:
    library = "gguf" if format.startswith("gguf") else "transformers"
    tags = ["bitnet", "1-bit", "sparse", str(source.format.pattern).replace(":", "-")]
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---"])


def _model_rows(source: Checkpoint, format: str, embeddings: str) -> list[Row]:
    config = source.config
    weights = sum(rows * columns for rows, columns in source.layers.values())
    others = sum(math.prod(shape) for shape in source.others.values())
    rows = [
        ("architecture", str(config.get("model_type"))),
        ("training format", f"`{source.format}`"),
        ("pattern", f"{source.format.pattern} (keeps {source.format.pattern.density:.0%})"),
        ("weights in sparse layers", f"{weights:,} in {len(source.layers)} layers"),
        ("other parameters", f"{others:,} ({embeddings})"),
        ("bits per sparse weight", f"{_bits(source, format, embeddings):.4g}"),
    ]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for name in (*names, "num_key_value_heads", "vocab_size", "max_position_embeddings"):
        if type(config.get(name)) is int:
            rows.append((name, f"{config[name]:,}"))
    return rows


def _bits(source: Checkpoint, format: str, embeddings: str) -> float:
    if format.startswith("gguf"):
        wanted = BLOCK_TYPES[format.removeprefix("gguf-").upper()]
        shapes = source.layers.values()
        blocks = [(math.prod(shape), block_for(shape[1], wanted)) for shape in shapes]
        bits = sum(weights * 8 * block.nbytes / block.codes for weights, block in blocks)
        return bits / sum(weights for weights, _ in blocks)
    return 32 if (format, embeddings) == ("dense", "f32") else FORMATS[format].bits_per_weight


def _training_rows(record: TrainingRecord) -> list[Row]:
    config, result = record.config, record.result
    rows: list[Row] = []
    if config:
        tokens = config["batch_size"] * config["sequence_length"]
        rows += [
            ("start", config["init"] or f"random, seed {config['seed']}"),
            ("steps", f"{config['steps']:,} of {tokens:,} tokens"),
            ("sequence length", f"{config['sequence_length']:,}"),
            ("share of steps with the mask", f"{config['sparse_fraction']:g}"),
            (
                "learning rate",
                f"{config['learning_rate']:g}, {config['schedule']}, warm-up "
                f"{config['warmup_fraction']:.2g} of the steps",
            ),
            (
                "AdamW",
                f"betas {config['beta1']}, {config['beta2']}; epsilon {config['epsilon']:g}; weight "
                f"decay {config['weight_decay']:g}; gradient clipping {config['gradient_clip']:g}",
            ),
        ]
    if data := record.data:
        rows.append(("data", _data(data)))
    if result:
        rows += [
            ("validation perplexity", f"{result['validation_perplexity']:.3f}"),
            ("validation tokens", f"{result['validation_tokens']:,}"),
            ("zero fraction of the codes", f"{result['zero_fraction']:.3f}"),
        ]
    return rows


def _data(data: dict[str, Any]) -> str:
    facts = []
    for key, value in data.items():
        if key == "files" and isinstance(value, list):
            value = ", ".join(file["name"] for file in value[:_MOST_FILES])
            value += " ..." if len(data[key]) > _MOST_FILES else ""
        if isinstance(value, str | int | float):
            facts.append(f"{key.replace('_', ' ')} {value}")
    return "; ".join(facts)


def _table(rows: list[Row]) -> str:
    lines = [f"| {name} | {value.replace('|', '/')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])


_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```"""
_VLLM = "```sh\nvllm serve THIS_FOLDER\n```"


def _loading(format: str) -> str:
    if format.startswith("gguf"):
        file = gguf_file_name(format)
        return (
            f"llama.cpp:\n\n```sh\nllama-cli -m {file} -p 'Once upon a time'\n```\n\n"
            f"Python (`pip install llama-cpp-python`):\n\n```python\nfrom llama_cpp import Llama\n\n"
            f'model = Llama("{file}")\nprint(model("Once upon a time", max_tokens=32))\n```\n\n'
            f"Ollama: a Modelfile with the line `FROM ./{file}`, then "
            "`ollama create NAME -f Modelfile`. LM Studio: put the file into its models folder."
        )
    install = {
        "bitnet": "`pip install transformers accelerate`; on a CPU without a C++ compiler set "
        "`TORCHDYNAMO_DISABLE=1`",
        "dense": "`pip install transformers`",
    }.get(format, "`pip install transformers compressed-tensors`")
    text = f"transformers ({install}):\n\n{_TRANSFORMERS}"
    return text if format == "bitnet" else f"{text}\n\nvLLM:\n\n{_VLLM}"


_NOTES = {
    "bitnet": "`weight_scale` holds the reciprocal of the scale, as the `bitlinear` class of "
    "transformers expects. Its activation quantiser is the one of the training.",
    "compressed-tensors": "transformers' activation quantiser divides by 127.5 where the training "
    "divided by 127, so logits differ in the third digit.",
    "gguf": "Codes are exact, the scale is in float16. llama.cpp quantises activations per block "
    "instead of per token: log-probabilities are close to those of the trained model, never "
    "equal. It does not normalise Unicode: give it text in form NFC.",
    "dense": "Activations are not quantised here, as they were in training. Do not let a tool "
    "quantise these weights to ternary again: it would get the scale wrong.",
}


def _notes(format: str) -> str:
    note = next(text for prefix, text in _NOTES.items() if format.startswith(prefix))
    return f"{note}\n\nWritten by sparse-bitnet {__version__}."


def gguf_file_name(format: str) -> str:
    """The file inside a GGUF export's folder."""
    return f"model-{format.removeprefix('gguf-').upper()}.gguf"
