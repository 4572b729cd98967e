"""The benchmark scripts run, and print one document whose figures are usable."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from evenpipe.planner.iteration import simulated
from evenpipe.schedule import Programs, Size
from evenpipe.simulate import Costs

pytestmark = pytest.mark.benchmarks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


def run(script, *arguments):
    """The script's standard output, standard error and exit status."""
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, timeout=800
    )


def document(script, *arguments):
    finished = run(script, "--json", *arguments)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def usable(value):
    return math.isfinite(value) and value > 0


def test_overlap_of_transfers():
    shown = document(
        "bpipe_overlap.py", "--stages", "4", "5", "--micro-batches", "8", "--repeats", "2", "--forward-ms", "10",
        "--transfer-ms", "20", "--saved-mib", "0.1",
    )  # fmt: skip
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "bpipe_overlap")
    assert shown["machine"]["cpus"] >= 1
    assert [(entry["stages"], entry["micro_batches"]) for entry in shown["results"]] == [(4, 8), (5, 8)]
    for entry in shown["results"]:
        for mode in ("none", "asynchronous", "synchronous"):
            assert usable(entry[f"{mode}_ms"])
            assert len(entry["batches_ms"][mode]) == 2
            # Sleeping stages and wires are never faster than the simulator's; without a load they are hardly slower.
            assert min(entry["batches_ms"][mode]) > 0.97 * entry[f"simulated_{mode}_ms"]
        for prefix in ("", "simulated_"):
            assert usable(entry[f"{prefix}asynchronous_ratio"])
            assert usable(entry[f"{prefix}synchronous_ratio"])
        assert entry["simulated_synchronous_ratio"] > 1.05


def test_swaps_under_caps():
    shown = document(
        *("capped.py", "--micro-batches", "8", "--repeats", "2", "--forward-ms", "20", "--caps", "0.75", "0.45"),
        *("--copy-ms", "40"),
    )
    roomy, tight = ([way["layers"] for way in entry["ways"]] for entry in shown["results"])
    assert sum(roomy) < sum(tight)
    for entry in shown["results"]:
        assert entry["peak"] <= 1.02 * entry["cap"]
        # Sleeping stages and copies are never faster than the simulator's; without a load they are hardly slower.
        assert min(entry["batches_ms"]) > 0.97 * entry["predicted_ms"]
        # Decided by times that were measured.
        assert entry["predicted_ms"] <= 1.03 * min(entry["others_ms"].values())


def test_moves_to_partners_under_caps():
    """Where copies to the host take four forwards, recomputation one, and messages to the partner a quarter of one."""
    shown = document(
        *("capped.py", "--micro-batches", "8", "--repeats", "2", "--forward-ms", "40", "--layers", "1"),
        *("--caps", "0.76", "--copy-ms", "160", "--partner-ms", "10"),
    )
    [entry] = shown["results"]
    assert [way["bound"] for way in entry["ways"]] == [3, 0, 0, 3]
    assert entry["peak"] <= 1.02 * entry["cap"]
    assert min(entry["batches_ms"]) > 0.97 * entry["predicted_ms"]
    assert entry["predicted_ms"] <= 1.03 * min(entry["others_ms"].values())


