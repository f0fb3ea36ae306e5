# SPDX-License-Identifier: Apache-2.0
"""What a run would take on some GPUs before any of it is trained: memory, communication, time, days.

Formulas from shapes, stated here and in footprint.py; nothing is run and torch is not needed. Float32
masters, gradients and AdamW moments are split over `shard` processes, blocks gathered one at a time (2
bits a ternary weight, else the compute type), the embedding gathered whole. Times come from a roofline:
data-sheet rates times the stated efficiencies.
"""

from dataclasses import dataclass, replace

from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.footprint import (
    activation_bytes,
    converted_weights,
    flops_per_token,
    mask_bytes,
    parameter_counts,
)
from sparse_bitnet.training.job import GPUS, Job

GPUS_PER_MACHINE = 8
UTILISATION = 0.4
"""Share of the bfloat16 rate that a well-tuned training run of dense models reaches."""
LINK_EFFICIENCY = 0.8
"""Share of a link's rate that large collectives reach."""
MEMORY_EFFICIENCY = 0.8
"""Share of the memory's rate that elementwise passes reach."""
UNPACKING_BYTES = 10.25
"""Read and written a weight when packed codes become bfloat16: shift, mask, int8, less one, cast, each
a pass of its own (compiled code would move 2.25)."""
COLLECTIVE_LATENCY = 20e-6
"""Seconds a collective takes at least, for every doubling of the processes."""
RUNTIME_BYTES = 2.5e9
"""CUDA context, communication buffers, allocator's slack."""
HOST_COPY = 20e9
"""Bytes/s from a GPU to its machine's memory."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The estimate; bytes are per GPU, seconds per optimiser step."""

    memory: dict[str, float]
    """Bytes by component, at the step's peak."""
    traffic: dict[str, float]
    """Bytes received by component, in one step."""
    traffic_bf16: dict[str, float]
    """The same if linear layers were gathered as bfloat16 weights."""
    seconds: dict[str, float]
    """By part; those named "hidden" lie behind the computing and do not add up."""
    step_seconds: float
    step_seconds_bf16: float
    tokens_per_second: float
    days: float
    checkpoint_bytes: float
    """Over all GPUs."""
    checkpoint_stall: float
    """Seconds that training waits: the copy to the machine's memory."""
    checkpoint_write: float
    """Seconds the files take in the background."""

    @property
    def memory_bytes(self) -> float:
        """All components together."""
        return sum(self.memory.values())


def fitted(job: Job) -> Job:
    """The job with the largest micro-batch that fits, unless it has one; 1 when none fits."""
    if job.micro_batch_size is not None:
        return job
    rows = job.rows
    while rows > 1:
        tried = replace(job, micro_batch_size=rows)
        if plan(tried).memory_bytes <= GPUS[job.gpu].memory:
            return tried
        rows = rows // 2
    return replace(job, micro_batch_size=1)


