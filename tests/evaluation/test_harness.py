# SPDX-License-Identifier: Apache-2.0
"""lm-eval on our models: the same numbers as lm-eval's own, local tasks, clear refusals."""

import json
import re
import sys

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.cli import evaluate
from sparse_bitnet.cli.main import main
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation import harness
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.usefixtures("quick_lm_eval")

QUESTIONS = [
    {
        "question": f"What follows {word}?",
        "choices": [word * 2, "nothing at all"],
        "gold": place % 2,
    }
    for place, word in enumerate(["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"])
]

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
output_type: multiple_choice
training_split: null
validation_split: validation
test_split: null
doc_to_text: "{{{{question}}}} Answer:"
doc_to_target: gold
doc_to_choice: choices
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture
def tasks(tmp_path):
    """A folder with one local task."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "doubling.yaml").write_text(TASK.format(name="doubling", path=data))
    return folder


@pytest.fixture(params=["ternary-6:8", "full-2:4"])
def checkpoint(request, tmp_path):
    """A converted model with a tokenizer, saved as transformers saves it."""
    texts = [f"{q['question']} Answer: {' '.join(q['choices'])}" for q in QUESTIONS]
    tokenizer = train_tokenizer(iter(texts * 3), 300)
    model = tiny_model(vocab_size=len(tokenizer))
    convert_(model, SparseBitConfig.parse(request.param))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    save_pretrained(model, tmp_path / "model", tokenizer)
    return tmp_path / "model"


def test_numbers_are_those_of_lm_eval_on_the_same_folder(checkpoint, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    ours = harness.evaluate_tasks(
        checkpoint, ["doubling"], include_path=tasks, precision="float32", device="cpu"
    )
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(checkpoint), "dtype": "float32"},
        tasks=["doubling"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=8,
        device="cpu",
        bootstrap_iters=1000,
    )
    assert ours["results"] == theirs["results"]
    assert ours["n-samples"]["doubling"]["effective"] == len(QUESTIONS)
    scores = harness.accuracies(ours)["doubling"]
    assert scores["acc"] == theirs["results"]["doubling"]["acc,none"]
    assert set(scores) == {"acc", "acc_norm"}
    json.dumps(ours)


HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["is using wrap.", "is ripping tiles off.", "holds a cube.", "starts pulling."],
    "source_id": "activitynet~v_-JhWjGDPHMY",
    "split": "val",
    "split_type": "indomain",
    "label": "3",
}
ARC = {
    "id": "Mercury_417466",
    "question": "Which statement best explains why photosynthesis is the foundation of food webs?",
    "choices": {"text": ["Sunlight", "Water", "Oxygen", "Soil"], "label": ["A", "B", "C", "D"]},
    "answerKey": "A",
}
PIQA = {"goal": "open a jar", "sol1": "turn the lid", "sol2": "turn the table", "label": 0}
BOOLQ = {"question": "is ice cold", "passage": "Ice is frozen water.", "idx": 0, "label": 1}
COPA = {
    "premise": "My body cast a shadow.",
    "choice1": "The sun was rising.",
    "choice2": "The grass was cut.",
    "question": "cause",
    "idx": 0,
    "label": 0,
}
DOWNLOADED = {
    "hellaswag/data/validation-00000-of-00001.parquet": (HELLASWAG, 2),
    "ai2_arc/ARC-Easy/test-00000-of-00001.parquet": (ARC, 3),
    "ai2_arc/ARC-Easy/validation-00000-of-00001.parquet": (ARC, 1),
    "ai2_arc/ARC-Challenge/test-00000-of-00001.parquet": (ARC, 1),
    "piqa/plain_text/train-00000-of-00001.parquet": (PIQA, 1),
    "piqa/plain_text/validation-00000-of-00001.parquet": (PIQA, 4),
    "super_glue/boolq/validation-00000-of-00001.parquet": (BOOLQ, 5),
    "super_glue/copa/validation-00000-of-00001.parquet": (COPA, 6),
    "super_glue/copa/train-00000-of-00001.parquet": (COPA, 1),
}
"""Rows of the paper's data sets as they lie on the hub, and how many."""


