# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 3 and a training step on an NVIDIA GPU: rows that can be resumed, and one page.

The models are transformers models with random weights. A ternary one has our int8 linears: dense ones,
or 6:8 and 2:4 through cuSPARSELt. Decoding uses transformers' static cache; blocks are compiled by
`torch.compile`, and short calls run as CUDA graphs. All variants of a size are measured in turn.
"""

import gc
import html
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from sparse_bitnet.bench.interleaved import turns
from sparse_bitnet.bench.options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import load_with
from sparse_bitnet.errors import UserError, reason_of
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.nn.convert import convert_, selected, set_integer_forward_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.ops.int8_linear import compress_windows, int8_linear, sparse_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8, quantize_windows
from sparse_bitnet.ops.windows import window_expand
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.provenance import append_records
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, make_deterministic
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.model import build_optimizer

PAGE, ROWS = "index.html", "rows.jsonl"
RECORDED_TOKENS = 8192
"""Longest prompt that runs as a CUDA graph; for longer ones launching kernels costs nothing."""

VARIANTS = {
    "prefill": ("bf16", "int8", "sparse"),
    "decode": ("bf16", "int8", "sparse"),
    "train": ("bf16", "int8", "fake"),
}
BASELINE = {"prefill": "int8", "decode": "int8", "train": "bf16"}

Row = dict[str, Any]
Gains = Callable[[str], Mapping[int, float]]
"""Maps a phase to the paper's speedups of 6:8 over dense, by prompt length or batch."""


class Int8Linear(nn.Module):
    """Inference form of a ternary layer: int8 activations times int8 codes, dense or in 2:4 layout.

    Buffers: `weight` int8 [out_features, in_features], or the result of `compress_windows`;
    `weight_scale` float32 [1]; `bias` [out_features] or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: SparseBitLinear, windows: NMPattern | None, name: str) -> None:
        """Convert a ternary layer on the device to compute on. `windows`: its pattern, to use sparse
        tensor cores; None for the dense product."""
        super().__init__()
        selection = layer.select()
        codes, scale = selection.codes, selection.weight_scale
        assert codes is not None
        assert scale is not None
        if windows is not None:
            codes = compress_windows(window_expand(codes, windows, name=name))
        self.out_features, self.windows = layer.out_features, windows
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", scale.reshape(-1).float())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] of the same dtype."""
        weight, scale, bias, dtype = self.weight, self.weight_scale, self.bias, input.dtype
        if self.windows is None:
            return int8_linear(*quantize_int8(input), weight, scale, bias, dtype)
        x = quantize_windows(input, self.windows)
        return sparse_int8_linear(*x, weight, self.out_features, scale, bias, dtype)


def build(options: GpuBenchOptions, variant: str, pattern: str, dtype: torch.dtype) -> Any:
    """Return a transformers model of the preset's shape in one variant, with the same weights in every
    call.

    Args:
        options: preset and device.
        variant: "bf16" (unchanged), "int8", "sparse" (both for inference) or "fake" (for training).
        pattern: n:m of the ternary weights.
        dtype: of the weights that are not ternary.
    """
    from transformers import AutoModelForCausalLM

    config: Any = preset_config(options.model)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = load_with(AutoModelForCausalLM.from_config, config, dtype=dtype)
    if variant != "bf16":
        convert_(model, SparseBitConfig.parse(f"ternary-{pattern}"))
    return model


@torch.no_grad()
def for_inference_(model: Any, variant: str) -> Any:
    """Replace ternary layers by `Int8Linear`; on a GPU compile the blocks. Returns `model`."""
    for name, layer in list(sparse_layers(model).items()):
        windows = layer.config.pattern if variant == "sparse" else None
        model.set_submodule(name, Int8Linear(layer, windows, name))
    model.eval().requires_grad_(False)
    for block in model.get_decoder().layers if model.device.type == "cuda" else ():
        block.compile(dynamic=False)
    return model


