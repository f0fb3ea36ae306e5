# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on conversations: what is computed, LoRA, and everything that comes after."""

import itertools
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from small_runs import final_weights, interrupted, logged, losses
from transformers import BloomConfig, BloomForCausalLM

from factories import tiny_model
from small_models import ENDED_TEMPLATE as TEMPLATE
from small_models import conversation, write_conversations
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.cli import train as command
from sparse_bitnet.cli.evaluate import main as evaluate
from sparse_bitnet.cli.prepare import main as prepare_command
from sparse_bitnet.data.chat import LEARNT
from sparse_bitnet.data.loader import TokenLoader, Windows
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import evaluate as evaluation
from sparse_bitnet.evaluation.perplexity import read_text
from sparse_bitnet.export.gguf_vocabulary import add_vocabulary
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.generation.open_model import end_tokens
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.training.loss import SummedLoss
from sparse_bitnet.training.metrics import describe
from sparse_bitnet.training.trainer import train


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ and chats.jsonl."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = train_tokenizer(iter(["<|user|><|assistant|> one two three"] * 3), 300)
    tokenizer.chat_template = TEMPLATE
    model = tiny_model("llama", vocab_size=304)
    model.config.eos_token_id = tokenizer.eos_token_id
    save_pretrained(
        convert_(model, SparseBitConfig.parse("ternary-6:8")), folder / "model", tokenizer
    )
    rows = [conversation(f"{n} and", f"{n} " * (n % 5 + 1)) for n in range(40)]
    write_conversations(folder / "chats.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def data(chats: Path) -> Path:
    source = parse_source(str(chats / "chats.jsonl"), chat=True, validation_fraction=0.2)
    prepare(source, chats / "data", tokenizer=chats / "model", chat=True)
    return chats / "data"


@pytest.fixture
def chat_run(small_run: Any, chats: Path, data: Path) -> Any:
    """`chat_run(**changes)`: the config of a short training on them."""
    values = {"data": str(data), "init": str(chats / "model"), "learning_rate": 1e-2}
    return lambda **changes: small_run(**{**values, **changes})


@pytest.mark.parametrize(
    ("template", "ends", "warns"),
    [
        (TEMPLATE, [], False),
        (TEMPLATE.replace("{{ eos_token }}", "<|im_end|>\n"), ["<|eom|>", "<|im_end|>"], False),
        (TEMPLATE.replace("{{ eos_token }}", "\n"), ["<|eom|>"], True),
        (
            "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            ["<|eom|>", "<|im_end|>"],
            True,
        ),
    ],
)
def test_end_of_turn_tokens_end_texts_of_the_model(
    chats: Path,
    chat_run: Any,
    tmp_path: Path,
    capsys: Any,
    template: str,
    ends: list[str],
    warns: bool,
) -> None:
    """In `final/`, packed, and in GGUF; the model's own special end tokens stay."""
    folder = shutil.copytree(chats / "model", tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    if ends:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|eom|>"]})
        own = [tokenizer.convert_tokens_to_ids("<|eom|>"), 2]  # which is no special token
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    source = parse_source(str(chats / "chats.jsonl"), chat=True, validation_fraction=0.2)
    prepare(source, tmp_path / "data", tokenizer=folder, chat=True)
    train(config := chat_run(steps=1, data=str(tmp_path / "data"), init=str(folder)))
    final = Path(config.out) / "final"
    stored = json.loads((final / "generation_config.json").read_text())
    wanted = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ends)]
    assert stored["eos_token_id"] == (wanted if ends else wanted[0])
    assert ("the model will never stop" in capsys.readouterr().err) == warns
    pack_checkpoint(final, tmp_path / "packed")
    assert end_tokens(tmp_path / "packed") == {*wanted}
    add_vocabulary(writer := GGUFWriter("unused", "qwen2"), final, 304)
    fields = writer.kv_data[0]
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom")]
    assert {fields[key].value for key in keys if key in fields} == {*wanted}


def long_questions(chats: Path, folder: Path, words: int, count: int, *options: str) -> str:
    """Prepare conversations of a question with so many words and a short answer."""
    rows = [conversation(f"{n} " * words, "yes") for n in range(count)]
    text = str(write_conversations(folder / "long.jsonl", rows))
    chat = ["--chat", "--tokenizer", str(chats / "model"), "--no-near-duplicates"]
    prepare_command([text, str(folder / "long"), *chat, *options])
    return str(folder / "long")


def test_validation_without_an_answer_is_refused_at_once(chat_run, chats, tmp_path):
    data = long_questions(chats, tmp_path, 400, 60, "--validation-fraction", "0.2")
    config = chat_run(data=data, validation_tokens=32)
    with pytest.raises(UserError, match="no answer in its first 32 validation tokens"):
        train(config)
    assert not Path(config.out).exists()


