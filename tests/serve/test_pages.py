"""The pages that people look at: the server's at ``/``, and that of ``explain --html``.

A browser lays the server's page out where the machine has one; what can be read from its source is
checked everywhere.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SERVE = Path(__file__).resolve().parents[2] / "serve"
STATUS, EXPLAINED = SERVE / "http/endpoints/status.html", SERVE / "commands/explain.html.jinja"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
MODEL = "meta-llama/Llama-3.1-8B-Instruct-" + "with-a-long-name" * 4
METRICS = f"""
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 3
vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} 1234567
fusewright:steps_total{{engine="0",graph="NONE",model_name="{MODEL}",step="mixed"}} 7
fusewright:steps_total{{engine="0",graph="FULL",model_name="{MODEL}",step="decode"}} 12345
fusewright:copy_ceiling_unknown{{why="no device table has the copy rate of x86_64"}} 1
"""
STUB = f"""<script>
let looks = 0;
window.fetch = async url => new Response(url === "/health" ? '{{"status": "ok"}}' :
  {json.dumps(METRICS)}.replace("1234567", 1234567 + 9000 * looks++));
</script>"""
PROBE = """<script>
setTimeout(() => {
  const page = document.documentElement, canvas = document.getElementById("rates");
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  page.dataset.probe = JSON.stringify({
    wider: page.scrollWidth - page.clientWidth,
    cut: [...document.querySelectorAll("h1, h2, td, small span")].filter(
      each => each.clientWidth && each.scrollWidth > each.clientWidth + 1).map(
      each => each.textContent),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    rate: document.getElementById("rate").textContent,
    drawn: pixels.some(value => value),
    rows: [...document.querySelectorAll("tr")].map(row => row.textContent),
  });
}, 5500);
</script>"""


@pytest.mark.parametrize("page", [STATUS, EXPLAINED], ids=lambda page: page.name)
def test_a_page_follows_the_reader(page: Path) -> None:
    """Dark or light as the reader has it, as wide as the window, and nothing from elsewhere."""
    text = page.read_text()
    assert "color-scheme: light dark" in text
    assert '<meta name="viewport" content="width=device-width">' in text
    assert not re.search(r"(src|href)=\"?(https?:)?//|@import", text)


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_of_texts_can_be_read_on_both_grounds() -> None:
    """At least 4.5 to 1, as WCAG 2.2 asks for."""
    light, dark = re.findall(r":root \{[^}]*?((?:--\w+: #\w{6}[; ]*)+)\}", STATUS.read_text())
    for colors, ground in ((light, "#ffffff"), (dark, "#121212")):
        found = re.findall(r"#\w{6}", colors)
        assert len(found) == 3
        for color in found:
            low, high = sorted((luminance(color), luminance(ground)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (color, ground)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(320, False), (1000, True)])
def test_the_status_page_in_a_browser(width: int, dark: bool, tmp_path: Path) -> None:
    page = STATUS.read_text().replace("<script>", STUB + "<script>", 1).replace("</html>", PROBE)
    (tmp_path / "status.html").write_text(page)
    # A window is never narrower than 500 pixels; a frame in it is.
    frame = f'<iframe src="status.html" style="width: {width}px; height: 900px"></iframe>'
    copy = "<script>setTimeout(() => document.body.textContent = document.querySelector('iframe')"
    copy += ".contentDocument.documentElement.dataset.probe, 8000)</script>"
    (tmp_path / "frame.html").write_text(f"<body>{frame}{copy}</body>")
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--allow-file-access-from-files", "--window-size=1200,1000"),
            *("--virtual-time-budget=10000", f"--user-data-dir={tmp_path / 'profile'}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    probe = re.search(r"<body>(\{.*\})</body>", done.stdout, re.DOTALL)
    assert probe, done.stdout[-500:] + done.stderr[-500:]
    seen = json.loads(probe[1])
    assert (seen["wider"], seen["cut"], seen["dark"], seen["drawn"]) == (0, [], dark, True)
    assert int(seen["rate"].replace(",", "")) > 5000
    assert "running requests3" in seen["rows"] and "steps: FULL graph, decode12,345" in seen["rows"]
