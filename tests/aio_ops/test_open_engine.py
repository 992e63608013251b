"""Choosing an engine, what is said when a choice cannot be met, and importing."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import aio_ops
from aio_ops import HostArena, open_engine
from tests.aio_ops.support import SECTOR, contents, filled, make_engine, pattern


def test_auto_takes_the_native_engine_and_says_why() -> None:
    with make_engine("threads"), open_engine() as engine:
        assert engine.name == "threads"
        assert "io_uring" in engine.reason


def _hide_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aio_ops._native", None)
    monkeypatch.delattr(aio_ops, "_native", raising=False)


def test_without_the_native_engine_auto_takes_python_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, scratch: Path, arena: HostArena
) -> None:
    _hide_native(monkeypatch)
    monkeypatch.delenv("TIERZERO_REQUIRE_NATIVE", raising=False)
    assert not aio_ops.native_available()
    with pytest.warns(RuntimeWarning, match="slower pure-Python engine") as warned:
        engine = open_engine("auto")
    with engine:
        assert len(warned) == 1
        assert warned[0].filename == __file__
        assert engine.name == "python"
        assert engine.reason.startswith("threads was refused: ")
        assert str(aio_ops.native_unavailable_reason()) in engine.reason
        with contextlib.closing(engine.create_file(scratch, SECTOR)) as file:
            engine.submit_write(file, 0, filled(arena, pattern(1, SECTOR))).wait()
            assert contents(file, 0, SECTOR) == pattern(1, SECTOR)


def test_without_the_native_engine_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _hide_native(monkeypatch)
    with pytest.raises(RuntimeError, match=r"native engine does not load.*use the engine 'python'"):
        open_engine("threads")
    monkeypatch.setenv("TIERZERO_REQUIRE_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"TIERZERO_REQUIRE_NATIVE=1, but .*aio_ops\._native"):
        open_engine("auto")


@pytest.mark.parametrize("kind", ["io_uring", "kernel_aio"])
def test_without_the_native_module_its_engines_are_an_error(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _hide_native(monkeypatch)
    with pytest.raises(RuntimeError, match=r"native engine does not load.*use the engine 'python'"):
        open_engine(kind)


@pytest.mark.parametrize(
    ("kind", "choices", "message"),
    [
        ("uring", {}, "there is no engine 'uring'; choose one of 'auto', 'threads', 'python'"),
        ("python", {"thread_count": 0}, "thread_count must be from 1 to 1024, got 0"),
        ("python", {"queue_depth": 0}, "queue_depth must be .* got 0"),
        ("python", {"block_bytes": 5000}, "multiple of 4096 .* got 5000; the nearest is 4096"),
        ("python", {"block_bytes": 0}, "got 0; the nearest is 4096"),
        ("python", {"block_bytes": 1 << 31}, f"the nearest is {1 << 30}"),
    ],
)
def test_a_choice_that_cannot_be_met_is_an_error(
    kind: str, choices: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(kind, **choices)


def _run_python(code: str) -> str:
    root = Path(aio_ops.__file__).parent.parent
    environment = {"PYTHONPATH": str(root)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_does_no_work() -> None:
    code = """
import sys, threading
import aio_ops
heavy = {"torch", "numpy", "fcntl", "mmap", "aio_ops._native"} & set(sys.modules)
print(sorted(heavy), threading.active_count())
"""
    assert _run_python(code) == "[] 1\n"


def test_elsewhere_than_on_linux_the_first_use_says_so() -> None:
    code = """
import sys
from pathlib import Path
sys.platform = "darwin"
sys.modules["fcntl"] = None
import aio_ops
uses = (
    aio_ops.open_engine,
    lambda: aio_ops.HostArena(1),
    lambda: aio_ops.SwapFile.create(Path(), 1),
)
for use in uses:
    try:
        use()
    except ImportError as error:
        print(error)
"""
    line = "aio_ops needs Linux (direct I/O, O_TMPFILE); this is darwin\n"
    assert _run_python(code) == 3 * line