def test_figures_of_bpipe(tmp_path):
    picture = tmp_path / "figure.png"
    shown = document("figures_bpipe.py", "--micro-batches", "32", "64", "--picture", str(picture))
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "figures_bpipe")
    of_figure = [entry for entry in shown["results"] if entry["recompute"] == "none"]
    assert [entry["micro_batches"] for entry in of_figure] == [32, 64]
    for entry in of_figure:
        # (m + p - 1) (forward + backward): asynchronous transfers leave it as it is.
        assert entry["none_ms"] == pytest.approx((entry["micro_batches"] + 7) * 110.44)
        assert entry["asynchronous_ratio"] == pytest.approx(1, abs=1e-6)
        assert 1.11 < entry["synchronous_ratio"] < 1.3
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_figures_of_2bw(tmp_path):
    picture = tmp_path / "figures.png"
    shown = document("figures_2bw.py", "--models", "gpt2-2.2b", "--picture", str(picture))
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "figures_2bw")
    for reading in (entry for entry in shown["results"] if entry["part"] == "readings"):
        assert reading["ratio"] > 1
    published = {
        (entry["figure"], entry["batch"], entry["system"]): entry
        for entry in shown["results"]
        if entry["part"] == "published"
    }
    for figure, batches in (("6a", (64, 256)), ("6b", (512, 2048))):
        for batch in batches:
            bars = [published[figure, batch, system] for system in ("inter-layer", "gpipe", "1f1b", "2bw")]
            assert all(bar["fits"] for bar in bars)
            speeds = [bar["samples_per_second"] for bar in bars]
            assert speeds == sorted(speeds)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_figures_of_ada_grouper(tmp_path):
    picture = tmp_path / "figures.png"
    shown = document("figures_ada_grouper.py", "--figures", "6", "10", "--picture", str(picture))
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "figures_ada_grouper")
    six = [gain for gain in shown["settings"]["gains"] if gain["figure"] == "6"]
    # The less others leave of the network, the more groups gain.
    assert [gain["left"] for gain in six] == sorted((gain["left"] for gain in six), reverse=True)
    assert [gain["gain"] for gain in six] == sorted(gain["gain"] for gain in six)
    assert six[0]["gain"] > 0
    hours = [[one for one in shown["results"] if one.get("hour") == hour] for hour in (1, 2, 3, 4)]
    for of_hour in hours:
        (chosen,) = (one for one in of_hour if one["chosen"])
        # The tuner does not switch for less than 2 %.
        assert chosen["ms"] < 1.02 * min(one["ms"] for one in of_hour)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_growth(tmp_path):
    picture = tmp_path / "growth.png"
    shown = document(
        "scale.py", "--micro-batches", "256", "--stages", "64", "--gpus", "320", "--nodes", "1000", "--traced", "80",
        "--repeats", "1", "--picture", str(picture),
    )  # fmt: skip
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "scale")
    assert {entry["what"] for entry in shown["results"]} == {
        "build", "verify", "simulate", "plan", "partition", "trace", "count",
    }  # fmt: skip
    assert all(usable(entry["seconds"]) and entry["n"] > 0 for entry in shown["results"])
    for grown in shown["settings"]["growth"]:
        assert grown["holds"] == (grown["exponent"] <= grown["n_log_n"] + shown["settings"]["slack"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_orders():
    shown = document("orders.py", "--stages", "2")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "orders")
    of_1f1b = [entry["percent"] for entry in shown["results"] if entry["schedule"] == "1f1b"]
    for percent in of_1f1b:
        assert max(percent["measured"]) <= 0 < max(percent["shared"])
        assert percent["even"] == [0]


def test_front(tmp_path):
    shown = document("front.py", "--stages", "4", "--seconds", "0.2", "--picture", str(tmp_path / "front.png"))
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "front")
    for entry in shown["results"]:
        assert 0 < entry["searched_speed"] <= 1
        assert entry["known"] is None or entry["searched_speed"] >= entry["known_speed"] - 1e-9
    whole = [entry for entry in shown["results"] if entry["memory"] == 1]
    assert len(whole) == 6
    assert all(entry["least"] <= entry["wrong"] for entry in whole)
    assert all(0 < entry["longest_search_s"] < 10 for entry in whole)


def test_building_blocks():
    """Means over uneven models and one with experts, p = 8: over what is published, 2.5 %, and 6 % below all memory."""
    shown = document("building_blocks.py", "--stages", "8", "--times", "2")
    rows = shown["results"]
    for level in {row["memory"] for row in rows}:
        cases = [row for row in rows if row["memory"] == level]
        for row in cases:
            assert row["searched"] >= max(row["named"], row["closed_up"], row["justified"]) - 1e-9
            assert row["search_s"] <= 20
        for rival, gain in (("closed_up", 0.025), ("named", 0.025 if level == 1 else 0.06)):
            assert sum(row["searched"] / row[rival] - 1 for row in cases) / len(cases) >= gain


