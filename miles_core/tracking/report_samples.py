"""The report's sampled trajectories, turn by turn: which tokens were sampled, by which version, and which are in the loss."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from miles_core.paths import RunPaths
from miles_core.tracking.ledger import Ledger
from miles_core.tracking.report_charts import number
from miles_core.tracking.samples import Sample, Tokens, choose, load_tokens, read_samples
from miles_core.trajectories.schema import Trajectory, Turn

_COLOURS = 6
_FROM_STEPS = 4
_EACH = 2
_MOST_TOKENS = 600


def samples_section(ledger: Ledger, paths: RunPaths) -> str:
    """The best and the worst trajectory of four steps, spread over the run."""
    steps = [step for step in sorted(ledger.batches) if step in ledger.steps.steps]
    if not steps:
        return '<p class="hint">Nothing was trained yet.</p>'
    last = len(steps) - 1
    chosen = sorted({steps[round(index * last / (_FROM_STEPS - 1))] for index in range(_FROM_STEPS)})
    members = [member for step in chosen for member in choose(ledger.batches[step], _EACH)]
    samples = read_samples(paths, members)
    if not samples:
        return '<p class="hint">The shards of the trained trajectories are gone.</p>'
    tokens = load_tokens(paths.base_model)
    hint = (
        '<p class="hint">The best and the worst of a batch, from the start to the end of the run. '
        '<span class="chip s1">Coloured</span> tokens were sampled and are in the loss, one colour for each policy version '
        "(named where it begins); the others are prompt, tool results and template."
        + ("" if tokens.is_text else " There is no tokenizer in the run directory, so token ids are shown.")
        + "</p>"
    )
    return hint + f'<div class="two">{"".join(_card(sample, tokens) for sample in samples)}</div>'


def _card(sample: Sample, tokens: Tokens) -> str:
    row = sample.row
    shown = min(len(row.tokens), _MOST_TOKENS)
    pieces = tokens.pieces(row.tokens[:shown].tolist())
    turns = "".join(
        f'<div class="turn"><div class="role">{html.escape(turn.role)}</div>'
        f'<div class="tokens">{_tokens(row, pieces, turn.start, min(turn.end, shown))}</div></div>'
        for turn in _whole_turns(row)
        if turn.start < shown
    )
    rest = f'<p class="note">{len(row.tokens) - shown} more tokens.</p>' if len(row.tokens) > shown else ""
    age = "" if row.oldest_step is None else f", {max(0, sample.step - 1 - row.oldest_step)} behind"
    return (
        f'<article class="card sample"><h3>Step {sample.step}, reward {number(sample.reward)}</h3>'
        f'<p class="note">{html.escape(row.status)}, {row.num_sampled} sampled tokens{age}, '
        f"{html.escape(row.trajectory_id)}</p>"
        f"{turns}{rest}</article>"
    )


def _whole_turns(row: Trajectory) -> list[Turn]:
    """The turns, each with the template tokens before it; what follows the last one is `template`."""
    turns, end = [], 0
    for turn in row.turns:
        turns.append(Turn(turn.role, end, turn.end))
        end = turn.end
    if end < len(row.tokens):
        turns.append(Turn("template" if row.turns else "tokens", end, len(row.tokens)))
    return turns


def _tokens(row: Trajectory, pieces: list[str], start: int, end: int) -> str:
    return "".join(_marked(row, pieces, start, end))


def _marked(row: Trajectory, pieces: list[str], start: int, end: int) -> Iterator[str]:
    named = None
    for index in range(start, end):
        text = html.escape(pieces[index])
        if not row.loss_mask[index]:
            yield text
            continue
        step = next(run.step for run in reversed(row.versions) if run.start <= index)
        colour = f"s{step % _COLOURS + 1}"
        if step != named:
            named = step
            yield f'<sup class="{colour}">v{step}</sup>'
        yield f'<b class="{colour}" title="version {step}, probability {math.exp(row.logprobs[index]):.3f}">{text}</b>'
