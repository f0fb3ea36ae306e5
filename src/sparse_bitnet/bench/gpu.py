# SPDX-License-Identifier: Apache-2.0
"""The paper's Table 3 and a training step on an NVIDIA GPU: rows that resume, and one page.

The models are transformers models with random weights. A ternary one has our int8 linears: dense ones, or
6:8 and 2:4 through cuSPARSELt. Decoding uses transformers' static cache; blocks are compiled by
`torch.compile`, and short calls run as CUDA graphs. All variants of a size are measured in turn.
"""

import gc
import html
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparse_bitnet.bench.options import PAPER_DECODE, PAPER_PREFILL, GpuBenchOptions
from sparse_bitnet.bench.record import append_records
from sparse_bitnet.checkpoint.build_model import preset_config
from sparse_bitnet.checkpoint.load import load_with
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet.nn.convert import convert_, selected, set_integer_forward_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig, SparseBitLinear
from sparse_bitnet.ops.int8_linear import compress_windows, int8_linear, sparse_int8_linear
from sparse_bitnet.ops.quantize_int8 import quantize_int8, quantize_windows
from sparse_bitnet.ops.windows import window_expand
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import autocast, make_deterministic, peak_memory_bytes
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.optimizer import build_optimizer

PAGE, ROWS = "index.html", "rows.jsonl"
TESTS = "tests/ops/test_cuda.py"
RECORDED_TOKENS = 8192
"""Longest prompt that runs as a CUDA graph; for longer ones launching kernels costs nothing."""

VARIANTS = {
    "prefill": ("bf16", "int8", "sparse"),
    "decode": ("bf16", "int8", "sparse"),
    "train": ("bf16", "int8", "fake"),
}
BASELINE = {"prefill": "int8", "decode": "int8", "train": "bf16"}
LIMITS = {"tests": 240, "prefill": 480, "decode": 480, "train": 300}
"""Seconds after which a step is stopped; the rows that it has written stay."""

Row = dict[str, Any]
Gains = Callable[[str], Mapping[int, float]]
"""Of a phase the paper's speed of 6:8 over dense, by prompt length or batch."""


