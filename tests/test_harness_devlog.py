"""``python -m harness devlog``: an entry from results and git, and figures that no result holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.devlog import MARK, check_draft
from tests.harness_project import HarnessCall, Project

FAILS = 'case("small", ok=False, message="rows differ"); view("x", wrong=3, ok=False); finish(False); sys.exit(1)'
MEASURES = 'write("figure", name="time", value=1234.56, unit="us"); pass_all()'


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def _git(project: Project, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    done = subprocess.run(["git", *names, *arguments], cwd=project.root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _check(project: Project, text: str, *arguments: str) -> HarnessCall:
    (project.root / "draft.md").write_text(text)
    return project.call("devlog", "--check", "draft.md", *arguments)


def test_an_entry_from_results_and_git(project: Project) -> None:
    """Parent, commits and files since the last entry; calls and results; failures; blanks for what only people know."""
    project.phase(1, MEASURES, targets={"host": {"ranks": {1: ["single"], 2: ["virtual"]}}})
    project.phase(2, FAILS)
    (project.root / ".gitignore").write_text("runs/\n__pycache__/\n")
    (project.root / "old.txt").write_text("old\n")
    (project.root / "DEVLOG.md").write_text("# Development log\n")
    _git(project, "init", "-q")
    _git(project, "add", ".")
    _git(project, "commit", "-q", "-m", "Entry of yesterday")
    parent = _git(project, "rev-parse", "--short", "HEAD")
    (project.root / "csrc").mkdir()
    (project.root / "csrc" / "new | file.hpp").write_text("int a;\n")
    _git(project, "add", ".")
    _git(project, "commit", "-q", "-m", "A kernel")
    (project.root / "old.txt").unlink()
    (project.root / "untracked.txt").touch()
    run = project.call("run", "--target", "host")
    entry = project.call("devlog")
    assert entry.code == 0, entry.output
    commit = _git(project, "rev-parse", "HEAD")
    for words in [
        f"Parent: {parent} (Entry of yesterday). Asked: <what was asked",
        f"- {commit[:7]} A kernel",
        "| csrc | new \\| file.hpp (new) |",
        "| . | old.txt (gone), untracked.txt (new) |",
        f"**Run** {run.run_folder.name} of {commit}+ on ",
        "| `python -m harness run --target host --runs-dir",
        "2 passed, 1 failed |",
        "| phase 1 toy1, host, ranks 1, 2 (virtual) | 2 passed, 0 failed; ",
        "- phase2-host-1-single failed: exit code 1; rank 0 ended first; case small: rows differ",
        "**Next.** <what is next>",
    ]:
        assert words in entry.output, f"{words}\n{entry.output}"
    assert "Entry of yesterday\n" not in entry.output
    # An entry's own figures are held by the results that it was made from.
    draft = entry.output.replace(parent, "").replace(commit, "").replace(commit[:7], "")
    assert _check(project, draft).code == 0


def test_figures_of_a_draft(project: Project) -> None:
    project.phase(1, MEASURES)
    run = project.call("run", "--target", "host")
    (project.root / "runs" / "bench").mkdir()
    (project.root / "runs" / "bench" / "moe.json").write_text('{"rows": [{"us": 5773.2}]}')
    text = "## 2026-11-29 21:00 · a heading with 99\nIt takes 1235 us, or 1,234.6 us, not 1,300 us.\nBench: 5773 us.\n"
    call = _check(project, text)
    assert call.code == 1
    assert f"not 1,300{MARK} us." in call.output
    assert call.output.count(MARK) == 1
    assert "draft.md:2: no result holds 1,300: It takes 1235 us" in call.output
    # Of one run only: what the bench left is no result of it.
    call = _check(project, text, run.run_folder.name)
    assert f"5773{MARK} us" in call.output
    missing = project.call("devlog", "--check", "none.md")
    assert missing.code == 2
    assert "none.md" in missing.output
    no_git = project.call("devlog")
    assert no_git.code == 2
    assert "not a git repository" in no_git.output


@pytest.mark.parametrize(
    ("line", "unheld"),
    [
        ("held: 12.5 and 12 or 13, 1.2e-3, 1,024", []),
        ("not held: 12.6, 14, 1.3e-3, -12.5, 1,025", ["12.6", "14", "1.3e-3", "-12.5", "1,025"]),
        ("30 steps, 17% of them", ["30", "17"]),
        ("code `python -m x --seeds 300`, issue 77, phases 3, 4 and 5, Python 3.99, torch 9.8", []),
        ("on 2026-11-29 at 23:59:59, 2026-11-29T23-35-53", []),
        ("names: sm90 l1_acts fbc5838 6e4452f 8x8 phase6-host a/77 v0.1.5", []),
        ("| 77 | 12.5 |", ["77"]),
        ("x = 0.0012.", []),
    ],
)
def test_what_is_a_figure(line: str, unheld: list[str]) -> None:
    held = sorted([12.5, 0.0012, 1024.0])
    marked, found = check_draft(line + "\n", held)
    assert [entry.figure for entry in found] == unheld
    assert marked.replace(MARK, "") == line + "\n"
    assert check_draft("```\n77\n```\n    77\n# 77\n", held)[1] == []
