"""Pages that scripts write are current (`make docs` writes them again), and links and options in pages exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from generated_page import with_tables

from ridgeline.cli.cmd_serve import ServerOptions
from ridgeline.config import declared_options

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_options_page", "make_models_page", "make_precision_tables", "make_quantize_tables"])
def test_a_page_is_what_its_script_writes(name: str) -> None:
    written = script(name)
    assert written.PAGE.read_text(encoding="utf-8") == written.page(), f"python scripts/{name}.py --write"


def test_tables_of_a_page_are_made_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: sizes -->\nold\n<!-- end -->\nafter <!-- end -->\n")
    assert with_tables(page, {"sizes": lambda: "new"}) == page.read_text().replace("old", "new")
    with pytest.raises(SystemExit, match="no place for the table speeds"):
        with_tables(page, {"speeds": lambda: ""})


def test_the_map_lists_every_file_of_the_package_once() -> None:
    page = script("make_file_map")
    found = sorted(page.listed(page.PAGE.read_text(encoding="utf-8")))
    assert found == page.package_files(), "python scripts/make_file_map.py --write, then edit the new lines"


def test_a_new_file_gets_a_line_and_a_lost_one_loses_its_line(tmp_path: Path) -> None:
    page = script("make_file_map")
    folder = tmp_path / "ridgeline" / "cache"
    folder.mkdir(parents=True)
    (folder / "new.py").write_text('"""Does this. And more.\n\nAt length."""\n')
    (folder / "kept.py").write_text("")
    (folder / "__init__.py").write_text("")
    old = "# Map\n\n## Every file\n\nWords.\n\n### `ridgeline/cache/`: blocks\n\n- `kept.py`: by hand\n- `gone.py`: was here\n"
    new = page.mended(old, page.package_files(tmp_path), tmp_path)
    assert new == old.replace("- `gone.py`: was here", "- `new.py`: Does this")
    assert page.listed(new) == ["ridgeline/cache/kept.py", "ridgeline/cache/new.py"] == page.package_files(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Files, folders and headings that a page links to exist."""
    for link in links(page):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [link for link in found if "://" not in link]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / link).resolve() for link in links(index)}
    assert [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in {*named, index}] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    """A sentence under the title, before any heading, table, list or command."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, first = [line for line in text.splitlines() if line.strip()][:2]
    assert title.startswith("# ") and not first.startswith(("#", "|", "-", "!", "```", "    "))


USER_PAGES = [ROOT / "docs" / name for name in ("gpu-quick-start.md", "install.md", "operations.md")]
OTHERS_OPTIONS = {"gpus"}            # of docker


@pytest.mark.parametrize("page", [*USER_PAGES, *sorted((ROOT / "docs" / "techniques").glob("*.md"))], ids=lambda page: page.stem)
def test_options_that_a_page_names_exist(page: Path) -> None:
    """Options in backticks: `--max-model-len 4096`, `--no-async-scheduling`."""
    known = {each.name for each, _, _ in (*declared_options(), *declared_options(ServerOptions))}
    for name in re.findall(r"`--(?:no-)?([a-z0-9-]+)", page.read_text(encoding="utf-8")):
        assert name.replace("-", "_") in known or name in OTHERS_OPTIONS, name
