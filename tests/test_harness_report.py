"""``report.html``: what it holds, that nothing in it can act, and how it looks in a real browser without network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.pictures import BEYOND, NOTHING, WITHIN, colour
from harness.plan import BadRequest
from harness.report import write_report
from tests.browser import open_browser
from tests.harness_project import PASSING, Project

WIDTH = 1280

MAPPED = """
cells = [[0.001 * (row + column) for column in range(32)] for row in range(20)]
worst = [{"where": "rank 0, expert 3, pool block 4 row 77 = rank 1 token 40 slot 2, column 130",
          "got": "1.5", "expected": "1.0", "error": 0.05}]
picture = {"rows": 200, "columns": 640, "unit": "bound", "cells": cells, "worst": worst, "rank": 0}
"""
PASSES = MAPPED + 'case("small"); view("x", map=picture, against="oracle"); view("topk_idx", max_errors=0); finish()'
HOSTILE = "<script>document.title='taken'</script><img src='http://127.0.0.1:9/a.png'>&quot;"
FAILS = f"""
{MAPPED}
hostile = {HOSTILE!r}
long = "x" * 5000
picture |= {{"unit": "differ", "cells": [[0, 3], [0, 1200]]}}
worst[0] |= {{"where": hostile, "got": long}}
print(hostile)
print(long, flush=True)
case("small", ok=False, message=hostile + long)
view("x", wrong=3, ok=False, map=picture, against=hostile)
write("figure", name=hostile, value=1e9, unit=long)
write("dump", path="/tmp/" + long)
finish(False)
sys.exit(1)
"""

# The first and the last pixel of the scale, as the browser has decoded them.
PIXELS = """(() => {
  const scale = document.images[0], canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [scale.naturalWidth, 1];
  const context = canvas.getContext("2d");
  context.drawImage(scale, 0, 0);
  return [0, canvas.width - 1].map(x => Array.from(context.getImageData(x, 0, 1, 1).data.slice(0, 3)));
})()"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_report_in_a_browser(project: Project, tmp_path: Path) -> None:
    """At 1280 pixels nothing overflows, nothing is asked for, nothing from a log acts, and every picture is one."""
    project.phase(1, PASSES, targets={"host": {"ranks": {1: ["single"], 2: ["virtual"]}}})
    project.phase(2, FAILS, targets={"host": {"ranks": {1: ["single"], 8: ["virtual"]}}})
    project.phase(3, PASSING, requires=[2])
    project.phase(4, PASSING, targets={"sm90": {"ranks": {1: ["single"]}}})
    project.phase(5, 'print("stuck", flush=True); time.sleep(100)', seconds=1)
    call = project.call("run", "--target", "host")
    assert call.code == 1, call.output
    with open_browser(tmp_path) as page:
        page.open(call.run_folder / "report.html", WIDTH)
        page.value("document.querySelectorAll('details').forEach(folded => folded.open = true)")
        page.screenshot(tmp_path / "report.png")
        assert page.value("document.documentElement.scrollWidth") <= WIDTH
        inner = "Array.from(document.querySelectorAll('body *')).filter(e => e.getBoundingClientRect().right > 1280)"
        assert page.value(f"{inner}.map(e => e.tagName)") == []
        assert [url for url in page.requests if not url.startswith("data:image/png")] == [
            (call.run_folder / "report.html").as_uri()
        ]
        assert page.value("document.title") == f"megamoe run {call.run_folder.name}: failed"
        assert page.value("document.scripts.length") == 0
        assert page.value("document.images.length") == 7  # the scale; 2 phases; 4 steps
        assert page.value("Array.from(document.images).every(image => image.complete && image.naturalWidth > 0)")
        assert page.value(PIXELS) == [list(colour(10**exponent, "bound")) for exponent in (-2.95, 2.95)]
        text = str(page.value("document.body.innerText"))
    assert (tmp_path / "report.png").stat().st_size > 50_000
    for words in [
        "2 passed, 3 failed (1 timed out), 1 blocked, 1 skipped",
        HOSTILE,
        "rank 1 token 40 slot 2, column 130: got 1.5, expected 1.0, 0.05 times the bound",
        "200 rows × 640 columns",
        "gate phase 2 failed",
        "phase 4 does not list target host",
        "still running at its limit of 1 s",
        "Hang bundle: no rank holds a buffer whose memory could be read",
        "hang/summary.txt",  # what explains it, folded
        "No element differs: topk_idx (20 compared)",
        "phase 1 toy1: 2 passed, 0 failed",
    ]:
        assert words in text, words


