# SPDX-License-Identifier: Apache-2.0
"""Names and versions in the workflows, the citation and the notices exist and agree."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[\w./]+", step["uses"])
            elif step["run"].startswith("make "):
                assert re.search(rf"^{step['run'].split()[1]}:", makefile, re.MULTILINE)
            elif step["run"].startswith("."):
                assert (ROOT / step["run"]).is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_sanitizers_run_tests_that_are_there():
    """pytest runs none of them where one is missing."""
    done = subprocess.run(["make", "-n", "sanitize"], cwd=ROOT, capture_output=True, text=True)
    tests = re.findall(r"tests/\S+\.py", done.stdout)
    assert len(tests) > 4
    assert [name for name in tests if not (ROOT / name).is_file()] == []


def test_pythons_that_are_tested_are_those_that_are_named():
    test = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if ":: 3." in one]
    assert test["strategy"]["matrix"]["python"] == named


def test_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    (paper,) = citation["references"]
    assert all({"given-names", "family-names"} == author.keys() for author in paper["authors"])


def test_every_source_names_its_license():
    """In one of its first lines; REUSE.toml does for texts and data."""
    sources = [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml")]
    for folder in ("src", "csrc", "tests", "benchmarks", "examples", ".github", ".ci"):
        sources += (ROOT / folder).rglob("*")
    held = {"", ".py", ".cpp", ".h", ".sh", ".sbatch", ".yml", ".yaml", ".toml", ".j2", ".html"}
    held |= {".txt"}
    wanted = f"SPDX-License-Identifier: {PROJECT['license']}"
    for path in sources:
        if path.suffix in held and path.is_file():
            assert wanted in "".join(path.read_text(encoding="utf-8").splitlines()[:3]), path
