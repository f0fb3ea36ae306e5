# SPDX-License-Identifier: Apache-2.0
"""lm-eval over an engine gives the scores of lm-eval's own model, and computes each context once."""

import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.models.huggingface import HFLM

from small_models import write_models
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.cli import evaluate
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.engine_lm import EngineLM
from sparse_bitnet.evaluation.harness import evaluate_tasks
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.generation.text import TextTokenizer

pytestmark = pytest.mark.usefixtures("quick_lm_eval")
WORDS = ["some", "words", "more", "talk about", "few"]

TASKS = {
    "choosing": """\
output_type: multiple_choice
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "writing": """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_target: "{{question}} {{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}

HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {path}}}
training_split: null
validation_split: validation
test_split: null
doc_to_text: "{text}"
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models")) / "packed"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with one local task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    rows = [
        {"question": f"some words about {w}", "gold": 1, "choices": [w, f"{w} and more", "x"]}
        for w in WORDS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rest in TASKS.items():
        text = "" if name == "rolling" else "{{question}}:"
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name, path=data, text=text) + rest)
    return folder


@pytest.fixture
def models(packed):
    """lm-eval's own model, and ours over the same forward."""
    opened = open_model(packed, EngineOptions(engine="transformers"))
    model = from_pretrained(packed, dtype=torch.float32).eval()
    theirs = HFLM(model, backend="causal", tokenizer=load_tokenizer(packed), batch_size=3)
    yield theirs, EngineLM(opened, batch_size=3)
    assert not opened.engine.sequences, "every sequence is given back"
    opened.engine.close()


def requests(*arguments):
    return [SimpleNamespace(args=pair) for pair in arguments]


PAIRS = [
    ("some words", " and more"),
    ("some words", " talk"),
    ("some words", "e"),
    ("some words ", "about"),
    ("", "words to talk"),
    ("some words", " and more"),
    ("few " * 300, "words"),
    ("some words, and some more words to talk about when few", " are"),
    ("some words, and some more words to talk about when few", " words are"),
]


@pytest.mark.parametrize("cache_tokens", [None, 1000])
def test_log_likelihoods_are_lm_evals(packed, models, cache_tokens):
    """Also where the cache is too small for a batch."""
    theirs, _ = models
    opened = open_model(packed, EngineOptions(engine="transformers", cache_tokens=cache_tokens))
    ours = EngineLM(opened, batch_size=8)
    expected, scores = (
        model.loglikelihood(requests(*PAIRS), disable_tqdm=True) for model in (theirs, ours)
    )
    for (a, a_greedy), (b, b_greedy) in zip(expected, scores, strict=True):
        assert b == pytest.approx(a, abs=1e-4)
        assert a_greedy == b_greedy
    opened.engine.close()


