"""The house rules: sizes of files, functions, classes and folders, unique names, imports, and plain words.

What exceeds a limit today stands in `house_offenders.json` with its size. The list may only shrink: a new offender fails, a
larger one fails, and an entry that is not needed any more fails too. `python tests/test_house.py --shrink` rewrites the list,
and refuses to add anything to it.
"""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ridgeline"
LIST = Path(__file__).with_name("house_offenders.json")
LIMITS = {"file lines": 500, "function lines": 60, "kernel lines": 150, "branches": 15, "attributes": 15, "folder files": 15}
WORDS = re.compile(r"\b(whoever|nobody|somebody|so many|such a one)\b", re.IGNORECASE)
MOST_WORDS = 25
BRANCHES = {ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.comprehension, ast.match_case, ast.Assert}
# Classes of what a field of a node may hold and holds no node itself: two of three nodes are such.
SIGNS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
LEAVES = {ast.Name, ast.Constant, str, int, type(None), *(kind for each in SIGNS for kind in each.__subclasses__())}
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")        # the fields with statements
CLOCKS = {                          # functions that read one: nothing that may be early or late belongs in `make test`
    "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns", "thread_time",
    "thread_time_ns", "time", "time_ns", "clock_gettime", "getrusage", "cpu_times", "timeit",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package, by its path below the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    with no_garbage():
        return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@contextmanager
def no_garbage() -> Iterator[None]:
    """A million nodes are made, and none is garbage: to look for it again and again takes half of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def is_kernel(node: ast.AST) -> bool:
    marks = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
    return any(re.search(r"(triton|gluon)\w*(_kernel|_function)|\.jit", mark) for mark in marks)


def statements(node: ast.AST) -> list[ast.AST]:
    """As `ast.walk`, without expressions: most nodes are expressions, and they hold no statement."""
    found = [node]
    for each in found:
        found += [child for child in ast.iter_child_nodes(each) if not isinstance(child, ast.expr)]
    return found


@cache
def functions(tree: ast.Module) -> list[tuple[str, Function]]:
    """With qualified names; functions inside functions count as part of their own and of the outer one."""
    found: list[tuple[str, Function]] = []

    def below(node: ast.AST, prefix: str) -> None:
        for child in (child for field in BODIES for child in getattr(node, field, ())):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if isinstance(child, Function):
                found.append((prefix + child.name, child))
            below(child, f"{prefix}{child.name}." if named else prefix)

    below(tree, "")
    return found


def is_attribute(node: ast.AST) -> bool:
    """Whether something is assigned to self."""
    return (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id == "self")


def contents(tree: ast.Module) -> tuple[dict[ast.AST, int], dict[ast.AST, set[str]]]:
    """Of every function its branches, and of every class what its methods assign to self; in one walk through the file."""
    branches: dict[ast.AST, int] = {}
    attributes: dict[ast.AST, set[str]] = {}
    left: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]       # nodes, and the functions and classes around them
    while left:
        node, around = left.pop()
        kind = node.__class__
        if kind is ast.FunctionDef or kind is ast.AsyncFunctionDef:
            branches[node], around = 0, (*around, node)
        elif kind is ast.ClassDef:
            attributes[node], around = set(), (*around, node)
        elif kind in BRANCHES:
            for each in around:
                if each in branches:
                    branches[each] += 1
        elif kind is ast.Attribute and is_attribute(node):
            for each in around:
                if each in attributes:
                    attributes[each].add(node.attr)  # type: ignore[attr-defined]
        left += [(child, around) for child in inside(node)]
    return branches, attributes


def inside(node: ast.AST) -> list[ast.AST]:
    """As ast.iter_child_nodes, without leaves."""
    found: list[ast.AST] = []
    for field in node._fields:
        value = getattr(node, field)
        if value.__class__ is list:
            found += [each for each in value if each.__class__ not in LEAVES]
        elif value.__class__ not in LEAVES:
            found.append(value)
    return found


@cache
def sizes() -> list[tuple[str, str, int]]:
    """(limit, place, size) of everything that has one."""
    return list(_sizes())


def _sizes() -> Iterator[tuple[str, str, int]]:
    for name, tree in trees().items():
        found = functions(tree)
        branches, attributes = contents(tree)
        if not any(is_kernel(node) for _, node in found):
            yield "file lines", name, len((PACKAGE / name).read_text(encoding="utf-8").splitlines())
        for function, node in found:
            lines, kernel = (node.end_lineno or node.lineno) - node.lineno + 1, is_kernel(node)
            yield "kernel lines" if kernel else "function lines", f"{name}:{function}", lines
            if not kernel:
                yield "branches", f"{name}:{function}", branches[node]
        for each, assigned in attributes.items():
            yield "attributes", f"{name}:{each.name}", len(assigned)  # type: ignore[attr-defined]
    for top in (PACKAGE, ROOT / "tests"):
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir() and path.name != "__pycache__")):
            files = [path for path in folder.iterdir() if path.suffix in (".py", ".c") and path.name != "__init__.py"]
            yield "folder files", folder.relative_to(ROOT).as_posix(), len(files)


def module_name(file: str) -> str:
    return "ridgeline." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def own_modules() -> frozenset[str]:
    return frozenset(module_name(file) for file in trees())


def imported(node: ast.AST) -> set[str]:
    """Names of our own modules that an import statement takes, packages left out."""
    names = own_modules()
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ridgeline":
        return {full for each in node.names if (full := f"{node.module}.{each.name}") in names} or ({node.module} & names)
    if isinstance(node, ast.Import):
        return {each.name for each in node.names} & names
    return set()


def local_imports() -> Iterator[tuple[str, str, int]]:
    for file, tree in trees().items():
        for function, node in functions(tree):
            count = sum(bool(imported(each)) for each in statements(node))
            if count:
                yield "own imports in a function", f"{file}:{function}", count


def clock_reads(tree: ast.Module) -> dict[str, int]:
    """Tests that are not slow and read a clock, themselves or by a function of their file: how often."""
    scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    defined = {node.name: node for scope in scopes for node in scope.body if isinstance(node, Function)}
    reads = dict.fromkeys(defined, 0)
    uses: dict[str, set[str]] = {name: set() for name in defined}
    for name, node in defined.items():
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                reads[name] += each.func.attr in CLOCKS
            elif isinstance(each, (ast.Name, ast.Attribute)):
                uses[name].add(each.id if isinstance(each, ast.Name) else each.attr)
    is_slow = any(isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node) and "mark.slow" in ast.unparse(node)
                  for node in tree.body)
    found: dict[str, int] = {}
    for name, node in defined.items():
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if not name.startswith("test_") or is_slow or "pytest.mark.slow" in marks:
            continue
        reached, more = {name}, {name}
        while more:
            more = defined.keys() & set[str]().union(*(uses[one] for one in more)) - reached
            reached |= more
        if total := sum(reads[each] for each in reached):
            found[name] = total
    return found


def clocks_in_tests() -> Iterator[tuple[str, str, int]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f".{clock}(" in text for clock in CLOCKS):
            continue
        for name, count in clock_reads(ast.parse(text)).items():
            yield "reads of a clock in a quick test", f"{path.relative_to(ROOT / 'tests').as_posix()}:{name}", count


def circles() -> list[str]:
    """Modules that import each other, also where an import stands inside a function or is for types alone."""
    arrows = {
        module_name(file): set[str]().union(*(imported(each) for each in statements(tree))) for file, tree in trees().items()
    }
    left = {name: {each for each in to if each in arrows and each != name} for name, to in arrows.items()}
    while free := [name for name, to in left.items() if not to]:
        for name in free:
            del left[name]
        left = {name: to - set(free) for name, to in left.items()}
    back: dict[str, set[str]] = {name: set() for name in left}
    for name, to in left.items():
        for each in to:
            back[each].add(name)
    while free := [name for name, by in back.items() if not by]:      # those that only lead into a circle
        for name in free:
            del back[name]
        back = {name: by - set(free) for name, by in back.items()}
    return sorted(back)


@cache
@cache
def offenders() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    with no_garbage():
        for limit, place, size in sizes():
            if size > LIMITS[limit]:
                found.setdefault(limit, {})[place] = size
        for limit, place, size in (*local_imports(), *clocks_in_tests()):
            found.setdefault(limit, {})[place] = size
    return found


def words() -> Counter[str]:
    return Counter(
        match.lower() for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".js", ".html")
        for match in WORDS.findall(path.read_text(encoding="utf-8"))
    )


def allowed() -> dict[str, dict[str, int]]:
    return dict(json.loads(LIST.read_text(encoding="utf-8")))


def test_nothing_exceeds_a_limit_but_what_did_before() -> None:
    listed = allowed()
    more = [f"{limit}: {place} has {size}, allowed {listed.get(limit, {}).get(place, LIMITS.get(limit, 0))}"
            for limit, places in offenders().items() for place, size in places.items()
            if size > listed.get(limit, {}).get(place, 0)]
    assert not more, "\n".join(more)


def test_the_list_of_offenders_has_shrunk_with_them() -> None:
    found = offenders()
    stale = [f"{limit}: {place} is listed with {size} and has {found.get(limit, {}).get(place, 'no more than allowed')}"
             for limit, places in allowed().items() for place, size in places.items()
             if size != found.get(limit, {}).get(place)]
    assert not stale, "run `python tests/test_house.py --shrink`:\n" + "\n".join(stale)


def test_no_two_files_have_one_name() -> None:
    for top in (PACKAGE, ROOT / "tests"):
        names = Counter(path.name for path in top.rglob("*.py") if path.name != "__init__.py")
        assert {name for name, count in names.items() if count > 1} == set()


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_the_words_are_plain() -> None:
    found = words()
    assert found.total() <= MOST_WORDS, dict(found)


def test_the_walks_see_what_they_are_for() -> None:
    """A rule that finds nothing anywhere would hold for any code."""
    body = "self.x = self.y = 1\n        if a and b: pass\n        import ridgeline.errors\n"
    tree = ast.parse(f"class A:\n    def f(self):\n        {body}")
    assert [name for name, _ in functions(tree)] == ["A.f"]
    branches, attributes = contents(tree)
    assert list(branches.values()) == [2] and list(attributes.values()) == [{"x", "y"}]
    assert set().union(*(imported(node) for node in ast.walk(tree))) == {"ridgeline.errors"}
    assert any(limit == "kernel lines" for limit, _, _ in sizes()) and len(trees()) > 300
    assert WORDS.search("Nobody knows") and not WORDS.search("no body")


def test_a_quick_test_that_reads_a_clock_is_found() -> None:
    """Whether it compares what it reads is not asked: count the work, use a clock that the test moves, or mark the test slow."""
    source = "def took():\n    return time.thread_time()\n{mark}def test_a():\n    def f(): return took()\n    assert f() < 1\n"
    assert clock_reads(ast.parse(source.format(mark=""))) == {"test_a": 1}
    assert clock_reads(ast.parse(source.format(mark="@pytest.mark.slow\n"))) == {}
    assert clock_reads(ast.parse("pytestmark = pytest.mark.slow\n" + source.format(mark=""))) == {}
    assert clock_reads(ast.parse(source.format(mark="").replace("time.thread_time()", "clock.now"))) == {}
    assert clock_reads(ast.parse("def test_a(child):\n    assert sum(child.cpu_times()[:2]) < 1")) == {"test_a": 1}


def shrink() -> None:
    listed, found = allowed() if LIST.exists() else None, offenders()
    if listed is not None:
        new = [f"{limit}: {place} {size}" for limit, places in found.items() for place, size in places.items()
               if size > listed.get(limit, {}).get(place, 0)]
        if new:
            sys.exit("mend these instead:\n" + "\n".join(new))
    ordered = {limit: dict(sorted(places.items())) for limit, places in sorted(found.items())}
    LIST.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--shrink"]:
        shrink()
    else:
        print(json.dumps(offenders(), indent=1), dict(words()), circles())
