"""The benchmark on an emulated network: it measures, says in one line what it lacks, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmarks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "preempted_network.py"


def emulated_parts() -> set[str]:
    """Namespaces of the benchmark's, and interfaces outside them."""
    listed = [("netns", "list"), ("-brief", "link")]
    shown = [subprocess.run(["ip", *which], capture_output=True, text=True, check=True).stdout for which in listed]
    return {name for name in shown[0].split() if name.startswith("evenpipe-")} | set(shown[1].splitlines())


def may_make_namespaces() -> bool:
    name = f"evenpipe-{os.getpid()}-probe"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    except OSError:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


emulated = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need root and ip")


@emulated
def test_groups_hide_messages_as_simulated_and_the_tuner_follows_the_network(tmp_path: Path) -> None:
    before = emulated_parts()
    # As a run leaves it that was killed.
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"evenpipe-{ended.pid}-0"], check=True)
    picture = tmp_path / "throughput.png"
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--quick", "--picture", picture], capture_output=True, text=True, timeout=800
    )
    assert finished.returncode == 0, finished.stderr
    assert emulated_parts() <= before, "something new is left"
    shown = json.loads(finished.stdout)
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "preempted_network")
    half, constant, adaptive = shown["results"]
    assert (half["case"], constant["case"], adaptive["case"]) == ("half", "constant", "adaptive")
    for entry in (half, constant):
        assert len(entry["batches_ms"]["k1"]) == len(entry["batches_ms"]["k2"]) == 1
        # Sleepers are never faster than simulated ones; what others do on this machine makes them slower.
        assert -0.4 < entry["k2_simulated_error"] < 0.05
        # 1F1B waits for each message, pairs hide them; only where others keep the machine busy is it less.
        assert entry["best_speed_up"] > 1.05
    assert constant["k1_message_ms"]["forward 0"] > 1.4 * half["k1_message_ms"]["forward 0"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    quiet, preempted, again = adaptive["retunes"]
    assert [retuned["iteration"] for retuned in adaptive["retunes"]] == [0, 2, 4]
    for retuned in adaptive["retunes"]:
        estimates = retuned["estimates_ms"]
        assert set(estimates) == {"k1b4", "k2b2", "k4b1"}
        assert estimates[retuned["chosen"]] <= min(estimates.values()) / 0.98
        assert retuned["took_ms"] > 0
    for calm in (quiet, again):
        assert preempted["estimates_ms"]["k1b4"] > 1.1 * calm["estimates_ms"]["k1b4"]
    assert [len(every) for every in adaptive["iterations_ms"].values()] == [6] * 4
    assert adaptive["totals_ms"]["auto"] > sum(adaptive["iterations_ms"]["auto"])
    assert 0 < adaptive["retune_part_of_an_hour"] < 0.01


@emulated
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(told: signal.Signals) -> None:
    before = emulated_parts()
    # A shell that starts these tests in the background has them, and all that they start, ignore SIGINT.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, SCRIPT, "--cases", "constant"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heeds)
    try:
        patience = time.monotonic() + 60
        while emulated_parts() == before and time.monotonic() < patience:
            time.sleep(0.1)
        assert emulated_parts() > before
        time.sleep(1.0)
        running.send_signal(told)
        assert running.wait(timeout=800) == 128 + told
    finally:
        running.kill()
        running.wait()
    assert emulated_parts() <= before, "something new is left"


def test_without_root_it_says_so_in_one_line() -> None:
    # Imported first: Python itself may be where only root may read.
    program = "import os; import preempted_network as run; os.getuid() or os.setuid(65534); run.main()"
    finished = subprocess.run(
        [sys.executable, "-c", program, "--json"], capture_output=True, text=True, timeout=800, cwd=SCRIPT.parent
    )
    assert finished.returncode == 2
    assert finished.stderr.count("\n") == 1
    assert "root" in finished.stderr
    assert finished.stdout == ""