def test_the_browser_sees_what_must_not_be(tmp_path: Path) -> None:
    """The checks above can fail: a page that overflows, asks, and acts."""
    page_file = tmp_path / "bad.html"
    page_file.write_text(f"<pre>{'x' * 5000}</pre><title>a</title>{HOSTILE}")
    with open_browser(tmp_path) as page:
        page.open(page_file, WIDTH)
        assert page.value("document.documentElement.scrollWidth") > WIDTH
        assert "http://127.0.0.1:9/a.png" in page.requests
        assert page.value("document.title") == "taken"


def test_report_of_a_run_that_was_killed(project: Project) -> None:
    """Written from what there is: run.json without an end, half a line, a damaged map; with notes of the flights."""
    project.phase(1, PASSES)
    project.phase(2, PASSING)
    call = project.call("run", "--target", "host")
    report = call.run_folder / "report.html"
    assert "</span></h1>" in report.read_text()
    report.unlink()
    facts = json.loads((call.run_folder / "run.json").read_text())
    del facts["exit_code"], facts["finished"]
    facts["post_flight"] = {"leftovers": ["removed <a>"], "notes": ["GPU 1: 0.50 GiB more, by pid 6"]}
    (call.run_folder / "run.json").write_text(json.dumps(facts))
    results = call.run_folder / "results.jsonl"
    lines = results.read_text().splitlines(keepends=True)
    (last,) = [number for number, line in enumerate(lines) if json.loads(line).get("phase") == 2]
    results.write_text("".join(lines[:last]) + lines[last][:200])
    again = project.call("report", call.run_folder.name)
    assert again.code == 0, again.output
    assert again.output.splitlines()[:2] == [
        line for line in call.output.splitlines() if line.startswith("phase 1")
    ] + ["1 passed, 0 failed"]
    assert "never: the run was ended from outside" in report.read_text()
    assert "not finished" in report.read_text()
    assert "phase2" not in report.read_text()
    assert "left behind: removed &lt;a&gt;" in report.read_text()
    assert "post-flight: GPU 1: 0.50 GiB more, by pid 6" in report.read_text()


def test_report_of_a_run_from_another_machine(project: Project) -> None:
    """The folders of its lines are not here: logs come from beside the results, of the attempt that failed."""
    body = 'open("tries", "a").write("x"); print("try", os.path.getsize("tries")); pass_all()'
    project.phase(1, body + '; sys.exit(os.path.getsize("tries") == 2)')
    call = project.call("run", "--target", "host", "--repeat", "2")
    assert call.statuses() == {"1-1-single": "flaky"}
    results = call.run_folder / "results.jsonl"
    results.write_text(results.read_text().replace(str(project.root), "/scratch/other").replace("try 2", "not this"))
    assert project.call("report").code == 0
    text = (call.run_folder / "report.html").read_text()
    assert "try 2" in text
    assert "not this" not in text


def test_report_of_no_run_is_a_bad_call(project: Project) -> None:
    project.phase(1, PASSING)
    assert project.call("report").code == 2
    call = project.call("report", "2000-01-01T00-00-00")
    assert call.code == 2
    assert "no such run" in call.output


@pytest.mark.parametrize(
    ("facts", "line", "words"),
    [
        ({"steps": 5, "machine": []}, {}, "run.json has a strange steps, machine"),
        ({}, {"phase": [1], "views": 5}, "results.jsonl has a strange phase, views"),
    ],
)
def test_a_run_of_another_version_is_a_bad_call(
    tmp_path: Path, facts: dict[str, Any], line: dict[str, Any], words: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "results.jsonl").write_text(json.dumps({"kind": "step", **line}) + "\n")
    with pytest.raises(BadRequest, match=words):
        write_report(tmp_path)


def test_importing_the_report_needs_no_torch() -> None:
    """The harness must not hold torch's memory beside the ranks'."""
    code = "import sys, harness.runner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_colours() -> None:
    assert colour(0, "bound") == colour(0, "differ") == NOTHING
    assert colour(1e-9, "bound") == WITHIN[0]
    assert colour(1.0, "bound") == WITHIN[1]
    assert colour(1.0, "differ") == BEYOND[0]
    assert colour(1e6, "bound") == colour(1e6, "differ") == BEYOND[1]
