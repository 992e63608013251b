"""The script that the field expects beside checkpoints: `zero_to_fp32.py`."""

from __future__ import annotations

import logging
from pathlib import Path

SCRIPT_NAME = "zero_to_fp32.py"

SCRIPT = '''#!/usr/bin/env python
"""Turn a checkpoint of this folder into full fp32 weights.

    python zero_to_fp32.py . OUTPUT_FOLDER [--max_shard_size 5GB] [--safe_serialization]
        [-t TAG] [--exclude_frozen_parameters] [-d]
"""

import sys

try:
    from zero.checkpoint.convert import main
except ImportError as error:
    sys.exit(f"this needs the package tierzero ({error}): python -m pip install tierzero")

if __name__ == "__main__":
    sys.exit(main())
'''

_log = logging.getLogger(__name__)


def write_script(folder: Path) -> None:
    """Put the script into a folder of checkpoints; failing is only told."""
    path = folder / SCRIPT_NAME
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != SCRIPT:
            path.write_text(SCRIPT, encoding="utf-8")
            path.chmod(0o755)
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s was not written: %s", path, error)
