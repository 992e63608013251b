"""Rates and sizes: by name, as written, and as the tuner measured them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from estimators.hardware import GPUS, bandwidths_of, measured, parse_gpu
from estimators.words import bytes_text, count_text, parse_bytes, parse_count, seconds_text


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24e9), ("24gib", 24 << 30), ("1.5TB", 1.5e12), ("600 TB", 6e14), ("12", 12),
     ("2_000", 2000), ("7g", 7e9), ("3e9", 3e9), ("16MiB", 16 << 20)],
)  # fmt: skip
def test_sizes_as_people_write_them(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "24XB", "-3GB", "1.2.3GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 24GB"):
        parse_bytes(text)


def test_counts_and_what_people_read() -> None:
    assert [parse_count(each) for each in ("7e9", "7B", "131M", "12", "1.1B", "1.5e1")] == [
        7 * 10**9, 7 * 10**9, 131 * 10**6, 12, 1_100_000_000, 15,
    ]  # fmt: skip
    for text in ("1.5", "7e-1", "1.00001k"):
        with pytest.raises(ValueError, match=f"'{text}' is not a whole number; [0-9]+ is the next"):
            parse_count(text)
    for text in ("1e31", "1e999999999"):
        with pytest.raises(ValueError, match="more than anything has"):
            parse_count(text)
    assert [bytes_text(each) for each in (12, 1500, 24e9, 1e12)] == [
        "12 B", "1.5 kB", "24 GB", "1 TB",
    ]  # fmt: skip
    assert [count_text(each) for each in (12, 8.03e9, 1e13)] == ["12", "8.03 B", "10 T"]
    assert [seconds_text(each) for each in (0.012, 57.8, 600, 7300, 400000)] == [
        "12 ms", "57.8 s", "10 min", "2.03 h", "4.63 days",
    ]  # fmt: skip


def test_gpus_by_name_and_by_size() -> None:
    assert parse_gpu("H100") is GPUS["h100"]
    assert parse_gpu("NVIDIA RTX 4090") is GPUS["rtx4090"]
    assert parse_gpu("24GB").memory_bytes == 24 * 10**9
    with pytest.raises(ValueError, match="did you mean rtx4090"):
        parse_gpu("rtx4909")


def test_rates_that_the_tuner_measured(tmp_path: Path) -> None:
    rate = {"median": 1e9, "low": 0.9e9, "count": 3}
    slow = {"read": {"rate": {**rate, "high": 1.1e9}}, "write": {"rate": {**rate, "high": 1.2e9}}}
    fast = {
        "read": {"rate": {**rate, "high": 3e9}},
        "write": {"rate": {**rate, "high": 2e9}},
        "mix": {"rate": {**rate, "high": 2.5e9}},
    }
    file = tmp_path / "tune.json"
    directories = [{"workloads": each} for each in (slow, fast, {"read": {"rate": None}})]
    file.write_text(json.dumps({"directories": directories}), encoding="utf-8")
    found = measured(bandwidths_of(None), file)
    assert (found.drive.read_bytes_per_s, found.drive.write_bytes_per_s) == (3e9, 2e9)
    assert found.mixed_bytes_per_s == 2.5e9
    assert found.drive.source == f"measured: {file}"
    file.write_text(json.dumps({"directories": []}), encoding="utf-8")
    with pytest.raises(ValueError, match="no directory has rates"):
        measured(bandwidths_of(None), file)


def test_what_is_wrong_with_an_answer_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'24' is 24 bytes of GPU memory .*24GB, not 24"):
        parse_gpu("24")
    with pytest.raises(FileNotFoundError, match=r"rates in .* cannot be read: No such file"):
        measured(bandwidths_of(None), tmp_path / "absent.json")


def test_rates_that_are_written_down(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text('{"read_bytes_per_s": 2e9, "flops": 5e14}', encoding="utf-8")
    before = bandwidths_of(parse_gpu("h100"))
    found = measured(before, file)
    assert (found.drive.read_bytes_per_s, found.flops) == (2e9, 5e14)
    assert found.drive.write_bytes_per_s == before.drive.write_bytes_per_s
    assert found.link_bytes_per_s == before.link_bytes_per_s
    file.write_text('{"read": 2e9}', encoding="utf-8")
    with pytest.raises(ValueError, match="read is no rate; known are read_bytes_per_s"):
        measured(before, file)
    file.write_text('{"flops": -1}', encoding="utf-8")
    with pytest.raises(ValueError, match="flops must be a positive number, got -1"):
        measured(before, file)
