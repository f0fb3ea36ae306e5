"""Command-line options through tyro, with its complaints in one line instead of a box."""

import functools
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, TypeVar

from sparse_bitnet.errors import UserError

T = TypeVar("T")


def parse(
    target: Callable[..., T],
    arguments: list[str],
    *,
    prog: str,
    description: str | None = None,
    default: T | None = None,
) -> T:
    """Build a config or call a function with the options given.

    Args:
        target: a dataclass, or a function whose parameters are the options.
        arguments: after the command's name.
        prog: the command, "sparse-bitnet VERB".
        description: for `--help`; by default the docstring of `target`.
        default: of a dataclass, for options that are not given.

    Returns what `target` returns. Raises `UserError` for options that do not parse, and whatever
    `target` raises; `--help` prints and exits.
    """
    import tyro

    # Called only after parsing, when nothing is redirected any more.
    @functools.wraps(target, updated=())
    def later(*values: Any, **named: Any) -> Callable[[], T]:
        return lambda: target(*values, **named)

    complaint = io.StringIO()
    chosen: Any = target if isinstance(target, type) else later
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(complaint):
            parsed = tyro.cli(chosen, args=arguments, prog=prog, description=description, **more)
    except SystemExit as stop:
        if stop.code in (0, None):
            print(complaint.getvalue(), end="", file=sys.stderr)
            raise
        raise UserError(f"{_first_paragraph(complaint.getvalue())}; see {prog} --help") from None
    return parsed if isinstance(target, type) else parsed()


def _first_paragraph(box: str) -> str:
    """The text of tyro's box before its first empty or ruled line."""
    words: list[str] = []
    for line in box.splitlines():
        text = line.strip("│ ")
        if line.startswith(("╭", "╰")):
            continue
        if not text or text.startswith("─"):
            break
        words += text.split()
    return " ".join(words).rstrip(".") or "the options do not parse"