@pytest.fixture
def downloaded(tmp_path):
    """A folder of the paper's five data sets."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, (row, count) in DOWNLOADED.items():
        path = tmp_path / "sets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row] * count), path)
    return tmp_path / "sets"


@pytest.mark.parametrize("checkpoint", ["ternary-6:8"], indirect=True)
def test_the_papers_tasks_are_scored_from_a_folder_of_data_sets(
    checkpoint, downloaded, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    results = harness.evaluate_tasks(checkpoint, ["paper"], include_path=downloaded, device="cpu")
    asked = {task: count["effective"] for task, count in results["n-samples"].items()}
    assert asked == {"hellaswag": 2, "arc_easy": 3, "piqa": 4, "boolq": 5, "copa": 6}
    norm = {task for task, scores in harness.accuracies(results).items() if "acc_norm" in scores}
    assert norm == {"hellaswag", "arc_easy", "piqa"}
    ([arc], _) = harness.load_tasks(["arc_easy"], downloaded)
    assert arc.doc_to_target(arc.test_docs()[0]) == 0


def write_rows(path, row, count=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((json.dumps(row) + "\n") * count)


def test_a_data_set_may_be_one_file(tmp_path, monkeypatch):
    """In a relative folder of any name, and a link."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "blob", HELLASWAG, 2)
    (tmp_path / "dat😀").mkdir()
    (tmp_path / "dat😀" / "hellaswag_raw.jsonl").symlink_to(tmp_path / "blob")
    ([loaded], _) = harness.load_tasks(["hellaswag"], "dat😀")
    assert len(loaded.eval_docs) == 2


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ai2_arc/ARC-Challenge/test-00000-of-00001.parquet", "arc_easy"),
        ("super_glue/copa/validation.parquet", "boolq"),
    ],
)
def test_other_configurations_of_a_data_set_are_ignored(tmp_path, name, task):
    write_rows(tmp_path / "sets" / name, ARC)
    harness.write_task_files([task], tmp_path / "sets", tmp_path)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("piqa-Train.jsonl", "piqa-Train.jsonl is not of the split validation"),
        ("piqa/train.parquet", "has no .parquet file of its validation split"),
    ],
)
def test_a_data_set_without_the_needed_split_is_named(tmp_path, name, words):
    write_rows(tmp_path / name, PIQA)
    with pytest.raises(UserError, match=f"task piqa: .*{words}"):
        harness.load_tasks(["piqa"], tmp_path)


def test_data_without_its_answers_is_refused(tmp_path):
    write_rows(tmp_path / "piqa-valid.jsonl", {key: PIQA[key] for key in ("goal", "sol1", "sol2")})
    with pytest.raises(UserError, match=r"task piqa: its data has no label; .*\(baber/piqa\)"):
        harness.load_tasks(["piqa"], tmp_path)


@pytest.fixture
def groups(tasks):
    """The folder of tasks with a second one, and groups: of both, of that group, of one task."""
    data = tasks / "questions.jsonl"
    (tasks / "tripling.yaml").write_text(TASK.format(name="tripling", path=data))
    held = {"both": ["doubling", "tripling"], "outer": ["both"], "other": ["tripling"]}
    for name, members in held.items():
        group = {"group": name, "task": members, "aggregate_metric_list": [{"metric": "acc"}]}
        (tasks / f"{name}.yaml").write_text(json.dumps(group))
    return tasks


@pytest.mark.parametrize("checkpoint", ["ternary-6:8"], indirect=True)
def test_a_group_is_scored_beside_its_tasks(checkpoint, groups):
    asked = ["doubling,both", "doubling"]
    results = harness.evaluate_tasks(checkpoint, asked, include_path=groups, limit=2, device="cpu")
    assert results["results"].keys() == {"both", "doubling", "tripling"}
    assert harness.accuracies(results).keys() == {"doubling", "tripling"}


def test_a_group_may_hold_another_but_share_no_task_with_it(groups):
    (group,) = harness.load_tasks(["both", "outer"], groups)[0]
    assert group.name == "outer"
    with pytest.raises(UserError, match=r"'tripling': found in both 'both' and 'other'"):
        harness.load_tasks(["both", "other"], groups)


