# SPDX-License-Identifier: Apache-2.0
"""What a run sets of torch before it begins."""

import platform

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from sparse_bitnet.bench import gpu
from sparse_bitnet.bench.options import GpuBenchOptions
from sparse_bitnet.training import device
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.widened_products import WidenProducts, WideProducts


@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),
        ("AuthenticAMD", "avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx2", False),
    ],
)
def test_bfloat16_is_the_type_where_its_products_are_faster(vendor, flags, fast, monkeypatch):
    monkeypatch.setattr(device, "cpu_info", lambda: {"vendor_id": vendor, "flags": flags})
    wanted = torch.bfloat16 if fast else torch.float32
    assert device.resolve_dtype("auto", torch.device("cpu")) == wanted
    assert ("post_grad_custom_post_pass" in device.compile_options("cpu")) != fast
    eager = device.wide_products("cpu", torch.bfloat16)
    assert isinstance(eager, WideProducts) != fast


@pytest.mark.parametrize("compiled", [True, False])
def test_widened_products_are_those_of_float32_rounded_once(compiled):
    def products(a, b, c):
        x = torch.mm(a, b)
        return torch.addmm(c, x, b), torch.bmm(a[None], x[None])

    torch.manual_seed(0)
    a, b, c = (torch.randn(*shape).bfloat16() for shape in ((17, 17), (17, 17), (17,)))
    if compiled:
        traced = make_fx(products)(a, b, c)
        WidenProducts()(traced.graph)
        traced.recompile()
        results = traced(a, b, c)
    else:
        with WideProducts():
            results = products(a, b, c)
    x = (a.float() @ b.float()).bfloat16()
    wanted = (
        (c.float() + x.float() @ b.float()).bfloat16(),
        (a.float() @ x.float()).bfloat16()[None],
    )
    for result, value in zip(results, wanted, strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, value)


def test_a_gpu_computes_with_deterministic_kernels(monkeypatch):
    torch.use_deterministic_algorithms(False)
    device.make_deterministic(torch.device("cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_training_is_measured_with_the_kernels_of_a_run(monkeypatch):
    chosen = []

    def stop(where: torch.device) -> None:
        chosen.append(where.type)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "make_deterministic", stop)
    with pytest.raises(KeyboardInterrupt):
        next(gpu.measure(GpuBenchOptions(rehearse=True), "train", "6:8", []))
    assert chosen == ["cpu"]


def test_long_runs_on_a_cpu_are_compiled(monkeypatch):
    cpu, million = torch.device("cpu"), 1_000_000
    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    assert device.compiles(TrainConfig(compile="on", steps=1), cpu, million)
    assert not device.compiles(TrainConfig(compile="off", steps=10**6), cpu, million)
    assert not device.compiles(TrainConfig(steps=100), cpu, million)
    assert device.compiles(TrainConfig(steps=10_000), cpu, million)
    assert not device.compiles(TrainConfig(steps=10_000), torch.device("cuda"), million)
    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    assert not device.compiles(TrainConfig(steps=10_000), cpu, million)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep it or not")
def test_what_a_step_frees_is_there_for_the_next():
    import resource

    def new_pages() -> int:
        """Of ten tensors of 8 MB, made and dropped five times: 102,400 pages."""
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            made = [torch.zeros(2**21) + 1 for _ in range(10)]
            del made
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    device.keep_freed_memory()
    new_pages()
    assert new_pages() < 20_000
