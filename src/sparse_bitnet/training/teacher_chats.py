# SPDX-License-Identifier: Apache-2.0
"""Conversations that a teacher writes by itself, as training text (Magpie, Xu et al., 2024).

The teacher samples a user's turn after the text that the chat template puts before one, then the answer.
Each batch has its own seed. A resumed call repeats the last one and gives the same file.
"""

import json
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sparse_bitnet.checkpoint.load import load_tokenizer, max_positions
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, fingerprint
from sparse_bitnet.data.chat import check_template, end_of_turn_tokens
from sparse_bitnet.errors import UserError, library_errors_as, os_errors_as
from sparse_bitnet.files import write_atomic
from sparse_bitnet.progress import Progress, say
from sparse_bitnet.training.device import resolve_device, resolve_dtype

USER_TURN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 256}
ANSWER: dict[str, Any] = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 512}
BATCH_SIZE = {"cpu": 32, "cuda": 1024}
_CONTENT = "the user's turn"
_ROUND_TOKENS = 64  # after which the turns that have ended leave the batch


def write_conversations(
    path: Path | str, teacher: str, count: int, seed: int = 0, batch_size: int | None = None
) -> None:
    """Write a .jsonl file of `count` conversations, or the rest of it: a user's turn and an answer each.

    Turns that repeat another user's, are empty or longer than 512 tokens (a user's: 256) are dropped.

    Raises `UserError` for a model that cannot write any, other rows in the file, and too little memory.
    """
    path, place, longest = Path(path), resolve_device("auto"), ANSWER["max_tokens"]
    stored, tokenizer = find_checkpoint(teacher), load_tokenizer(teacher)
    check_template(tokenizer)
    render: Any = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    with library_errors_as(f"the chat template of {teacher} refuses a user's turn"):
        opening, *rest = render([{"role": "user", "content": _CONTENT}]).split(_CONTENT)
    ends = {tokenizer.eos_token_id, *end_of_turn_tokens(tokenizer)}
    marks = tuple(tokenizer.convert_ids_to_tokens(sorted(ends)))
    if not opening or len(rest) != 1 or not rest[0].lstrip().startswith(marks):
        raise UserError(
            f"{teacher}: its chat template must put text before a user's message, an end token after it"
        )
    size = BATCH_SIZE[place.type] if batch_size is None else batch_size
    if path.suffix != ".jsonl" or min(count, size) < 1:
        raise UserError(
            "--from-model: give FILE.jsonl, --conversations and --batch-size at least 1"
        )
    made = {"teacher": fingerprint(teacher), "seed": seed, "tokens": longest, "batch_size": size}
    made["template"] = zlib.crc32(str(tokenizer.chat_template).encode())
    if len(rows := _written(path, made)) == count:
        return
    if len(rows) > count:
        raise UserError(f"{path} holds {len(rows):,} conversations: request at least that many")
    batch = last = rows[-1][0] if rows else 0
    rows = [row for row in rows if row[0] < batch]
    turns, dropped = {turn for _, turn, _ in rows}, {"repeated": 0, "too long": 0, "empty": 0}
    model: Any = stored.load(dtype=resolve_dtype("auto", place)).eval().to(place)
    most = max_positions(model) or 1 << 30
    if len(tokenizer(opening)["input_ids"]) + USER_TURN["max_tokens"] + longest > most:
        raise UserError(f"{teacher} has {most:,} positions, too few for a conversation")
    write_atomic(path, b"".join(line for *_, line in rows))
    # A model's own settings, such as a repetition penalty, would change its distribution.
    model.generation_config = type(model.generation_config)()
    with Progress(plain_lines=20) as display:
        show = display.line("sampling", "conversations")
        while len(turns) < count:
            show(len(turns), count)
            torch.manual_seed((seed * 1_000_003 + batch) % (1 << 64))
            with library_errors_as(f"{teacher}: cannot sample {size} conversations at once"):
                asked = _sample(model, tokenizer, [opening] * size, ends, **USER_TURN)
                chats = [[{"role": "user", "content": user}] for user in asked if user]
                prompts = [render(chat) for chat in chats]
                said = _sample(model, tokenizer, prompts, ends, **ANSWER)
            lines = ""
            for chat, answer in zip(chats, said, strict=True):
                if answer and (turn := _folded(chat)) not in turns and len(turns) < count:
                    turns.add(turn)
                    chat.append({"role": "assistant", "content": answer})
                    row = {"sampled": made | {"batch": batch}, "messages": chat}
                    lines, last = lines + json.dumps(row, ensure_ascii=False) + "\n", batch
                else:
                    dropped["repeated"] += bool(answer) and turn in turns
            with os_errors_as(f"cannot write {path}"), open(path, "ab") as file:
                file.write(lines.encode())
            dropped["too long"] += asked.count(None) + said.count(None)
            dropped["empty"] += asked.count("") + said.count("")
            reasons = f"dropped {', '.join(f'{number:,} {why}' for why, number in dropped.items())}"
            if (batch := batch + 1) > last + 10:
                raise UserError(f"{teacher} writes no more conversations ({reasons})")
    say(f"{path}: {count:,} conversations; {reasons}{' since the resumption' if rows else ''}")


