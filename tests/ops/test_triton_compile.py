# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled for an H100 and an A100, and what their machine code takes: that needs no
GPU, only triton's own compiler, assembler and disassembler.

The interpreter, which the other tests use, does not check types, shapes or inline assembly.
"""

import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.ops import backends

pytest.importorskip("triton.backends.compiler", reason="triton is not installed")

PROGRAM = """
import json, subprocess, sys, tempfile
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from sparse_bitnet.ops.triton import int8_dot, matvec, quantize, rope_cache, select

F, BYTES, WORDS, CODES = "*fp32", "*u8", "*i32", "*i8"
scaled = dict(activation_scale=F, weight_scale=F, bias=F, y="*bf16", rows="i32")
many = dict(x_codes=CODES, tokens="i32", **scaled)
selection = dict(weight_scale=F, codes=CODES, mask=BYTES, words=BYTES, previous=BYTES, flips=WORDS,
                 groups="i32")
tokens = dict(codes=CODES, scale=F, epsilon="fp32", features="i32", columns="i32")
dot, matvec, quantise = int8_dot.i2_dot.fn, matvec.i2_matvec, quantize._quantize
plain = dict(KIND=0, weight=None)
rope = dict(tokens="i32", heads="i32", kv_heads="i32", length="i32", epsilon="fp32", places="*i64")
rope |= {name: "*bf16" for name in ("qkv", "cos", "sin", "query", "keys", "values")}
of_heads = dict(HALF=64, LANES=64, HEADS=4)
KERNELS = {
    "select 6:8": (select._select, 4, dict(weight=F, **selection),
                   dict(N=6, M=8, LANES=8, GROUPS=128)),
    "select 2:7": (select._select, 4, dict(weight="*i16", **selection),
                   dict(N=2, M=7, LANES=8, GROUPS=128)),
    "absmean": (select._sum_magnitudes, 8, dict(weight="*i16", partial="*fp64", count="i32"),
                dict(BLOCK=8192)),
    # Tokens of 2,048 features, 16 a thread: 4 warps, of windows 2.
    "quantise": (quantise, 4, dict(x="*i16", **tokens), dict(M=4, WINDOWS=1, QUADS=512, **plain)),
    "windows": (quantise, 2, dict(x="*i16", **tokens), dict(M=8, WINDOWS=3, QUADS=256, **plain)),
    "norm": (quantise, 4, dict(x="*bf16", weight="*bf16", **tokens),
             dict(KIND=1, M=4, WINDOWS=1, QUADS=512)),
    "swiglu": (quantise, 16, dict(x="*bf16", **tokens),
               dict(KIND=2, weight=None, M=4, WINDOWS=1, QUADS=2048)),
    "dense": (int8_dot.dense_dot.fn, 8, dict(codes=CODES, columns="i32", **many),
              dict(NEAR=4096, IS_EVEN=True, ROWS=128, TOKENS=128, DEPTH=128)),
    "i2 16 split": (dot, 4, dict(packed=BYTES, blocks="i32", **many),
                    dict(TOKENS=16, ROWS=16, SPLIT=4)),
    "i2 64": (dot, 4, dict(packed=BYTES, blocks="i32", **many), dict(TOKENS=64, ROWS=64, SPLIT=1)),
    "rope": (rope_cache._rope_cache, 1, rope, dict(q_norm=None, k_norm=None, **of_heads)),
    # triton makes constants of arguments that are 1.
    "rope, one key head": (rope_cache._rope_cache, 1, rope,
                           dict(q_norm=None, k_norm=None, kv_heads=1, tokens=1, **of_heads)),
    "rope, norms": (rope_cache._rope_cache, 1, dict(q_norm="*bf16", k_norm="*bf16", **rope), of_heads),
    "matvec": (matvec, 1, dict(x_words=WORDS, packed=WORDS, blocks="i32", **scaled),
               dict(TOKENS=1, ROWS=8, WORDS=128)),
}
disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
for name, (kernel, warps, types, constants) in KERNELS.items():
    names = kernel.arg_names
    assert set(names) == {*types, *constants}, (name, set(names) ^ {*types, *constants})
    aligned = [n for n in types if types[n][0] == "*" or n in ("columns", "features")]
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    for arch in (80, 90):
        if arch == 80 and name not in ("dense", "i2 16 split"):
            continue
        options = {"num_warps": warps, "num_stages": 3, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            sass = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True)
        print(json.dumps([name, arch, compiled.asm["ptx"], sass.stdout, compiled.metadata.shared]))
