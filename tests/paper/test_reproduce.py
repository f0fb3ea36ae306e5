# SPDX-License-Identifier: Apache-2.0
"""The smoke scale from end to end: trained, measured, kept, continued, rendered."""

import contextlib
import dataclasses
import json
import math
import os
import queue
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
from rich.console import Console

from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.cli import report as report_cli
from sparse_bitnet.cli import reproduce as reproduce_cli
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import evaluate
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training import device
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.run_folder import stop_signals
from sparse_bitnet.training.validation import validation_loss
from sparse_bitnet_paper import runner, workers
from sparse_bitnet_paper.measured_run import thinned
from sparse_bitnet_paper.paper_runs import EXPERIMENTS, plan
from sparse_bitnet_paper.results import CURVE_POINTS, Results
from sparse_bitnet_paper.results_page import write_report
from sparse_bitnet_paper.runner import reproduce
from sparse_bitnet_paper.scales import Size, find_scale
from sparse_bitnet_paper.weight_statistics import pool
from sparse_bitnet_paper.weights import model_statistics

ALL = list(EXPERIMENTS)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    """The folder of the whole smoke scale, trained once for this module."""
    out = tmp_path_factory.mktemp("results") / "smoke"
    text = out.parent / "other.txt"
    text.write_text("def other(self):\n    return self\n" * 20)
    outcome = reproduce(find_scale("smoke"), ALL, out, workers=1, other_text=text, console=QUIET)
    assert (outcome.skipped, outcome.left, outcome.failed) == (0, 0, ())
    return out


def small_scale(**changes):
    """Four runs of one model."""
    scale = find_scale("smoke")
    return dataclasses.replace(scale, sizes=(Size(model=scale.main, steps=4, seeds=1),), **changes)


def test_every_planned_run_has_a_row_with_all_it_needs(smoke):
    folder = Results(smoke)
    rows = {row.name: row for row in folder.rows}
    runs = plan(find_scale("smoke"), ALL)
    assert set(rows) == {run.name for run in runs}
    for run in runs:
        row = rows[run.name]
        assert not run.differences(row.config)
        assert row.perplexity == pytest.approx(math.exp(row.loss))
        assert (row.format, row.steps, row.seed) == (run.config.format, 8, run.config.seed)
        assert set(row.provenance) == {"commit", "hardware", "threads", "versions", "date"}
        assert (smoke / row.checkpoint / "model.safetensors").is_file()
        assert not (smoke / "runs" / row.name / "checkpoints").exists()
        assert [part for part in folder.curves(row) if "validation_loss" in part]
        assert (row.weights is not None) == run.is_dense
    assert str(smoke) not in (smoke / "results.jsonl").read_text("utf-8")


def test_what_a_repository_should_not_hold_is_ignored(smoke):
    assert (smoke / ".gitignore").read_text("utf-8").split() == ["/data/", "/runs/", "/.lock"]


def test_perplexity_is_that_of_the_whole_held_out_text(smoke):
    row = Results(smoke).rows[-1]
    config = TrainConfig(**row.config | {"data": str(smoke / "data"), "validation_tokens": 0})
    device = resolve_device("cpu")
    model = from_pretrained(smoke / row.checkpoint)
    dtype = resolve_dtype("auto", device)
    loss, tokens = validation_loss(SummedLoss(model, None), config, device=device, dtype=dtype)
    held_out = len(TokenDataset.open(smoke / "data", "validation")) - 1
    # The loop leaves out the tail that fills no whole sequence.
    assert row.validation_tokens == held_out >= tokens > held_out - config.sequence_length
    assert row.loss == pytest.approx(loss, rel=2e-3)


def test_the_other_text_is_measured_as_evaluate_does(smoke):
    row = Results(smoke).rows[-1]
    found = evaluate(
        smoke / row.checkpoint, str(smoke.parent / "other.txt"), context_length=32, device="cpu"
    ).result
    assert row.other_text == {
        "name": "other.txt",
        "tokens": found.tokens,
        "perplexity": pytest.approx(found.perplexity, rel=2e-3),
    }