def _folded(chat: list[dict[str, str]]) -> str:
    return " ".join(chat[0]["content"].split()).casefold()


def is_written(path: Path | str, count: int) -> bool:
    """Whether the file holds at least `count` rows, so that `write_conversations` will not sample."""
    with os_errors_as(f"cannot read {path}"):
        return (Path(path).read_bytes() if Path(path).is_file() else b"").count(b"\n") >= count


def _written(path: Path, made: dict[str, Any]) -> list[tuple[int, str, bytes]]:
    """Return batch, folded user's turn and line of each whole row. Raises `UserError` for other rows.

    The last line may be cut off, as by an interruption, but begins like one of these rows.
    """
    rows, others = [], f"{path} holds rows of another kind, choose another file"
    with os_errors_as(f"cannot read {path}"):
        *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for line in lines:
        with library_errors_as(others):
            how = (row := json.loads(line))["sampled"]
            rows.append((how.pop("batch"), _folded(row["messages"]), line + b"\n"))
        if other := [name for name in made if how.get(name) != made[name]]:
            raise UserError(f"{path} was made with another {', '.join(other)}: choose another file")
    begin = json.dumps({"sampled": made}).encode()[:-2]
    if last[: len(begin)] != begin[: len(last)]:
        raise UserError(others)
    return rows


@torch.inference_mode()
def _sample(
    model: Any, tokenizer: Any, prompts: list[str], ends: set[int], *, max_tokens: int, **how: Any
) -> list[str | None]:
    """Return what the model writes after each prompt before one of `ends`: None for no end within
    `max_tokens`, "" where another special token or half a character comes first."""
    texts: list[str | None] = [None] * len(prompts)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    given = tokenizer(prompts or [""], add_special_tokens=False, padding=True, return_tensors="pt")
    ids, mask = (given[name].to(model.device) for name in ("input_ids", "attention_mask"))
    rows, new, cache = list(range(len(prompts))), 0, None
    how |= {"do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    how |= {"eos_token_id": sorted(ends), "pad_token_id": tokenizer.eos_token_id}
    marks = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    while rows and new < max_tokens:
        how |= {"max_new_tokens": min(_ROUND_TOKENS, max_tokens - new), "past_key_values": cache}
        output = model.generate(input_ids=ids, attention_mask=mask, **how)
        new += output.sequences.shape[1] - ids.shape[1]
        ids, cache = output.sequences, output.past_key_values
        for row, turn in zip(rows, ids[:, -new:].tolist(), strict=True):
            if stops := ends.intersection(turn):
                text = tokenizer.decode(turn[: min(map(turn.index, stops))]).strip()
                texts[row] = "" if any(mark in text for mark in [*marks, "\ufffd"]) else text
        left = [place for place, row in enumerate(rows) if texts[row] is None]
        kept = torch.tensor(left, dtype=torch.int64, device=ids.device)
        rows, ids = [rows[place] for place in left], ids[kept]
        mask = F.pad(mask[kept], (0, ids.shape[1] - mask.shape[1]), value=1)
        cache.batch_select_indices(kept)
    return texts
