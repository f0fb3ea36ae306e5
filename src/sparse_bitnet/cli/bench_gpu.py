"""`sparse-bitnet bench prefill|decode|train`: the paper's Table 3 and training steps on a GPU."""

from typing import TYPE_CHECKING, Annotated

from sparse_bitnet.cli.arguments import parse

if TYPE_CHECKING:
    from sparse_bitnet.bench.gpu_options import GpuBenchOptions, GpuOutput


def main(arguments: list[str]) -> None:
    """Measure on the GPU; `arguments` start with prefill, decode or train."""
    import tyro

    from sparse_bitnet.bench.gpu_options import GpuBenchOptions, GpuOutput

    kind, *rest = arguments

    def entry(
        options: Annotated[GpuBenchOptions, tyro.conf.arg(name="")],
        output: Annotated[GpuOutput, tyro.conf.arg(name="")],
    ) -> None:
        """Dense bf16, dense int8 and sparse models of one shape, in turn, on a GPU.

        Args:
            options: what to measure.
            output: where results go.
        """
        _run(kind, options, output)

    parse(entry, rest, prog=f"sparse-bitnet bench {kind}")


def _run(kind: str, options: "GpuBenchOptions", output: "GpuOutput") -> None:
    from rich.console import Console

    from sparse_bitnet.bench.gpu import run

    console = Console()
    # In a file or a pipe nothing of a row is to be cut off.
    run(kind, options, output, console if console.is_terminal else Console(width=140))
