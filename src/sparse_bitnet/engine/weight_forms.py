# SPDX-License-Identifier: Apache-2.0
"""Forms of weights and of the output head in memory, and which of them a model can take. No torch."""

from sparse_bitnet import _cpu
from sparse_bitnet.engine.engine_model import EngineModel
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import coded_pattern
from sparse_bitnet.pattern import NMPattern

FORMATS = {
    "i2": _cpu.WeightFormat.i2,
    "b3": _cpu.WeightFormat.b3,
    "lookup": _cpu.WeightFormat.lookup,
}
"""Run-time formats of weights."""

STORED_NAMES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8", "U8": "i2"}
TABLE_BITS = {"int8": 8, "int4": 4, "bfloat16": 16, "float32": 32}

INT4_GROUP = 64
ALIGNMENT = 64


def choose_head(model: EngineModel, head: str) -> str:
    """The form of the output head: int8, int4, bfloat16, float32 or i2, for an option of `Engine.load`.

    Raises `UserError` for an unknown option, for int4 where the hidden size has no groups of 64, for int8
    where it is beyond 2^17, and for another form of a head that is ternary.
    """
    stored = STORED_NAMES[model.file.entries[model.table_names[-1]].dtype]
    auto = stored if stored == "i2" else "int8"
    choices = {"auto": auto, "stored": stored, "int8": "int8", "int4": "int4"}
    if head not in choices:
        raise UserError(f"head {head!r}: choose one of {', '.join(choices)}")
    if stored == "i2" and choices[head] != stored:
        raise UserError(
            f"head {head}: the head of {model.folder} is ternary and stays so in memory; use auto, or "
            "pack the model with --embeddings bf16"
        )
    if head == "int4" and model.architecture.hidden % INT4_GROUP:
        raise UserError(
            f"head int4 needs a hidden size in groups of {INT4_GROUP}, this model has "
            f"{model.architecture.hidden}; use int8"
        )
    if choices[head] == "int8" and model.architecture.hidden > _cpu.MOST_INT8_COLUMNS:
        raise UserError(
            f"head int8 takes a hidden size up to {_cpu.MOST_INT8_COLUMNS}, this model has "
            f"{model.architecture.hidden}; use int4"
        )
    return choices[head]


def check_format(model: EngineModel, weight_format: str) -> None:
    """Raise `UserError` where the model cannot be multiplied in a format of `FORMATS`."""
    if weight_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise UserError(f"weight format {weight_format!r} is for files: choose one of {known}")
    if weight_format == "lookup" and model.scale_groups() != {0}:
        raise UserError("weight format lookup has no scales of groups; use i2")


def row_bytes(weight_format: str, pattern: NMPattern, columns: int, exact: bool) -> int:
    """Bytes of a row in a format of `FORMATS`; `exact`: every group has n non-zeros."""
    coded = coded_pattern(pattern)
    is_exact = exact and weight_format == "lookup"
    return _cpu.bytes_per_row(FORMATS[weight_format], coded.n, coded.m, columns, is_exact)


def row_stride(weight_format: str, pattern: NMPattern, columns: int, exact: bool) -> int:
    """Bytes between rows: whole cache lines, but for lookup, of which strips take whole lines."""
    size = row_bytes(weight_format, pattern, columns, exact)
    return size if weight_format == "lookup" else aligned(size)


def aligned(size: int) -> int:
    """Whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT
