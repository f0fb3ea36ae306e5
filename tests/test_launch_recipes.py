# SPDX-License-Identifier: Apache-2.0
"""Launch recipes: shell scripts parse, options exist, the Kubernetes manifest is valid."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparse_bitnet.cli.train import parse
from sparse_bitnet.training.recipes import RECIPES

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "launch"
SCRIPTS = sorted([*FOLDER.glob("*.sh"), *FOLDER.glob("*.sbatch")])


def run_script(script: Path, *arguments: str, env: dict[str, str]) -> Any:
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_recipes_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_missing_folder_is_named(script: Path) -> None:
    done = run_script(script, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0
    assert re.search(r"(DATA|HEAD): (folder|address)", done.stderr), done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_recipe_reaches_torchrun_as_it_stands(script: Path, tmp_path: Path) -> None:
    from torch.distributed.run import get_args_parser

    commands = tmp_path / "commands"
    for name, body in {
        "torchrun": 'printf "%s\\n" "$@"',
        "srun": 'while [ "$1" != torchrun ]; do shift; done; exec "$@"',
        "scontrol": "echo first; echo second",
    }.items():
        path = commands / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{commands}:/usr/bin:/bin", "MACHINES": "2"}
    environment |= {"DATA": "some data", "OUT": "run", "HEAD": "first"}
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    done = run_script(script, "--steps", "5", env=environment)
    assert done.returncode == 0, done.stderr
    arguments = done.stdout.splitlines()
    own = arguments[arguments.index("train") + 1 :]
    chosen = parse(own, RECIPES["default"](), "default")
    assert (chosen.data, chosen.out, chosen.steps) == ("some data", "run", 5)
    options = get_args_parser().parse_args([*arguments[: arguments.index("-m")], "script.py"])
    assert options.max_restarts > 0
    assert options.standalone or options.rdzv_endpoint == "first:29400"


def test_kubernetes_manifest_is_valid() -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = manifest["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    container = next(one for one in pod["containers"] if one["name"] == "pytorch")
    policy = spec["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert isinstance(spec["nprocPerNode"], str)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert all(isinstance(variable["value"], str) for variable in container["env"])
    command: list[Any] = container["command"]
    options = [text for text in command[command.index("train") + 1 :] if "--recipe" not in text]
    assert command[:4] == ["torchrun", "-m", "sparse_bitnet", "train"]
    assert parse(options, RECIPES["paper-tuned"](), "paper-tuned").data == "/shared/data"
