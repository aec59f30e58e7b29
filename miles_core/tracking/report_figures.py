"""Which charts the report has. The first step is warm-up (compilation, caches, an empty queue): where it would hide the others,
it stands in the note instead of the drawing."""

from __future__ import annotations

from typing import Any

from miles_core.tracking.report_charts import Chart, Series, number
from miles_core.tracking.report_data import TIME_PARTS, ReportData, StepFigures, age_shares, moving_average

Figures = list[tuple[Chart, bool]]
"""Charts, each with: is it wide."""

_SIGNALS = (
    ("entropy", "Entropy", "nats per token", "Of the learner's policy at the start of the step."),
    ("grad_norm", "Gradient norm", "", "Mean over the step's updates, before clipping."),
    ("clip_frac", "Clipped tokens", "share", "Tokens whose ratio left the clip range."),
)


def all_figures(data: ReportData) -> list[tuple[str, Figures]]:
    """(section title, charts) of every section that has data."""
    sections: list[tuple[str, Figures]] = [
        ("Learning", [(_reward(data), True), (_lengths(data), False), *((chart, False) for chart in _signals(data))]),
        ("Staleness and freshness", [(_staleness(data), False), (_freshness(data), False), (_mismatch(data), False)]),
        ("Speed", [(_sampling(data), False), (_time_split(data), False), (_bytes(data), False)]),
    ]
    if "routing_changed_frac" in data.metric_names():
        sections.insert(2, ("Routing", [(chart, False) for chart in _routing(data)]))
    return [(title, figures) for title, figures in sections if data.steps]


def _steps(data: ReportData) -> list[float]:
    return [float(figures.step) for figures in data.steps]