def measure(options: GpuBenchOptions, phase: str, pattern: str, done: list[Row]) -> Iterator[Row]:
    """Yield rows of one phase and pattern, all variants of a size at a time; sizes in `done` are skipped.

    Training variants are built, measured and freed one after another, so that only one model and its
    optimiser must fit. Without `--batch`, training uses the largest batch that fits for all variants.
    """
    variants = VARIANTS[phase]
    known = {(row["size"], row["variant"]) for row in done if not row["failed"]}
    trains, device = phase == "train", torch.device(options.device)
    sizes = {
        "prefill": options.tokens or PAPER_PREFILL,
        "decode": options.batch or PAPER_DECODE,
        "train": options.batch or (4, 2, 1),
    }[phase]
    wanted = [size for size in sizes if not known >= {(size, name) for name in variants}]
    if trains and not options.batch and len(wanted) < len(sizes):
        return  # the largest batch that fits is done
    length = (options.tokens or (2048,))[0] if trains else 1
    torch.compiler.reset()  # the blocks of all models share one limit of recompilations
    models: dict[str, Any] = {}
    if trains:
        make_deterministic(device)
    for name in variants if wanted and not trains else ():
        models[name] = for_inference_(build(options, name, pattern, torch.bfloat16), name)
    make = _prefill if phase == "prefill" else _decode
    for size in wanted:
        taken: dict[str, list[float]] = {}
        for name in variants if trains else ():
            step = partial(_training_step, name, options, pattern, size, length)
            taken |= interleaved({name: step}, options)
        makers = {n: partial(make, m, size, options) for n, m in models.items()}
        taken |= interleaved(makers, options)
        for name in variants:
            seconds = taken.get(name)  # None: out of memory
            median = statistics.median(seconds) if seconds else None
            yield {
                "phase": phase,
                "pattern": pattern,
                "variant": name,
                "size": size,
                "seconds": median,
                "spread": max(seconds) / min(seconds) - 1 if seconds else None,
                "tokens_per_second": size * length / median if median else None,
                "failed": None if seconds else "out of memory",
            }
        if trains and not options.batch and len(taken) == len(variants):
            break


Call = Callable[[], object]
"""Runs the measured computation once."""


def _prefill(model: Any, tokens: int, options: GpuBenchOptions) -> Call:
    device = torch.device(options.device)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)

    @torch.no_grad()
    def call() -> object:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    return recorded(call, device) if tokens <= RECORDED_TOKENS else call


def _decode(model: Any, batch: int, options: GpuBenchOptions) -> Call:
    from transformers import StaticCache

    config, device = model.config, torch.device(options.device)
    # Each call appends a token: those that record, try and warm up, and one a round.
    cache: Any = StaticCache(config, max_cache_len=options.context + options.rounds + 8)
    head = config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, config.num_key_value_heads, head, torch.bfloat16, device)
    ids = torch.randint(0, config.vocab_size, (batch, 1), device=device)
    places = torch.full((batch, 1), options.context, device=device)
    for layer in cache.layers:
        layer.cumulative_length.fill_(options.context)

    @torch.no_grad()
    def call() -> object:
        return model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits

    return recorded(call, device)