def test_a_step_without_anything_to_learn_has_no_loss(chat_run, chats, tmp_path, capsys):
    data = long_questions(chats, tmp_path, 200, 4)
    assert "train windows of 256 tokens hold no answer to learn (0, " in capsys.readouterr().out
    windows = Windows(TokenDataset.open(data), 60)
    empty = [n for n in range(len(windows)) if not windows.learnt(np.array([n]))]
    assert 0 < len(empty) < len(windows)
    options = {"sequence_length": 60, "batch_size": 1, "micro_batch_size": 1}
    config = chat_run(data=data, steps=len(windows), validation_tokens=0, **options)
    seen: list[Any] = []
    result = train(config, on_step=seen.append)
    named = f"{len(empty)} of {len(windows)} train windows of 60 tokens hold no answer to learn"
    assert named in capsys.readouterr().err
    curve = losses(config)
    assert curve.count(None) == len(empty)
    assert 0.0 not in curve
    assert result.training_loss == curve[-1]
    assert sum(describe(row).startswith("loss - ") for row in seen) == len(empty)
    first = curve.index(None) + 1
    interrupted(again := replace(config, out=config.out + "-again"), first)
    train(again)
    assert losses(again) == curve


def test_a_run_without_anything_to_learn_is_refused(chat_run, chats, tmp_path):
    data = long_questions(chats, tmp_path, 200, 4)
    dataset = TokenDataset.open(data)
    seed = next(
        seed
        for seed in itertools.count()
        if not TokenLoader(dataset, sequence_length=60, batch_size=1, seed=seed).learnt(0)
    )
    options = {"sequence_length": 60, "batch_size": 1, "micro_batch_size": 1, "data_seed": seed}
    config = chat_run(data=data, steps=1, validation_tokens=0, **options)
    with pytest.raises(UserError, match="no step of this run has anything to learn"):
        train(config)
    assert not Path(config.out).exists()


@pytest.mark.parametrize("attention", ["sdpa", "eager", "causal_blocks", "qwen3_5_text", "lfm2"])
def test_a_window_of_conversations_is_as_good_as_each_alone(
    chats: Path, data: Path, attention: str
) -> None:
    import sparse_bitnet.training.causal_blocks  # noqa: F401  (registers one of them)

    dataset = TokenDataset.open(data)
    has_state = attention in ("qwen3_5_text", "lfm2")
    model: Any = tiny_model(attention, vocab_size=304) if has_state else None
    model = (model or from_pretrained(chats / "model")).eval()
    model.set_attn_implementation("sdpa" if has_state else attention)
    windows = Windows(dataset, 100)
    ids, labels, positions = map(torch.from_numpy, windows.batch(np.arange(2)))
    assert int((positions == 0).sum()) > 6
    together = SummedLoss(model)(ids, labels, positions)
    alone = 0.0
    for row, label, place in zip(ids, labels, positions, strict=True):
        bounds = [*torch.where(place == 0)[0].tolist(), len(row)]
        for start, end in itertools.pairwise(bounds):
            alone += SummedLoss(model)(row[None, start:end], label[None, start:end])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-4)
    assert abs(SummedLoss(model)(ids, labels) - alone) > 1e-2


def test_only_assistant_words_count_in_the_loss(chat_run: Any) -> None:
    """Whatever the micro-batches, over the predictions that count, and with a teacher."""
    train(whole := chat_run(steps=2, micro_batch_size=4))
    assert 4.0 < losses(whole)[0] < 8.0
    train(parts := chat_run(steps=2, micro_batch_size=1, out=whole.out + "-parts"))
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    teacher = {"teacher": whole.init, "steps": 2, "logits_weight": 0.5, "ce_weight": 1.0}
    train(direct := chat_run(**teacher, out=whole.out + "-taught"))
    cache = {"logit_cache": whole.out + "-cache", "top_logits": 304}
    train(cached := chat_run(**teacher, **cache, out=whole.out + "-cached"))
    np.testing.assert_allclose(losses(cached), losses(direct), rtol=1e-3)


