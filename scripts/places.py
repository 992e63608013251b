"""Folders and files that programs are given: what is not there ends in a line of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from estimators.command import output_option


def folder_option(text: str) -> Path:
    """Return a folder to measure in.

    Raises:
        argparse.ArgumentTypeError: if there is none.
    """
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}: make it with mkdir")
    return path


def json_option(text: str) -> Path:
    """Return a file that holds a JSON object.

    Raises:
        argparse.ArgumentTypeError: if it cannot be read as one.
    """
    path = Path(text)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {reason}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} holds {type(found).__name__}, not an object")
    return path


def picture_option(text: str) -> Path:
    """Return a file for a picture that is drawn when the work is done.

    Raises:
        argparse.ArgumentTypeError: if it could not be written, or there is nothing to draw with.
    """
    path = output_option(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            f"{text} needs matplotlib, which is not installed: pip install matplotlib, or leave it"
            " out"
        )
    return path