"""


class Compiled:
    """PTX and machine code of a kernel."""

    def __init__(self, ptx: str, sass: str, shared: int) -> None:
        self.ptx, self.shared = ptx, shared
        self.lines = re.findall(r"^\.L\w+:|/\*[0-9a-f]{4,}\*/.*", sass, re.MULTILINE)

    def counts(self, lines: list[str] | None = None) -> collections.Counter[str]:
        """Instructions by their first word."""
        found = (
            re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line)
            for line in (self.lines if lines is None else lines)
        )
        return collections.Counter(match[1] for match in found if match)

    def registers(self) -> int:
        """Of a thread."""
        return 1 + max(int(found) for line in self.lines for found in re.findall(r"\bR(\d+)", line))

    def loop(self) -> collections.Counter[str]:
        """Instructions of the longest loop."""
        labels = {line[:-1]: at for at, line in enumerate(self.lines) if line.startswith(".L")}
        loops: list[list[str]] = [[]]
        for at, line in enumerate(self.lines):
            target = re.search(r"BRA.*`\((\.L\w+)\)", line)
            if target and labels.get(target[1], at) < at:
                loops.append(self.lines[labels[target[1]] : at + 1])
        return self.counts(max(loops, key=len))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[tuple[str, int], Compiled]:
    folder = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, arch): Compiled(*parts) for name, arch, *parts in rows}


@pytest.mark.slow
def test_every_kernel_that_an_op_names_is_there() -> None:
    named = [
        name
        for file in sorted(Path(backends.__file__).parent.glob("*.py"))
        for name in re.findall(r'cuda="([\w.]+)"', file.read_text())
    ]
    assert len(named) == 11
    assert all(callable(backends._kernel(name)) for name in named)


def test_every_kernel_compiles_and_rounds_where_its_reference_does(compiled) -> None:
    assert len(compiled) == 16
    for (name, _), kernel in compiled.items():
        # A fused multiply-add rounds once where the reference rounds twice; exp may contain one.
        assert "fma.rn.f32" not in kernel.ptx or name == "swiglu", name
        assert ("dp4a" in kernel.ptx) == name.startswith("matvec"), name
        # No loop spills registers to memory.
        assert not kernel.loop()["STL"] + kernel.loop()["LDL"], name


def test_products_run_on_tensor_cores(compiled) -> None:
    assert compiled["dense", 90].loop()["IGMMA"] == 4
    assert compiled["i2 64", 90].loop()["IGMMA"] == 8
    for arch in (80, 90):
        assert compiled["i2 16 split", arch].loop()["IMMA"] == 16
    assert compiled["dense", 80].loop()["IMMA"] == 64


def test_packed_weights_are_decoded_once(compiled) -> None:
    """A loop of a warp takes 16 rows of 256 weights, as much as two rows of 2,048: 15 instructions decode
    the 16 weights of a word, whatever the tokens."""
    for key, most in (("i2 16 split", 90), 210), (("i2 16 split", 80), 210), (("i2 64", 90), 240):
        loop = compiled[key].loop()
        assert loop["LOP3"] <= 68, key
        assert loop["SHF"] <= 26, key
        assert loop.total() <= most, key
        assert loop["BAR"] <= 3, key


def test_the_matvec_moves_nothing_between_threads(compiled) -> None:
    """A loop of a warp takes 8 rows of 2,048 weights."""
    kernel = compiled["matvec", 90]
    loop = kernel.loop()
    assert loop.total() <= 8 * 56
    assert loop["SHFL"] == loop["STS"] == loop["LDS"] == kernel.counts()["BAR"] == 0


def test_weights_under_way_hide_the_latency_of_memory(compiled) -> None:
    """At 700 ns an H100's 3.35 TB/s are 18 KB under way on each of 132 SMs, an H200's 4.8 TB/s 25 KB."""
    # 16 bytes a thread and row, all asked for before the first is used: 4 KiB a warp, of which the
    # registers of an SM hold so many.
    kernel = compiled["matvec", 90]
    wide = [line for line in kernel.lines if re.search(r"LDG\S*\.128", line)]
    assert len(wide) == 8 + 4
    assert 65536 // (32 * kernel.registers()) * 4096 >= 25_000
    # Asynchronous copies of two tiles, 4 KiB of weights each beside their activations, in every program
    # that an SM's shared memory has room for.
    for name, tokens, split in ("i2 16 split", 16, 4), ("i2 64", 64, 1):
        tile = 4096 + split * 256 * tokens
        assert 2 * tile <= compiled[name, 90].shared <= 3 * tile
        assert 8192 * (227 * 1024 // compiled[name, 90].shared) >= 25_000


def test_rope_is_one_small_kernel(compiled) -> None:
    """Instructions of a warp for four heads of 128, 16 features a thread; with norms of the heads too."""
    assert compiled["rope", 90].counts().total() <= 190
    assert compiled["rope, norms", 90].counts().total() <= 500
    assert "fma.rn.bf16" not in compiled["rope", 90].ptx


def test_quantisation_leaves_the_memory_busy(compiled) -> None:
    """Instructions a feature, against those that an H100 can issue (132 SMs, 4 a cycle, 1.755 GHz) while
    3.35 TB/s move its bytes: 26 for 3 bytes, 44 for 5. Both triton 3.7, which torch 2.13 brings, and 3.9
    keep below these."""
    for name, warps, features, most in (
        ("quantise", 4, 2048, 21),
        ("windows", 2, 2048, 23),
        ("norm", 4, 2048, 37),
        ("swiglu", 16, 8192, 41),
    ):
        assert compiled[name, 90].counts().total() * warps * 32 / features <= most, name
