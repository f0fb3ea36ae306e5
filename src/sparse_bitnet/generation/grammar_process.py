# SPDX-License-Identifier: Apache-2.0
"""The process in which grammars are tried: `python -m sparse_bitnet.generation.grammar_process`.

llguidance bounds a grammar's size, not its depth, which overflows the stack, nor the time to compile it.
"""

import json
import threading
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from sparse_bitnet.generation.bounded_process import answer_requests

MOST_SECONDS = 0.5
"""Of processor time, for each grammar; ordinary ones take a thousandth."""
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
"""A fifth of llguidance's own: with those one hostile pattern takes five seconds."""
_STACK = 1 << 20
"""Bytes; the server's threads have twice as many or more, so that what fits here fits there."""


class _Bytes:
    """The smallest vocabulary: a token for each byte, and the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def matcher_of(source: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """At the beginning of a text, or with an error."""
    limits = llguidance.LLParserLimits(**_LIMITS)
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)


def _source(request: tuple[str, bool]) -> str:
    """What llguidance is to read, once it has read it here. It is the server that says what is wrong."""
    source, is_lark_or_gbnf = request
    if is_lark_or_gbnf:
        source = json.dumps({"grammars": [{"lark_grammar": any_to_lark(source)}]})
    vocabulary: Any = _Bytes()
    matcher = matcher_of(source, llguidance.LLTokenizer(vocabulary, slices=[]))
    if not matcher.is_error():
        matcher.compute_bitmask()
    return source


def main() -> None:
    """Answer until the input ends."""
    threading.stack_size(_STACK)
    complaint = "the rules are neither Lark nor GBNF: {}".format
    thread = threading.Thread(target=answer_requests, args=(_source, MOST_SECONDS, complaint))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
