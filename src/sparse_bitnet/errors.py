# SPDX-License-Identifier: Apache-2.0
"""The one exception that means "what you gave us is wrong", as opposed to "we are wrong"."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_LONGEST_REASON = 300
"""Characters: some errors quote what they refuse."""


class UserError(ValueError):
    """Bad input, file or option. The message is one line: what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; any other exception is a defect
    of ours and keeps its traceback.
    """


class EngineLacks(UserError):
    """A sound model that the CPU engine cannot run; transformers can."""


@contextmanager
def os_errors_as(failure: str, remedy: str = "") -> Iterator[None]:
    """An `OSError` inside becomes a `UserError`: `failure` ("cannot read X"), its reason, what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{failure}: {error.strerror or error}{remedy and f'; {remedy}'}"
        ) from error


@contextmanager
def library_errors_as(failure: str) -> Iterator[None]:
    """Turn any exception that a library raises inside into a `UserError`: `failure`, then the reason. Bad
    values can raise anything; panics of tokenizers are no `Exception`."""
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{failure}: {reason_of(error)}") from error


def check_least(options: object, **least: float) -> None:
    """Raise `UserError` for a field of `options` with a value below its least, or NaN; None passes."""
    for name, bound in least.items():
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else [values]:
            if value is not None and not value >= bound:
                raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {bound}")


def refuse_unused(options: object, names: Iterable[str], why: str) -> None:
    """Raise `UserError` for a field of a dataclass that was set though nothing will look at it.

    `why` ends the message: what it would have to be for the option to count.
    """
    unset = type(options)()
    for name in names:
        if (value := getattr(options, name)) != getattr(unset, name):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise UserError(f"--{name.replace('_', '-')} {shown} is not used here: {why}")


def reason_of(error: BaseException) -> str:
    """The first line of an error; of a validation error, which says what is wrong in the second, both."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    reason = " ".join(" ".join(lines[: 2 if lines[0].rstrip().endswith(":") else 1]).split())
    return reason if len(reason) < _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


def install(extra: str) -> str:
    """Return how to install an extra of this package, which is on no index."""
    return f'in a clone of sparse-bitnet run pip install ".[{extra}]"'


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " (did you mean ...?)" where a known word is close, or begins so, else nothing."""
    words = list(known)
    begin = [each for each in words if each.startswith(word) and len(word.strip("-")) > 2]
    close = begin or difflib.get_close_matches(word, words, 1, 0.7)
    return f" (did you mean {close[0]}?)" if close else ""
