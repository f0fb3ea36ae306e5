# SPDX-License-Identifier: Apache-2.0
"""The smoke scale from end to end: planned, trained, measured, kept, continued, rendered."""

import contextlib
import dataclasses
import math
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
from rich.console import Console

from made_up_results import read_rows
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.cli import paper as cli
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation import harness
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet_paper import record, reproduce
from sparse_bitnet_paper.claims import average_accuracies
from sparse_bitnet_paper.record import thinned
from sparse_bitnet_paper.report import markdown_report, write_report
from sparse_bitnet_paper.results import CURVE_POINTS, DETAILS, Results
from sparse_bitnet_paper.results import read_rows as frame_of
from sparse_bitnet_paper.runs import EXPERIMENTS, plan
from sparse_bitnet_paper.scales import Size, find_scale
from sparse_bitnet_paper.weight_counts import pool, shares
from sparse_bitnet_paper.weights import count_model

ROOT = Path(__file__).parents[2]
ALL = list(EXPERIMENTS)
QUIET = Console(quiet=True)
train_all = reproduce.reproduce


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """The folder of the whole smoke scale, trained once for this module."""
    out = tmp_path_factory.mktemp("results") / "smoke"
    outcome = train_all(find_scale("smoke"), ALL, out, workers=1, console=QUIET)
    assert (outcome.skipped, outcome.failed) == (0, ())
    return out


def small_scale(steps=4, **changes):
    """Four runs of one model."""
    scale = find_scale("smoke")
    return dataclasses.replace(
        scale, sizes=(Size(model=scale.main, steps=steps, seeds=1),), **changes
    )


@pytest.fixture
def options(smoke):
    return {"data": smoke / "data", "workers": 1, "console": QUIET}


def test_every_planned_run_has_a_row_with_all_it_needs(smoke):
    results = Results(smoke)
    rows = {row["name"]: row for row in results.rows.to_dict("records")}
    runs = plan(find_scale("smoke"), ALL)
    assert set(rows) == {run.name for run in runs}
    for run in runs:
        row = rows[run.name]
        assert TrainConfig(**row["config"] | {"data": "", "out": ""}) == dataclasses.replace(
            run.config, data="", out=""
        )
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert (row["format"], row["steps"], row["seed"]) == (run.config.format, 8, run.config.seed)
        assert set(row["provenance"]) == {"commit", "hardware", "threads", "versions", "date"}
        assert (smoke / row["checkpoint"] / "model.safetensors").is_file()
        assert not (smoke / "runs" / run.name / "checkpoints").exists()
        own = results.curves[results.curves.run == run.name]
        assert own.validation_loss.notna().any()
        assert (results.details[run.name]["weights"] is not None) == run.is_dense
    assert str(smoke) not in (smoke / "results.jsonl").read_text("utf-8")
    assert (smoke / ".gitignore").read_text("utf-8").split() == ["/data/", "/runs/", "/.lock"]


def test_weights_of_dense_runs_are_followed_from_the_initial_ones(smoke):
    results = Results(smoke)
    row = results.by_seed("ternary-8:8").loc[0]
    history = results.details[row["name"]]["weights"]
    assert history["steps"] == [0, 4, 8]
    assert len(history["near_zero_mass"]) == len(history["overall"]) == 3
    assert {len(layers) for layers in history["near_zero_mass"]} == {len(history["layers"])}
    initial = build_model(row.model, SparseBitConfig.parse(row.format), seed=0, vocab_size=512)
    start = shares(pool(count_model(initial)))["near_zero_mass"]
    assert history["overall"][0] == row.near_zero_start == pytest.approx(start, rel=1e-5)
    assert history["overall"][-1] == row.near_zero_mass
    assert set(history["final"]) == {"all", "late"}  # two blocks have no middle third
    assert history["final"]["all"]["groups"] * 8 == history["final"]["all"]["weights"]


def test_a_folder_of_another_setting_is_refused(smoke, tmp_path):
    scale = find_scale("smoke")
    recipe = dataclasses.replace(scale.recipe, learning_rate=6e-3, batch_size=2)
    with pytest.raises(UserError, match=r"recipe.batch_size 8 -> 2; recipe.learning_rate 0.003"):
        train_all(dataclasses.replace(scale, recipe=recipe), ["table2"], smoke, console=QUIET)
    shutil.copy(smoke / "setting.json", tmp_path)
    with pytest.raises(UserError, match="results of another setting"):
        train_all(find_scale("cpu"), ["table2"], tmp_path, console=QUIET)
    assert not (tmp_path / "data").exists()


def test_a_folder_of_other_files_is_refused_and_unchanged(tmp_path):
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    with pytest.raises(UserError, match="neither empty nor a set of results"):
        train_all(find_scale("smoke"), ["table2"], tmp_path, console=QUIET)
    assert [(file.name, file.read_text("utf-8")) for file in tmp_path.iterdir()] == [
        (".gitignore", "*.pyc\n")
    ]


