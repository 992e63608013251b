"""What a diagnosis is made of: rows, each with a status and, where it is not well, the remedy."""

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How something is: FAIL alone keeps training from starting."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at."""

    what: str
    status: Status
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return it as plain data."""
        return {
            "what": self.what,
            "status": self.status.value,
            "found": self.found,
            "remedy": self.remedy,
        }


def ok(what: str, found: str) -> Row:
    """Return a row of something that is well."""
    return Row(what, Status.OK, found)


def warn(what: str, found: str, remedy: str) -> Row:
    """Return a row of something that makes training slower or less safe."""
    return Row(what, Status.WARN, found, remedy)


def fail(what: str, found: str, remedy: str) -> Row:
    """Return a row of something that keeps training from starting."""
    return Row(what, Status.FAIL, found, remedy)


Check = Callable[[], Row | Iterable[Row]]

# What looking at a machine may raise: files that are not there, modules that do not load, ...
_EXPECTED = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError)


def run(checks: Iterable[tuple[str, Check]]) -> Iterator[Row]:
    """Yield the rows of every check; one that cannot be made is a row that says why."""
    for what, check in checks:
        try:
            rows = check()
            yield from [rows] if isinstance(rows, Row) else list(rows)
        except (*_EXPECTED, ValueError) as error:
            text = f"could not be found out: {type(error).__name__}: {error}"
            yield warn(what, text, "please report this with the output of --json")
