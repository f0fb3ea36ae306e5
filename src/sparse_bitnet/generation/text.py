# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and, one token at a time, back: tokenizer.json through `tokenizers`.

A token of a byte-level vocabulary can be a part of a character. Tokens are therefore turned into bytes
and these into text as soon as a character is complete; bytes that cannot become one are shown as U+FFFD.
"""

import codecs
import ctypes
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError, library_errors_as

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)

_USUAL_CHARACTERS = 6
"""Of a token; most texts have fewer."""
_MARGIN = 256
_LARGE_TEXT = 1 << 16
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def named_tokens(folder: str | Path) -> dict[str, str]:
    """The texts of `SPECIAL_TOKENS` that a folder names, in whichever file and form they are written."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        found = read_json_if_there(Path(folder) / file)
        for name in SPECIAL_TOKENS:
            token = found.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
    return texts


class TextTokenizer:
    """A tokenizer.json, taken as it stands."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Truncation and padding, which a tokenizer.json can also ask for, are off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {
            token: entry.content for token, entry in added.items() if entry.special
        }
        """Names of the tokens that are not text, such as the one that ends it."""
        self._to_bytes, self._strip = _byte_decoder(tokenizer)
        self._known: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "TextTokenizer":
        """Raises `UserError` when the folder has no readable tokenizer.json."""
        from tokenizers import Tokenizer

        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise UserError(f"{folder} has no {TOKENIZER_FILE}: copy the model's tokenizer there")
        with library_errors_as(f"{path} is damaged"):
            tokenizer = Tokenizer.from_file(str(path))
        _return_freed_memory()
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text; a special token that it spells becomes that token.

        Args:
            add_special_tokens: what the tokenizer puts around a text, such as a token for the start.

        Raises `UserError` for half a character (a lone surrogate), which UTF-8 has no bytes for, and for
        a text that the tokenizer cannot encode.
        """
        with library_errors_as("the model's tokenizer.json cannot encode this text"):
            try:
                # Of a batch, unlike one text, other threads can go on meanwhile.
                [found] = self._tokenizer.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
            except TypeError as error:
                raise UserError(
                    "the text is not Unicode: it has half a character (a surrogate)"
                ) from error
        return found.ids

    def encode_within(
        self, text: str, most: int, *, add_special_tokens: bool = True
    ) -> list[int] | None:
        """As `encode`; None for a text of more than `most` tokens, found out at the cost of a text a
        little longer than that, however long this one is."""
        size = _USUAL_CHARACTERS * most + _MARGIN
        while len(text) > size:
            # What follows changes the last few tokens of a beginning at most.
            found = len(self.encode(text[:size], add_special_tokens=False))
            if found > 1.25 * most + _MARGIN:
                return None
            if found * len(text) <= most * size:
                # Where tokens are long, as of spaces, all of it may fit: further tries cost more.
                break
            size *= 2
        tokens = self.encode(text, add_special_tokens=add_special_tokens)
        if len(text) > _LARGE_TEXT:
            _return_freed_memory()
        return tokens if len(tokens) <= most else None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of whole tokens, as `TextStream` gives it piece by piece."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens, is_start=True)
        return "".join([*map(stream.feed, tokens), stream.flush()])

    def token_id(self, token: str) -> int | None:
        """The number of a token, None for one that the vocabulary lacks."""
        return self._tokenizer.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The number of every token."""
        return self._tokenizer.get_vocab()

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for; empty for a number that the vocabulary lacks."""
        found = self._known.get(token)
        if found is None:
            piece = self._tokenizer.id_to_token(token)
            if piece is None:
                found = b""
            elif self._to_bytes is None:
                found = self._tokenizer.decode([token], skip_special_tokens=False).encode()
            else:
                found = self._to_bytes(piece)
            self._known[token] = found
        return found


def _return_freed_memory() -> None:
    """Parsing a large vocabulary leaves as much freed memory behind as the result takes; glibc keeps it
    (56 MB of Qwen2.5's) unless asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class TextStream:
    """Text out of tokens that come one by one."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        skip_special_tokens: bool = True,
        is_start: bool = False,
    ) -> None:
        """`is_start`: without the space that some tokenizers put before a text's first word; for a text
        that continues another one that space belongs to it."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_tokens if skip_special_tokens else ()
        self._strip = tokenizer._strip if is_start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole: _NeighbourStream | None = None
        if tokenizer._to_bytes is None:
            self._whole = _NeighbourStream(tokenizer._tokenizer)

    def feed(self, token: int) -> str:
        """The characters that the token completes, often none or several."""
        if token in self._skip:
            return ""
        if self._whole is not None:
            return self._whole.feed(token)
        return self._without_first_space(
            self._decoder.decode(self._tokenizer.token_bytes(token), final=False)
        )

    def flush(self) -> str:
        """At the end: U+FFFD for a character that was left incomplete."""
        if self._whole is not None:
            return self._whole.flush()
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class _NeighbourStream:
    """For decoders that look at neighbouring tokens: the library's own stream, which has no end."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        try:
            text = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # plain, for a token that changes what is shown already
            text = ""
        self._shown += len(text)
        return text

    def flush(self) -> str:
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        return text[self._shown :]


def _byte_decoder(tokenizer: "Tokenizer") -> tuple[Callable[[str], bytes] | None, int]:
    """A function from a token's text to its bytes, and how many spaces the decoder strips from the start
    of a text; (None, 0) for a decoder that does not work token by token."""
    if tokenizer.decoder is None:
        return None, 0
    outer = json.loads(tokenizer.decoder.__getstate__())
    steps = outer["decoders"] if outer["type"] == "Sequence" else [outer]
    replacements: list[tuple[str, str]] = []
    has_byte_tokens, strip = False, 0
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return _byte_level, 0
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                replacements.append((old, " "))
                strip += step.get("prepend_scheme") != "never"
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                strip += start
            case {"type": "Fuse"}:
                pass
            case _:
                return None, 0

    def to_bytes(piece: str) -> bytes:
        if has_byte_tokens and (found := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes, strip


def _byte_characters() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, others for 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others: Iterable[int] = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTES: dict[str, int] = _byte_characters()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, piece))
    except KeyError:  # an added token, which is plain text
        return piece.encode()
