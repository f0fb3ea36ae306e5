# SPDX-License-Identifier: Apache-2.0
"""Adds to the site, beside docs/: pages from the repository's root, and sources that pages link to."""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""File of the repository -> page."""

LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")


def on_files(files: Files, config) -> Files:
    pages = {file.src_uri: file for file in files if file.src_uri.endswith(".md")}
    texts = {name: Path(file.abs_src_path).read_text("utf-8") for name, file in pages.items()}
    for name, page in FROM_ROOT.items():
        texts[page] = (ROOT / name).read_text("utf-8")
    linked: set[Path] = set()
    for page, text in texts.items():
        base = ROOT if page in FROM_ROOT.values() else (ROOT / "docs" / page).parent
        up = "../" * page.count("/")
        rewritten = LINK.sub(lambda link, base=base, up=up: _link(link, base, up, linked), text)
        if page in pages:
            files.remove(pages[page])
        files.append(File.generated(config, page, content=rewritten))
    for path in sorted(linked):
        files.append(File.generated(config, _page_of(path), content=_source(path)))
    return files


def _link(link: re.Match, base: Path, up: str, linked: set[Path]) -> str:
    if "://" in link[1]:
        return link[0]
    path = (base / link[1]).resolve()
    name = path.relative_to(ROOT).as_posix()
    if name in FROM_ROOT:
        return f"]({up}{FROM_ROOT[name]}{link[2]})"
    if path.is_relative_to(ROOT / "docs"):
        return f"]({up}{path.relative_to(ROOT / 'docs').as_posix()}{link[2]})"
    linked.add(path)
    return f"]({up}{_page_of(path)})"


def _page_of(path: Path) -> str:
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def _source(path: Path) -> str:
    """A file as a page, a folder as the list of what is in it."""
    title = f"---\nsearch: {{exclude: true}}\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        names = (one.name for one in sorted(path.iterdir()) if one.name != "__pycache__")
        return title + "\n".join(f"- `{name}`" for name in names)
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return title + re.sub(r"\]\((?!http)[^)]*\)", "]", text)
    language = {".h": "cpp", ".sbatch": "bash"}.get(path.suffix, path.suffix.lstrip("."))
    return f"{title}````{language}\n{text}````\n"
