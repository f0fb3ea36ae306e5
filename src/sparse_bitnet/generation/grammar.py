# SPDX-License-Identifier: Apache-2.0
"""Structured output: llguidance computes which tokens can come next, so that output fits a grammar."""

import hashlib
import importlib.util
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from sparse_bitnet.errors import UserError, install, library_errors_as
from sparse_bitnet.generation.sandbox import Sandbox, grammar_matcher
from sparse_bitnet.generation.text import TextTokenizer

_MOST_REFUSED = 1000
"""Number of errors to remember; some take half a second of processor time each."""
_WHITESPACE = r"\x20|\x0A[\x20\x09]{0,32}"
"""Whitespace allowed between the parts of JSON; unbounded, a weak model would never stop writing it."""

_LONGEST = 64
"""Maximum length of a token in bytes."""
_MOST_SECONDS, _FREE_SECONDS = 0.5, 0.005
"""Seconds of processor time that an output's grammar may owe, and that each call pays back."""
_KEPT = 8
"""Number of recent grammars to keep: compiling takes 5 ms, and an agent's requests share one."""
_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_OFFSETS = np.where(_FLAGS == 1, np.float32(0), np.float32(-np.inf))
"""float32 [256, 8]: offsets that a byte of a mask adds to the logits of its eight tokens."""


class GrammarFailed(UserError):
    """Raised when an output cannot continue under its grammar."""


