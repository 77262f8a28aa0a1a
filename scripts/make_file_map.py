"""The file lists of ARCHITECTURE.md: one line per file of the package, below a heading per folder.

    python scripts/make_file_map.py            # says what is missing or too much; exit code 1 if anything is
    python scripts/make_file_map.py --write    # mends it

Lines that are there stay as they were written. A new file gets the first sentence of its docstring, which is meant to be edited.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BEGIN = "## Every file\n"
HEADING = re.compile(r"### `([^`]+/)`")
ENTRY = re.compile(r"- `([^`]+)`: \S")
LEFT_OUT = {"__init__.py"}


def package_files(root: Path = ROOT) -> list[str]:
    """Paths below the repository, folder by folder."""
    files = [path for path in (root / "ridgeline").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    kept = [path for path in files if path.name not in LEFT_OUT and path.suffix not in (".pyc", ".native")]
    return sorted(path.relative_to(root).as_posix() for path in kept)


def listed(text: str) -> list[str]:
    """The paths that a page lists, in its order."""
    folder, found = "", []
    for line in text[text.index(BEGIN) :].splitlines():
        if heading := HEADING.match(line):
            folder = heading[1]
        elif entry := ENTRY.match(line):
            found.append(folder + entry[1])
    return found


def mended(text: str, files: list[str], root: Path = ROOT) -> str:
    """The page with exactly these files."""
    start = text.index(BEGIN)
    head, *sections = re.split(r"(?m)^(?=### )", text[start:])
    by_folder: dict[str, list[str]] = {}
    for section in sections:
        match = HEADING.match(section)
        assert match, f"a heading without a folder: {section.splitlines()[0]}"
        by_folder[match[1]] = section.rstrip("\n").splitlines()
    wanted: dict[str, list[str]] = {}
    for path in files:
        folder, _, name = path.rpartition("/")
        wanted.setdefault(f"{folder}/", []).append(name)
    made = [head.rstrip("\n")]
    for folder in [*by_folder, *sorted(wanted.keys() - by_folder.keys())]:
        names = wanted.get(folder, [])
        lines = by_folder.get(folder, [f"### `{folder}`", ""])
        seen: set[str] = set()
        kept = []
        for line in lines:
            entry = ENTRY.match(line)
            if entry and (entry[1] not in names or entry[1] in seen):
                continue
            if entry:
                seen.add(entry[1])
            kept.append(line)
        kept += [f"- `{name}`: {first_sentence(root / folder / name)}" for name in names if name not in seen]
        if names:
            made.append("\n".join(kept))
    return text[:start] + "\n\n".join(made) + "\n"


def first_sentence(path: Path) -> str:
    whole = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".h"):
        text = re.match(r"/\*(.*?)\*/", whole, re.DOTALL)[1].strip()      # type: ignore[index]
    else:
        text = ast.get_docstring(ast.parse(whole)) if path.suffix == ".py" else None
    words = " ".join((text or "to be described").split("\n\n")[0].split())
    return words.split(". ")[0].rstrip(".:")


def main() -> int:
    text, files = PAGE.read_text(encoding="utf-8"), package_files()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(mended(text, files), encoding="utf-8")
        return 0
    names = listed(text)
    for path in sorted(set(files) - set(names)):
        print(f"not listed: {path}")
    for path in sorted(set(names) - set(files)):
        print(f"does not exist: {path}")
    for path in sorted({path for path in names if names.count(path) > 1}):
        print(f"listed twice: {path}")
    return int(sorted(names) != files)


if __name__ == "__main__":
    sys.exit(main())
