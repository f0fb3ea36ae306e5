# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet plan`: what a run would take on some GPUs."""

from typing import Annotated

from sparse_bitnet.cli.arguments import FLAT, command
from sparse_bitnet.training.job import GPUS, Job
from sparse_bitnet.training.run_estimate import (
    COLLECTIVE_LATENCY,
    LINK_EFFICIENCY,
    MEMORY_EFFICIENCY,
    UTILISATION,
    fitted,
    plan,
)


@command("plan")
def main(job: Annotated[Job, FLAT]) -> None:
    """Estimate a training run on GPUs from its shapes; nothing is run.

    Args:
        job: what is planned.
    """
    from rich.console import Console

    from sparse_bitnet_paper.table import Table, print_table

    job = fitted(job)
    found, gpu, console = plan(job), GPUS[job.gpu], Console()

    replicas = job.gpus // job.shards
    print(
        f"{job.model}, {job.config}, on {job.gpus} x {job.gpu.upper()}: split over {job.shards}, "
        f"{replicas} replica{'s' if replicas > 1 else ''}; {job.batch_size} x {job.sequence_length} "
        f"tokens a step, {job.rows} sequences a forward, {job.micro_steps} forwards a GPU"
    )
    total = found.memory_bytes
    memory = [[name, f"{size / 1e9:,.2f}"] for name, size in found.memory.items()]
    memory.append([f"total, of {gpu.memory / 1e9:.0f}", f"{total / 1e9:,.2f}"])
    print_table(Table(["component", "GB"], memory), console, "Memory of a GPU")
    traffic = [
        [name, f"{size / 1e6:,.2f}", f"{found.traffic_bf16[name] / 1e6:,.2f}"]
        for name, size in found.traffic.items()
    ]
    sums = (sum(found.traffic.values()), sum(found.traffic_bf16.values()))
    traffic.append(["total", *(f"{size / 1e6:,.2f}" for size in sums)])
    head = ["what", "MB", "MB, bf16 weights"]
    print_table(Table(head, traffic), console, "Received by a GPU in a step")
    seconds = [[name, f"{1000 * part:,.2f}"] for name, part in found.seconds.items()]
    seconds.append(["step", f"{1000 * found.step_seconds:,.2f}"])
    seconds.append(["step, bf16 weights gathered", f"{1000 * found.step_seconds_bf16:,.2f}"])
    print_table(Table(["part", "ms"], seconds), console, "Time of a step")
    fits = "fits"
    if total > gpu.memory:
        fits = "does NOT fit: smaller --micro-batch-size, --activation-checkpointing or more GPUs"
    print(
        f"memory: {fits}\n"
        f"{found.tokens_per_second:,.0f} tokens/s, {found.tokens_per_second / job.gpus:,.0f} a GPU; "
        f"{job.tokens:.3g} tokens in {found.days:,.2f} days\n"
        f"a checkpoint: {found.checkpoint_bytes / 1e9:,.1f} GB, training waits "
        f"{found.checkpoint_stall:,.2f} s, written in {found.checkpoint_write:,.0f} s behind it at "
        f"{job.storage / 1e9:g} GB/s a machine"
    )
    console.print(
        f"From data sheets: {gpu.flops / 1e12:,.0f} TFLOP/s bf16 at {UTILISATION:.0%}, memory "
        f"{gpu.bandwidth / 1e12:g} TB/s at {MEMORY_EFFICIENCY:.0%}, links {gpu.link / 1e9:,.0f} GB/s in "
        f"a machine of 8 and {gpu.network / 1e9:,.0f} GB/s between at {LINK_EFFICIENCY:.0%}, "
        f"{COLLECTIVE_LATENCY * 1e6:.0f} us a collective and doubling. Not measured on such machines.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