class Int8Linear(nn.Module):
    """Inference form of a ternary layer: int8 activations times int8 codes, dense or in 2:4 form.

    Buffers: `weight` int8 [out_features, in_features], or what `compress_windows` returns;
    `weight_scale` float32 [1]; `bias` [out_features] or None.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, layer: SparseBitLinear, windows: NMPattern | None, name: str) -> None:
        """
        Args:
            layer: a ternary layer on the device to compute on.
            windows: its pattern, for sparse tensor cores; None for the dense product.
            name: for error messages.
        """
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
    """A transformers model of the preset's shape in one variant, with the same weights in every call.

    Args:
        options: preset, number of layers and device.
        variant: "bf16" (left as it is), "int8", "sparse" (both for inference) or "fake" (for training).
        pattern: n:m of the ternary weights.
        dtype: of the weights that are not ternary.

    Raises `UserError` for a number of layers that the preset does not have.
    """
    from transformers import AutoModelForCausalLM

    config: Any = preset_config(options.model)
    if options.layers is not None:
        if not 1 <= options.layers <= config.num_hidden_layers:
            raise UserError(
                f"--layers {options.layers}: {options.model} has 1 to {config.num_hidden_layers}"
            )
        config.num_hidden_layers = options.layers
        config.layer_types = config.layer_types[: options.layers]
    torch.manual_seed(0)
    with torch.device(options.device):
        model = load_with(AutoModelForCausalLM.from_config, config, dtype=dtype)
    if variant != "bf16":
        convert_(model, SparseBitConfig.parse(f"ternary-{pattern}"))
    return model


@torch.no_grad()
def for_inference_(model: Any, variant: str, compiled: bool) -> Any:
    """Put `Int8Linear` in the place of ternary layers and compile the blocks; returns `model`."""
    for name, layer in list(sparse_layers(model).items()):
        windows = layer.config.pattern if variant == "sparse" else None
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Int8Linear(layer, windows, name))
    model.eval().requires_grad_(False)
    if compiled:
        for block in model.get_decoder().layers:
            block.compile(dynamic=False)
    return model


def measure(options: GpuBenchOptions, phase: str, pattern: str, done: list[Row]) -> Iterator[Row]:
    """Rows of one phase and pattern, all variants of a size at a time; sizes in `done` are skipped."""
    device = torch.device(options.device)
    known = {(row["size"], row["variant"]) for row in done}
    sizes = {
        "prefill": options.tokens or PAPER_PREFILL,
        "decode": options.batch or PAPER_DECODE,
        "train": options.batch or (4, 2, 1),
    }[phase]
    variants = VARIANTS[phase]
    wanted = [size for size in sizes if not known >= {(size, name) for name in variants}]
    if phase == "train":
        yield from _measure_training(options, pattern, wanted)
        return
    models = {}
    if wanted:
        for name in variants:
            model = build(options, name, pattern, torch.bfloat16)
            models[name] = for_inference_(model, name, device.type == "cuda")
    make = _prefill if phase == "prefill" else _decode
    for size in wanted:
        calls = {name: _fitting(make, model, size, options) for name, model in models.items()}
        taken = interleaved(calls, device, options.rounds)
        for name in variants:
            yield _row(phase, pattern, name, size, size, taken.get(name))
        del calls
        give_back_memory(device)


Call = tuple[Callable[[], object], Callable[[], object]]
"""What is called untimed before each measurement, and what is measured."""


@torch.no_grad()
def _prefill(model: Any, tokens: int, options: GpuBenchOptions) -> Call:
    device = torch.device(options.device)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=device)

    @torch.no_grad()
    def call() -> object:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    return _nothing, recorded(call, device) if tokens <= RECORDED_TOKENS else call


@torch.no_grad()
def _decode(model: Any, batch: int, options: GpuBenchOptions) -> Call:
    from transformers import StaticCache

    config, device = model.config, torch.device(options.device)
    cache: Any = StaticCache(config, max_cache_len=options.context + 8)
    head = config.hidden_size // config.num_attention_heads
    cache.early_initialization(batch, config.num_key_value_heads, head, torch.bfloat16, device)
    ids = torch.randint(0, config.vocab_size, (batch, 1), device=device)
    places = torch.full((batch, 1), options.context, device=device)

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(options.context)

    @torch.no_grad()
    def call() -> object:
        return model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits

    rewind()
    return rewind, recorded(call, device, rewind)


def _measure_training(options: GpuBenchOptions, pattern: str, batches: list[int]) -> Iterator[Row]:
    """Forward, backward and AdamW with float32 masters under bf16 autocast, as `train` computes them.

    Variants are built, measured and dropped one after the other, so that one model and its optimiser
    need to fit. Without `--batch`, ends with the largest batch that every variant has the memory for.
    """
    device = torch.device(options.device)
    make_deterministic(device)
    length = (options.tokens or [2048])[0]
    for batch in batches:
        rows = []
        for variant in VARIANTS["train"]:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            step = _fitting(_training_step, variant, options, pattern, batch, length)
            taken = interleaved({variant: step}, device, options.rounds)
            row = _row("train", pattern, variant, batch, batch * length, taken.get(variant))
            rows.append({**row, "peak_bytes": peak_memory_bytes(device)})
            del step
            give_back_memory(device)
        yield from rows
        if not options.batch and not any(row["failed"] for row in rows):
            break


def _training_step(
    variant: str, options: GpuBenchOptions, pattern: str, batch: int, length: int
) -> Call:
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
    return _nothing, step


def _nothing() -> None:
    pass


def recorded(
    function: Callable[[], object],
    device: torch.device,
    before: Callable[[], object] = _nothing,
) -> Callable[[], object]:
    """The function as a CUDA graph, after two calls that compile and search kernels; elsewhere itself."""
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            before()
            function()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def _fitting(make: Callable[..., Call], *arguments: Any) -> Call | None:
    """What `make` returns, called once; None where the GPU's memory is too small for it."""
    try:
        before, call = make(*arguments)
        before()
        call()
        return before, call
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return None


