"""The page in a real browser, if installed: no overflow, no error, contrast as painted, sorting; screenshots.

`DRAFTSMITH_SCREENSHOTS=FOLDER` writes screenshots and a PDF into that folder too.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.report_facts import all_facts

from draftsmith.eval.report.page.page import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = {"phone": 390, "tablet": 820, "desk": 1440}
SCHEMES = {"dark": 0, "light": 1}
METHODS = {f"method-{number}": 0.7 + 0.06 * number for number in range(24)}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

# Scripts before and after the page, which report the browser's layout as JSON.
ERRORS = "<script>window.errors = []; addEventListener('error', (event) => errors.push(event.message));</script>"
MEASURE = """<script>
function rgb(text) { return text.match(/[\\d.]+/g).map(Number); }
function luminance(colour) {
  const parts = colour.slice(0, 3).map((part) => part / 255);
  const [r, g, b] = parts.map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(element) {
  for (let each = element; each; each = each.parentElement) {
    const colour = rgb(getComputedStyle(each).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
}
const low = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
let seen = 0;
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || element.closest("script, title")) continue;
  const style = getComputedStyle(element);
  const ink = rgb(element.closest("svg") ? style.fill : style.color);
  const [dark, light] = [luminance(ink), luminance(ground(element))].sort((a, b) => a - b);
  const contrast = (light + 0.05) / (dark + 0.05);
  seen += 1;
  if (contrast < 4.5) low.push([texts.currentNode.data.trim().slice(0, 40), contrast]);
}
const wide = [...document.querySelectorAll("body *")].filter((each) => !each.closest(".scroll, svg") &&
  each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80));
const table = document.querySelector("#methods table");
const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
const before = names(), button = table.tHead.rows[0].cells[1].querySelector("button");
button.click(); button.click();
const found = { width: innerWidth, scrollWidth: document.documentElement.scrollWidth, wide, low, seen, errors, before,
  after: names(), sort: table.tHead.rows[0].cells[1].getAttribute("aria-sort"),
  requests: performance.getEntriesByType("resource").length,
  background: getComputedStyle(document.body).backgroundColor };
parent.postMessage(JSON.stringify(found), "*");
</script>"""
# A window is at least 500 pixels wide; a frame can be narrower.
FRAME = """<!doctype html><pre id="found"></pre><script>
addEventListener("message", (event) => document.getElementById("found").textContent = event.data);
</script><iframe src="measured.html" style="width: WIDTHpx; height: 900px; border: 0"></iframe>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("page"), all_facts(METHODS, (0.0, 1.0)))[1]


def browse(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    return subprocess.run([CHROMIUM, *fixed, *arguments], capture_output=True, text=True, timeout=120, check=False)


def measure(page: Path, folder: Path, width: int, scheme: str, medium: str = "screen") -> dict[str, Any]:
    """Return the layout in a browser; medium `print` shows the page as printed."""
    text = page.read_text(encoding="utf-8")
    if medium == "print":
        text = text.replace("@media print", "@media all").replace("<details>", "<details open>")
    file = folder / "measured.html"
    text = text.replace("<head>", "<head>" + ERRORS).replace("</body>", MEASURE + "</body>")
    file.write_text(text, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    out = browse(
        folder / "profile",
        "--window-size=1500,1000",
        "--virtual-time-budget=20000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
        "--dump-dom",
        frame.as_uri(),
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', out.stdout, re.DOTALL)
    assert found, out.stderr[-2000:]
    return dict(json.loads(unescape(found[1])))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_layout_and_sorting_in_a_browser(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    found = measure(page, tmp_path, width, scheme)
    assert found["width"] == width
    assert found["scrollWidth"] <= width
    assert found["wide"] == []
    assert found["errors"] == []
    assert found["requests"] == 0
    assert found["seen"] > 500
    assert found["low"] == []
    assert found["background"] == {"dark": "rgb(20, 20, 22)", "light": "rgb(250, 250, 248)"}[scheme]
    # Sorted by speedup, descending and then ascending: the slowest first.
    assert found["sort"] == "ascending"
    assert found["before"] == list(METHODS)
    assert found["after"] == list(METHODS)[::-1]


def test_printed_page_fits_the_paper(page: Path, tmp_path: Path) -> None:
    """A4 between its margins is 688 pixels; folded sections are printed open, and nothing scrolls."""
    found = measure(page, tmp_path, 688, "light", "print")
    assert found["scrollWidth"] <= 688
    assert (found["wide"], found["low"], found["errors"]) == ([], [], [])


@pytest.mark.skipif("DRAFTSMITH_SCREENSHOTS" not in os.environ, reason="for people to look at")
def test_screenshots(page: Path, tmp_path: Path) -> None:
    folder = Path(os.environ["DRAFTSMITH_SCREENSHOTS"]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for (name, width), (scheme, number) in itertools.product(WIDTHS.items(), SCHEMES.items()):
        colours = f"--blink-settings=preferredColorScheme={number}"
        picture = folder / f"report-{name}-{scheme}.png"
        browse(tmp_path / "profile", f"--window-size={width},4000", colours, f"--screenshot={picture}", page.as_uri())
        assert picture.read_bytes().startswith(b"\x89PNG")
    file = folder / "report.pdf"
    browse(tmp_path / "profile", "--no-pdf-header-footer", f"--print-to-pdf={file}", page.as_uri())
    assert file.read_bytes().startswith(b"%PDF")