def test_weights_of_dense_runs_are_followed_from_the_initial_ones(smoke):
    folder = Results(smoke)
    row = next(row for row in folder.rows if row.format == "ternary-8:8")
    history = folder.weights(row)
    assert history["steps"] == [0, 4, 8]
    assert len(history["near_zero_mass"]) == len(history["overall"]) == 3
    assert {len(layers) for layers in history["near_zero_mass"]} == {len(history["layers"])}
    initial = build_model(
        row.model, SparseBitConfig.parse(row.format), seed=row.seed, vocab_size=512
    )
    start = pool(model_statistics(initial)).near_zero_mass
    assert history["overall"][0] == pytest.approx(start, rel=1e-5)
    assert history["overall"][-1] == pytest.approx(row.near_zero_mass, rel=1e-5)
    assert set(history["final"]) == {"all", "late"}  # two blocks have no middle third
    assert history["final"]["all"]["groups"] * 8 == history["final"]["all"]["weights"]


def test_a_second_call_trains_nothing(smoke):
    before = (smoke / "results.jsonl").read_bytes()
    outcome = reproduce(find_scale("smoke"), ALL, smoke, console=QUIET)
    assert (outcome.trained, outcome.left, outcome.failed) == (0, 0, ())
    assert outcome.skipped == len(plan(find_scale("smoke"), ALL))
    assert (smoke / "results.jsonl").read_bytes() == before


def test_models_of_one_set_are_measured_on_one_other_text(smoke, tmp_path):
    with pytest.raises(UserError, match=r"measured on other\.txt"):
        reproduce(find_scale("smoke"), ALL, smoke, other_text=tmp_path / "more", console=QUIET)


def test_a_folder_of_another_setting_is_refused(smoke):
    scale = find_scale("smoke")
    other = dataclasses.replace(
        scale, recipe=dataclasses.replace(scale.recipe, learning_rate=6e-3, batch_size=2)
    )
    with pytest.raises(UserError, match=r"recipe.batch_size 8 -> 2; recipe.learning_rate 0.003"):
        reproduce(other, ["table2"], smoke, console=QUIET)


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / ".gitignore").write_text("*.pyc\n")
    with pytest.raises(UserError, match="neither empty nor a set of results"):
        reproduce(find_scale("smoke"), ["table2"], tmp_path, console=QUIET)
    assert [(file.name, file.read_text("utf-8")) for file in tmp_path.iterdir()] == [
        (".gitignore", "*.pyc\n")
    ]


def test_more_patterns_rates_and_sizes_may_be_asked_for_later(smoke, tmp_path):
    scale = small_scale(patterns=("8:8",))
    options = {"data": smoke / "data", "budget_minutes": 0, "console": QUIET}
    reproduce(scale, ["sweep"], tmp_path, **options)
    main = dataclasses.replace(scale.sizes[0], search=(3e-3, 9e-3))
    second = Size(model="qwen2.5-0.5m", steps=4, seeds=1, learning_rate=9e-3)
    wider = dataclasses.replace(scale, sizes=(main, second), patterns=("8:8", "2:8"))
    assert (
        reproduce(wider, ["table2", "sweep", "search"], tmp_path, **options).left == 4 + 4 + 2 + 4
    )
    results = Results(tmp_path)
    assert results.setting["patterns"] == ["8:8", "2:8"]
    assert results.learning_rate(second.model) == 9e-3
    assert results.learning_rate(main.model) == 3e-3
    shorter = dataclasses.replace(scale, sizes=(dataclasses.replace(main, steps=2),))
    with pytest.raises(UserError, match=r"0.3m 4 -> 2; sizes.qwen2.5-0.5m 4 -> null"):
        reproduce(shorter, ["sweep"], tmp_path, **options)


