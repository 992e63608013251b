"""What a drive can do, and the time that it needs for given bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes a second that a drive reads and writes, each on its own."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    source: str
    """Where the rates come from: "measured", "given" or "assumed"."""

    def __post_init__(self) -> None:
        if self.read_bytes_per_s <= 0 or self.write_bytes_per_s <= 0:
            raise ValueError(
                f"a drive's rates must be positive, got {self.read_bytes_per_s} bytes/s read and"
                f" {self.write_bytes_per_s} bytes/s written"
            )

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the seconds that the drive needs for the bytes, one direction after the other."""
        return read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s

    def describe(self) -> str:
        """Return the rates as text for people."""
        return (
            f"{self.read_bytes_per_s / 1e9:.2f} GB/s read, {self.write_bytes_per_s / 1e9:.2f} GB/s"
            f" written ({self.source})"
        )


ASSUMED_RATES = DriveRates(1e9, 1e9, "assumed")
"""Used to weigh reads against writes where nothing is measured or given: as fast as each other."""