def _training_step(
    variant: str, options: GpuBenchOptions, pattern: str, batch: int, length: int
) -> Call:
    """Forward, backward and AdamW with float32 masters under bf16 autocast, as `train` computes them."""
    device = torch.device(options.device)
    model = build(options, variant, pattern, torch.float32).train()
    set_integer_forward_(model, variant == "int8")
    optimizer, summed_loss = build_optimizer(model, TrainConfig()), SummedLoss(model)
    ids = torch.randint(0, model.config.vocab_size, (batch, length + 1), device=device)

    def step() -> None:
        with selected(model):
            with autocast(device, torch.bfloat16):
                loss = summed_loss(ids[:, :-1], ids[:, 1:])
            (loss / (batch * length)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    return step


def recorded(function: Call, device: torch.device) -> Call:
    """Return the function as a CUDA graph, after two calls that compile it; unchanged without CUDA."""
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _fitting(make: Callable[[], Call]) -> Call | None:
    """Return the function from `make` after one call of it; None if the GPU runs out of memory."""
    try:
        call = make()
        call()
        return call
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return None


def interleaved(
    makers: Mapping[str, Callable[[], Call]], options: GpuBenchOptions
) -> dict[str, list[float]]:
    """Return the seconds of each call by round, for calls that fit. Calls alternate, so that clock drift
    affects all alike."""
    gc.collect()  # free the memory of earlier calls
    torch.cuda.empty_cache()
    calls = {name: call for name, make in makers.items() if (call := _fitting(make))}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for turn, name in turns([list(taken)], options.rounds + 1):
        wait()
        began = time.perf_counter()
        calls[name]()
        wait()
        if turn:  # the first round warms up
            taken[name].append(time.perf_counter() - began)
    return taken


def run(options: GpuBenchOptions, folder: Path, where: Mapping[str, Any], gains: Gains) -> bool:
    """Measure all missing rows of every phase and pattern, append each to the folder at once, and write
    the page after each. Return whether all succeeded; the next call resumes.

    Raises `UserError` if `folder` cannot be written.
    """
    make_folder(folder)
    given = {name: getattr(options, name) for name in ("model", "context", "rounds")}
    given["hardware"] = where["hardware"]
    for row in read_rows(folder):
        if any(row.get(name) != value for name, value in given.items()):
            raise UserError(
                f"{folder} has rows measured with options other than {given}: choose another --out"
            )
    steps = [*product(("prefill", "decode"), options.pattern), ("train", options.pattern[0])]
    failures: dict[str, str] = {}
    for phase, pattern in (s for s in steps if options.step in ("all", s[0])):
        step = f"{phase} {pattern}"
        done = [r for r in read_rows(folder) if (r["phase"], r["pattern"]) == (phase, pattern)]
        try:
            for row in measure(options, phase, pattern, done):
                append_records(folder / ROWS, [{**given, **row}], where)
                speed = row["failed"] or f"{row['tokens_per_second']:,.0f} tokens/s"
                print(f"{step} {row['size']:,} {row['variant']}: {speed}", flush=True)
        except Exception as error:
            # An error on a GPU may leave this process unusable: the next call resumes in another one.
            failures[step] = reason_of(error)
            print(f"{step}: {failures[step]}", flush=True)
        write_atomic(folder / PAGE, page(folder, where, gains, failures))
    print(f"{folder / PAGE}")
    return not failures


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a folder, none without a file. A line cut off by a crash is skipped."""
    file, rows = folder / ROWS, []
    for line in file.read_text().splitlines() if file.is_file() else []:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def page(folder: Path, where: Mapping[str, Any], gains: Gains, failures: Mapping[str, str]) -> str:
    """Return HTML: a table per phase and pattern (speeds, ratios, the paper's ratios), and failures."""
    parts = [f"<h1>{html.escape(where['hardware'])}</h1><p>{where['date']}, {where['commit']}</p>"]
    if rows := read_rows(folder):
        for (phase, pattern), mine in pd.DataFrame(rows).groupby(["phase", "pattern"], sort=False):
            is_papers = (pattern, mine.model.iloc[0]) == ("6:8", "qwen2.5-3b")
            table = _table(str(phase), mine, gains(str(phase)) if is_papers else {})
            parts.append(f"<h2>{phase} {pattern}</h2>{table}")
    parts += [f"<p>{step} failed: {html.escape(why)}</p>" for step, why in failures.items()]
    return "<!doctype html><meta charset=utf-8>" + "\n".join(parts) + "\n"


def _table(phase: str, rows: pd.DataFrame, gains: Mapping[int, float]) -> str:
    """Return tokens per second by size, ratios to the baseline and to bf16, and the paper's ratio."""
    variants = list(VARIANTS[phase])
    rows = rows.drop_duplicates(["size", "variant"], keep="last")
    speeds = rows.pivot(index="size", columns="variant", values="tokens_per_second")
    speeds = speeds.reindex(columns=variants).astype(float)
    shown = speeds.map("{:,.0f}".format)
    for base in (BASELINE[phase], "bf16"):
        shown[f"over {base}"] = (speeds[variants[-1]] / speeds[base]).map("{:.2f}x".format)
    shown["paper"] = [f"{gains[size]:.2f}x" if size in gains else "" for size in speeds.index]
    return shown.to_html(border=0)
