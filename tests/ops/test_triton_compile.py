# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compiled for an A100, an H100 and a B200, and what their machine code takes.

That needs no GPU, only triton's own compiler, assembler and disassembler.

The interpreter, which the other tests use, does not check types, shapes or inline assembly.
"""

import collections
import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton.backends.compiler", reason="triton is not installed")

PROGRAM = """
import json, subprocess, sys, tempfile
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from sparse_bitnet.ops import triton as ours

F, BYTES, CODES = "*fp32", "*u8", "*i8"
scaled = dict(activation_scale=F, weight_scale=F, bias=F, y="*bf16", rows="i32")
many = dict(x_codes=CODES, tokens="i32", **scaled)
selection = dict(weight_scale=F, codes=CODES, mask=BYTES, groups="i32")
tokens = dict(x="*i16", codes=CODES, scale=F, features="i32", columns="i32")
KERNELS = {
    "select 6:8": (ours._select, 4, dict(weight=F, **selection),
                   dict(N=6, M=8, LANES=8, GROUPS=128)),
    "select 2:7": (ours._select, 4, dict(weight="*i16", **selection),
                   dict(N=2, M=7, LANES=8, GROUPS=128)),
    # Tokens of 2,048 features, 16 a thread: 4 warps, of windows 2.
    "quantise": (ours._quantize, 4, tokens, dict(M=4, WINDOWS=1, QUADS=512)),
    "windows": (ours._quantize, 2, tokens, dict(M=8, WINDOWS=3, QUADS=256)),
    "dense": (ours.dense_dot.fn, 8, dict(codes=CODES, columns="i32", **many),
              dict(NEAR=4096, IS_EVEN=True, ROWS=128, TOKENS=128, DEPTH=128)),
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
    for arch in (80, 90, 100):
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
        matches = (
            re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line)
            for line in (self.lines if lines is None else lines)
        )
        return collections.Counter(match[1] for match in matches if match)

    def registers(self) -> int:
        """Registers of one thread."""
        return 1 + max(
            int(number) for line in self.lines for number in re.findall(r"\bR(\d+)", line)
        )

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


def test_every_kernel_compiles_and_rounds_where_its_reference_does(compiled) -> None:
    for (name, _), kernel in compiled.items():
        # A fused multiply-add rounds once where the reference rounds twice.
        assert "fma.rn.f32" not in kernel.ptx, name
        # No loop spills registers to memory.
        assert not kernel.loop()["STL"] + kernel.loop()["LDL"], name


def test_products_run_on_tensor_cores(compiled) -> None:
    assert compiled["dense", 90].loop()["IGMMA"] == 4
    assert compiled["dense", 80].loop()["IMMA"] == 64
    assert compiled["dense", 100].counts()["UTCIMMA"]
    # Quantisation: instructions a feature; an H100 issues 26 while its memory moves the 3 bytes.
    for name, warps, features, most in (("quantise", 4, 2048, 21), ("windows", 2, 2048, 23)):
        assert compiled[name, 90].counts().total() * warps * 32 / features <= most, name
