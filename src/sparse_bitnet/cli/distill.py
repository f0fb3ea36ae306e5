# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet distill TEACHER OUT`: the training command with a teacher."""

import os

from sparse_bitnet.cli import train
from sparse_bitnet.errors import UserError


def main(arguments: list[str]) -> None:
    """Train a student that starts from a teacher's weights and learns from its logits."""
    named, rest = [], list(arguments)
    while rest and not rest[0].startswith("-"):
        named.append(rest.pop(0))
    if len(named) > 2:
        raise UserError(
            f"distill: {named[2]} is one argument too many; see sparse-bitnet distill --help"
        )
    if len(named) < 2 and not {"-h", "--help"} & set(rest):
        raise UserError(
            f"distill: {'OUT' if named else 'TEACHER'} is missing: TEACHER and OUT come first, "
            "then the options; see sparse-bitnet distill --help"
        )
    for option in ("--teacher", "--out"):
        if any(each.partition("=")[0] == option for each in rest):
            raise UserError(f"distill: TEACHER and OUT come first; leave {option} out")
    if not named[1:] or not os.path.isfile(os.path.join(named[1], "config.json")):
        rest = ["--recipe", "distill", *rest] if "--recipe" not in " ".join(rest) else rest
    for option, value in zip(("--teacher", "--out"), named, strict=False):
        rest += [option, value]
    if named and not any(each == "--init" or each.startswith("--init=") for each in rest):
        rest += ["--init", named[0]]
    train.main(rest, prog="sparse-bitnet distill TEACHER OUT")