def test_evaluate_scores_answers_as_training_does(
    chat_run: Any, chats: Path, data: Path, tmp_path: Path
) -> None:
    result = train(config := chat_run(validation_tokens=0, sequence_length=64))
    seen: list[tuple[int, int]] = []
    read = read_text(config.out, data, context_length=64)
    whole = evaluation(*read, precision="float32", on_batch=lambda *done: seen.append(done))
    assert (whole.tokens, whole.text_bytes) == (result.validation_tokens, None)
    assert seen[-1] == (whole.tokens, whole.tokens)
    assert whole.mean_nll == pytest.approx(result.validation_loss, rel=1e-5)

    rows = tmp_path / "rows.jsonl"
    lines = (chats / "chats.jsonl").read_text().splitlines()[:9]
    rows.write_text("\n".join([*lines, '{"messages": []}']))
    source = parse_source(str(rows), chat=True, validation_fraction=0.0)
    prepare(source, tmp_path / "rows", tokenizer=chats / "model", chat=True)
    learnt = int((TokenDataset.open(tmp_path / "rows").stored(slice(None)) & LEARNT != 0).sum())
    pack_checkpoint(Path(config.out) / "final", tmp_path / "packed", format="i2")
    for length in (64, 7):
        options = ["--data", str(rows), "--chat", "--context-length", str(length)]
        reports = []
        for model, engine in (
            (config.out, ["--engine", "transformers", "--precision", "float32"]),
            (tmp_path / "packed", ["--engine", "cpu"]),
        ):
            out = tmp_path / f"{engine[1]}-{length}.json"
            evaluate([str(model), *options, *engine, "--out", str(out)])
            reports.append(json.loads(out.read_text()))
            assert reports[-1]["tokens"] == learnt
        assert reports[1]["mean_nll"] == pytest.approx(reports[0]["mean_nll"], rel=1e-3)
    out = tmp_path / "both.json"
    options = ["--data", str(rows), "--chat", "--max-tokens", "37", "--out", str(out)]
    evaluate([config.out, config.init, *options])
    both = json.loads(out.read_text())
    assert [each["tokens"] for each in both] == [37, 37]
    assert [each["context_length"] for each in both] == [64, 64]
    assert both[0]["mean_nll"] < both[1]["mean_nll"] - 0.1
    rows.write_text('{"messages": []}')
    with pytest.raises(UserError, match="no assistant message"):
        read_text(config.out, rows, chat=True)


@pytest.mark.parametrize("tables", ["", ",embeddings=ternary"])
def test_samples_are_greedy_answers_and_change_nothing_of_the_run(
    chat_run: Any, chats: Path, tables: str
) -> None:
    train(alone := chat_run(steps=4, validation_every=2, format=f"ternary-6:8{tables}"))
    samples: list[tuple[int, str]] = []
    shown = replace(alone, out=alone.out + "-shown")
    train(shown, on_sample=lambda row, text: samples.append((row["step"], text)))
    assert logged(shown) == logged(alone)
    assert final_weights(shown) == final_weights(alone)
    assert [step for step, _ in samples] == [2, 4]
    model, tokenizer = from_pretrained(f"{shown.out}/final").eval(), load_tokenizer(chats / "model")
    prompt = "<|user|>Why is the sky blue?<|endoftext|><|assistant|>"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    said = tokenizer.decode(
        model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    )
    assert samples[-1][1] == " ".join(f"Why is the sky blue? ... {said}".split())


@pytest.mark.parametrize("lora", [0, 4])
def test_a_stopped_run_resumes(chat_run: Any, lora: int) -> None:
    if lora:
        pytest.importorskip("peft")
    train(straight := chat_run(lora=lora))
    again = chat_run(lora=lora, out=straight.out + "-again")
    interrupted(again, 3, signal.SIGTERM)
    if lora:
        with pytest.raises(UserError, match="holds adapters beside the weights"):
            evaluate([again.out, "--data", straight.data])
    train(again)
    assert losses(again) == losses(straight)
    assert final_weights(again) == final_weights(straight)


def test_lora_trains_adapters_and_merges_them(
    chat_run: Any, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    samples = list[int]()
    config = chat_run(lora=4, steps=12)
    result = train(config, on_sample=lambda row, _: samples.append(row["step"]))
    assert samples == [12]
    said = capsys.readouterr().err
    assert "with the adapters beside the weights; merging them changes" in said
    (share,) = (row[name] for row in logged(config) if (name := "merged_codes_changed") in row)
    assert losses(config)[-1] < losses(config)[0]
    before, after = (from_pretrained(f) for f in (chats / "model", Path(config.out) / "final"))
    assert before.state_dict().keys() == after.state_dict().keys()
    pairs = zip(sparse_layers(before).values(), sparse_layers(after).values(), strict=True)
    codes = [(a.select().codes, b.select().codes) for a, b in pairs]
    changed = sum(int((a != b).sum()) for a, b in codes) / sum(a.numel() for a, _ in codes)
    assert 0 < share < 1
    assert share == pytest.approx(changed)
    zeros = sum(int((b == 0).sum()) for _, b in codes) / sum(b.numel() for _, b in codes)
    assert result.zero_fraction == pytest.approx(zeros)
    assert torch.equal(before.model.embed_tokens.weight, after.model.embed_tokens.weight)


def test_invalid_chat_and_lora_options_are_refused(
    chat_run: Any, small_run: Any, chats: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(UserError, match="lora needs activation=int8, not int4-hadamard"):
        train(chat_run(lora=4, format="ternary-6:8,activation=int4-hadamard"))
    with pytest.raises(UserError, match="name it with --init"):
        command.main(["--chat", str(chats / "chats.jsonl")])
    bloom = BloomForCausalLM(BloomConfig(vocab_size=304, hidden_size=8, n_layer=1, n_head=1))
    bloom.save_pretrained(tmp_path / "bloom")
    with pytest.raises(UserError, match="BloomForCausalLM takes no positions"):
        train(chat_run(init=str(tmp_path / "bloom")))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="does not work under torchrun"):
        command.main(["--chat", str(chats / "chats.jsonl"), "--init", str(chats / "model")])