def test_evictions():
    shown = document("evictions.py", "--stages", "4", "--seconds", "0.1")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "evictions")
    assert len(shown["results"]) >= 4 * 6
    for entry in shown["results"]:
        speeds = [entry["vee_speed"], entry["known_speed"] or 0]
        assert entry["evicting_wins"] == (entry["evicting_speed"] > max(speeds) * 1.0005)
        assert entry["swapping_speed"] >= entry["vee_speed"] - 1e-9
        assert 0 < entry["evicting_speed"] <= 1.2  # of a V's limit, which differs where parts are uneven


def test_overhead():
    shown = document("overhead.py", "--layers", "4", "--hidden", "32", "--seq-length", "32", "--repeats", "2")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "overhead")
    (entry,) = shown["results"]
    assert (entry["stages"], entry["micro_batches"]) == (4, 8)
    for variant in ("megatron", "evenpipe", "bpipe", "measured"):
        assert usable(entry[f"{variant}_ms"])
        assert len(entry["iterations_ms"][variant]) == 2
        assert usable(entry[f"{variant}_cpu_ms"])
        assert usable(entry[f"{variant}_ratio"])
        assert usable(entry[f"{variant}_cpu_ratio"])
    assert entry["megatron_ratio"] == 1.0


def test_bubbles():
    shown = document("bubbles.py", "--cases", "2x2", "--repeats", "2", "--forward-ms", "40", "--batches", "2")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "bubbles")
    (entry,) = shown["results"]
    assert (entry["stages"], entry["micro_batches"]) == (2, 2)
    for variant, theory_ms in (("megatron", 3 * 120), ("evenpipe", 3 * 120), ("2bw", 2 * 120)):
        assert entry[f"theory_{variant}_ms"] == theory_ms
        assert len(entry["rounds_ms"][variant]) == 2
        # Theory has no messages; a round that began late ends as if it had been faster, by a little.
        assert min(entry["rounds_ms"][variant]) > 0.9 * theory_ms
        assert usable(entry[f"{variant}_ratio"])
    assert entry["theory_2bw_speed_up"] == 1.5
    # Far from theory only where others keep the machine busy.
    assert entry["2bw_speed_up"] > 1.15


@pytest.mark.long
def test_the_planner_s_iterations_are_those_of_emulated_stages():
    """Megatron's and EvenPipe's engines on stages that sleep: the fastest round, since others keep the machine busy."""
    shown = document("bubbles.py", "--cases", "4x8", "--repeats", "4", "--forward-ms", "50", "--batches", "2")
    (entry,) = shown["results"]
    costs = Costs((50.0,) * 4, (100.0,) * 4)
    for variant, schedule, batches in (("megatron", "1f1b", 1), ("evenpipe", "1f1b", 1), ("2bw", "2bw", 3)):
        planned = simulated(Programs(schedule), Size(4, 8, batches=batches), costs, [[1]] * 4)
        assert min(entry["rounds_ms"][variant]) == pytest.approx(planned.makespan_ms, rel=0.05)


def test_bubbles_under_deepspeed():
    pytest.importorskip("deepspeed")
    shown = document(
        "deepspeed_bubbles.py", "--cases", "2x2", "--dtypes", "bf16", "--repeats", "1", "--forward-ms", "40",
        "--batches", "2",
    )  # fmt: skip
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "deepspeed_bubbles")
    (entry,) = shown["results"]
    assert (entry["stages"], entry["micro_batches"], entry["dtype"]) == (2, 2, "bf16")
    for variant, theory_ms in (("stock", 3 * 120), ("evenpipe", 3 * 120), ("2bw", 2 * 120)):
        assert entry[f"theory_{variant}_ms"] == theory_ms
        assert min(entry["rounds_ms"][variant]) > 0.9 * theory_ms
    assert entry["2bw_speed_up"] > 1.15