def test_a_run_that_fails_is_named_and_the_others_continue(tmp_path, monkeypatch, options):
    train = record.train

    def failing(config, **options):
        if config.format == "full-6:8":
            raise UserError("the loss is not finite")
        return train(config, **options)

    monkeypatch.setattr(record, "train", failing)
    outcome = train_all(small_scale(), ["table2"], tmp_path, **options)
    assert outcome.trained == 3
    (message,) = outcome.failed
    assert "full-6-8" in message
    assert "not finite" in message
    monkeypatch.undo()
    again = train_all(small_scale(), ["table2"], tmp_path, **options)
    assert (again.trained, again.skipped, again.failed) == (1, 3, ())


def interrupt_at(step):
    """`train`, with a Ctrl-C at a step."""
    train = record.train

    def interrupted(config, on_step):
        def report(row):
            on_step(row)
            if row["step"] == step:
                os.kill(os.getpid(), signal.SIGINT)

        return train(config, on_step=report)

    return interrupted


@contextlib.contextmanager
def interrupt_at_a_checkpoint(out, wanted):
    """Ctrl-C for this process as soon as one of its workers has saved."""
    ended = threading.Event()

    def watch():
        while wanted and not ended.wait(0.01):
            if list(out.glob("runs/*/checkpoints/step-*")):
                return os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@pytest.mark.parametrize(("count", "steps"), [(1, 12), (2, 120)])
def test_an_interrupted_set_resumes(tmp_path, monkeypatch, options, count, steps):
    out, scale = tmp_path / "set", small_scale(steps, patterns=("8:8",))
    options |= {"workers": count, "console": Console()}
    if count == 1:
        monkeypatch.setattr(record, "train", interrupt_at(5))
    stopped = pytest.raises(KeyboardInterrupt, match=r"^stopped.* the same command to resume\b")
    with interrupt_at_a_checkpoint(out, count > 1), stopped:
        cli.train_set(scale, ["sweep"], out=out, **options)
    monkeypatch.undo()
    assert len(Results(out).rows) < 2
    cli.train_set(scale, ["sweep"], out=out, **options)
    assert sorted(row["format"] for row in read_rows(out)) == ["full-8:8", "ternary-8:8"]
    assert set(Results(out).curves.groupby("run").step.max()) == {steps}


def test_progress_counts_embeddings_of_the_prepared_vocabulary(make_set):
    """The presets' own vocabulary of 151,936 would hide how models differ in size."""
    run = plan(find_scale("cpu"), ["table2"], 1)[0]
    queue = reproduce._Queue(make_set(names=["table2"]), [run], reproduce.Progress(QUIET))
    weights = record.trained_weights(PRESETS[run.config.model], 9)
    tokens = run.config.steps * run.config.tokens_per_step
    assert queue.work == {run.name: 6 * tokens * weights}


@pytest.mark.parametrize("steps", [1, 7, 100, 101, 999])
def test_thinned_curves_keep_ends_means_and_validations(steps):
    rows = [
        {"step": step, "loss": float(step), "flip_rate": None if step == 1 else 1 / step}
        for step in range(1, steps + 1)
    ]
    validation = {"step": 3, "validation_loss": 7.0}
    rows.insert(3, validation)
    curve = thinned(rows)
    losses = [row for row in curve if "loss" in row]
    assert len(losses) <= CURVE_POINTS
    assert losses[-1]["step"] == steps
    width = losses[0]["step"]
    assert losses[0]["loss"] == pytest.approx((1 + width) / 2)
    assert [row for row in curve if "validation_loss" in row] == [validation]