def test_a_set_goes_on_in_the_type_that_it_was_begun_in(smoke, tmp_path, monkeypatch):
    options = {"data": smoke / "data", "workers": 1, "console": QUIET}
    for fast in (True, False):
        monkeypatch.setattr(device, "cpu_has_fast_bf16", lambda fast=fast: fast)
        formats = {"patterns": ("8:8",) if fast else ("8:8", "2:8")}
        assert reproduce(small_scale(**formats), ["sweep"], tmp_path, **options).trained == 2
    assert {row.precision for row in Results(tmp_path).rows} == {"bfloat16"}
    assert {row.config["precision"] for row in Results(tmp_path).rows} == {"auto"}
    assert Results(tmp_path).machines[0]["precision"] == "bfloat16"


def test_a_row_trained_with_another_config_is_refused(smoke, tmp_path):
    folder = Results(tmp_path)
    rows = [dataclasses.asdict(row) for row in Results(smoke).rows]
    rows[0]["config"]["beta1"] = 0.8
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"another config \(beta1 0.8 there, 0.9 here\)"):
        runner.finished(folder, plan(find_scale("smoke"), ALL))


def test_no_run_is_started_beyond_the_budget(smoke, tmp_path):
    outcome = reproduce(
        small_scale(), ["table2"], tmp_path, data=smoke / "data", budget_minutes=0, console=QUIET
    )
    assert (outcome.trained, outcome.left) == (0, 4)
    assert not (tmp_path / "results.jsonl").exists()


def test_runs_that_fit_into_the_budget_are_trained_behind_one_that_does_not(
    smoke, tmp_path, monkeypatch
):
    def seconds(speed, config):
        return 7200.0 if config.format == "full-8:8" else 0.0

    monkeypatch.setattr(runner.Speed, "seconds", seconds)
    outcome = reproduce(
        small_scale(), ["table2"], tmp_path, data=smoke / "data", budget_minutes=60, console=QUIET
    )
    assert (outcome.trained, outcome.left) == (3, 1)
    assert "full-8:8" not in {row.format for row in Results(tmp_path).rows}


def test_a_run_that_fails_is_named_and_the_others_go_on(smoke, tmp_path, monkeypatch):
    train = runner.train

    def failing(config, **options):
        if config.format == "full-6:8":
            raise UserError("the loss is not finite")
        return train(config, **options)

    monkeypatch.setattr(runner, "train", failing)
    outcome = reproduce(
        small_scale(), ["table2"], tmp_path, data=smoke / "data", workers=1, console=QUIET
    )
    assert outcome.trained == 3
    (message,) = outcome.failed
    assert "full-6-8" in message
    assert "not finite" in message
    monkeypatch.undo()
    again = reproduce(
        small_scale(), ["table2"], tmp_path, data=smoke / "data", workers=1, console=QUIET
    )
    assert (again.trained, again.skipped, again.failed) == (1, 3, ())


def test_runs_at_once_give_the_same_numbers(smoke, tmp_path):
    scale = small_scale(patterns=("8:8",))
    numbers = {}
    for name, count in (("one", 1), ("two", 2)):
        out = tmp_path / name
        reproduce(scale, ["sweep"], out, data=smoke / "data", workers=count, console=QUIET)
        rows = sorted(Results(out).rows, key=lambda row: row.name)
        numbers[name] = [(row.name, row.loss, row.training_loss) for row in rows]
    assert len(numbers["one"]) == 2
    assert numbers["one"] == numbers["two"]


