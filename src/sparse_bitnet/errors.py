# SPDX-License-Identifier: Apache-2.0
"""`UserError`, the exception for wrong input (any other is our defect), and helpers that raise it."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LONGEST_REASON = 300
"""Maximum length in characters; some libraries quote the whole input in their message."""


class UserError(ValueError):
    """Bad input, file or option. The message is one line: what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; any other exception is a defect
    of ours and keeps its traceback.
    """


class Unsupported(UserError):
    """Raised for a valid model that the CPU engine does not support; transformers may run it."""


@contextmanager
def os_errors_as(failure: str, remedy: str = "") -> Iterator[None]:
    """Turn an `OSError` inside into a `UserError`: `failure` ("cannot read X"), the reason, `remedy`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failure}: {error.strerror or error}{remedy}") from error


@contextmanager
def library_errors_as(failure: str) -> Iterator[None]:
    """Turn any exception that a library raises inside into a `UserError`: `failure`, then the reason.
    Bad values can raise anything; a panic in tokenizers is not even an `Exception`."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{failure}: {reason_of(error)}") from error


def check_least(options: object, **least: float) -> None:
    """Raise `UserError` for a field of `options` with a value below its minimum, or NaN; None passes."""
    for name, bound in least.items():
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else [values]:
            if value is not None and not value >= bound:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")


def refuse_unused(options: object, names: Iterable[str], why: str) -> None:
    """Raise `UserError` for a dataclass field that was set but has no effect.

    `why` ends the message: it says when the option would have an effect.
    """
    for name in names:
        if (value := getattr(options, name)) != getattr(type(options), name):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"--{name.replace('_', '-')} {shown} is not used here: {why}")


def reason_of(error: BaseException) -> str:
    """Return an error's first line, or the first two of a validation error, whose first ends with ":"."""
    said = f"no {error}" if isinstance(error, KeyError) else str(error).strip()
    lines = (said or type(error).__name__).splitlines()
    reason = " ".join(" ".join(lines[: 2 if lines[0].rstrip().endswith(":") else 1]).split())
    return reason if len(reason) < _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


def install(extra: str) -> str:
    """Return how to install an extra of this package, which is in no package index."""
    return f'in a clone of sparse-bitnet run pip install ".[{extra}]"'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with a similar known word or one with this beginning; else ""."""
    words = list(known)
    begin = [each for each in words if each.startswith(word) and len(word.strip("-")) > 2]
    close = begin or difflib.get_close_matches(word, words, 1, 0.7)
    return f" (did you mean {close[0]}?)" if close else ""