def test_table1_scores_the_trained_models_once(make_set, monkeypatch, capsys):
    calls, trained = [], []

    def evaluate_tasks(folder, tasks, **options):
        calls.append((tasks, options["limit"]))
        return {"results": {"piqa": {"acc,none": 0.5}}, "n-samples": {"piqa": {"effective": 9}}}

    monkeypatch.setattr(harness, "load_tasks", lambda names, folder: trained.append(names))
    monkeypatch.setattr(reproduce, "evaluate_tasks", evaluate_tasks)
    monkeypatch.setattr(cli, "train_set", lambda scale, names, **options: trained.append(names))
    results = make_set(seeds=2, names=("table2",))
    for seeds in (1, 1, 2):
        options = ["--tasks", "piqa", "--limit", "9", "--seeds", f"{seeds}"]
        cli.reproduce(["table1", "--out", str(results.path), *options])
    printed = re.findall(r"(\d+) models scored", capsys.readouterr().out)
    assert printed == ["12", "0", "12"]
    assert trained == 3 * [["piqa"], ["table2"]]
    assert calls == 24 * [(["piqa"], 9)]
    assert "reproduce all table1 --scale cpu" in markdown_report([results])[0]["experiments/set.md"]
    scores = {"results": {"piqa": {"f1,none": 0.5}}, "n-samples": {"piqa": {"effective": 9}}}
    monkeypatch.setattr(reproduce, "evaluate_tasks", lambda *given, **options: scores)
    with pytest.raises(UserError, match="task piqa has no acc, the accuracy of table 1"):
        cli.reproduce(["table1", "--out", str(results.path), "--tasks", "copa"])
    monkeypatch.setattr(reproduce, "evaluate_tasks", evaluate_tasks)
    for task in ("copa", "boolq", "copa"):  # of the newest tasks alone
        cli.reproduce(["table1", "--out", str(results.path), "--tasks", task])
        assert {line["asked"][0] for line in results.scores[-12:]} == {task}
        assert len(average_accuracies(results)) == 12
    for option in (["--tasks", "piqa"], ["--include-path", "sets"], ["--limit", "9"]):
        with pytest.raises(UserError, match=f"{option[0]} .*only table1 scores tasks"):
            cli.reproduce(["table2", "--out", str(results.path), *option])


def test_the_report_is_made_of_the_result_files_alone(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(smoke.parent)
    document = tmp_path / "docs" / "experiments.md"
    (smoke / "notes.md").write_text("The gap is `small` because\n\nof the steps & more.\n")
    try:
        write_report([Path("smoke")], document)
    finally:
        (smoke / "notes.md").unlink()
    pages = [document, *(tmp_path / "docs" / "experiments").glob("*.md")]
    assert {page.stem for page in pages} == {"experiments", "verdicts", "smoke"}
    text = (tmp_path / "docs" / "experiments" / "smoke.md").read_text("utf-8")
    for number in ("26.31", "32.23", "+18.8", "27.39", "42.3"):  # the paper's own, alongside
        assert number in text
    for row in read_rows(smoke):
        assert f"{row['perplexity']:.2f}" in text
    assert "not decided" in text
    assert "- The published code's recipe, one thing at a time: not run.\n" in text
    assert "The gap is `small` because\n\nof the steps & more." in text
    for page in pages:
        links = re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))
        assert all((page.parent / link).is_file() for link in links)
    assert len(list((document.parent / "figures").glob("*.svg"))) == 7


def test_the_command_writes_below_the_results_and_prints_the_claims(
    smoke, tmp_path, monkeypatch, capsys
):
    """A file docs/experiments.md of the user's own stays."""
    (tmp_path / "docs").mkdir()
    own = tmp_path / "docs" / "experiments.md"
    own.write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    cli.report([str(smoke)])
    printed = capsys.readouterr().out
    assert own.read_text("utf-8") == "mine"
    assert (smoke / "report.md").is_file()
    assert (smoke / "report" / "smoke.md").is_file()
    for expected in ("The paper's claims", "verdict", "not decided", "report.md"):
        assert expected in printed
    assert max(len(line) for line in printed.splitlines() if "report" not in line) <= 80


@pytest.mark.skipif(not (ROOT / "docs" / "results").is_dir(), reason="no checkout")
def test_the_committed_pages_are_those_of_their_results(monkeypatch):
    monkeypatch.chdir(ROOT)
    command = re.search(
        r"sparse-bitnet report (.*?)`", Path("docs/experiments/verdicts.md").read_text("utf-8")
    )
    *folders, engine = command[1].replace("--engine ", "").split()
    pages, drawn = markdown_report([Results(Path(folder)) for folder in folders], Path(engine))
    assert {f"experiments/{page.name}" for page in Path("docs/experiments").glob("*")} == set(
        list(pages)[1:]
    )
    for name, text in pages.items():
        assert text.splitlines() == (Path("docs") / name).read_text("utf-8").splitlines()
        for line in text.splitlines():
            if line.startswith("|"):
                assert len(line) <= 100
                assert len(re.findall(r"(?<!\\)\|", line)) <= 8
    assert {path.stem for path in Path("docs/figures").glob("*.svg")} == set(drawn)


def test_the_first_page_has_one_line_for_each_main_claim(make_set):
    pages, drawn = markdown_report([make_set()], name="report")
    text = pages["report.md"]
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[1] for line in lines] == ["holds"] * 5
    assert lines[0].endswith("| +4.1 points |")  # the paper's own number
    assert "[set](report/set.md)" in text
    assert "](figures/set-norm-ppl.svg)" in text
    assert "set-norm-ppl" in drawn