def interrupt_at(step):
    """`train` of the runner, with a Ctrl-C at a step."""
    train = runner.train

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
def test_an_interrupted_set_goes_on_where_it_was(
    smoke, tmp_path, monkeypatch, capsys, count, steps
):
    out = tmp_path / "set"
    scale = small_scale(patterns=("8:8",))
    scale = dataclasses.replace(scale, sizes=(Size(model=scale.main, steps=steps, seeds=1),))
    options = {"data": smoke / "data", "workers": count, "console": Console()}
    if count == 1:
        monkeypatch.setattr(runner, "train", interrupt_at(5))
    with interrupt_at_a_checkpoint(out, count > 1), pytest.raises(SystemExit) as stopped:
        reproduce_cli.run(scale, ["sweep"], out=out, **options)
    monkeypatch.undo()
    assert stopped.value.code == 130
    assert "the same command continues" in capsys.readouterr().out.replace("\n", " ")
    assert len(Results(out).rows) < 2
    reproduce_cli.run(scale, ["sweep"], out=out, **options)
    rows = Results(out).rows
    assert sorted(row.format for row in rows) == ["full-8:8", "ternary-8:8"]
    assert all(Results(out).curves(row)[-1]["step"] == steps for row in rows)


@pytest.mark.parametrize("steps", [1, 7, 100, 101, 999])
def test_thinned_curves_keep_ends_means_and_validations(steps):
    rows = [
        {"step": step, "loss": float(step), "flip_rate": None if step == 1 else 1 / step}
        for step in range(1, steps + 1)
    ]
    rows.append({"step": steps, "validation_loss": 2.5})
    curve = thinned(rows)
    training = [row for row in curve if "loss" in row]
    assert len(training) <= CURVE_POINTS
    assert training[-1]["step"] == steps
    assert curve[-1] == {"step": steps, "validation_loss": 2.5}
    if steps == 999:  # 99 stretches of 10 and one of 9
        assert training[0]["loss"] == pytest.approx(5.5)
        assert training[-1]["loss"] == pytest.approx(995)


def test_flip_noise_is_the_deviation_around_a_slow_trend():
    def noise_of(flips):
        rows = [{"step": n, "loss": 1.0, "flip_rate": x} for n, x in enumerate(flips, 1)]
        return thinned(rows)[0]["flip_noise"]

    steady = [0.01 - 1e-9 * n for n in range(100 * 50)]
    noisy = [0.01 + (0.001 if n % 2 else -0.001) for n in range(100 * 50)]
    assert noise_of(steady) < 1e-8
    assert noise_of(noisy) == pytest.approx(0.001 * math.sqrt(2), rel=0.05)


def test_the_report_is_made_of_the_result_files_alone(smoke, tmp_path, monkeypatch):
    monkeypatch.chdir(smoke.parent)
    document, page = tmp_path / "docs" / "experiments.md", tmp_path / "report.html"
    write_report([Path("smoke")], document=document, page=page)
    text, html = document.read_text("utf-8"), page.read_text("utf-8")
    for number in ("26.31", "32.23", "+18.8", "27.39", "42.3"):  # the paper's own, alongside
        assert number in text
        assert number in html
    for row in Results(smoke).rows:
        assert f"{row.perplexity:.2f}" in text
    figures = re.findall(r"\]\((figures/[^)]+\.svg)\)", text)
    assert len(figures) == 7
    assert all((document.parent / figure).is_file() for figure in figures)
    for verdict in ("not decided", "no runs"):
        assert (verdict in text) == (verdict == "not decided")
    assert "- The published code's recipe, one thing at a time: not run.\n" in text
    assert "Throughput" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)  # nothing is loaded from anywhere
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    again = tmp_path / "again.md"
    write_report([Path("smoke")], document=again)
    assert again.read_bytes() == document.read_bytes()


def test_the_command_writes_below_the_results_and_prints_the_claims(
    smoke, tmp_path, monkeypatch, capsys
):
    """A file docs/experiments.md of the user's own stays."""
    (tmp_path / "docs").mkdir()
    own = tmp_path / "docs" / "experiments.md"
    own.write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    report_cli.main([str(smoke)])
    printed = capsys.readouterr().out
    assert own.read_text("utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs"]
    assert (smoke / "report.md").is_file()
    assert (smoke / "report.html").is_file()
    assert len(list((smoke / "figures").glob("*.svg"))) == 7
    for expected in ("The paper's claims", "verdict", "not decided", "report.md"):
        assert expected in printed
    assert max(len(line) for line in printed.splitlines() if "report" not in line) <= 80