def test_rolling_log_likelihoods_are_lm_evals(models):
    texts = [("some words and more",), ("words to talk about " * 200,)]
    theirs, ours = (
        model.loglikelihood_rolling(requests(*texts), disable_tqdm=True) for model in models
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_generated_texts_are_lm_evals(models):
    kinds = [{"until": ["e"], "max_gen_toks": 20}, {"until": [], "max_gen_toks": 5}]
    asked = requests(*[(f"some {word}", kinds[place % 2]) for place, word in enumerate(WORDS)])
    models[0].model.generation_config.repetition_penalty = 1.3
    models[1].defaults["repetition_penalty"] = 1.3
    theirs, ours = (model.generate_until(asked, disable_tqdm=True) for model in models)
    assert ours == theirs
    assert len(set(ours)) > 1


def test_a_special_token_among_the_stop_strings_ends_the_text_as_in_lm_eval(models):
    theirs, ours = models
    asked = requests(("some words", {"until": ["never"], "max_gen_toks": 20}))
    (whole,) = ours.generate_until(asked, disable_tqdm=True)
    plain = {letter for letter in whole if letter.isascii() and letter.isprintable()}
    name = max(plain.difference("some words"), key=whole.find)
    for model in models:
        model.tokenizer.add_special_tokens({"extra_special_tokens": [name]})
    ours.model.tokenizer = TextTokenizer(ours.tokenizer.backend_tokenizer)
    asked = requests(("some words", {"until": [name], "max_gen_toks": 20}))
    texts, expected = (model.generate_until(asked, disable_tqdm=True) for model in (ours, theirs))
    assert texts == expected
    assert texts == [whole.partition(name)[0]]


def test_prompts_beyond_the_context_are_user_errors(models):
    _, ours = models
    with pytest.raises(UserError, match="an answer alone has more tokens"):
        ours.loglikelihood(requests(("some", " word" * 600)), disable_tqdm=True)
    with pytest.raises(UserError, match="an answer of the task adds no token to its question 'so"):
        ours.loglikelihood(requests(("some", "")), disable_tqdm=True)
    with pytest.raises(UserError, match="leave no room for a prompt"):
        ours.generate_until(requests(("some", {"max_gen_toks": 512})), disable_tqdm=True)
    with pytest.raises(UserError, match="needs --engine transformers: the CPU engine is greedy"):
        ours.generate_until(requests(("some", {"do_sample": True})), disable_tqdm=True)
    with pytest.raises(UserError, match="generation with num_beams=4 needs --engine transf"):
        ours.generate_until(requests(("some", {"num_beams": 4})), disable_tqdm=True)


def test_the_cpu_engine_scores_tasks_as_pytorch_does(packed, tasks, tmp_path, capsys):
    pytest.importorskip("sparse_bitnet._cpu")
    names = list(TASKS)
    options = ["--tasks", ",".join(names), "--include-path", str(tasks), "--fewshot", "1"]
    scores = tmp_path / "scores.json"
    evaluate.main([str(packed), *options, "--engine", "cpu", "--out", str(scores)])
    assert "acc_norm" in capsys.readouterr().out
    ours = json.loads(scores.read_text())
    theirs = evaluate_tasks(
        packed, names, include_path=tasks, fewshot=1, precision="float32", device="cpu"
    )
    for task in names:
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-3), metric
    assert ours["n-samples"] == theirs["n-samples"]


def test_perplexity_of_the_cpu_engine_is_that_of_pytorch(packed, tmp_path, capsys):
    pytest.importorskip("sparse_bitnet._cpu")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"some words and {number} more" for number in range(60)))
    results = {}
    for engine in ("cpu", "transformers"):
        options = ["--context-length", "100", "--batch-size", "3"]
        options += ["--precision", "float32"] if engine == "transformers" else ["--threads", "2"]
        output = tmp_path / f"{engine}.json"
        arguments = [str(packed), "--data", str(text), "--engine", engine, "--out", str(output)]
        evaluate.main([*arguments, *options])
        results[engine] = json.loads(output.read_text())
    cpu, reference = results["cpu"], results["transformers"]
    assert cpu["perplexity"] == pytest.approx(reference["perplexity"], rel=1e-3)
    for key in ("tokens", "context_length", "text_bytes", "checkpoint", "format"):
        assert cpu[key] == reference[key]
    assert cpu["format"] == "ternary-6:8, packed as b3"
    assert cpu["device"] == "cpu engine"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("packed", ["--engine", "cpu", "--precision", "bf16"], "computes in float32"),
        ("packed", ["--engine", "transformers", "--head", "int8"], "--head int8 is not used here"),
        (
            "packed",
            ["--device", "cuda", "--threads", "1"],
            r"--threads 1 is not used .*--device cuda",
        ),
        ("trained", ["--kv-cache", "int8"], "the model is not packed"),
        ("trained", ["--engine", "cpu"], "pack it first"),
        ("packed", ["--context-length", "513"], "513"),
        ("packed", ["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        ("packed", ["--max-tokens", "-5"], "--max-tokens -5: must be at least 0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(packed, tmp_path, model, options, words):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    with pytest.raises(UserError, match=words):
        evaluate.main([str(packed.parent / model), "--data", str(text), *options])
