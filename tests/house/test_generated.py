"""What of the documents is made from something else is what that says today."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from generate.picture import ARMS, LEFT, RESULT, pictures

SPEEDUPS = pictures()
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("file", SPEEDUPS, ids=lambda file: file.stem)
def test_the_picture_shows_the_figures(file: Path) -> None:
    """If not: `python docs/generate/picture.py`."""
    assert file.read_text(encoding="utf-8") == SPEEDUPS[file]
    drawn = ElementTree.fromstring(SPEEDUPS[file])
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]["rows"]
    speedups = [rows[name]["speedup_mean"] for name in ARMS]
    lengths = [float(bar.attrib["width"]) for bar in drawn.iter(f"{SVG}rect")]
    assert [length / lengths[0] for length in lengths] == pytest.approx(speedups, rel=0.002)  # a tenth of a pixel
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert [text for text in texts if re.fullmatch(r"[\d.]+x", text or "")] == [f"{each:.2f}x" for each in speedups]
    whiskers = [path.attrib["d"] for path in drawn.iter(f"{SVG}path")]
    ends = [[float(end) for end in re.findall(r"[MH]([\d.]+)", whisker)[:2]] for whisker in whiskers]
    scale = lengths[0]
    intervals = [interval for name in ARMS if (interval := rows[name]["speedup_interval"])]
    assert [[(end - LEFT) / scale for end in pair] for pair in ends] == [
        pytest.approx(each, rel=0.002) for each in intervals
    ]
