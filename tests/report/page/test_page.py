"""What pages say of runs, simulations, partitions and plans, how large they are, and what has no page."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenpipe.cli.formats import Page
from evenpipe.cli.main import main
from evenpipe.report.page.content import amount

_MOST_BYTES = 3_000_000


def written(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> Path:
    """What the command prints with --json, as a file."""
    assert main([*words, "--json"]) == 0
    path.write_text(capsys.readouterr().out)
    return path


def page_of(document: Path) -> str:
    out = document.with_suffix(".html")
    assert main(["report", str(document), "--html", str(out)]) == 0
    return out.read_text()


def test_where_the_page_is_as_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.html"
    main(["report", str(run), "--html", str(out), "--json"])
    assert Page.model_validate_json(capsys.readouterr().out).path == str(out)
    assert out.exists()


def without_library(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def test_a_run_has_what_was_measured_beside_what_was_predicted(run: Path) -> None:
    page = without_library(page_of(run))
    for said in ("Where time goes", "measured", "predicted", "What else was simulated", "Versions", "torch"):
        assert said in page
    assert "<img" not in page
    assert re.search(r"On average, a stage is idle for \d+ % of the batch", page)


def test_charts_come_before_words_and_numbers(run: Path) -> None:
    page = without_library(page_of(run))
    order = ['class="facts"', "On average", ">Timeline<", ">Memory<", ">Where time goes<", ">In numbers<"]
    assert sorted(order, key=page.index) == order


def test_a_run_is_recommended_nothing_above_its_limit(run: Path, tmp_path: Path) -> None:
    document, path = json.loads(run.read_text()), tmp_path / "run.json"
    holds = max(one["static_bytes"] + one["message_bytes"] + one["peak_saved_bytes"] for one in document["stages"])
    path.write_text(changed(document, settings=document["settings"] | {"memory_gib": (holds + 1) / 2**30}))
    page = without_library(page_of(path))
    rows = re.findall(r'<th scope="row">2bw, gradients a batch late</th>(.*?)</tr>', page, re.DOTALL)
    assert "does not fit" in rows[0]
    assert not re.search(r"<li>2bw[^<]*<code>", page)


def test_a_last_iteration_unlike_the_others_is_said_to_be(run: Path, tmp_path: Path) -> None:
    document, path = json.loads(run.read_text()), tmp_path / "run.json"
    path.write_text(changed(document, iteration_ms=[5000.0, 400.0, 410.0, 390.0, 100.0]))
    page = without_library(page_of(path))
    assert "took 100 ms, 0.25× the median of 395 ms" in page
    assert "<dt>Iteration, median</dt><dd>395 ms</dd>" in page
    path.write_text(changed(document, iteration_ms=[5000.0, 400.0, 410.0, 390.0, 420.0]))
    assert "other iterations look different" not in page_of(path)


def held_after(page: str) -> list[list[tuple[str, str]]]:
    """Of each stage's table, its actions and what is held then."""
    tables = re.findall(r"<caption>Actions of stage \d+,.*?</table>", page, re.DOTALL)
    cells = r'<tr><th scope="row">([^<]*)</th>.*?<td>([^<]*)</td></tr>'
    return [re.findall(cells, table) for table in tables]


@pytest.mark.parametrize("simulated", [False, True])
def test_the_table_says_what_is_held_after_each_action(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, simulated: bool
) -> None:
    """One micro-batch more after a forward, one less after a backward, whether or not the next starts at once."""
    sizes = ("--stages", "2", "--micro-batches", "4", "--forward-ms", "1", "--backward-ms", "2")
    path = written(capsys, tmp_path / "s.json", "simulate", "--schedule", "1f1b", *sizes) if simulated else run
    tables, memory = held_after(without_library(page_of(path))), json.loads(path.read_text())["memory"]
    assert [len(rows) for rows in tables] == [8, 8]
    for rows, points in zip(tables, memory, strict=True):
        live = 0
        for action, held in rows:
            live += 1 if action.startswith("F") else -1
            known = {amount(nbytes) for _, units, nbytes in points if units == live}
            assert held in ({f"{live} live"} if simulated else known), action


