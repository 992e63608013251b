"""The rules of style that no linter enforces, as tests over the syntax trees of this repository."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("aio_ops", "estimators", "offload", "zero")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CLASS_METHODS = 20
MAX_PARAMETERS = 8

# (file, rule) -> why the rule does not hold there.
EXEMPT = {
    ("zero/compatibility.py", "parameters"): "mirrors the signature of the field's initialize",
    ("zero/compatibility.py", "function_length"): "documents each parameter of that signature",
    ("zero/init_context.py", "parameters"): "mirrors the signature of the field's Init",
    ("zero/lr_schedules.py", "parameters"): "mirrors the signatures of the field's schedules",
    ("zero/config/__main__.py", "prints"): "a command line",
    ("estimators/command.py", "prints"): "a command line",
    ("zero/checkpoint/__main__.py", "prints"): "a command line",
    ("zero/plan_command.py", "prints"): "a command line",
    ("estimators/field.py", "prints"): "the field's functions print a table",
    ("aio_ops/tune/command.py", "prints"): "a command line",
    ("aio_ops/doctor/command.py", "prints"): "a command line",
    ("tests/support/delays.py", "sleeps"): "its sleeps are the delays that are tested",
    ("zero/engine.py", "methods"): "mirrors the surface of the field's engine",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Iterator[tuple[int, str]]  # line number, what is wrong there


def functions_in(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def file_length(tree: ast.Module, source: str) -> Breaches:
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        yield lines, f"the file has {lines} lines, and {MAX_FILE_LINES} are allowed"


def function_length(tree: ast.Module, source: str) -> Breaches:
    for function in functions_in(tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            yield function.lineno, f"{function.name} has {lines} lines of {MAX_FUNCTION_LINES}"


def parameters(tree: ast.Module, source: str) -> Breaches:
    for function in functions_in(tree):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in named)
        count += (arguments.vararg is not None) + (arguments.kwarg is not None)
        if count > MAX_PARAMETERS:
            yield function.lineno, f"{function.name} has {count} parameters of {MAX_PARAMETERS}"


def methods(tree: ast.Module, source: str) -> Breaches:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            # By name: a property and its setter, or overloads, are one.
            names = {member.name for member in node.body if isinstance(member, Function)}
            if len(names) > MAX_CLASS_METHODS:
                yield node.lineno, f"{node.name} has {len(names)} methods of {MAX_CLASS_METHODS}"


def asserts(tree: ast.Module, source: str) -> Breaches:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "an assert vanishes under -O: raise an exception"


def acting_asserts(tree: ast.Module, source: str) -> Breaches:
    """Find waits and transfers inside asserts; tests may call what only looks."""
    acting = {"wait", "step", "backward", "submit_read", "submit_write", "drain", "close", "write"}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        for call in ast.walk(node.test):
            if isinstance(call, ast.Call) and name_of(call.func).rpartition(".")[2] in acting:
                yield node.lineno, f"{name_of(call.func)} acts inside an assert: call it before"


def prints(tree: ast.Module, source: str) -> Breaches:
    yield from calls_of(tree, {"print", "sys.stdout.write"}, "only scripts print")


def factories(tree: ast.Module, source: str) -> Breaches:
    """Find tensors that are made without device or type: torch's defaults would change them."""
    typed = ("arange", "as_tensor", "asarray", "randint", "randperm", "scalar_tensor", "tensor")
    untyped = ("empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "zeros")
    wanted: dict[str, tuple[str, ...]] = {
        **{f"torch.{name}": ("device",) for name in typed},
        **{f"torch.{name}": ("device", "dtype") for name in (*untyped, "rand", "randn")},
    }
    for node in ast.walk(tree):
        name = name_of(node.func) if isinstance(node, ast.Call) else ""
        given = [each.arg for each in node.keywords] if isinstance(node, ast.Call) else []
        for keyword in wanted.get(name, ()):
            if keyword not in given and None not in given:
                yield node.lineno, f"{name}: say which {keyword}"


def sleeps(tree: ast.Module, source: str) -> Breaches:
    yield from calls_of(tree, {"time.sleep", "sleep", "asyncio.sleep"}, "a test waits for an event")


def calls_of(tree: ast.AST, names: set[str], advice: str) -> Breaches:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) in names:
            yield node.lineno, f"{name_of(node.func)}: {advice}"


def name_of(node: ast.expr) -> str:
    """Return the dotted name that an expression is, as far as it is one."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


Rule = Callable[[ast.Module, str], Breaches]
SIZES: tuple[Rule, ...] = (file_length, function_length, methods)
RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(PACKAGES, (*SIZES, parameters, asserts, prints, factories)),
    "scripts": (*SIZES, parameters, asserts),
    # The parameters of a test are its fixtures and cases, as many as it needs.
    "tests": (*SIZES, acting_asserts, sleeps),
}


def python_files() -> list[str]:
    paths = (path for folder in RULES for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


@pytest.mark.parametrize("file", python_files())
def test_python_is_tidy(file: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(source, filename=file)
    breaches = [
        f"{file}:{line}: {message}"
        for rule in RULES[file.partition("/")[0]]
        if (file, rule.__name__) not in EXEMPT
        for line, message in rule(tree, source)
    ]
    assert not breaches, "\n".join(breaches)


def test_native_files_are_short() -> None:
    folders = (*PACKAGES, "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if is_native(path)]
    assert paths
    long = [path.name for path in paths if len(path.read_text().splitlines()) > MAX_FILE_LINES]
    assert not long


def is_native(path: Path) -> bool:
    return path.suffix in (".cpp", ".h")


def test_every_exemption_names_a_file_and_a_rule() -> None:
    rules = {rule.__name__ for of_folder in RULES.values() for rule in of_folder}
    for file, rule in EXEMPT:
        assert (ROOT / file).is_file(), file
        assert rule in rules, rule


NINE = ", ".join(f"p{number}" for number in range(9))
BREACHES = [
    (file_length, "x = 1\n" * 501),
    (function_length, "def f():\n" + "    x = 1\n" * 60),
    (parameters, f"def f({NINE}): ..."),
    (parameters, "def f(self, a, b, c, d, /, e, f, g, *rest, **more): ..."),
    (methods, "class C:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(21))),
    (asserts, "assert queue.depth > 0"),
    (acting_asserts, "assert ticket.wait() is None"),
    (acting_asserts, "assert 4096 == engine.queue.submit_read(file, 0, span)"),
    (prints, "if x:\n    print('x')"),
    (prints, "import sys\nsys.stdout.write('x')"),
    (sleeps, "import time\ntime.sleep(1)"),
]


@pytest.mark.parametrize(("rule", "source"), BREACHES)
def test_each_rule_finds_a_breach(rule: Rule, source: str) -> None:
    assert len(list(rule(ast.parse(source), source))) == 1


ALLOWED = [
    (file_length, "x = 1\n" * 500),
    (function_length, "def f():\n" + "    x = 1\n" * 59),
    (parameters, "def f(self, a, b, c, d, *, e, f, g, h): ..."),
    (methods, "class C:\n" + "    def m(self): ...\n" * 21),
    (acting_asserts, "assert ticket.done() and len(events) == 3"),
    (prints, "console.print('x')"),
    (sleeps, "event.wait()"),
]


@pytest.mark.parametrize(("rule", "source"), ALLOWED)
def test_no_rule_finds_what_is_allowed(rule: Rule, source: str) -> None:
    assert list(rule(ast.parse(source), source)) == []
