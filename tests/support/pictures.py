"""What a picture of curves must be: labelled, nothing over anything else, no colour."""

from __future__ import annotations

import colorsys
from typing import Any

import pytest
from matplotlib.colors import to_rgb

UNITS = ("(GB/s)", "(GiB/s)", "(ms)", "(s)")


def kept_figures(patch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that every figure made from now on is added to."""
    import matplotlib.figure

    figures: list[Any] = []

    class Kept(matplotlib.figure.Figure):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            figures.append(self)

    patch.setattr(matplotlib.figure, "Figure", Kept)
    return figures


def assert_tidy(figure: Any, panel_count: int) -> None:
    """Assert labelled axes with units, greys alone, and that no text lies over another."""
    panels = [axes for axes in figure.axes if axes.axison]
    assert len(panels) == panel_count
    boxes = []
    for axes in panels:
        assert axes.get_xlabel()
        assert any(unit in axes.get_ylabel() for unit in UNITS)
        assert len([label for label in axes.get_yticklabels() if label.get_text()]) > 1
        for line in axes.get_lines():
            assert colorsys.rgb_to_hsv(*to_rgb(line.get_color()))[1] == 0
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        shown = axes.get_window_extent().padded(1)
        texts += [
            label
            for label in axes.get_xticklabels()
            if label.get_text() and shown.containsx(sum(label.get_window_extent().intervalx) / 2)
        ]
        legend = axes.get_legend()
        texts += legend.get_texts() if legend is not None else []
        boxes += [(text.get_text(), text.get_window_extent()) for text in texts]
        boxes += [("the curves", axes.get_window_extent())]
    for index, (name, box) in enumerate(boxes):
        assert figure.bbox.containsx(box.x0), name
        assert figure.bbox.containsx(box.x1), name
        for other, box_other in boxes[index + 1 :]:
            assert not box.overlaps(box_other), f"{name!r} lies over {other!r}"