def test_memory_has_a_scale_a_unit_and_a_legend(run: Path) -> None:
    page, document = page_of(run), json.loads(run.read_text())
    chart = re.search(r'<div class="chart" data-chart="memory".*?</script>', page, re.DOTALL)
    assert chart is not None
    for said in ("area: measured", "line: predicted"):
        assert said in chart[0]
    peaks = [max(nbytes for _, _, nbytes in points) for points in document["memory"]]
    most = max(peaks + [nbytes for points in document["predicted"]["memory"] for _, _, nbytes in points])
    assert f"full height of every row: {amount(most)}" in chart[0]
    for stage, peak in enumerate(peaks):
        assert json.dumps(f"stage {stage}\n{amount(peak)}") in chart[0]


def as_run(run: Path, simulated: Path) -> dict[str, Any]:
    """A run's document as if it had measured just what was simulated."""
    document, predicted = json.loads(run.read_text()), json.loads(simulated.read_text())
    stages = len(predicted["timeline"])
    predicted["unit_bytes"] = [[1 << 20]] * stages
    predicted["memory"] = [[[at, live, live << 20] for at, live, _ in row] for row in predicted["memory"]]
    document |= {name: predicted[name] for name in ("timeline", "memory")} | {"predicted": predicted}
    document["stages"] = document["stages"][:1] * stages
    return document  # type: ignore[no-any-return]


@pytest.mark.parametrize("stages", [4, 24])
def test_transfers_are_three_pixels_of_their_colour(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, stages: int
) -> None:
    sizes = ("--stages", str(stages), "--micro-batches", "26", "--bpipe", "--transfer-ms", "0.4")
    simulated = written(capsys, tmp_path / "s.json", "simulate", "--schedule", "1f1b", *sizes)
    (tmp_path / "run.json").write_text(json.dumps(as_run(run, simulated)))
    for path in (simulated, tmp_path / "run.json"):
        data = re.search(r'data-chart="timeline".*?<script type="application/json">(.*?)</script>', page_of(path), re.S)
        assert data is not None
        plot = json.loads(data[1])["doc"]["roots"][0]["attributes"]
        boxes = next(one["attributes"] for one in plot["renderers"] if one["attributes"]["glyph"]["name"] == "Quad")
        columns = dict(boxes["data_source"]["attributes"]["data"]["entries"])
        top, bottom = (
            np.frombuffer(gzip.decompress(b64decode(columns[name]["array"]["data"])), columns[name]["dtype"])
            for name in ("top", "bottom")
        )
        edge_px = boxes["glyph"]["attributes"]["line_width"]["value"]
        pixels = (bottom - top) * (plot["height"] - 56) / (stages + 0.06) + edge_px
        transfers = [at for at, kind in enumerate(columns["kind"]) if kind in "ELAR"]
        assert transfers
        assert all(pixels[at] >= 3 and columns["edge"][at] == columns["colour"][at] for at in transfers)


def test_eight_stages_and_64_micro_batches_are_below_three_megabytes(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
) -> None:
    sizes = ("--stages", "8", "--micro-batches", "64", "--bpipe", "--transfer-ms", "0.4")
    simulated = written(capsys, tmp_path / "s.json", "simulate", "--schedule", "1f1b", *sizes)
    (tmp_path / "run.json").write_text(json.dumps(as_run(run, simulated)))
    page = page_of(tmp_path / "run.json")
    assert len(page.encode()) <= _MOST_BYTES
    assert page.count("<tr>") > 8 * 2 * 64, "its actions are a table too"


def test_a_page_asks_nothing_of_a_network(run: Path) -> None:
    page = page_of(run)
    assert "default-src 'none'" in page
    assert not re.search(
        r"""<(script|link|img|iframe|source)[^>]+(src|href)=["']?(https?:)?//""", without_library(page)
    )
    assert page.count("</script>") == len(re.findall(r"<script[ >]", page)), "no script ends early"


