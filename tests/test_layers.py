"""The layers and what importing may do, each import in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.canary import fail_an_assert

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("aio_ops", "estimators", "offload", "zero")

# What an import does is seen by Python's audit events, after the third-party packages, whose own
# doings are not ours, have been imported. Threads are counted as the kernel does: native ones too.
OBSERVER = """
import importlib, json, os, sys, threading
root, name, *allowed = sys.argv[1:]
sys.path.append(root)
for package in allowed:
    importlib.import_module(package)
events = []
forbidden = {"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system",
             "os.mkdir", "os.rename", "os.remove", "os.putenv", "os.unsetenv", "signal.signal",
             "socket.connect", "socket.bind", "tempfile.mkstemp", "tempfile.mkdtemp"}
def watch(event, arguments):
    writing = event == "open" and isinstance(arguments[2], int) and arguments[2] & (
        os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if watching and (writing or event in forbidden):
        events.append(f"{event} {arguments}")
threads_before = set(os.listdir("/proc/self/task"))
environment_before = dict(os.environ)
watching = True
sys.addaudithook(watch)
importlib.import_module(name)
watching = False
print(json.dumps({
    "events": events,
    "new_threads": len(set(os.listdir("/proc/self/task")) - threads_before),
    "python_threads": threading.active_count(),
    "environment_changed": dict(os.environ) != environment_before,
    "modules": sorted(sys.modules),
    "origin": sys.modules[name].__file__,
}))
"""


def observe_import(name: str, *allowed: str, root: Path = ROOT) -> dict[str, Any]:
    """Import a package in an empty environment and return what that did."""
    command = [sys.executable, "-B", "-c", OBSERVER, str(root), name, *allowed]
    done = subprocess.run(command, env={}, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    observed: dict[str, Any] = json.loads(done.stdout)
    return observed


@pytest.mark.parametrize("name", PACKAGES)
def test_importing_does_nothing(name: str) -> None:
    torch_free = name in ("aio_ops", "estimators")
    allowed = (
        ("numpy",) if torch_free else ("numpy", "torch", "torch.distributed", "rich", "pydantic")
    )
    observed = observe_import(name, *allowed)
    assert Path(observed["origin"]).is_relative_to(ROOT)
    assert observed["events"] == []
    assert observed["new_threads"] == 0
    assert observed["python_threads"] == 1
    assert not observed["environment_changed"]


def test_the_observer_sees_what_an_import_does(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import os, subprocess, sys, threading\n"
        "subprocess.run([sys.executable, '-c', ''], check=True)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "os.environ['BUSY'] = '1'\n"
        "open(__file__ + '.out', 'w').close()\n"
    )
    observed = observe_import("busy", root=tmp_path)
    assert {event.split()[0] for event in observed["events"]} >= {"subprocess.Popen", "open"}
    assert observed["new_threads"] == 1
    assert observed["python_threads"] == 2
    assert observed["environment_changed"]


@pytest.mark.parametrize("name", ["aio_ops", "estimators"])
def test_the_bottom_layers_import_no_torch(name: str) -> None:
    modules = observe_import(name)["modules"]
    assert name in modules
    assert "torch" not in modules


def test_layers_hold() -> None:
    program = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_native_modules_are_loaded_when_they_are_required() -> None:
    import aio_ops
    import offload

    if os.environ.get("TIERZERO_REQUIRE_NATIVE") != "1":
        pytest.skip("TIERZERO_REQUIRE_NATIVE is not 1: setup found no compiler, or was not used")
    assert aio_ops.native_available(), aio_ops.native_unavailable_reason()
    assert offload.native_available(), offload.native_unavailable_reason()


def test_asserts_of_the_support_package_work() -> None:
    with pytest.raises(AssertionError, match="this assert of tests/support is rewritten"):
        fail_an_assert(1)