def test_verdicts_of_several_sets_stand_side_by_side(make_set, tmp_path):
    sets = [make_set(folder=tmp_path / name, names=["table2"]) for name in ("one", "two")]
    pages, _ = markdown_report(sets)
    text = pages["experiments/verdicts.md"]
    assert "| claim | size | unit | one | two |" in text
    assert "| penalty shrinks with size | 1m | points | holds, +0.27 | holds, +0.27 |" in text
    assert "# Scale one" in pages["experiments/one.md"]
    same = make_set(folder=tmp_path / "more" / "one", names=["table2"])
    with pytest.raises(UserError, match="two pages would be named one"):
        markdown_report([sets[0], same])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("setting.json", "{", "setting.json is damaged"),
        ("setting.json", "[]", "setting.json is damaged"),
        ("setting.json", "{}", "setting.json: damaged, it lacks data"),
        ("downstream.jsonl", "x\n", "downstream.jsonl:1: not JSON"),
        ("downstream.jsonl", "{}\n", "downstream.jsonl:1: damaged, it lacks run"),
        (DETAILS, "x", f"{DETAILS}"),
        ("results.jsonl", "", "no finished run of smoke yet"),
        ("notes.md", "Gr\xf6\xdfe", "notes.md: 'utf-8' codec can't decode"),
    ],
)
def test_damaged_files_of_a_set_are_named(smoke, tmp_path, name, content, words):
    shutil.copytree(smoke, tmp_path / "set", ignore=shutil.ignore_patterns("runs", "data"))
    (tmp_path / "set" / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=re.escape(words)):
        write_report([tmp_path / "set"], tmp_path / "a.md")
    assert not (tmp_path / "a.md").exists()


def test_damaged_rows_are_named(smoke, tmp_path):
    rows, path = (smoke / "results.jsonl").read_text(), tmp_path / "results.jsonl"
    perplexity = re.search('"perplexity": [0-9.]+', rows)[0]
    for damaged, words in (
        (rows + rows.splitlines()[0], f"{len(rows.splitlines()) + 1}: a second line of that run"),
        (rows.replace(perplexity, '"perplexity": "x"'), "1: its perplexity is no number"),
        (rows.replace(perplexity, '"perplexity": null'), "1: its perplexity is no number"),
        (re.sub('"config": {.*?}', '"config": null', rows, count=1), "1: its learning_rate is no"),
    ):
        path.write_text(damaged)
        with pytest.raises(UserError, match=f"results.jsonl:{words}"):
            frame_of(path)


def test_errors_of_the_report_are_one_line(smoke, tmp_path):
    with pytest.raises(UserError, match=r"no setting.json"):
        write_report([tmp_path], tmp_path / "a.md")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^cannot write .*file"):
        write_report([smoke], tmp_path / "file" / "page.md")


def dry_run(capsys, *arguments):
    cli.reproduce([*arguments, "--dry-run"])
    return capsys.readouterr().out


def test_a_dry_run_trains_nothing_and_says_what_is_done(smoke, tmp_path, monkeypatch, capsys):
    """Within 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    text = dry_run(capsys, "table2", "--scale", "smoke")
    assert "runs/smoke: 0 of 8 runs are done" in text
    assert "0.3m-full-6-8" in text
    assert max(map(len, text.splitlines())) <= 80
    assert not any(tmp_path.iterdir())
    (tmp_path / "set").mkdir()
    lines = (smoke / "results.jsonl").read_text("utf-8").splitlines()[:2]
    (tmp_path / "set" / "results.jsonl").write_text("\n".join(lines) + "\n")
    text = dry_run(capsys, "table2", "--scale", "smoke", "--out", "set")
    line = next(line for line in text.splitlines() if line.split()[:1] == ["qwen2.5-0.3m"])
    assert line.split()[1:3] == ["4", "2"]
    assert text.count("\ndone  ") == 2


def test_the_plan_of_the_paper_s_sizes_is_in_hours_of_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = dry_run(capsys, "table2", "sweep", "--scale", "paper")
    assert all(run.name in text for run in plan(find_scale("paper"), ["table2", "sweep"]))
    assert "\u2026" not in text
    hours = {
        gpu: float(n.replace(",", "")) for gpu, n in re.findall(r"([ABH]\d00)\s+([\d,.]+\d)", text)
    }
    assert hours["A100"] > hours["H100"] == hours["H200"] > hours["B200"]
    # 6 operations a weight and token for the four models of each size and 12 more of the smallest one.
    work = 6 * 50e9 * (16 * 494e6 + 4 * 1544e6 + 4 * 3086e6)
    assert hours["A100"] == pytest.approx(work / (0.4 * 312e12) / 3600, rel=0.15)
    for scale in ("paper", "gpu"):
        assert "H200" in dry_run(capsys, "--scale", scale)
        with pytest.raises(UserError, match=r"needs a GPU; --dry-run"):
            cli.reproduce(["table2", "--scale", scale])
    assert not any(tmp_path.iterdir())
