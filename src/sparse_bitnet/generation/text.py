# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, one token at a time: tokenizer.json through `tokenizers`, and stop strings.

A token of a byte-level vocabulary can be a part of a character. Tokens are therefore turned into bytes
and these into text as soon as a character is complete; bytes that cannot become one are shown as U+FFFD.
"""

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.checkpoint.model_folder import read_json_if_there
from sparse_bitnet.errors import UserError, library_errors_as

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def named_tokens(folder: str | Path) -> dict[str, str]:
    """Return the texts of the `SPECIAL_TOKENS` that a folder names, in whichever file and format."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json_if_there(Path(folder) / file)
        for name in SPECIAL_TOKENS:
            token = content.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
    return texts


class TextTokenizer:
    """A tokenizer.json, used unchanged."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Turn off truncation and padding, which a tokenizer.json can also declare."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens = {
            token: entry.content for token, entry in added.items() if entry.special
        }
        """Names of the tokens that are not text, such as the one that ends it."""
        self._to_bytes, self._strip = _byte_decoder(tokenizer)
        self.token_bytes = cache(self._token_bytes)
        """Returns the bytes that a token stands for; b"" for a number outside the vocabulary."""

    @classmethod
    def load(cls, folder: str | Path) -> "TextTokenizer":
        """Load a folder's tokenizer.json. Raises `UserError` if there is none, or an unreadable one."""
        from tokenizers import Tokenizer

        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise UserError(f"{folder} has no {TOKENIZER_FILE}: copy the model's tokenizer there")
        with library_errors_as(f"{path} is damaged"):
            tokenizer = Tokenizer.from_file(str(path))
        return cls(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text; a special token that it spells becomes that token.

        `add_special_tokens`: whether to add the tokens that the tokenizer puts around a text, such as
        bos.

        Raises `UserError` for half a character (a lone surrogate), which UTF-8 has no bytes for, and for
        a text that the tokenizer cannot encode.
        """
        with library_errors_as("the text cannot be written as UTF-8"):
            text.encode()
        with library_errors_as("the model's tokenizer.json cannot encode this text"):
            # Encoding a batch, unlike a single text, lets other threads run.
            encode = self._tokenizer.encode_batch_fast
            (encoding,) = encode([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of whole tokens, as `TextStream` gives it piece by piece."""
        stream = TextStream(self, skip_special_tokens=skip_special_tokens, is_start=True)
        if self._to_bytes is None:  # each piece would decode all those before it again
            stream._tokens = [token for token in tokens if token not in stream._skip]
            return stream.flush()
        return "".join([*map(stream.feed, tokens), stream.flush()])

    def token_id(self, token: str) -> int | None:
        """Return the number of a token, None for one that the vocabulary lacks."""
        return self._tokenizer.token_to_id(token)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Return every token with its number."""
        return self._tokenizer.get_vocab()

    def _token_bytes(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._to_bytes is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return self._to_bytes(piece)


class TextStream:
    """Turns tokens into text, one token at a time."""

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, is_start: bool = False
    ) -> None:
        """`is_start`: drop the space that some tokenizers put before a text's first word; it is needed
        where the output continues another text."""
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_tokens if skip_special_tokens else ()
        self._strip = tokenizer._strip if is_start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._shown = ""

    def feed(self, token: int) -> str:
        """Return the characters that the token completes, often none or several."""
        if token in self._skip:
            return ""
        if self._tokenizer._to_bytes is None:
            self._tokens.append(token)
            return self._new_of_all(is_last=False)
        return self._without_first_space(
            self._decoder.decode(self._tokenizer.token_bytes(token), final=False)
        )

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for a character that was left incomplete."""
        if self._tokenizer._to_bytes is None:
            return self._new_of_all(is_last=True)
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _new_of_all(self, is_last: bool) -> str:
        """Return the new part of the text of all tokens: some decoders look at a token's neighbours."""
        text = self._tokenizer._tokenizer.decode(self._tokens, skip_special_tokens=False)
        if not is_last and (text.endswith("\ufffd") or not text.startswith(self._shown)):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def _without_first_space(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class StopStrings:
    """Passes streamed text on up to the first stop string, of which nothing is passed on.

    The result does not depend on how the text is cut into pieces: the stop string that is complete first
    counts, and of those complete at once the one that starts first.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._shown: list[bool] = []
        """Whether each held character is shown."""
        self.ended_by: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str, *, is_shown: bool = True) -> str:
        """Return the text that can be shown now, in which no stop string begins; "" after a stop string.

        `is_shown`: False for a special token's name, which a stop string may contain but output never
        shows.
        """
        if self.ended_by is not None:
            return ""
        held = self._held + text
        self._shown += [is_shown] * len(text)
        places = [(held.find(stop), stop) for stop in self._stop]
        if ends := [(place + len(stop), place, stop) for place, stop in places if place >= 0]:
            _, place, self.ended_by = min(ends)
            return self._give(held[:place], "")
        keep = max((overlap(held, stop) for stop in self._stop), default=0)
        return self._give(held[: len(held) - keep], held[len(held) - keep :])

    def flush(self) -> str:
        """Return the text held back, when the text ended without a stop string."""
        return self._give(self._held, "")

    def _give(self, text: str, held: str) -> str:
        shown, self._shown = self._shown, self._shown[len(text) :]
        self._held = held
        return "".join(compress(text, shown))


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class GeneratedText:
    """The text of one generation, token by token: whole characters, up to a stop string."""

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str] = (), *, is_start: bool = False
    ) -> None:
        """`is_start`: see `TextStream`; True for answers, which continue no text."""
        self._stream = TextStream(tokenizer, is_start=is_start)
        self._stop = StopStrings(stop)
        self._names = tokenizer.special_tokens
        self._length = self._given = 0
        self.held: deque[int] = deque()
        """Places where tokens begin of which no text has been given out: a stop string may take them."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come; nothing further will be returned."""
        return self._stop.ended_by is not None

    def add(self, token: int) -> str:
        """Return the text that is certain with this token."""
        self.held.append(self._length)
        text = self._stream.feed(token)
        self._length += len(text)
        if token in self._names:
            return self._counted(self._stop.feed(self._names[token], is_shown=False))
        return self._counted(self._stop.feed(text))

    def flush(self) -> str:
        """Return the text held back, when no token follows."""
        return self._counted(self._stop.feed(self._stream.flush()) + self._stop.flush())

    def _counted(self, text: str) -> str:
        self._given += len(text)
        while self.held and self.held[0] < self._given:
            self.held.popleft()
        return text


def _byte_decoder(tokenizer: "Tokenizer") -> tuple[Callable[[str], bytes] | None, int]:
    """Return a function from a token's text to its bytes, and how many spaces the decoder strips from
    the start of a text; (None, 0) for a decoder that does not work token by token."""
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
        if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes, strip


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = sorted({*range(256)} - _PRINTABLE)
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(c): b for c, b in enumerate(_OTHERS, 256)}
"""GPT-2's characters for bytes: printable ones are themselves, others 256, 257, ..."""


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(_BYTES.__getitem__, piece))
    except KeyError:  # an added token, which is plain text
        return piece.encode()
