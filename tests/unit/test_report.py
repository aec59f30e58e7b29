"""The report page: its figures, its charts, and that nothing a run wrote becomes markup."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path

import pytest

from flows.report import build_report
from miles_core.errors import RunDirectoryError
from miles_core.provenance import Data, Git, Provenance, Submitter
from miles_core.records import Incident
from miles_core.tracking.ledger import read_ledger
from miles_core.tracking.report_charts import Chart, Series, draw, number, thinned, ticks
from miles_core.tracking.report_data import Lane, ReportData, collect, moving_average
from miles_core.tracking.report_figures import all_figures
from miles_core.tracking.samples import Tokens, load_tokens
from miles_core.tracking.summary import summarize
from tests.unit.synthetic_run import HOSTILE, WORDS, SyntheticRun


@pytest.fixture
def made(tmp_path: Path) -> SyntheticRun:
    run = SyntheticRun(tmp_path / "synthetic-1", wandb=False)
    run.drop("g99.o1")
    for step in range(1, 5):
        run.train(step)
    run.evaluate(0, 0.25)
    return run


def data_of(made: SyntheticRun) -> ReportData:
    ledger = read_ledger(made.run, made.paths)
    return collect(ledger, made.paths, summarize(ledger, made.paths))


def charts_of(made: SyntheticRun) -> dict[str, Chart]:
    return {chart.title: chart for _, figures in all_figures(data_of(made)) for chart, _ in figures}


def lane_of(data: ReportData, writer: str) -> Lane:
    return next(lane for lane in data.lanes if lane.writer == writer)


def page_of(made: SyntheticRun) -> str:
    return build_report(made.paths.root).read_text()


def test_a_live_and_a_closed_run_say_so(made: SyntheticRun) -> None:
    assert ">RUNNING<" in page_of(made)
    made.close()
    page = page_of(made)
    assert ">COMPLETED<" in page and "4 / 8" in page and "steps trained" in page


def test_the_page_says_what_the_run_was_made_from_but_not_by_whom(made: SyntheticRun) -> None:
    assert "&quot;made from&quot;: &quot;UNKNOWN&quot;" in page_of(made)
    record = Provenance(
        git=Git(commit="c0ffee"), data=Data(family="chain_sum", options={}), base_model=(), packages={"torch": "2.13.0"},
        submitted=Submitter(user="alice", host="login1", command=("miles", "run")),
    )  # fmt: skip
    made.paths.provenance.write_text(record.model_dump_json())
    page = page_of(made)
    assert "c0ffee" in page and "2.13.0" in page and "alice" not in page


def test_a_run_in_which_nothing_happened_has_a_page(tmp_path: Path) -> None:
    empty = SyntheticRun(tmp_path / "empty")
    assert "Nothing was trained yet" in page_of(empty)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        build_report(tmp_path)


def test_what_a_run_wrote_is_never_markup(made: SyntheticRun) -> None:
    made.add_tokenizer()
    made.lose("rollout-0", HOSTILE)
    made.write("supervisor-0", Incident(what=HOSTILE, detail="</style><img src=x onerror=alert(1)>", unix_s=made.now_s))
    page = page_of(made)
    assert HOSTILE not in page and page.count(html.escape(HOSTILE)) >= 8
    assert "<img" not in page and page.count("<script") == 1 and page.count("</style>") == 1


def test_nothing_is_loaded_from_anywhere(made: SyntheticRun) -> None:
    page = page_of(made)
    assert not re.search(
        r"https?:|//[a-z0-9-]+\.|@import|url\(|<link(?! rel=\"icon\" href=\"data:,\")|\bsrc=|fetch\(|XMLHttp", page
    )


def test_rewards_raw_smoothed_and_greedy_stand_at_their_steps(made: SyntheticRun) -> None:
    chart = charts_of(made)["Reward"]
    raw, smooth, greedy = chart.series
    assert list(chart.x) == [0, 1, 2, 3, 4]
    assert raw.values == [None, 0.5, 0.5, 0.5, 0.5] and "raw" in raw.name
    assert "moving average of 3 steps" in smooth.name
    assert greedy.values == [0.25, None, None, None, None]


def test_the_first_step_is_shown_apart(made: SyntheticRun) -> None:
    chart = charts_of(made)["Learner time"]
    assert list(chart.x) == [2, 3, 4]
    assert "First step (warm-up), not drawn: waiting for a batch 90 s" in chart.note


def test_staleness_and_freshness_are_those_of_the_batches(made: SyntheticRun) -> None:
    charts = charts_of(made)
    oldest, mean, bound = charts["Staleness"].series
    assert oldest.values == [0, 1, 1, 1] == mean.values and set(bound.values) == {4.0}
    shares = {series.name: series.values for series in charts["Freshness"].series}
    assert shares["newest version"] == [1, 0, 0, 0] and shares["1 behind"] == [0, 1, 1, 1]


def routed(step: int) -> dict[str, float]:
    """The metrics of a mixture of experts; every fifth step is measured without replay, too."""
    always = {"routing_changed_frac": 0.02, "routing_load_cv": 0.5, "routing_load_peak": 3.0, "routing_cold_frac": 0.25 / step,
              "routing_missing_tokens": 4.0 * (step == 2), "logprob_gap_max": 0.125}  # fmt: skip
    return always | ({} if step % 5 != 1 else {"k3_no_replay": 0.03 * step, "logprob_gap_max_no_replay": 0.5})


def test_a_mixture_shows_its_mismatch_without_and_with_replay_at_the_steps_that_know_both(tmp_path: Path) -> None:
    mixture = SyntheticRun(tmp_path / "mixture-1", wandb=False)
    for step in range(1, 8):
        mixture.train(step, metrics=routed(step))
    charts = charts_of(mixture)
    chart = charts["Mismatch without and with replay"]
    assert list(chart.x) == [1, 6] and [series.values for series in chart.series] == [[0.03, 0.18], [0.01, 0.01]]
    assert "2 steps measured both ways: 0.105 without, 0.01 with" in chart.note
    assert [series.values for series in charts["Largest logprob gap"].series] == [[0.5, 0.5], [0.125, 0.125]]
    assert len(charts["Experts changed"].x) == 7 and "4 positions had no record" in charts["Experts changed"].note
    assert "25% at first, 3.57% at last" in charts["Expert load"].note
    assert [series.name for series in charts["Rollout-learner mismatch"].series] == ["k3"]
    assert "<h2>Routing</h2>" in page_of(mixture)


def test_a_dense_model_has_no_section_on_routing(made: SyntheticRun) -> None:
    assert "Routing" not in [title for title, _ in all_figures(data_of(made))] and "<h2>Routing</h2>" not in page_of(made)


def test_lanes_show_attempts_work_and_incidents(made: SyntheticRun) -> None:
    made.lose("rollout-0", "node n1 failed")
    data = data_of(made)
    lane = lane_of(data, "rollout-0")
    assert lane.busy == [(11.0, 14.0), (16.0, 19.0), (21.0, 24.0), (26.0, 29.0)] and lane.busy_s == 12
    assert [incident.detail for incident in lane.incidents] == ["node n1 failed"]
    assert [attempt.number for attempt in lane.attempts] == [1]
    assert lane_of(data, "grader-0").busy, "grades have times"


def test_sampling_speed_integrates_to_the_sampled_tokens(made: SyntheticRun) -> None:
    data = data_of(made)
    width = data.sampling[1][0] - data.sampling[0][0]
    assert sum(rate * width for _, rate in data.sampling) == pytest.approx(40 * 3)


def test_drops_jobs_and_incidents_are_named(made: SyntheticRun) -> None:
    made.lose("rollout-0", "node n1 failed")
    page = page_of(made)
    assert re.search(r"dropped: stale</td><td[^>]*>1</td><td[^>]*>20.0%", page)
    assert "a1: infrastructure (NODE_FAIL) on n1" in page and "103, 200" in page and "n1 (Fast CPU, 8 CPUs, 2 x H200)" in page
    assert "Of dropped groups: 9 on average" in page


def test_tokens_are_marked_by_version_and_by_loss_mask(made: SyntheticRun) -> None:
    made.add_tokenizer()
    card = next(card for card in page_of(made).split("<article")[1:] if "Step 4, reward 1" in card)
    user, assistant = re.findall(r'class="tokens">(.*?)</div>', card, re.DOTALL)[:2]
    assert user == WORDS[0]
    assert re.findall(r"<sup[^>]*>(v\d)</sup>", assistant) == ["v2", "v3"]
    marked = re.findall(r'<b class="s(\d)" title="version (\d), probability 0.607">(.*?)</b>', assistant)
    assert [(int(colour) - 1, step, html.unescape(text)) for colour, step, text in marked] == [
        (2, "2", HOSTILE), (2, "2", "two"), (3, "3", " & "), (3, "3", "2"),
    ]  # fmt: skip
    assert assistant.startswith("\n<sup"), "a token that was not sampled has no mark"


def test_without_tokenizer_or_shards_the_page_says_so(made: SyntheticRun) -> None:
    assert "token ids are shown" in page_of(made)
    for shard in made.paths.root.glob("trajectories/*/000/*.arrow"):
        shard.unlink()
    assert "shards of the trained trajectories are gone" in page_of(made)


def test_characters_of_several_tokens_are_shown_once() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode(errors="replace")

    text = "a\u00e9\U0001f600b"
    pieces = Tokens(Bytes()).pieces(list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    assert not load_tokens(Path("/nowhere")).is_text


def test_a_long_run_makes_a_small_page_in_short_time() -> None:
    steps = list(range(1, 20_001))
    chart = Chart("t", steps, [Series("a", [step / 2 for step in steps], "s1")])
    started = time.process_time()
    svg = draw(chart, 376)
    assert len(svg) < 60_000 and time.process_time() - started < 20
    thin = thinned(chart)
    assert len(thin.x) <= 400 and thin.x[-1] == 20_000 and "mean over 50 neighbours" in thin.note
    assert thin.series[0].values[0] == sum(steps[:50]) / 100


def test_a_drawing_holds_its_points_inside_and_its_numbers_beside() -> None:
    chart = Chart(
        'a"<b', [1, 2, 4], [Series("up", [0.0, None, 2.0], "s1"), Series("flat", [1.0, 1.0, float("nan")], "s2")], "s"
    )
    svg = draw(chart, 376, 190)
    assert 'aria-label="a&quot;&lt;b"' in svg
    path = re.search(r'class="line s1" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', svg)
    assert path is not None
    left, low, right, high = map(float, path.groups())
    assert left < right <= 376 and 0 <= high < low <= 190
    points = json.loads(html.unescape(re.search(r'data-points="([^"]*)"', svg).group(1)))  # type: ignore[union-attr]
    assert points["series"][0]["values"] == ["0", "-", "2"] and points["series"][1]["values"][2] == "-"


def test_stacked_bars_stand_on_each_other() -> None:
    svg = draw(Chart("t", [1], [Series("a", [1.0], "s1", "bar"), Series("b", [3.0], "s2", "bar")], y_to=4.0), 376, 190)
    spans = [tuple(map(float, found)) for found in re.findall(r'class="bar s\d" d="M[\d.]+ ([\d.]+)V([\d.]+)', svg)]
    (bottom, middle), (also_middle, top) = spans
    assert bottom == 166 and middle == also_middle and top == 10 and middle - top == pytest.approx(3 * (bottom - middle))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.98765, "0.988"),
        (1234, "1.23k"),
        (999.9, "1k"),
        (1_143_000, "1.14M"),
        (3e-5, "3.0e-5"),
        (-2, "-2"),
    ],
)
def test_numbers_for_people(value: float | None, text: str) -> None:
    assert number(value) == text


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 78.6, 5) == [0, 20, 40, 60]
    assert ticks(3, 3) == [3]
    assert ticks(0, 2.3e-13) == [0, 1e-13, 2e-13], "a mismatch of two equal policies is not zero"


def test_moving_average_looks_back_only() -> None:
    assert moving_average([1, 2, 3, 10], 3) == [1, 1.5, 2, 5]