def test_bubbles_come_with_a_remedy_that_was_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ada-Grouper: messages of half a forward cost 1F1B 17 %, which 2F2B hides."""
    costs = ("--forward-ms", "100", "--backward-ms", "200", "--link-ms", "50")
    words = ("simulate", "--stages", "4", "--micro-batches", "12", *costs)
    ms = {}
    for schedule, more in {"1f1b": (), "kfkb": ("--group-size", "2")}.items():
        document = written(capsys, tmp_path / f"{schedule}.json", *words, "--schedule", schedule, *more)
        ms[schedule] = json.loads(document.read_text())["makespan_ms"]
    page = without_library(page_of(tmp_path / "1f1b.json"))
    gain = f"{ms['1f1b'] / ms['kfkb']:.2f}×"
    assert f"kfkb, k=2 (<code>--schedule kfkb --group-size 2</code>): predicted {gain}. " in page
    assert "What messages take of the waits of stage 0 for backward 1→0" in page
    assert re.search(r"Stage 0 waits \d+ % of the batch for backward 1→0 \([\d,.]+ m?s in \d+ waits, ", page)
    row = re.search(r'<th scope="row">kfkb, k=2</th>(.*?)</tr>', page, re.DOTALL)
    assert row is not None
    assert gain in row[1]


def test_plans_have_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    question = ("--model", "gpt3-96b", "--cluster", "4x8-a100-80gb", "--global-batch-size", "128")
    document = written(capsys, tmp_path / "plan.json", "plan", *question)
    weighed = json.loads(document.read_text())["runs"]["weighed"]
    assert weighed > 1000
    page = without_library(page_of(document))
    for said in ("gpt3-96b on 4x8-a100-80gb", "The fastest runs", "Pareto front", "Not taken", "Samples a second"):
        assert said in page
    # The planner has weighed all schedules, with their memory.
    assert "What else was simulated" not in page
    assert not re.search(r"predicted \d\.\d\d×", page)
    assert f"the planner found none faster that fits into 79.35 GiB: {weighed:,} were weighed" in page
    facts = page[page.index('class="facts"') : page.index("</dl>")]
    assert facts.count(" ms<") == facts.count("Bubble") == 1, "the planner's; the simulator's are in a sentence"
    assert "These figures are the planner&#39;s" in page
    assert re.search(r"Iteration, interval</dt><dd>[\d,.]+ ms to [\d,.]+ ms \(-[\d.]+% to \+[\d.]+%\)", facts)
    estimate, recipe = re.findall(r'class="copy">Copy</button><code>(.*?)</code>', page)
    assert main(estimate.split()[1:]) == 0
    assert recipe.startswith("evenpipe recipe gpt --model gpt3-96b")


def test_partitions_are_recommended_nothing_above_their_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(capsys, tmp_path / "p.json", "partition", "--model", "bert-large", "--small", "--stages", "2")
    document = json.loads(path.read_text())
    assert "Its fullest stage would save" in page_of(path)
    assert "for which <code>evenpipe partition</code> looks" not in page_of(path), "it is one"
    path.write_text(changed(document, limit_bytes=max(stage["peak_bytes"] for stage in document["stages"])))
    page = without_library(page_of(path))
    [row] = re.findall(r'<th scope="row">2bw, gradients a batch late</th>(.*?)</tr>', page, re.DOTALL)
    assert "does not fit" in row
    assert not re.search(r"<li>2bw[^<]*<code>", page)
    older = [{key: one[key] for key in one if key[:5] not in ("kept_", "weigh", "besid")} for one in document["stages"]]
    path.write_text(changed(document, stages=older))
    assert "cannot be told: the document is of an older release" in page_of(path)


def test_hostile_names_of_a_partition_are_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the page, and on a terminal that they would steer."""
    name = "<script>alert(1)</script>\x1b]0;taken over\x07\u202e"
    profile, plan = tmp_path / "f.json", tmp_path / "p.json"
    known = ["partition", "--model", "bert-large", "--small", "--stages", "2", "--profile-out", str(profile)]
    assert main(known) == 0
    document = json.loads(profile.read_text())
    document["origin"]["model"] = name
    document["nodes"] = [one | {"name": name + one["name"]} for one in document["nodes"]]
    profile.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["partition", "--profile", str(profile), "--stages", "2", "--out", str(plan)]) == 0
    said = capsys.readouterr().out
    assert r"\x1b]0;taken over\u202e" in said, "and rich leaves the bell out"
    assert not {"\x1b", "\x07", "\u202e"}.intersection(said)
    page = page_of(plan)
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page


