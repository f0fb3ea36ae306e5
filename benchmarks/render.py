# SPDX-License-Identifier: Apache-2.0
"""Renders the tables of README.md and docs/*.md from the rows in benchmarks/results/.

    python benchmarks/render.py            # rewrites what stands between the markers
    python benchmarks/render.py --check    # exit code 1 where the file is not what the rows say

Each table stands between `<!-- table: NAME -->` and `<!-- end -->` (a function of engine_tables.py or
training_tables.py) and shows the newest run of its kind; where none was recorded yet, it stays as it is.
"""

import argparse
import re
import sys
from pathlib import Path

import engine_tables
import training_tables
from recorded import NothingRecorded

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES = vars(engine_tables) | vars(training_tables)


def render(text: str) -> str:
    """Return the document with its tables rendered again."""

    def table(match: re.Match[str]) -> str:
        try:
            made = TABLES[match[1]]()
        except NothingRecorded:
            return match[0]
        return f"<!-- table: {match[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        made = render(text)
        if check and made != text:
            sys.exit(f"{document}: not what the rows say")
        if not check:
            document.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