def test_unknown_tasks_and_folders_are_refused(tasks, monkeypatch):
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager.__init__.__defaults__", (None, None, False, None)
    )
    with pytest.raises(UserError, match="task 'tripling' is unknown to lm-eval"):
        harness.load_tasks(["tripling"], tasks)
    with pytest.raises(UserError, match="no such folder"):
        harness.load_tasks(["doubling"], tasks / "nowhere")


@pytest.mark.parametrize("what", ["somebody/questions", "json"])
def test_a_task_without_its_data_says_which_data(tasks, what, monkeypatch):
    text = TASK.format(name="remote", path=tasks / "missing.jsonl")
    (tasks / "remote.yaml").write_text(text.replace("dataset_path: json", f"dataset_path: {what}"))
    named = "somebody/questions" if "/" in what else "missing.jsonl"
    with pytest.raises(UserError, match=rf"task remote: .*{named}.*--include-path"):
        harness.load_tasks(["remote"], tasks)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("metric: acc\n", "metric: nosuch\n", "lm-eval: nosuch not found in the evaluate library"),
        ("aggregation: mean", "aggregation: nosuch", "lm-eval has no such aggregation of acc"),
        ("{{question}}", "{{missing}}", "lm-eval: UndefinedError: 'missing' is undefined"),
        ("doc_to_target: gold", "doc_to_target: missing", "its data has no missing; doc_to_target"),
        ("multiple_choice", "nosuch", "lm-eval: ValueError: Got invalid output_type 'nosuch'"),
        ("validation_split: validation", "validation_split: dev", "lm-eval: KeyError: 'dev'"),
    ],
)
def test_lm_evals_errors_in_a_task_are_quoted(tasks, monkeypatch, old, new, reason):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    text = (tasks / "doubling.yaml").read_text()
    assert old in text
    (tasks / "wrong.yaml").write_text(text.replace(old, new).replace("task: dou", "task: wrong #"))
    with pytest.raises(UserError, match=f"^task wrong: {re.escape(reason)}") as refused:
        harness.load_tasks(["wrong"], tasks)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("checkpoint", ["ternary-6:8"], indirect=True)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("unsafe_code: true", "ValueError: Attempted to run task: doubling which is marked as"),
        ("output_type: generate_until", "AssertionError: Invalid configuration"),
    ],
)
def test_lm_evals_errors_while_scoring_are_one_line(checkpoint, tasks, changed, reason, capsys):
    file, key = tasks / "doubling.yaml", changed.partition(":")[0]
    kept = [line for line in file.read_text().splitlines() if not line.startswith(key)]
    file.write_text("\n".join([*kept, changed]))
    options = ["--tasks", "doubling", "--include-path", str(tasks), "--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(checkpoint), *options])
    assert stopped.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith(f"sparse-bitnet: --tasks: lm-eval: {reason}")


def test_without_lm_eval_the_extra_is_named(monkeypatch, checkpoint):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'pip install "\.\[lm-eval\]"'):
        harness.evaluate_tasks(checkpoint, ["paper"])


def test_the_command_prints_metrics_and_writes_lm_evals_json(checkpoint, tasks, tmp_path, capsys):
    scores = tmp_path / "scores.json"
    task = ["--tasks", "doubling", "--include-path", str(tasks)]
    evaluate.main([*task, str(checkpoint), "--out", str(scores)])
    text = capsys.readouterr().out
    assert re.search(rf"^{checkpoint}:\n.*acc_norm", text, re.S)
    written = json.loads(scores.read_text())
    assert harness.accuracies(written)["doubling"]["acc"] == pytest.approx(
        float(re.search(r"acc +\|[^|]*\|([\d. ]+)\|", text)[1]), abs=1e-4
    )


@pytest.mark.parametrize("options", [[], ["--tasks", "doubling", "--data", "text.txt"]])
def test_perplexity_or_tasks_never_both_and_never_neither(options):
    with pytest.raises(UserError, match="either --data"):
        evaluate.main(["model", *options])
