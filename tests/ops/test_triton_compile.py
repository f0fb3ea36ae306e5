"""The Triton kernels compile for NVIDIA GPUs: no GPU is needed for that, only triton's own compiler.

The interpreter, which the other tests use, does not check types, shapes or inline assembly.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_bitnet.ops import backends

pytest.importorskip("triton.backends.compiler", reason="triton is not installed")

PROGRAM = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from sparse_bitnet.ops.triton import epilogue, fused_inputs, packed_dot, packed_matvec
from sparse_bitnet.ops.triton import quantize_gather, select

FLOAT, BYTES, WORDS = "*fp32", "*u8", "*i32"
products = dict(activation_scale=FLOAT, weight_scale=FLOAT, bias=FLOAT, y="*bf16",
                tokens="i32", rows="i32")
tail = dict(ONE_SCALE=False, HAS_BIAS=True)
selection = dict(weight_scale=FLOAT, codes="*i8", mask=BYTES, words=BYTES, previous=BYTES,
                 flips=WORDS, groups="i32")
wanted = dict(HAS_CODES=True, HAS_MASK=True, HAS_WORDS=True, HAS_PREVIOUS=True)
windows = dict(M=8, WINDOWS=3, BLOCK=2048)
tokens = dict(codes="*i8", scale=FLOAT, features="i32", columns="i32")
KERNELS = [
    (select._select, dict(weight=FLOAT, **selection),
     dict(N=6, M=8, LANES=8, GROUPS=256, **wanted)),
    (select._select, dict(weight="*i16", **selection),
     dict(N=2, M=7, LANES=8, GROUPS=256, **wanted)),
    (select._sum_magnitudes, dict(weight="*i16", partial="*fp64", count="i32"), dict(BLOCK=8192)),
    (quantize_gather._quantize, dict(x="*i16", **tokens), windows),
    (fused_inputs._norm_quantize, dict(x="*bf16", weight="*bf16", epsilon="fp32", **tokens), windows),
    (fused_inputs._swiglu_quantize, dict(gate_up="*bf16", **tokens), dict(M=1, WINDOWS=0, BLOCK=64)),
    (epilogue._scale_rows,
     dict(sums=WORDS, y="*bf16", activation_scale=FLOAT, weight_scale=FLOAT, bias="*bf16",
          stride="i32", columns="i32"), dict(BLOCK=1024, **tail)),
    (packed_matvec._i2_words,
     dict(x_words=WORDS, packed=WORDS, row_words="i32", x_row_words="i32", full_words="i32", **products),
     dict(PLANE_WORDS=4, BLOCK_WORDS=16, TOKENS=2, ROWS=4, WORDS=128, DP4A=True, **tail)),
    (packed_matvec._bitmap_words,
     dict(x_words=WORDS, packed=BYTES, table=WORDS, row_bytes="i32", chunks="i32", **products),
     dict(SIGN_BYTES=6, TOKENS=1, ROWS=4, CHUNKS=32, DP4A=True, **tail)),
    (packed_dot.i2_dot, dict(x_codes="*i8", packed=BYTES, blocks="i32", **products),
     dict(PLANE=48, BLOCK_BYTES=64, TOKENS=16, ROWS=32, **tail)),
]
for kernel, types, constants in KERNELS:
    names = kernel.arg_names
    assert set(names) == {*types, *constants}, kernel.__name__
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    ptx = compiled.asm["ptx"]
    # A fused multiply-add rounds once where the reference rounds twice; only exp may contain one.
    assert "fma.rn.f32" not in ptx or "ex2.approx" in ptx, kernel.__name__
    assert ("dp4a" in ptx) == ("DP4A" in constants), kernel.__name__
    assert ("mma.sync" in ptx) == (kernel.__name__ == "i2_dot"), kernel.__name__
    print(kernel.__name__)
"""


@pytest.mark.slow
def test_every_kernel_that_an_op_names_is_there() -> None:
    named = [
        name
        for file in sorted(Path(backends.__file__).parent.glob("*.py"))
        for name in re.findall(r'cuda="([\w.]+)"', file.read_text())
    ]
    assert len(named) == 8
    assert all(callable(backends._kernel(name)) for name in named)


def test_every_kernel_compiles_for_sm_80(tmp_path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
