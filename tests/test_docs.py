"""The documents of the repository name what is there: links, notes, scripts."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "scripts/*.md", "aio_ops/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path
    for package in ("aio_ops", "estimators", "offload", "zero")
    for pattern in ("*.py", "*.h", "*.cpp")
    for path in (ROOT / package).rglob(pattern)
)
NOTE = re.compile(r"\[Note: ([^\]]+)\]")
# A note begins a line and a sentence; whatever else has its name refers to it.
WRITTEN = re.compile(
    r"^\s*(?:(?://|#)\s*)?\[Note: ([^\]]+)\](?:\s|//|#)+(?:[A-Z`\d]|torch)", re.MULTILINE
)


def on_one_line(text: str) -> str:
    """Return a text whose comments and table cells are not broken into lines."""
    return re.sub(r"\s*\n\s*(?:#|//)?\s*", " ", text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_resolve(name: str) -> None:
    document = ROOT / name
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        assert target.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name} links to {link}"
    for path in re.findall(r"\b(?:scripts|docs|tests)/[\w/-]+\.(?:py|sh|md|json)\b", text):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_the_table_of_invariants_names_what_is_there() -> None:
    found = 0
    for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines():
        file = None
        for path, note in re.findall(r"`([\w/]+(?:\.py|\.md|/))`|\[Note: ([^\]]+)\]", line):
            if path:
                file = ROOT / path
                assert file.exists(), line
            elif note != "...":
                assert file is not None, f"no file before the note: {line}"
                assert f"[Note: {note}]" in on_one_line(file.read_text(encoding="utf-8")), line
                found += 1
    assert found > 40


def test_whoever_refers_to_a_note_finds_it() -> None:
    written: dict[str, set[Path]] = {}
    named: dict[str, set[Path]] = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for note in NOTE.findall(on_one_line(text)):
            named.setdefault(note, set()).add(path)
        for note in WRITTEN.findall(text):
            written.setdefault(note, set()).add(path)
    lost = {note: sorted(map(str, paths)) for note, paths in named.items() if note not in written}
    assert not lost
    assert len(named) > 60


def test_scripts_are_listed() -> None:
    listed = (ROOT / "scripts" / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in (ROOT / "scripts").iterdir() if path.suffix in {".py", ".sh"}]
    assert len(scripts) > 30
    assert [name for name in scripts if f"`{name}" not in listed] == []
