# SPDX-License-Identifier: Apache-2.0
"""lm-eval on our models: the same numbers as lm-eval's own, local tasks, clear refusals."""

import json
import sys

import pytest
import torch

from factories import tiny_model
from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.cli import evaluate
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation import harness
from sparse_bitnet.evaluation.harness import accuracies, evaluate_tasks, load_tasks
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig

pytest.importorskip("lm_eval")

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


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    """No survey of the machine, which takes seconds; data sets are cached below a temporary folder."""
    import datasets

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


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

    ours = evaluate_tasks(
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
    scores = accuracies(ours)["doubling"]
    assert scores["acc"] == theirs["results"]["doubling"]["acc,none"]
    assert set(scores) == {"acc", "acc_norm"}
    json.dumps(ours)


def test_masks_are_selected_once_and_released(checkpoint, tasks, monkeypatch):
    from sparse_bitnet.nn.layer import SparseBitLinear

    calls = []
    select = SparseBitLinear.select_
    monkeypatch.setattr(
        SparseBitLinear, "select_", lambda layer: (calls.append(layer), select(layer))[1]
    )
    evaluate_tasks(checkpoint, ["doubling"], include_path=tasks, limit=3, device="cpu")
    assert len(calls) == len(set(map(id, calls))) == 14


def test_paper_stands_for_the_papers_five_tasks(monkeypatch, checkpoint):
    asked = []
    monkeypatch.setattr(harness, "load_tasks", lambda names, _: asked.extend(names) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate_tasks(checkpoint, ["paper", "doubling"])
    assert asked == ["hellaswag", "arc_easy", "piqa", "boolq", "copa", "doubling"]


@pytest.mark.parametrize("order", ["first", "last"])
def test_the_option_for_tasks_leaves_the_checkpoint_alone(monkeypatch, order):
    given = []
    monkeypatch.setattr(evaluate, "run_tasks", lambda *arguments: given.append(arguments))
    options = ["--tasks", "piqa,copa"]
    evaluate.main([*options, "folder"] if order == "first" else ["folder", *options])
    ((checkpoint, config),) = given
    assert (checkpoint, config.tasks) == ("folder", ("piqa,copa",))


def test_tasks_may_be_joined_by_commas(monkeypatch):
    monkeypatch.setattr(harness, "load_tasks", lambda names, _: names)
    assert harness.load_paper_tasks(["paper,doubling", "x"]) == [
        *harness.PAPER_TASKS,
        "doubling",
        "x",
    ]


def test_unknown_tasks_and_folders_are_refused(tasks, monkeypatch):
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager.__init__.__defaults__", (None, None, False, None)
    )
    with pytest.raises(UserError, match="task 'tripling' is unknown to lm-eval"):
        load_tasks(["tripling"], tasks)
    with pytest.raises(UserError, match="no such folder"):
        load_tasks(["doubling"], tasks / "nowhere")


@pytest.mark.parametrize("what", ["somebody/questions", "json"])
def test_a_task_without_its_data_says_which_data(tasks, what, monkeypatch):
    text = TASK.format(name="remote", path=tasks / "missing.jsonl")
    (tasks / "remote.yaml").write_text(text.replace("dataset_path: json", f"dataset_path: {what}"))
    named = "somebody/questions" if "/" in what else "missing.jsonl"
    with pytest.raises(UserError, match=rf"task remote: .*{named}.*--include-path"):
        load_tasks(["remote"], tasks)


def test_without_lm_eval_the_extra_is_named(monkeypatch, checkpoint):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'sparse-bitnet\[lm-eval\]'"):
        evaluate_tasks(checkpoint, ["paper"])


def test_the_command_prints_metrics_and_writes_lm_evals_json(checkpoint, tasks, tmp_path, capsys):
    scores = tmp_path / "scores.json"
    task = ["--tasks", "doubling", "--include-path", str(tasks)]
    evaluate.main([str(checkpoint), *task, "--json", str(scores)])
    text = capsys.readouterr().out
    assert "acc_norm" in text
    written = json.loads(scores.read_text())
    assert accuracies(written)["doubling"]["acc"] == pytest.approx(
        float(text.split("acc")[1].split()[0]), abs=1e-4
    )


@pytest.mark.parametrize("options", [[], ["--tasks", "doubling", "--data", "text.txt"]])
def test_perplexity_or_tasks_never_both_and_never_neither(options):
    with pytest.raises(UserError, match="either --data, for perplexity, or --tasks"):
        evaluate.main(["model", *options])
