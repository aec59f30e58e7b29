"""What a run leaves for people: the report in a real browser (drawn, quiet, never wider than the screen), and the W&B run."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.report import build_report
from tests.e2e.runs import miles, short_run_arguments, start_miles, wait_for
from tests.unit.synthetic_run import SyntheticRun
from tests.unit.test_tracker import history

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1280, 390)

# The page stands in a frame of each width: one browser start measures both, and a frame has no least width as a window has.
PROBE = """<!doctype html><body>
<script>
const frames = {frames};
const results = [];
function measure(frame, width) {{
  const page = frame.contentDocument, root = page.documentElement;
  const shown = [...page.querySelectorAll("svg.chart")].filter((svg) => svg.getBoundingClientRect().width > 0);
  const svg = shown[0], box = svg.getBoundingClientRect();
  const at = {{clientX: box.left + box.width / 2, clientY: box.top + 40}};
  svg.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", at));
  const text = shown[0].querySelector("text").getBoundingClientRect();
  results.push({{width, inner: frame.contentWindow.innerWidth, overflow: root.scrollWidth, charts: shown.length,
    drawn: shown.filter((one) => one.querySelector("path") && one.querySelector("path").getTotalLength() > 0).length,
    text: text.height, pointer: page.getElementById("pointer").textContent, errors: frame.contentWindow.failures}});
  if (results.length === frames.length)
    document.body.innerHTML = "<pre id=result>" + JSON.stringify(results) + "</pre>";
}}
for (const width of frames) {{
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900;
  frame.onload = () => measure(frame, width);
  frame.src = "page.html";
  document.body.appendChild(frame);
}}
</script>"""
LISTEN = '<script>var failures = []; addEventListener("error", (event) => failures.push(String(event.message)));</script>'


def browse(page: Path, *flags: str) -> tuple[str, str]:
    """The page's document after its scripts ran, and the browser's own log."""
    if BROWSER is None:
        message = "no Chromium here: `make test` installs it with apt-get where it may (package chromium)"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    profile = page.parent / "profile"
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--allow-file-access-from-files", "--enable-logging=stderr", f"--user-data-dir={profile}",
            "--virtual-time-budget=5000", *flags, "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def check_page(report: Path, folder: Path) -> None:
    """Opens the page at both widths and looks at what came of it."""
    folder.mkdir()
    text = report.read_text()
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text), "the page names something outside itself"
    (folder / "page.html").write_text(text.replace("<head>", "<head>" + LISTEN, 1))
    (folder / "probe.html").write_text(PROBE.format(frames=list(WIDTHS)))
    dom, log = browse(folder / "probe.html", "--window-size=1400,1000")
    found = re.search(r'<pre id="?result"?>(.*?)</pre>', dom)
    assert found is not None, dom[:2000] + log
    for seen in json.loads(found.group(1)):
        assert seen["inner"] == seen["width"] and seen["overflow"] <= seen["width"], seen
        assert seen["charts"] == seen["drawn"] >= 9, seen
        assert seen["errors"] == [] and seen["text"] >= 10 and "step" in seen["pointer"], seen
    console = [line for line in log.splitlines() if "CONSOLE" in line]
    assert console == []


@pytest.mark.timeout(300)
def test_a_page_with_everything_on_it(tmp_path: Path) -> None:
    made = SyntheticRun(tmp_path / "synthetic-1-with-a-long-name-that-must-wrap-on-a-telephone-0123456789", steps=12)
    made.add_tokenizer()
    made.drop("g99.o1")
    for step in range(1, 9):
        made.train(step)
    made.evaluate(0, 0.25)
    made.lose("rollout-0", "a_very_long_detail_without_any_space_in_it_" * 8)
    check_page(build_report(made.paths.root), tmp_path / "browser")


@pytest.mark.xdist_group("e2e")
@pytest.mark.timeout(900)
def test_the_page_that_a_run_leaves(finished_run: Path, tmp_path: Path) -> None:
    check_page(finished_run / "reports" / "index.html", tmp_path / "browser")


@pytest.mark.xdist_group("e2e")
@pytest.mark.timeout(900)
def test_a_tracked_run_whose_supervisor_is_killed_is_one_wandb_run(tmp_path: Path) -> None:
    arguments = short_run_arguments("tracked", "steps=20", "tracking.wandb=true")
    root = tmp_path / "runs" / "tracked"
    first = start_miles(tmp_path, *arguments, WANDB_MODE="offline")
    wait_for("rows of the first supervisor", lambda: any(row.get("train/step", 0) > 0 for row in history(root)))
    first.kill()
    first.wait(timeout=10)
    second = miles(tmp_path, *arguments, WANDB_MODE="offline")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"wandb sync --id tracked {root}/wandb/offline-run-" in second.stdout
    rows = history(root)
    steps = [row["train/step"] for row in rows if "train/step" in row]
    assert len(steps) >= 20 and steps[-1] == 20, "kill -9 may cost the one row between cursor and W&B"
    for axis in ("train/step", "policy_version", "eval/step", "wall_s"):
        values = [row[axis] for row in rows if axis in row]
        assert values and all(before < after for before, after in itertools.pairwise(values)), axis