def interleaved(
    calls: Mapping[str, Call | None], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each call that fits, by round, in turn, so that a drifting clock meets all alike."""
    fitting = {name: call for name, call in calls.items() if call is not None}
    taken: dict[str, list[float]] = {name: [] for name in fitting}
    for number in range(rounds + 1):
        for name, (before, call) in fitting.items():
            before()
            seconds = seconds_of(call, device)
            if number:  # the first round warms up
                taken[name].append(seconds)
    return taken


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes: between two events of the GPU, or by the clock on a CPU."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def give_back_memory(device: torch.device) -> None:
    """Free what nothing refers to, so that the next variant finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(
    phase: str, pattern: str, variant: str, size: int, tokens: int, seconds: list[float] | None
) -> Row:
    """`tokens`: computed in `seconds`, one value a round; None where memory was too small."""
    median = statistics.median(seconds) if seconds else None
    return {
        "phase": phase,
        "pattern": pattern,
        "variant": variant,
        "size": size,
        "seconds": median,
        "spread": max(seconds) / min(seconds) - 1 if seconds else None,
        "tokens_per_second": tokens / median if median else None,
        "failed": None if seconds else "out of memory",
    }


def run_step(
    options: GpuBenchOptions, step: str, pattern: str, file: Path, where: Mapping[str, Any]
) -> None:
    """Append the missing rows of one step to `file`, each as soon as it is measured."""
    given = {name: getattr(options, name) for name in ("model", "layers", "context", "rounds")}
    done = [row for row in read_rows(file) if (row["phase"], row["pattern"]) == (step, pattern)]
    for row in measure(options, step, pattern, done):
        append_records(file, [{**given, **row}], where)
        speed = row["failed"] or f"{row['tokens_per_second']:,.0f} tokens/s"
        print(f"{step} {pattern} {row['size']:,} {row['variant']}: {speed}", flush=True)


def read_rows(file: Path) -> list[Row]:
    """The rows of a results file; empty where there is none. A line cut off by a crash is skipped."""
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_all(options: GpuBenchOptions, folder: Path, where: Mapping[str, Any], gains: Gains) -> bool:
    """Run every step that lacks rows in a process of its own, since an error on a GPU leaves its process
    unusable; write the page after each. Returns whether all steps have ended well.

    `options.minutes` bounds the whole call; the next call resumes.

    Raises `UserError` outside a checkout of the repository, and where `folder` cannot be written.
    """
    if not Path(TESTS).is_file():
        raise UserError(f"no {TESTS} here: call it in the root of a checkout of the repository")
    with os_errors_as(f"cannot write {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * (options.minutes or 1e9)
    steps = [("tests", ""), *((s, p) for s in ("prefill", "decode") for p in options.pattern)]
    steps.append(("train", options.pattern[0]))
    all_well = True
    for step, pattern in steps:
        name = f"{step}-{pattern.replace(':', 'of')}".rstrip("-")
        left = min(LIMITS[step], end - time.monotonic())
        failure = "no time left: call it again" if left <= 0 else None
        if failure is None and not (folder / f"{name}.done").is_file():
            failure = _in_a_process(options, step, pattern, folder, name, left)
            if failure == "":
                (folder / f"{name}.done").touch()
        all_well &= not failure
        print(f"{name}: {failure or 'done'}", flush=True)
        write_atomic(folder / PAGE, page(folder, where, gains))
    print(f"{folder / PAGE}")
    return all_well


def _in_a_process(
    options: GpuBenchOptions, step: str, pattern: str, folder: Path, name: str, seconds: float
) -> str:
    """Why a step failed, "" where it did not; what it prints goes to NAME.txt."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS]
    if step != "tests":
        command = [sys.executable, "-m", "sparse_bitnet", "bench", "gpu", "--step", step]
        command += ["--pattern", pattern, "--out", str(folder), *_as_arguments(options)]
    with open(folder / f"{name}.txt", "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s: call it again"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    lines = (folder / f"{name}.txt").read_text(errors="replace").splitlines()
    return f"exit code {process.returncode}: {[*lines, ''][-1][:300]}" if process.returncode else ""


def _as_arguments(options: GpuBenchOptions) -> list[str]:
    if options.rehearse:
        return ["--rehearse"]
    arguments = []
    for name in ("model", "tokens", "batch", "context", "rounds", "layers"):
        if value := getattr(options, name):
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}", *map(str, values)]
    return arguments


def page(folder: Path, where: Mapping[str, Any], gains: Gains) -> str:
    """HTML: a table a phase and pattern, speeds with their ratios and the paper's beside, and what each
    step printed."""
    parts = [f"<h1>{html.escape(where['hardware'])}</h1><p>{where['date']}, {where['commit']}</p>"]
    rows = read_rows(folder / ROWS)
    for phase, pattern in dict.fromkeys((row["phase"], row["pattern"]) for row in rows):
        mine = [row for row in rows if (row["phase"], row["pattern"]) == (phase, pattern)]
        parts.append(f"<h2>{phase} {pattern}</h2>{_table(phase, mine, gains(phase))}")
    for text in sorted(folder.glob("*.txt")):
        parts.append(
            f"<h2>{text.stem}</h2><pre>{html.escape(text.read_text(errors='replace'))}</pre>"
        )
    return "<!doctype html><meta charset=utf-8>" + "\n".join(parts) + "\n"


def _table(phase: str, rows: list[Row], gains: Mapping[int, float]) -> str:
    """Tokens a second, in brackets over the baseline and over bf16."""
    cells = {(row["size"], row["variant"]): row for row in rows}
    head = ["tokens" if phase == "prefill" else "batch", *VARIANTS[phase]]
    lines = [[*head, f"{BASELINE[phase]} = 1", "bf16 = 1", "paper"]]
    for size in dict.fromkeys(row["size"] for row in rows):
        of_size = [cells.get((size, name), {}) for name in VARIANTS[phase]]
        speeds = [row.get("tokens_per_second") for row in of_size]
        shown = [f"{speed:,.0f}" if speed else "-" for speed in speeds]
        ratios = []
        for base in (BASELINE[phase], "bf16"):
            over = cells.get((size, base), {}).get("tokens_per_second")
            last = speeds[-1]
            ratios.append(f"{last / over:.2f}x" if last and over else "-")
        paper = f"{gains[size]:.2f}x" if size in gains else "-"
        lines.append([f"{size:,}", *shown, *ratios, paper])
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines
    )
    return f"<table>{body}</table>"