@dataclass(frozen=True)
class Grammar:
    """A grammar for structured output, in llguidance's syntax."""

    source: str
    rule: str = ""
    """A Lark rule for use in other rules; empty unless the grammar is of JSON."""
    is_lark_or_gbnf: bool = False
    """Whether the source is as its author wrote it, and not yet in llguidance's syntax."""

    @classmethod
    def json_schema(cls, schema: Any, *, is_strict: bool = True) -> Self:
        """Return the grammar of JSON that fits a schema (object or boolean).

        `is_strict`: unsupported keywords are refused, later by `TokenGrammars.start`; else they are
        ignored.
        """
        rule = json_rule(schema, is_strict)
        return replace(cls.lark(f"start: {rule}"), rule=rule)

    @classmethod
    def json_text(cls, schema: str) -> Self:
        """Return the grammar of a schema written as JSON. Raises `UserError` for any other text."""
        with library_errors_as("this is not a JSON schema"):
            return cls.json_schema(json.loads(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of text that a regular expression (Rust's syntax) matches as a whole.

        Raises `UserError` for half a character (a lone surrogate).
        """
        with library_errors_as("the regular expression is not Unicode"):
            return cls(_llguidance().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the grammar of one of the texts, as one terminal: llguidance limits rules to 2,000."""
        return cls.lark("start: TEXT\nTEXT: " + " | ".join(map(lark_text, texts)))

    @classmethod
    def lark(cls, rules: str) -> Self:
        """Return a grammar in llguidance's dialect of Lark, which begins with the rule `start`. If a
        line ends in a comment, errors in that line begin with the comment."""
        return cls(json.dumps({"grammars": [{"lark_grammar": rules}]}))

    @classmethod
    def rules(cls, text: str) -> Self:
        """Return a grammar of rules in Lark or llama.cpp's GBNF; `TokenGrammars.start` detects which."""
        return cls(text, is_lark_or_gbnf=True)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UserError(
            f"structured output needs llguidance, which is not installed: {install('grammar')}"
        ) from None
    return llguidance


def lark_text(text: str) -> str:
    """Return a text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Any, is_strict: bool) -> str:
    """Return JSON of a schema as part of a Lark rule."""
    if schema is True:
        schema = {}
    elif not isinstance(schema, dict):
        raise UserError("a JSON schema is an object")
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


class TokenGrammars:
    """Grammars in one model's tokens. Creating it blocks threads, for seconds with 150,000 tokens."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        """`end_tokens`: tokens that are allowed where the output is complete."""
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._sandbox = Sandbox("grammar")
        self._kept: dict[Grammar, GrammarMatcher] = {}
        self._refused: dict[bytes, str] = {}
        """Errors by a digest of the grammar, which may be large."""
        self._tokenizer: Any = None
        if importlib.util.find_spec("llguidance") is not None:
            self._tokenizer = _llguidance().LLTokenizer(
                _Vocabulary(tokenizer, vocab_size, end_tokens),
                eos_token=[vocab_size, *(end for end in sorted(end_tokens) if end < vocab_size)],
            )

    def known(self, grammar: Grammar) -> "GrammarMatcher | None":
        """Return a recently used grammar at the start of an output, at once; None for any other.

        Raises `UserError` for a grammar that was refused recently.
        """
        digest = _digest(grammar) if self._refused else b""
        with self._lock:
            if (reason := self._refused.get(digest)) is not None:
                raise UserError(reason)
            if (matcher := self._kept.pop(grammar, None)) is None:
                return None
            self._kept[grammar] = matcher
            return matcher.copy()

    def start(self, grammar: Grammar) -> "GrammarMatcher":
        """Return a grammar at the start of an output. A new grammar is first tried in a separate
        process, which may fail; this takes up to two seconds, while other threads continue.

        Raises `UserError` for an invalid, unsupported or too large grammar, and if llguidance is not
        installed.
        """
        _llguidance()
        if (known := self.known(grammar)) is not None:
            return known
        tried = self._sandbox.ask(json.dumps([grammar.source, grammar.is_lark_or_gbnf]))
        if "answer" in tried:
            compiled = grammar_matcher(tried["answer"], self._tokenizer)
            tried = {"error": compiled.get_error()} if compiled.is_error() else {}
        if "error" in tried:
            # Anything before the last comment may be text of the schema itself.
            comments = re.findall(r" // (.{1,80})\n +\^", tried["error"])
            about = f"{comments[-1]}: " if comments else ""
            reason = f"{about}the grammar cannot be satisfied: {_one_line(tried['error'])}"
            with self._lock:
                self._refused[_digest(grammar)] = reason
                if len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise UserError(reason)
        matcher = GrammarMatcher(compiled, self.vocab_size)
        # The first mask may take long; computed here, it delays no other output.
        matcher._compute()
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        return matcher.copy()


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(repr((grammar.source, grammar.is_lark_or_gbnf)).encode()).digest()


class _Vocabulary:
    """Tokens as llguidance wants them, and one more that ends an output if the model has no end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)] + [b"<end>"]
        self.eos_token_id = vocab_size
        special = tokenizer.special_tokens.keys() | end_tokens | {vocab_size}
        self.special_token_ids = [
            token for token, text in enumerate(self.tokens) if token in special or not text
        ]
        for token in self.special_token_ids:
            # Unique names keep them apart.
            self.tokens[token] = b"<%d>" % token

        self._encode = tokenizer.encode
        plain = set(range(vocab_size)).difference(self.special_token_ids)
        self._by_bytes = {self.tokens[token]: token for token in plain}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of text that must come, as the model would write it; no special tokens."""
        tokens, rest = self._encode(text, add_special_tokens=False), text.encode()
        known = [self.tokens[token] for token in tokens if token < len(self.tokens)]
        if b"".join(known) == rest:
            return tokens
        # If the tokenizer adds a space or lacks a character, use the longest tokens that match.
        tokens = []
        while rest:
            starts = (rest[:size] for size in range(min(len(rest), _LONGEST), 0, -1))
            longest = next((start for start in starts if start in self._by_bytes), None)
            if longest is None:
                break
            tokens.append(self._by_bytes[longest])
            rest = rest[len(longest) :]
        return tokens


class GrammarMatcher:
    """A grammar and the place that one output has reached in it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._bits = np.zeros(vocab_size // 32 + 1, np.uint32)
        self._debt = 0.0

    def copy(self) -> "GrammarMatcher":
        """Return a matcher at the same place, for another output."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits, float32 [vocab_size], with minus infinity for tokens that cannot come next.

        Raises `GrammarFailed` if no token can: the vocabulary lacks the bytes, or llguidance gives up;
        and if the rules take so long that other outputs would wait.
        """
        began = time.thread_time()
        self._compute()
        self._pay_for(began)
        # A table is several times as fast as a choice for each token.
        offsets = _OFFSETS.take(self._bits.view(np.uint8), axis=0, mode="clip")
        masked = offsets.reshape(-1)[: self._vocab_size]
        masked += logits
        return masked

    def _compute(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        # The last bits stand for no token.
        self._bits[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        if self._matcher.is_error() or not self._bits.any():
            failure = _one_line(self._matcher.get_error())
            is_stuck = not failure or failure.startswith("NoExtension")
            reason = "the vocabulary lacks what comes next" if is_stuck else failure
            raise GrammarFailed(f"the grammar cannot be satisfied: {reason}")

    def take(self, token: int) -> bool:
        """Advance by a token; return whether the output is complete and nothing can follow. Raises
        `GrammarFailed` as `masked` does."""
        began = time.thread_time()
        self._matcher.consume_token(token)
        self._pay_for(began)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _pay_for(self, began: float) -> None:
        self._debt = max(0.0, self._debt + time.thread_time() - began - _FREE_SECONDS)
        if self._debt > _MOST_SECONDS:
            raise GrammarFailed(
                "the grammar cannot be satisfied: its rules take too long to follow"
            )


def _one_line(message: str) -> str:
    """Return the message in one line, without its place in rules that are ours."""
    text = re.sub(r"(\n *\d+ \|| ?<state>).*", "", message, flags=re.DOTALL)
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", text)
    return " ".join(text.split())[:300]