def test_a_demo_opens_with_its_runs_side_by_side(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document, path = json.loads(run.read_text()), tmp_path / "demo.json"
    other = document | {"weights_sha256": "0", "iteration_ms": [9000.0, 200.0, 300.0, 400.0]}
    demo = {"format": "evenpipe.demo/1", "runs": {"stock": document, "ours": other}}
    path.write_text(json.dumps(demo | {"machine": {"load_before": 9.25, "cores": 2}}))
    page = without_library(page_of(path))
    assert page.index("Side by side") < page.index(">Timeline<")
    for name, cell in {
        "all losses": "bit-identical",
        "final weights": "DIFFERENT",
        "median iteration": "300 ms",
    }.items():
        row = re.search(rf'<th scope="row">{name}</th>(.*?)</tr>', page, re.DOTALL)
        assert row is not None
        assert row[1].endswith(f"<td>{cell}</td>")
    assert "a load of 9.2 on 2 cores" in page
    path.write_text(json.dumps(demo | {"machine": {"load_before": 1.5, "cores": 2}}))
    assert "The machine was busy" not in page_of(path)
    assert [one.getMessage() for one in caplog.records if one.name.startswith("bokeh")] == [], "charts without data"


def refused(capsys: pytest.CaptureFixture[str], path: Path, content: str | None) -> str:
    """The one line that a document is refused with."""
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        main(["report", str(path), "--html", str(path.with_suffix(".html"))])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("evenpipe report: error: ")
    assert said.count("\n") == 1
    assert not path.with_suffix(".html").exists()
    return said


def changed(document: dict[str, Any], **changes: Any) -> str:
    return json.dumps({name: value for name, value in (document | changes).items() if value is not None})


def test_what_has_no_page_is_one_line(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    path, document = tmp_path / "r.json", json.loads(run.read_text())
    predicted = document["predicted"]
    contents = {
        "is no JSON document": "{",
        "is no JSON document: ": "[" * 100_000,
        "it has no format": "[1]",
        "format 'evenpipe.trace/1' has no page: use one of evenpipe.run/1": '{"format": "evenpipe.trace/1"}',
        "timeline: is missing: write it anew": changed(document, timeline=None),
        "timeline.0.0.action: 'X9' is no action": changed(
            document, timeline=[[{"action": "X9", "start_ms": 0, "end_ms": 1}]]
        ),
        "timeline.0.0.start_ms: must be": changed(document, timeline=[[{"action": "F0", "start_ms": -1, "end_ms": 1}]]),
        "stages: has 1 stages, timeline has 2": changed(document, stages=document["stages"][:1]),
        "predicted.schedule: is no schedule": changed(document, predicted=predicted | {"schedule": "nonsense"}),
        "schedule: ": changed(
            document, predicted=predicted | {"schedule": predicted["schedule"].strip().rsplit(" ", 1)[0]}
        ),
        "the costs have times for 1 stages": changed(
            document, predicted=predicted | {"costs": {"forward_ms": [1], "backward_ms": [2]}}
        ),
        "runs: has no runs": '{"format": "evenpipe.demo/1"}',
    }
    for said, content in contents.items():
        assert said.strip() in refused(capsys, path, content), said
    path.unlink()
    assert "No such file" in refused(capsys, path, None)
