# SPDX-License-Identifier: Apache-2.0
"""Commit, hardware and versions that are stored with every number."""

import json
import shutil
import subprocess
from datetime import datetime

import pytest

from sparse_bitnet import provenance as module
from sparse_bitnet.provenance import commit, hardware, provenance


def test_provenance_is_complete_and_json():
    record = json.loads(json.dumps(provenance()))
    assert set(record) == {"commit", "hardware", "threads", "versions", "date"}
    assert {"sparse-bitnet", "python", "numpy"} <= record["versions"].keys()
    assert datetime.fromisoformat(record["date"]).utcoffset().total_seconds() == 0


@pytest.mark.parametrize(
    ("name", "flags", "more"),
    [
        ("Intel(R) Xeon(R) Processor", "avx512_bf16", " without AMX"),
        ("Intel(R) Xeon(R) Processor", "avx512_bf16 amx_bf16", ""),
        ("Intel(R) Xeon(R) Processor", "avx512f", ""),
        ("AMD EPYC", "avx2", " without AVX-512"),
        ("AMD EPYC", "avx2 avx512f", ""),
    ],
)
def test_hidden_instruction_sets_are_named(name, flags, more, monkeypatch):
    monkeypatch.setattr(module, "cpu_info", lambda: {"model name": name, "flags": flags})
    assert hardware().startswith(f"{name}{more}, ")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_that_of_our_checkout_only(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
        )

    package = tmp_path / "src" / "sparse_bitnet"
    package.mkdir(parents=True)
    assert commit(package) is None
    git("init")
    assert commit(package) is None
    (package / "__init__.py").touch()
    git("add", ".")
    git("commit", "-m", "one")
    head = commit(package)
    assert head is not None
    assert len(head) == 12
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows.jsonl").touch()
    assert commit(package) == head
    (package / "__init__.py").write_text("changed = True\n")
    assert commit(package) == f"{head}+changes"
    # Somebody else's repository that holds an environment with this package.
    (package / "__init__.py").unlink()
    assert commit(package) is None


def test_commit_is_none_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None
