"""Every report of the field that is resolved has tests that exist and run."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.conftest import direct_io_directory

ROOT = Path(__file__).resolve().parents[2]
INDEX = tomllib.loads((ROOT / "tests" / "field" / "index.toml").read_text(encoding="utf-8"))
THEME_B = {f"B{number}" for number in (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14, 15)}
THEME_C = {f"C{number}" for number in (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12)}
GRAPHS_AND_NUMBERS = {"E7", "E8", "E10", "G1", "G2", "G3", "G4", "G6", "G7", "G8", "G9"}
NEVER_RUN = {"skip", "skipif", "xfail", "full"}
CONDITIONS = {"nvme", "gpu", "parametrize", "timeout"}


def test_every_report_is_listed() -> None:
    assert set(INDEX) >= THEME_B | THEME_C | GRAPHS_AND_NUMBERS
    for report, entry in INDEX.items():
        assert set(entry) == {"report", "tests"}, report
        assert entry["tests"], report


@pytest.mark.parametrize("report", INDEX)
def test_the_tests_of_a_report_exist_and_run(report: str) -> None:
    for test in INDEX[report]["tests"]:
        problem = why_not_run(test)
        assert problem is None, f"{report}: {test} {problem}"


def test_nothing_of_the_index_is_skipped_on_this_machine() -> None:
    """Most tests of the index page through a file with direct I/O, and would be skipped without."""
    refusal = direct_io_directory()[1]
    assert not refusal, f"the tests of the index cannot run here: {refusal}"


def why_not_run(test: str) -> str | None:
    """Return why a test of the index would not run in the fast suite, or None."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return "is in a file that does not exist"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if len(functions) != 1:
        return f"is defined {len(functions)} times"
    marks = {mark for decorator in functions[0].decorator_list for mark in marks_in(decorator)}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark"
            for target in statement.targets
        ):
            marks.update(marks_in(statement.value))
    unknown = marks - NEVER_RUN - CONDITIONS
    if unknown:
        return f"has marks that this check does not know: {sorted(unknown)}"
    if marks & NEVER_RUN:
        return f"is marked {sorted(marks & NEVER_RUN)}"
    if any(
        isinstance(node, ast.Call) and ast.unparse(node.func) in ("pytest.skip", "pytest.xfail")
        for node in ast.walk(functions[0])
    ):
        return "skips itself"
    return None


def marks_in(node: ast.expr) -> set[str]:
    """Return the names of the pytest marks of a decorator; those of single cases do not count."""
    if isinstance(node, ast.Call):
        return marks_in(node.func)
    if isinstance(node, ast.List):
        return {mark for item in node.elts for mark in marks_in(item)}
    text = ast.unparse(node)
    return {text.removeprefix("pytest.mark.")} if text.startswith("pytest.mark.") else set()


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("tests/none.py::test_x", "does not exist"),
        ("tests/field/test_index.py::test_nothing", "defined 0 times"),
        ("tests/zero/test_larger_than_memory.py::test_three_times_the_memory", "marked"),
    ],
)
def test_the_check_finds_what_would_not_run(test: str, problem: str) -> None:
    assert problem in (why_not_run(test) or "")