def test_notes_written_by_people_become_part_of_the_page(smoke, tmp_path):
    notes = smoke / "notes.md"
    notes.write_text("The gap is `small` because\n\nof the steps.\n")
    try:
        write_report([smoke], document=tmp_path / "a.md", page=tmp_path / "a.html")
    finally:
        notes.unlink()
    assert "The gap is `small` because" in (tmp_path / "a.md").read_text("utf-8")
    assert "<p>The gap is <code>small</code> because</p>" in (tmp_path / "a.html").read_text(
        "utf-8"
    )


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no setting.json"):
        write_report([tmp_path], document=tmp_path / "a.md")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("setting.json", "{", "setting.json is damaged"),
        ("setting.json", "[]", "setting.json is damaged"),
        ("setting.json", '{"version": 1}', "setting.json is damaged: it has no data, main"),
        ("machines.jsonl", "x\n", "machines.jsonl:1: not JSON"),
        ("downstream.jsonl", "[]\n", "downstream.jsonl:1: not a JSON object"),
        ("downstream.jsonl", "{}\n", "downstream.jsonl:1: damaged, it lacks run"),
        ("machines.jsonl", "{}\n", "machines.jsonl:1: damaged, it lacks hardware"),
        ("notes.md", "Gr\xf6\xdfe", "notes.md: 'utf-8' codec can't decode"),
    ],
)
def test_damaged_files_of_a_set_are_named(smoke, tmp_path, name, content, words):
    ignored = shutil.ignore_patterns("runs", "data")
    shutil.copytree(smoke, tmp_path / "set", ignore=ignored)
    (tmp_path / "set" / name).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=re.escape(words)):
        write_report([tmp_path / "set"], document=tmp_path / "a.md")


def test_a_provenance_that_lacks_something_is_named(smoke, tmp_path):
    row = dataclasses.asdict(Results(smoke).rows[0]) | {"provenance": {"commit": "abc"}}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        UserError, match=r"results\.jsonl:1: not a result row.*no date in its provenance"
    ):
        Results(tmp_path).rows  # noqa: B018


def test_another_scale_is_refused_before_its_text_is_prepared(smoke, tmp_path):
    shutil.copy(smoke / "setting.json", tmp_path)
    with pytest.raises(UserError, match="results of another setting"):
        reproduce(find_scale("cpu"), ["table2"], tmp_path, console=QUIET)
    assert not (tmp_path / "data").exists()


def test_a_text_that_is_not_there_is_refused_before_training(smoke, tmp_path):
    options = {"data": smoke / "data", "other_text": tmp_path / "none.txt", "console": QUIET}
    with pytest.raises(UserError, match=r"none\.txt"):
        reproduce(find_scale("smoke"), ["table2"], tmp_path, **options)
    assert not (tmp_path / "runs").exists()


def test_experiments_without_runs_are_refused(smoke, tmp_path):
    with pytest.raises(UserError, match="scale smoke has no runs of recipe, own-rates"):
        reproduce(
            find_scale("smoke"),
            ["recipe", "own-rates"],
            tmp_path,
            data=smoke / "data",
            console=QUIET,
        )
    assert not any(tmp_path.iterdir())


def test_a_signal_before_training_listens_stops_at_the_first_step(monkeypatch):
    monkeypatch.setattr(workers, "_parent", os.getppid())
    monkeypatch.setattr(workers, "_worker_steps", queue.Queue())
    workers._asked_to_stop.set()
    (run,) = plan(small_scale(), ["table2"])[:1]

    def train_one(run, on_step):
        received = threading.Event()
        with stop_signals(received.set):
            for step in (1, 2):
                on_step(run.name, {"step": step, "loss": 1.0})
            return received.is_set()

    assert workers._in_worker(train_one, run)