def test_time_to_loss():
    shown = document("time_to_loss.py", "--iterations", "20", "--lr", "4e-3", "--repeats", "2", "--optimizers", "adam")
    assert shown["name"] == "time_to_loss"
    rules = {entry["rule"]: entry for entry in shown["results"]}
    assert list(rules) == ["1f1b", "2bw", "weight-prediction", "nesterov", "error-feedback", "paci"]
    assert rules["1f1b"]["share_of_flush"] == pytest.approx(1)
    assert len({entry["loss"] for entry in rules.values()}) == 6
    assert rules["1f1b"]["loss"] < rules["2bw"]["loss"], "gradients that are a batch late cost something"


def test_a_sweep_goes_on_until_its_best_rate_lies_inside():
    from time_to_loss import Curve, Run, beyond

    def found(means):
        curves = {rate: Curve([(0, 5.0), (20, mean)], mean) for rate, mean in means.items()}
        return {Run("2bw", "adam", rate, 1): curve for rate, curve in curves.items()}

    assert beyond(found({1.0: 3.0, 2.0: 2.0}), "2bw", "adam") == [4.0]
    assert beyond(found({1.0: 3.0, 2.0: math.nan}), "2bw", "adam") == [0.5]
    assert beyond(found({1.0: 3.0, 2.0: 2.0, 4.0: math.nan}), "2bw", "adam") == []
    assert beyond(found({1.0: 3.0}), "2bw", "adam") == [], "one rate is no sweep"


def test_convergence(tmp_path):
    picture = tmp_path / "curves.png"
    shown = document(
        "convergence.py", "--models", "gpt", "--iterations", "40", "--interval", "20", "--layers", "2",
        "--hidden", "32", "--seq-length", "32", "--micro-batch-size", "8", "--lr", "0.002", "--picture", str(picture),
    )  # fmt: skip
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "convergence")
    (entry,) = shown["results"]
    flush, two_bw = entry["curves"]["flush"], entry["curves"]["2bw"]
    for curve in (flush, two_bw):
        assert len(curve["training"]) == 40
        assert [done for done, _ in curve["validation"]] == [0, 20, 40]
        assert curve["validation"][-1][1] < curve["validation"][0][1] - 1
    # The same weights and samples at first; then each batch of one runs on weights that the other has left behind.
    assert flush["training"][0] == two_bw["training"][0]
    assert flush["validation"][0] == two_bw["validation"][0]
    assert flush["training"][2] != two_bw["training"][2]
    assert abs(entry["difference"]) < 0.1
    ahead = "flush" if entry["difference"] > 0 else "2bw"
    assert 0.5 < entry[f"{ahead}_share"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_largest_batches():
    shown = document("max_batch.py", "--models", "BERT", "--stages", "4", "--optimized", "none")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "max_batch")
    rows = [entry for entry in shown["results"] if "method" in entry]
    for table, rivals in ((1, ("GPipe", "vPipe", "layers by memory")), (2, ("PipeDream", "vPipe", "layers by memory"))):
        batch = {row["method"]: row["batch"] for row in rows if row["table"] == table}
        for rival in rivals:
            # Whoever cuts between layers cuts at one of our cuts.
            assert 0 < batch[rival] <= batch["EvenPipe"]
        assert 0 < batch["BiPar"] <= batch["EvenPipe"]
    assert all(row["algorithm"] for row in rows)
    (over_vpipe,) = [entry for entry in shown["results"] if entry.get("over") == "vPipe (none)"]
    assert over_vpipe["mean"] >= over_vpipe["to_reach"]


