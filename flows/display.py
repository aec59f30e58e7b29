"""What a person sees in a terminal: live progress, status, the summary at the end. Plain lines where there is no terminal."""

from __future__ import annotations

import errno
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cluster.job_spec import make_job_spec
from cluster.profile import ClusterProfile
from cluster.schedulers import make_script
from cluster.supervise import Progress
from flows.output import plain
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe
from miles_core.records import Incident
from miles_core.run import RunConfig, all_writers

_LINE_EVERY_S = 5.0
_STALL_S = 20.0
"""Without a step for this long, a line also says what the roles do."""


def miles_command() -> str:
    """How the command can be typed here: by name, or by the path of this environment."""
    return "miles" if shutil.which("miles") else str(Path(sys.executable).with_name("miles"))


class PlainConsole(Console):
    """Colour and live drawing only on a terminal, whatever the environment asks for; a reader that left is an error here."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True, force_terminal=stream.isatty())

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "nobody reads the output any more")


class Display:
    """Live display of one run; `progress` and `incident` are the supervisor's hooks."""

    def __init__(self, run_id: str, steps: int, *, to_stderr: bool = False) -> None:
        self._run_id, self._steps = run_id, steps
        self._console = PlainConsole(sys.stderr if to_stderr else sys.stdout)
        self._live: Live | None = None
        self._last_line_at = 0.0
        self._last_step = -1
        self._moved = (-1, 0.0)
        """Last step and when it was first shown."""
        self._started_at = time.monotonic()

    @contextmanager
    def task(self, name: str) -> Iterator[None]:
        """Names a step that takes a while, and says how long it took."""
        start = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(name):
                yield
        else:
            yield
        self._console.print(f"{name}: {time.monotonic() - start:.1f} s")

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.print(text)

    def show_run(self, paths: RunPaths, cluster: str) -> None:
        """Where everything is, before the run starts."""
        self._console.print(
            f"run {self._run_id} on {cluster}\n  directory {paths.root}\n  logs      {miles_command()} logs -f {paths.root}"
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def progress(self, progress: Progress) -> None:
        """Redraws, or prints a line every few seconds."""
        if self._live is not None:
            self._live.update(_drawing(self._run_id, progress))
            return
        now = time.monotonic()
        if now - self._last_line_at < _LINE_EVERY_S and progress.step != self._steps:
            return
        if progress.step == self._last_step == self._steps:
            return
        self._last_line_at, self._last_step = now, progress.step
        if progress.step != self._moved[0]:
            self._moved = (progress.step, now)
        is_slow = progress.step == 0 or now - self._moved[1] >= _STALL_S
        self._console.print(_line(progress, tell_roles=is_slow))

    def incident(self, incident: Incident) -> None:
        """Prints an incident above the live display."""
        self._console.print(plain(f"! {incident.what} {incident.writer} {incident.detail}".rstrip()))

    def show_summary(self, summary: dict[str, Any], paths: RunPaths) -> None:
        """The last lines of `miles run`."""
        self._console.print(summary_text(summary))
        self._console.print(f"  directory {paths.root}\n  summary   {paths.summary}\n  report    {paths.report}")
        self._console.print(f"  prove it  {miles_command()} verify {paths.root}")


def _line(progress: Progress, *, tell_roles: bool = False) -> str:
    reward = "-" if progress.mean_reward is None else f"{progress.mean_reward:.3f}"
    staleness = "-" if progress.staleness is None else str(progress.staleness)
    waiting = [f"{writer}: {state}" for writer, state in progress.roles if state not in ("done", "serving", "training")]
    note = f"  [{'; '.join(waiting)}]" if waiting and tell_roles else ""
    return f"{progress.seconds:6.0f} s  step {progress.step}/{progress.steps}  reward {reward}  staleness {staleness}{note}"


def _drawing(run_id: str, progress: Progress) -> Group:
    roles = Table.grid(padding=(0, 2))
    for writer, state in progress.roles:
        roles.add_row(Text(writer), Text(state))
    bar = ProgressBar(total=progress.steps, completed=progress.step, width=48)
    return Group(Text(f"{run_id}: {_line(progress).strip()}"), bar, roles)


def summary_text(summary: dict[str, Any]) -> str:
    """The figures of a run in a few lines."""
    reward, evaluation, staleness = summary["reward"], summary["eval"], summary["staleness"]
    groups, seconds, policy = summary["groups"], summary["seconds"], summary["policy"]
    kind = "" if policy["adapter"] is None else f", an adapter of rank {policy['adapter']['rank']}"
    newest = policy["bytes_newest"]
    size = "-" if newest is None else f"{newest / 1e6:.3g} MB"
    dropped = ", ".join(f"{reason} {count}" for reason, count in groups["dropped"].items()) or "none"
    return "\n".join((
        f"{summary['state']}: {summary['steps']} steps",
        f"  reward    {_show(reward['first5'])} -> {_show(reward['last5'])} (sampled, mean of the first and last 5 steps)"
        + _of_trained(reward),
        f"  greedy    {_show(evaluation['greedy_before'])} -> {_show(evaluation['greedy_after'])} "
        f"on {evaluation['n']} held-out problems",
        f"  staleness mean {_show(staleness['mean'])}, max {_show(staleness['max'])}, bound {staleness['bound']}",
        f"  groups    {groups['issued']} issued, {groups['trained']} trained, {groups['open']} open, dropped: {dropped}",
        f"  versions  {policy['versions']}, the newest one {size}{kind}",
        f"  seconds   {seconds['total']} in all, {_show(seconds['setup'])} set-up, learner {seconds['learner_busy']}, "
        f"rollout {seconds['rollout_busy']}, both {seconds['both_busy']}; {_show(summary['tokens_per_s'])} sampled tokens/s",
    ))  # fmt: skip


def _of_trained(reward: dict[str, Any]) -> str:
    """Where groups without spread were replaced, the reward of those that were trained is another one."""
    trained = reward["trained"]
    if all(trained[end] == reward[end] for end in trained):
        return ""
    return f"; of trained groups {_show(trained['first5'])} -> {_show(trained['last5'])}"


def _show(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def job_scripts(recipe: Recipe, profile: ClusterProfile) -> dict[str, str]:
    """`miles jobs`: the exact text for every role, by writer. Raises RecipeError."""
    paths = RunPaths(Path(profile.runs_root).expanduser().resolve() / "RUN_ID")
    run = RunConfig(
        run_id="RUN_ID", recipe=recipe, timing=profile.timing, cluster={}, code_digest="", base_model_digest="", created_s=0.0
    )
    script = make_script(profile, paths.root)
    return {writer: script(make_job_spec(run, paths, profile, writer, 1)) for writer in all_writers(recipe)}