def plan(job: Job) -> Plan:
    """Estimate a job; without a micro-batch size each GPU's part of the batch is one."""
    shape, gpu, config = PRESETS[job.model], GPUS[job.gpu], job.config
    block, embedding, small = parameter_counts(shape)
    converted = converted_weights(shape, config)
    weights = block + embedding + small
    packed = 0.25 if config.weight == "ternary" else 2.0
    traffic, traffic_bf16 = _traffic(job, packed), _traffic(job, 2.0)
    memory = _memory(job, packed)
    compute: float = job.tokens_on_gpu * flops_per_token(shape, job.sequence_length)
    if job.activation_checkpointing:
        compute *= 4 / 3
    own = weights / job.shards
    rate = gpu.bandwidth * MEMORY_EFFICIENCY
    seconds = {
        "products": compute / (gpu.flops * UTILISATION),
        # For each forward and backward of a micro-batch.
        "unpacking codes": 2 * job.micro_steps * UNPACKING_BYTES * converted / rate
        if packed < 1
        else 0.0,
        "mask and codes": 12 * converted / job.shards / rate,
        "optimiser": 28 * own / rate,
    }
    hidden = _communication_seconds(job, traffic, packed)
    hidden_bf16 = _communication_seconds(job, traffic_bf16, 2.0)
    busy = seconds["products"] + seconds["unpacking codes"]
    rest = seconds["mask and codes"] + seconds["optimiser"]
    step = max(busy, hidden) + rest
    step_bf16 = max(seconds["products"], hidden_bf16) + rest
    checkpoint = 12 * weights + (0 if config.pattern.is_dense else converted / 8)
    machines = max(1, job.gpus // GPUS_PER_MACHINE)
    tokens_per_second = job.batch_size * job.sequence_length / step
    return Plan(
        memory=memory,
        traffic=traffic,
        traffic_bf16=traffic_bf16,
        seconds={**seconds, "communication (hidden)": hidden},
        step_seconds=step,
        step_seconds_bf16=step_bf16,
        tokens_per_second=tokens_per_second,
        days=job.tokens / tokens_per_second / 86400,
        checkpoint_bytes=checkpoint,
        checkpoint_stall=checkpoint / job.shards / HOST_COPY,
        checkpoint_write=checkpoint / (job.storage * min(machines, job.shards)),
    )


def _memory(job: Job, packed: float) -> dict[str, float]:
    """Of the step's fullest moment: at the end of a forward all activations are there, at the end of
    the backward all gradients."""
    shape, config = PRESETS[job.model], job.config
    block, embedding, small = parameter_counts(shape)
    converted = converted_weights(shape, config)
    weights, sharded = block + embedding + small, job.gpus > 1
    one_block = block / shape.num_hidden_layers
    codes = (1.25 if sharded else 1.0) * (config.weight == "ternary")
    gathered = 0.0
    if sharded:
        # Codes of all blocks; the weights of two that are no codes, each in the collective's buffer too.
        codes_bytes, dense = (packed * converted, block - converted) if packed < 1 else (0.0, block)
        gathered = codes_bytes + 4 * 2.0 * dense / shape.num_hidden_layers
    held = {
        "masters (float32)": 4 * weights / job.shards,
        "AdamW moments": 8 * weights / job.shards,
        "mask, codes": (codes + mask_bytes(config)) * converted / job.shards,
        "gathered embedding": 4.0 * embedding if sharded else 0.0,
        "gathered blocks": gathered,
        # Of one block as computed, of another in the collective's buffer.
        "gradients of two blocks": 8.0 * one_block if sharded else 0.0,
        "runtime": RUNTIME_BYTES,
    }
    activations = activation_bytes(
        shape, config, job.rows * job.sequence_length, checkpointing=job.activation_checkpointing
    )
    # The head in the compute type and its gradient; before it those of earlier forwards, not split yet.
    earlier = 4.0 * weights if job.micro_steps > 1 else 0.0
    # The embedding's gradient as its two parts and, where it is split, their sum; and the own rows.
    forward = 6 * embedding + earlier
    backward = 4 * weights / job.shards + (12 if sharded else 8) * embedding
    if activations + forward > backward:
        return {**held, "gradients": forward, "activations": activations}
    return {**held, "gradients": backward, "activations": 0.0}


def _traffic(job: Job, linear_bytes: float) -> dict[str, float]:
    shape = PRESETS[job.model]
    block, embedding, small = parameter_counts(shape)
    others = (job.shards - 1) / job.shards
    replicas = job.gpus // job.shards
    weights = block + embedding + small
    gradient = 2 if job.gradient_reduction == "bf16" else 4
    passes = _gathers(job, linear_bytes)
    converted = converted_weights(shape, job.config)
    linears = passes * linear_bytes * converted + _gathers(job, 2.0) * 2.0 * (block - converted)
    return {
        "gather of linear layers": others * linears,
        "gather of embedding, norms, biases": others * 4 * (embedding + passes * small),
        "gradients, reduce-scatter": others * gradient * weights,
        "gradients, between replicas": 2
        * (replicas - 1)
        / replicas
        * gradient
        * weights
        / job.shards,
        "scales and counts": 2 * others * 40 * 7 * shape.num_hidden_layers,
    }


def _gathers(job: Job, linear_bytes: float) -> int:
    """Of a block in a step: codes stay gathered, weights are gathered for each forward and backward."""
    return 1 if linear_bytes < 1 else 2 * job.micro_steps


def _communication_seconds(job: Job, traffic: dict[str, float], linear_bytes: float) -> float:
    gpu = GPUS[job.gpu]
    inside = gpu.link if job.shards <= GPUS_PER_MACHINE else gpu.network
    between = gpu.link if job.gpus <= GPUS_PER_MACHINE else gpu.network
    replicas = traffic["gradients, between replicas"]
    moved = (sum(traffic.values()) - replicas) / inside + replicas / between
    layers = PRESETS[job.model].num_hidden_layers
    collectives = (_gathers(job, linear_bytes) + 1) * (layers + 1) + 4
    doublings = max(1, (job.gpus - 1).bit_length())
    return moved / LINK_EFFICIENCY + collectives * COLLECTIVE_LATENCY * doublings