def test_how_uneven_stages_are(tmp_path):
    picture = tmp_path / "figure4.png"
    shown = document("imbalance.py", "--models", "BERT", "--parts", "figures", "appendix", "--picture", str(picture))
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "imbalance")
    figures, appendix = shown["results"]
    # The copies of PipeDream make uneven what GPipe holds alike.
    assert 0 < figures["gpipe_waste"] < figures["pipedream_waste"] < 1
    assert figures["activations_below_80_mb"] > 0.5
    assert appendix["ratio"] == pytest.approx(appendix["memory_ms"] / appendix["compute_ms"])
    assert appendix["ratio"] > 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_stages_take_what_their_plan_says_and_overlapped_swaps_next_to_nothing():
    shown = document("planned_times.py", "--models", "GPT-2", "--repeats", "3")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "planned_times")
    overlapped, weighed = shown["results"]
    assert sum(overlapped["swapped"]) > 0
    assert sum(overlapped["recomputed"]) == 0
    assert sum(weighed["recomputed"]) > 0
    for entry in shown["results"]:
        assert len(entry["planned_stage_ms"]) == 4
        # Of batches in turn: others that keep the machine busy make the median longer, of stages and of batches.
        assert entry["fastest_worst_stage_error"] < 0.1
        assert entry["batch_ms"] > 0.97 * entry["planned_batch_ms"]
    assert overlapped["fastest_overlapped_swap_cost"] < 0.01


def test_partitions_train_faster_than_a_rivals_at_equal_batch():
    shown = document(
        "partition_speed.py", "--models", "BERT", "--stages", "4", "--points", "2", "--repeats", "3", "--modes", "async"
    )
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "partition_speed")
    *rows, found = shown["results"]
    assert [row["micro_batch_size"] for row in rows] == sorted({row["micro_batch_size"] for row in rows})
    for row in rows:
        assert {len(batches) for batches in row["batches_ms"].values()} == {3}
        assert row["simulated_ratio"] >= 1.0
        # Of the fastest, for others that keep the machine busy make the median of either longer.
        assert row["fastest_ratio"] == pytest.approx(row["simulated_ratio"], rel=0.05)
    assert found["mean_by_model"].keys() == {"BERT"}


def test_settings_that_make_no_sense_are_refused():
    finished = run("overhead.py", "--json", "--layers", "6")
    assert finished.returncode == 2
    assert "--layers 6: not divisible by --stages 4" in finished.stderr
    assert finished.stdout == ""


def test_planner_truth():
    shown = document("planner_truth.py")
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "planner_truth")
    [found] = shown["results"]
    assert found["verdicts"]["count"] == 92
    for name, used in found["used"].items():
        assert math.isclose(found["fitted"][name], used, rel_tol=0.02)


def test_peers(tmp_path):
    picture = tmp_path / "P.png"
    only = ("1F1B", "2BW", "ZB-H1")  # of every engine
    shown = document(
        "peers.py", "--cases", "4x4", "--repeats", "2", "--forward-ms", "20", "--only", *only, "--picture", picture
    )
    assert (shown["format"], shown["name"]) == ("evenpipe.benchmark/1", "peers")
    rows = {row["peer"]: row for row in shown["results"]}
    one_f_one_b = [f"{engine}: 1F1B" for engine in ("Megatron", "torch", "DeepSpeed", "EvenPipe")]
    assert {row["mib"] for name, row in rows.items() if name in one_f_one_b} == {4.0}
    assert rows["EvenPipe: 1F1B + BPipe"]["mib"] == 3.0
    halves, whole = (min(rows[name]["batches_ms"]) for name in ("EvenPipe: ZB-H1", "EvenPipe: 1F1B"))
    assert halves < 0.9 * whole  # (m + p - 1)(tf + td) + (m - p + 1) tw, where all take the same
    # Nothing of what a stream had forwarded before it was drained is left.
    assert rows["EvenPipe: 2BW"]["mib"] == 4.0
    fastest = min(rows["EvenPipe: 2BW"]["batches_ms"])
    for name in one_f_one_b:
        assert min(rows[name]["batches_ms"]) > 7 * 60 * 0.97  # (m + p - 1)(tf + tb)
        assert min(rows[name]["batches_ms"]) > 1.3 * fastest
    assert fastest > 4 * 60 * 0.97
    assert [row["peer"] for row in shown["results"] if row["front"] and row["delayed"]]
    (verdict,) = (row[0] for row in shown["tables"][1]["rows"] if "2BW at m = p" in row[0])
    assert verdict.endswith("≥ 0.95: holds") == (rows["EvenPipe: 2BW"]["of_limit"] >= 0.95)
    assert picture.read_bytes().startswith(b"\x89PNG")
