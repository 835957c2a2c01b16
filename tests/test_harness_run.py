"""``python -m harness`` on small projects: statuses, exit codes, gates, results and what it prints."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.results import fresh_folder
from tests.harness_project import PASSING, HarnessCall, Project, processes_in

HANGS = 'case("small"); view("x"); print("waiting for rank 1", flush=True); time.sleep(1000)'
FAILS = 'case("small", ok=False, message="rows differ"); view("x", wrong=3, ok=False); finish(False); sys.exit(1)'
ONE_RANK = {"host": {"ranks": {1: ["single"]}}}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_all_pass(project: Project) -> None:
    """Exit code 0; every kind of group; figures and views are in results.jsonl and junit.xml; nothing is left."""
    project.phase(
        1,
        """
        if rank == 0:
            print("hello", arguments.group, os.environ["MEGAMOE_TIMEOUT_S"], os.environ["MEGAMOE_RUN_DIR"])
        write("figure", name="time", value=1.5, unit="us")
        write("dump", path="dump.bin")
        pass_all()
        """,
        targets={"host": {"ranks": {1: ["single"], 2: ["process", "virtual"]}}},
    )
    call = project.call("run", "--target", "host")
    assert call.code == 0, call.output
    assert call.statuses() == {"1-1-single": "passed", "1-2-process": "passed", "1-2-virtual": "passed"}
    assert call.output.splitlines()[-1] == "3 passed, 0 failed"
    (build,) = [line for line in call.lines() if line["kind"] == "build"]
    assert (build["target"], build["status"]) == ("host", "passed")
    for step in call.steps():
        assert step["figures"] == [{"kind": "figure", "name": "time", "value": 1.5, "unit": "us"}]
        assert step["views"] == {"x": {"compared": 10, "wrong": 0, "max_error": 0.5, "num_checks": 1, "map": None}}
        assert step["dumps"] == ["dump.bin"]
        assert step["seconds"] > 0
        assert step["outcome"]["survivors"] == []
        log = (Path(step["folder"]) / "rank0.log").read_text()
        assert log == f"hello {step['group']} 5 {step['folder']}\n"
    by_group = {step["group"]: step for step in call.steps()}
    assert (Path(by_group["process"]["folder"]) / "rank1.log").exists()
    assert by_group["process"]["peak_pss_bytes"] > 50 * 2**20  # torchrun itself has torch loaded
    facts = json.loads((call.run_folder / "run.json").read_text())
    assert facts["exit_code"] == 0
    assert facts["post_flight"]["leftovers"] == []
    cases = ElementTree.parse(call.run_folder / "junit.xml").getroot().findall(".//testcase")
    assert [case.get("name") for case in cases] == [
        "phase1-host-1-single",
        "phase1-host-2-process",
        "phase1-host-2-virtual",
    ]
    assert processes_in(project.root) == []


def test_failure_blocks_what_rests_on_it(project: Project) -> None:
    """Exit code 1; 3 rests on 2 only through its gate; 4 on nothing; the failure line's command shows it again."""
    project.phase(1, FAILS, cases=["small"])
    project.phase(2, PASSING, requires=[1])
    project.phase(3, PASSING, requires=[2])
    project.phase(4, PASSING)
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert call.statuses() == {
        "1-1-single": "failed",
        "2-1-single": "blocked",
        "3-1-single": "blocked",
        "4-1-single": "passed",
    }
    assert call.output.splitlines()[-1] == "1 passed, 1 failed, 2 blocked"
    assert [step["reasons"] for step in call.steps()[1:3]] == [["gate phase 1 failed"]] * 2
    (line,) = [line for line in call.output.splitlines() if line.startswith("FAILED")]
    assert "rows differ" in line
    root = ElementTree.parse(call.run_folder / "junit.xml").getroot()
    (failure,) = root.findall(".//failure")
    assert failure.get("type") == "failed"
    assert "3 of 10 elements wrong" in (failure.text or "")
    assert len(root.findall(".//skipped")) == 2
    words = line.split("see it again: python ")[1].split()
    again = subprocess.run(
        [sys.executable, *words, "--runs-dir", str(project.root / "again")],
        cwd=project.root,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1
    assert again.stdout.splitlines()[-1] == "0 passed, 1 failed"


def test_gates_run_first_and_can_be_left_out(project: Project) -> None:
    project.phase(1, PASSING)
    project.phase(2, PASSING, requires=[1])
    project.phase(3, PASSING, requires=[2])
    call = project.call("run", "--target", "host", "--phases", "3")
    assert call.code == 0
    assert [(step["phase"], step["is_gate"]) for step in call.steps()] == [(1, True), (2, True), (3, False)]
    project.runs_folder = project.root / "runs2"
    call = project.call("run", "--target", "host", "--phases", "3", "--no-gates")
    assert [step["phase"] for step in call.steps()] == [3]


def test_a_gate_without_the_asked_for_cases_is_run_whole(project: Project) -> None:
    """In the run that asks for it too, and when what failed is run again: else phase 2 would pass without its gate."""
    project.phase(1, FAILS)
    project.phase(2, 'case("other"); view("x"); finish()', cases=["other"], requires=[1])
    for options in ((), ("--rerun", "failed")):
        call = project.call("run", "--target", "host", "--cases", "other", *options)
        assert call.statuses() == {"1-1-single": "failed", "2-1-single": "blocked"}, call.output


def test_failing_gate(project: Project) -> None:
    project.phase(1, FAILS)
    project.phase(2, PASSING, requires=[1])
    call = project.call("run", "--target", "host", "--phases", "2")
    assert call.code == 1
    assert call.statuses() == {"1-1-single": "failed", "2-1-single": "blocked"}


def test_step_that_removes_its_folder_fails_and_the_run_goes_on(project: Project) -> None:
    project.phase(1, "pass_all(); import shutil; shutil.rmtree(os.environ['MEGAMOE_RUN_DIR'])")
    project.phase(2, PASSING)
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert call.statuses() == {"1-1-single": "failed", "2-1-single": "passed"}
    assert processes_in(project.root) == []


@pytest.mark.parametrize("name", ["outcome.json", "failure.txt"])
def test_a_step_that_takes_a_file_s_place_fails_and_the_run_goes_on(project: Project, name: str) -> None:
    project.phase(1, f"os.mkdir(os.path.join(os.path.dirname(arguments.record), {name!r})); sys.exit(1)")
    project.phase(2, PASSING)
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert call.statuses() == {"1-1-single": "failed", "2-1-single": "passed"}, call.output


def test_a_full_disk_ends_the_run_in_one_line(project: Project) -> None:
    """What stands for it: no file may be longer than 1 KiB, and run.json is."""
    project.phase(1, PASSING)
    limited = f"ulimit -f 1; trap '' XFSZ; exec {shlex.join(project.command('run', '--target', 'host'))}"
    done = subprocess.run(
        ["bash", "-c", limited],
        cwd=project.root,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"error: the run in {project.runs_folder} cannot go on: [Errno 27]" in done.stderr


def test_an_attempt_that_was_stopped_makes_no_step_flaky(project: Project) -> None:
    body = "time.sleep(0 if os.path.dirname(arguments.record).endswith('/1') else 100); pass_all()"
    project.phase(1, body)
    with project.start("run", "--target", "host", "--repeat", "3") as process:
        deadline = time.monotonic() + 60
        while not list(project.runs_folder.glob("*/phase1-host-1-single/2/rank0.pid")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert "stopped from outside" in output
    assert "flaky" not in output.lower()


def test_logs_cannot_steer_the_terminal(project: Project) -> None:
    project.phase(1, "sys.stdout.buffer.write(b'\\x1b[2Jcleared \\xe2\\x80\\xae'); sys.exit(1)")
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert "[2Jcleared" in call.output
    assert "\x1b[2J" not in call.output
    assert "\u202e" not in call.output


def test_a_locale_without_unicode(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    project.phase(1, "sys.stdout.buffer.write('naïve …'.encode()); sys.exit(1)")
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert call.output.splitlines()[-1] == "0 passed, 1 failed"


def test_time_out(project: Project) -> None:
    """Status 'timed out' with stacks and the last lines of the log in the failure's text."""
    project.phase(1, HANGS)
    start = time.monotonic()
    call = project.call("run", "--target", "host", "--seconds", "2")
    assert time.monotonic() - start < 12
    assert call.code == 1
    (step,) = call.steps()
    assert step["status"] == "timed out"
    limit, bundle, done = step["reasons"]
    assert limit == "still running at its limit of 2 s"
    assert bundle.startswith(f"hang bundle {step['folder']}/hang: ")
    assert done == "1 cases were done, the last was small"
    assert step["log_tails"]["rank0.log"].startswith("waiting for rank 1\n")
    assert "most recent call first" in step["log_tails"]["rank0.log"]
    assert call.output.splitlines()[-1] == "0 passed, 1 failed (1 timed out)"
    assert "--seconds 2" in step["again"]
    assert "waiting for rank 1" in (Path(step["folder"]) / "failure.txt").read_text()
    assert processes_in(project.root) == []


def test_repeat_finds_what_passes_only_sometimes(project: Project) -> None:
    """Flaky is a status of its own and fails the run; the gate is not repeated."""
    project.phase(
        1,
        """
        with open("counter", "a") as file:
            file.write("x")
        if os.path.getsize("counter") % 2 == 0:
            sys.exit("an even try")
        pass_all()
        """,
    )
    call = project.call("run", "--target", "host", "--repeat", "3")
    assert call.code == 1
    (step,) = call.steps()
    assert step["status"] == "flaky"
    assert step["attempts"] == ["passed", "failed", "passed"]
    assert step["reasons"][0] == "passed 2 of 3 times"
    assert step["folder"].endswith("phase1-host-1-single/2")
    assert step["log_tails"]["rank0.log"] == "an even try"
    assert call.output.splitlines()[-1] == "0 passed, 1 failed (1 flaky)"


def test_skips_give_exit_code_3(project: Project) -> None:
    """Without a GPU (tests hide them) every sm90 step says so."""
    project.phase(1, PASSING, targets={"sm90": {"ranks": {1: ["single"]}}})
    project.phase(2, PASSING)
    call = project.call("run", "--target", "sm90")
    assert call.statuses() == {"1-1-single": "skipped", "2-1-single": "skipped"}
    assert call.code == 3
    reasons = [step["reasons"] for step in call.steps()]
    assert reasons == [["torch sees no Hopper GPU"], ["phase 2 does not list target sm90"]]
    assert "0 passed, 0 failed, 2 skipped" in call.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--phases", "7"], "--phases: no phase [7]; there are [1]"),
        (["--phases", "1-x"], "--phases: expected numbers like 3 or 1-6"),
        (["--target", "tpu"], "--target: expected best, host or sm90, got 'tpu'"),
        (["--ranks", "3"], "--ranks: no asked-for phase runs with [3] ranks; there are [1]"),
        (["--groups", "threads"], "--groups: expected some of single, process, virtual, spread, got ['threads']"),
        (["--cases", "huge"], "--cases: no asked-for phase has ['huge']; there are ['small']"),
        (["--repeat", "0"], "--repeat: expected at least 1, got 0"),
        (["--seconds", "0"], "--seconds: expected a number above 0, got 0.0"),
        (["--seconds", "inf"], "--seconds: expected a number above 0, got inf"),
        (["--build-seconds", "nan"], "--build-seconds: expected a number above 0, got nan"),
        (["--phases", "1-99999999"], "--phases: expected numbers like 3 or 1-6"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_bad_calls_give_exit_code_2(project: Project, arguments: list[str], words: str) -> None:
    project.phase(1, PASSING)
    call = project.call("run", "--target", "host", *arguments)
    assert call.code == 2
    assert words in call.output
    assert not project.runs_folder.exists()


def test_a_place_that_cannot_hold_runs_gives_exit_code_2(project: Project) -> None:
    project.phase(1, PASSING)
    project.runs_folder = Path("/dev/null")
    call = project.call("run", "--target", "host")
    assert call.code == 2
    assert "error: --runs-dir: no folder for results in /dev/null" in call.output


def test_broken_spec_gives_exit_code_2(project: Project) -> None:
    path = project.phase(1, PASSING, seconds="soon")
    call = project.call("run", "--target", "host")
    assert call.code == 2
    assert f"{path}: seconds: expected a number above 0 and up to 60, got 'soon'" in call.output


def test_failing_build_blocks_all(project: Project) -> None:
    project.phase(1, PASSING)
    project.write_target("def build_all(max_ranks):\n    raise RuntimeError('no such header: cuda/atomic')\n")
    call = project.call("run", "--target", "host")
    assert call.code == 1
    assert call.statuses() == {"1-1-single": "blocked"}
    assert "no such header: cuda/atomic" in call.output


def test_a_run_builds_for_its_ranks(project: Project) -> None:
    project.phase(1, PASSING, targets={"host": {"ranks": {1: ["single"], 2: ["virtual"], 8: ["virtual"]}}})
    project.write_target("def build_all(max_ranks):\n    print('for', max_ranks, 'ranks')\n")
    call = project.call("run", "--target", "host", "--ranks", "1,2")
    assert call.code == 0, call.output
    assert "for 2 ranks" in (call.run_folder / "build-host" / "launcher.log").read_text()


def test_build_command(project: Project) -> None:
    project.phase(1, PASSING)
    project.write_target("import time\ndef build_all(max_ranks):\n    time.sleep(1000)\n", name="sm90")
    call = project.call("build", "--target", "host")
    assert call.code == 0, call.output
    project.runs_folder = project.root / "runs2"
    call = project.call("build", "--target", "sm90", "--build-seconds", "1")
    assert call.code == 1
    assert "still running at its limit of 1 s" in call.output
    assert project.call("build", "--target", "tpu").code == 2
    assert project.call("build").code == 2


def test_rank_that_dies_is_named_first(project: Project) -> None:
    """A rank killed by a signal: the step says which, and the other rank's stacks are in its log."""
    project.phase(
        1,
        """
        def wait_for_rank_1():
            open("rank 0 waits", "x").close()
            time.sleep(1000)
        if rank == 1:
            while not os.path.exists("rank 0 waits"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_rank_1()
        """,
        targets={"host": {"ranks": {2: ["process"]}}},
    )
    call = project.call("run", "--target", "host")
    (step,) = call.steps()
    assert step["status"] == "failed"
    assert step["reasons"][0] == "exit code 1; rank 1 ended first"
    assert "wait_for_rank_1" in step["log_tails"]["rank0.log"]
    assert "Signal 9" in step["log_tails"]["launcher.log"]


@pytest.mark.parametrize(
    "deaf",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        "sum(range(10**13))",  # one call that keeps the interpreter to itself
        "import atexit; atexit.register(time.sleep, 1000)",  # after the end of the script
    ],
    ids=["ignores", "computes", "lingers"],
)
def test_a_rank_that_does_not_end_with_its_peer_is_killed(deaf: str, project: Project) -> None:
    """The launcher, which asks it to end, would wait for 30 s."""
    project.phase(
        1,
        f"""
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        {deaf}
        """,
        targets={"host": {"ranks": {2: ["process"]}}},
    )
    call = project.call("run", "--target", "host")
    (step,) = call.steps()
    assert step["reasons"][0] == "exit code 1; rank 1 ended first"
    assert _seconds_after_kill(call, "rank 0 killed, since rank 1 is broken") < 15


def test_a_broken_rank_that_lingers_is_killed_too(project: Project) -> None:
    """It, and not a rank that was killed, is what the launcher names; and a peer may say its own error."""
    project.phase(
        1,
        """
        import atexit
        open(f"rank {rank} is there", "x").close()
        while not all(os.path.exists(f"rank {other} is there") for other in range(4)):
            time.sleep(0.01)
        if rank == 1:
            atexit.register(time.sleep, 0.5)
            sys.exit(3)
        if rank == 2:
            time.sleep(0.1)
            raise ValueError("an error of its own")
        if rank == 3:
            atexit.register(time.sleep, 1000)
            sys.exit(3)
        time.sleep(1000)
        """,
        targets={"host": {"ranks": {4: ["process"]}}},
    )
    call = project.call("run", "--target", "host")
    (step,) = call.steps()
    assert step["status"] == "failed"
    assert "an error of its own" in step["log_tails"]["rank2.log"]
    assert _seconds_after_kill(call, "rank 3 killed, since rank") < 15
    assert "exitcode  : -9" not in step["log_tails"]["launcher.log"].split("Root Cause")[1]


def _seconds_after_kill(call: HarnessCall, words: str) -> float:
    """From a line of the supervisor's log to the end of the only step. The launcher alone would wait for 30 s."""
    (path,) = call.run_folder.glob("phase*/supervisor.log")
    lines = path.read_text().splitlines()
    (killed,) = [line for line in lines if words in line]
    (ended,) = [line for line in lines if "exited, exit code" in line]
    return float(ended.split()[0]) - float(killed.split()[0])


def test_stale_processes_of_an_earlier_run_are_reported(project: Project) -> None:
    """Named, not ended: they are not this run's."""
    project.phase(1, PASSING)
    environment = {**os.environ, "MEGAMOE_STEP_ID": f"{2**22 + 1}.1.1.abcdef"}
    stale = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=environment)
    try:
        call = project.call("run", "--target", "host")
        assert call.code == 0
        assert f"an earlier run, whose harness is gone, still has pid {stale.pid} " in call.output
        assert stale.poll() is None
    finally:
        stale.kill()
        stale.wait()


def test_live_table_on_a_terminal(project: Project) -> None:
    """On a terminal the table and the same summary come; plain lines do not."""
    project.phase(1, PASSING)
    master, slave = pty.openpty()
    environment = {**project.environment(), "TERM": "xterm", "LINES": "40"}
    with subprocess.Popen(
        project.command("run", "--target", "host"), cwd=project.root, env=environment, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                output += os.read(master, 65536)
            except OSError:  # how a terminal ends
                break
    os.close(master)
    text = output.decode()
    assert process.returncode == 0
    assert "1 toy1" in text
    assert "\x1b[32mpassed" in text
    assert text.rstrip().endswith("1 passed, 0 failed")


def test_runs_of_one_name_get_numbers(tmp_path: Path) -> None:
    names = [fresh_folder(tmp_path / "runs", "now").name for _ in range(3)]
    assert names == ["now", "now.2", "now.3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