def _reward(data: ReportData) -> Chart:
    raw = [data.ledger.sampled_reward(figures.step) for figures in data.steps]
    trained = [figures.record.mean_reward for figures in data.steps]
    window = max(3, len(raw) // 12)
    evaluations = data.ledger.evaluations
    steps = sorted({*(figures.step for figures in data.steps), *evaluations})
    by_step = {figures.step: index for index, figures in enumerate(data.steps)}
    smooth = moving_average(raw, window)

    def over_steps(values: list[float]) -> list[float | None]:
        return [values[by_step[step]] if step in by_step else None for step in steps]

    greedy = [evaluations[step].greedy_score if step in evaluations else None for step in steps]
    kept = (Series("trained groups alone", over_steps(trained), "s5", "faint"),) if data.ledger.replaced else ()
    return Chart(
        "Reward", [float(step) for step in steps],
        (
            Series("sampled, each step (raw)", over_steps(raw), "s1", "faint"),
            Series(f"sampled, moving average of {window} steps", over_steps(smooth), "s1"),
            Series("greedy, held-out", greedy, "s2", "points"),
            *kept,
        ),
        y_to=1.0 if all(0 <= value <= 1 for value in raw) else None,
        note="Sampled: mean over all groups of a batch at the recipe's temperature, replaced ones included. Greedy: mean score "
        "of a version on held-out problems.",
    )  # fmt: skip


def _lengths(data: ReportData) -> Chart:
    names = (("max", "longest", "faint"), ("mean", "mean", "line"), ("min", "shortest", "faint"))
    series = [
        Series(name, [figures.lengths.get(key) for figures in data.steps], "s3" if key == "mean" else "s5", style)  # type: ignore[arg-type]
        for key, name, style in names
    ]
    note = "Sampled tokens of each trained trajectory."
    if data.dropped_tokens:
        mean = sum(data.dropped_tokens) / len(data.dropped_tokens)
        note += f" Of dropped groups: {number(mean)} on average."
    return Chart("Length", _steps(data), series, "tokens", note=note)


def _signals(data: ReportData) -> list[Chart]:
    names = data.metric_names()
    return [
        Chart(title, _steps(data), [Series(title.lower(), data.column(name), "s5")], unit, note=note)
        for name, title, unit, note in _SIGNALS
        if name in names
    ]


def _staleness(data: ReportData) -> Chart:
    bound = data.ledger.run.recipe.orchestrator.max_staleness
    means = [sum(figures.ages) / len(figures.ages) if figures.ages else None for figures in data.steps]
    return Chart(
        "Staleness", _steps(data),
        (
            Series("oldest sample of the batch", [float(figures.record.staleness) for figures in data.steps], "s2"),
            Series("mean over samples", means, "s1"),
            Series(f"bound {bound}", [float(bound)] * len(data.steps), "s6", "bound"),
        ),
        "versions", y_to=float(max(bound, 1)), note="Of batch k: k-1 less the oldest version that sampled a token of it.",
    )  # fmt: skip


def _freshness(data: ReportData) -> Chart:
    bound = data.ledger.run.recipe.orchestrator.max_staleness
    shares = age_shares(data.steps, bound)
    last = 5
    series = []
    for age in range(min(bound, last) + 1):
        columns = [shares[age]] if age < last else [shares[older] for older in range(last, bound + 1)]
        values = [None if stack[0] is None else sum(value or 0.0 for value in stack) for stack in zip(*columns, strict=True)]
        name = "newest version" if age == 0 else f"{age} behind" if age < last or bound == last else f"{last} or more behind"
        series.append(Series(name, values, f"a{age}", "bar"))
    return Chart("Freshness", _steps(data), series, "share of samples", y_to=1.0, note="How old the trained samples were.")


def _mismatch(data: ReportData) -> Chart:
    """k3 of the logprobs that the loss takes: of a mixture of experts, with routing replay."""
    gaps = [value for value in data.column("logprob_gap_max") if value is not None]
    note = "k3 estimate of KL(rollout || learner at the start of the step): off-policyness and numerical mismatch together."
    if gaps:
        note += f" Largest logprob gap of the run: {number(max(gaps))}."
    return Chart("Rollout-learner mismatch", _steps(data), [Series("k3", data.column("k3"), "s1")], "nats per token", note=note)


def _routing(data: ReportData) -> list[Chart]:
    """Of a mixture of experts whose routing is replayed: what replay removes, and how even the load is."""
    changed = [Series("changed by replay", data.column("routing_changed_frac"), "s4")]
    missing = sum(value or 0.0 for value in data.column("routing_missing_tokens"))
    note = "(position, layer) pairs of which the learner would have chosen another set of experts than rollout did."
    if missing:
        note += f" {number(missing)} positions had no record and were not replayed."
    return [
        _both_ways(data, "k3", "Mismatch without and with replay", "nats per token"),
        _both_ways(data, "logprob_gap_max", "Largest logprob gap", "nats"),
        Chart("Experts changed", _steps(data), changed, "share", note=note),
        _expert_load(data),
    ]


def _both_ways(data: ReportData, name: str, title: str, unit: str) -> Chart:
    """A metric at the steps whose logprobs the learner computed with its own choice of experts, too."""
    pairs = [
        (float(step), without, replayed)
        for step, without, replayed in zip(_steps(data), data.column(f"{name}_no_replay"), data.column(name), strict=True)
        if without is not None and replayed is not None
    ]
    means = [sum(pair[index] for pair in pairs) / max(1, len(pairs)) for index in (1, 2)]
    return Chart(
        title, [step for step, _, _ in pairs],
        (
            Series("the learner's own experts", [without for _, without, _ in pairs], "s2"),
            Series("rollout's experts, replayed", [replayed for _, _, replayed in pairs], "s1"),
        ),
        unit,
        note=f"Mean over {len(pairs)} steps measured both ways: {number(means[0])} without, {number(means[1])} with replay.",
    )  # fmt: skip


def _expert_load(data: ReportData) -> Chart:
    cold = [value for value in data.column("routing_cold_frac") if value is not None]
    return Chart(
        "Expert load", _steps(data),
        (
            Series("busiest expert", data.column("routing_load_peak"), "s2"),
            Series("standard deviation", data.column("routing_load_cv"), "s1"),
        ),
        "of the mean load",
        note=f"Experts under a tenth of the mean: {number(100 * cold[0])}% at first, {number(100 * cold[-1])}% at last.",
    )  # fmt: skip


def _sampling(data: ReportData) -> Chart:
    last = max(data.end_s, 1.0)
    size, unit = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 240 else (1.0, "seconds")
    return Chart(
        "Sampling speed", [at / size for at, _ in data.sampling],
        [Series("all replicas", [rate for _, rate in data.sampling], "s3")],
        "tokens/s", f"{unit} since the run was made", note="Sampled tokens of all rollout replicas per second of the run.",
    )  # fmt: skip


def _time_split(data: ReportData) -> Chart:
    steps = data.steps[1:] or data.steps
    series = [
        Series(name, [figures.point.get(key) for figures in steps], f"s{index}", "bar")
        for index, (key, name) in zip((4, 5, 1, 3), TIME_PARTS, strict=True)
    ]
    note = f"First step (warm-up), not drawn: {_time_text(data.steps[0])}." if len(data.steps) > 1 else ""
    return Chart("Learner time", [float(figures.step) for figures in steps], series, "s per step", note=note)


def _time_text(figures: StepFigures) -> str:
    parts = [f"{name} {number(figures.point[key])} s" for key, name in TIME_PARTS if key in figures.point]
    return ", ".join(parts) or "no figures"


def _bytes(data: ReportData) -> Chart:
    published = sorted(data.ledger.steps.published.items())
    by_step: dict[int, Any] = {version.step: record for version, record in published}
    steps = sorted(by_step)
    anchors = [float(by_step[step].size_bytes) if by_step[step].base is None else None for step in steps]
    deltas = [None if by_step[step].base is None else float(by_step[step].size_bytes) for step in steps]
    written = sum(record.size_bytes for _, record in published)
    full = sum(record.full_bytes or record.size_bytes for _, record in published)
    saved = f"; as full versions it would be {number(full)}B" if full != written else ""
    note = f"{len(published)} versions, {number(written)}B written{saved}."
    series = [Series("full version", anchors, "s1", "bar")]
    if any(deltas):
        series.append(Series("delta", deltas, "s2", "bar"))
    return Chart("Published per version", [float(step) for step in steps], series, "bytes", "version", note)
