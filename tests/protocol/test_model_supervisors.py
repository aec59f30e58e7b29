"""The model of two supervisors over one role (I3, I13, I14): a taken-over one that goes on, a role that dies once.

Who decides is the code: `decide` what is to be done, RoleRecord what a journal says, `cut_is_due` when a successor may cut.
Each thing that a supervisor does is two moves, the look at its epoch and the deed: a newer epoch may begin between them.
The scheduler lists all jobs at once; a job takes its lease when it starts, or leaves as a twin or superseded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest

from cluster.evidence import RoleRecord
from cluster.scheduler import Cause, JobView, Phase
from cluster.supervisor import Action as Wanted
from cluster.supervisor import Adopt, CancelJobs, Lost, Resubmit, RoleView, Start, World, decide
from miles_core.records import Cut, Cuts, Intent, Submitted
from miles_core.store import follow
from tests.protocol.exploring import Explored, Words, explore

WRITER = "learner-0"
NOT_YET = -1
WORDS = Words()
Stream = tuple[int, ...]
VIEWS = {
    "pending": (Phase.PENDING, Cause.NONE), "running": (Phase.RUNNING, Cause.NONE), "left": (Phase.ENDED, Cause.COMPLETED),
    "failed": (Phase.ENDED, Cause.FAILED), "cancelled": (Phase.ENDED, Cause.CANCELLED),
}  # fmt: skip


class Job(NamedTuple):
    attempt: int
    phase: str


class Supervisor(NamedTuple):
    stream: Stream = ()
    """() until it opened."""
    last_end: str = ""
    """The loss that it recorded last, until the next intent."""
    about_to: str = ""
    """What it looked at its epoch for and does next: intent, sbatch, record."""
    number: int = 0
    """The attempt, or the job to record."""
    has_left: bool = False


class Model(NamedTuple):
    supervisors: tuple[Supervisor, Supervisor]
    mark: int
    """Records of the first when the lease of the second appeared; NOT_YET before."""
    jobs: tuple[Job, ...]
    leases: tuple[int, ...]
    """Attempts of the role with a lease, in the order in which they were taken."""


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules themselves: a test breaks one to see the check fail."""

    decide: Callable[[World], list[Wanted]] = decide
    leases_are_exclusive: bool = True


START = Model((Supervisor((WORDS.number(1, Cuts()),)), Supervisor()), NOT_YET, (), ())


def known(state: Model, nth: int) -> Stream:
    """Records that count for a supervisor."""
    own = state.supervisors[nth].stream
    if nth == 0 or not own:
        return own
    return state.supervisors[0].stream[: WORDS.record(own[0]).cuts[0].bytes] + own


def view_of(state: Model, nth: int) -> RoleView:
    return _view_of(known(state, nth), state.supervisors[nth].last_end, state.jobs, max(state.leases, default=0))


@cache
def _view_of(records: Stream, last_end: str, jobs: tuple[Job, ...], newest_lease: int) -> RoleView:
    role = RoleRecord(WRITER)
    for item in WORDS.items(records):
        role.fold(item.record)
    seen = tuple(job_view(nth, job) for nth, job in enumerate(jobs) if job.attempt == role.attempt)
    return RoleView(
        writer=WRITER, attempt=role.attempt, submitted=role.submitted, jobs=seen, newest_lease=newest_lease,
        liveness="alive" if any(job.phase is Phase.RUNNING for job in seen) else "unknown", last_end=last_end,
    )  # fmt: skip


def job_view(nth: int, job: Job) -> JobView:
    phase, cause = VIEWS[job.phase]
    return JobView(
        job_id=str(nth), run_id="r", writer=WRITER, attempt=job.attempt, token="t", phase=phase, cause=cause,
        state=job.phase.upper(), exit_code=1 if cause is Cause.FAILED else None,
    )  # fmt: skip


@cache
def wanted(rules: Rules, view: RoleView, stale: tuple[str, ...]) -> list[Wanted]:
    return rules.decide(World(roles={WRITER: view}, now_s=0.0, query_ok=True, stale_jobs=stale, max_failures=9))


# --- what may happen -------------------------------------------------------------------------------------------------


def moves(state: Model, rules: Rules) -> Iterator[tuple[str, Model, bool]]:
    """(what, the state behind it, whether it surely comes)."""
    if state.mark == NOT_YET:
        yield "S2 takes the epoch", state._replace(mark=len(state.supervisors[0].stream)), False
    elif not state.supervisors[1].stream:
        waited_s = next(seconds for seconds in (0.0, 0.5, 1.0, 1.5, 2.0) if follow.cut_is_due(1, 2, seconds, 1.0))
        for at in range(state.mark if waited_s >= 2.0 else 1, len(state.supervisors[0].stream) + 1):
            cut = Cut(writer="supervisor-0", attempt=1, bytes=at, hash="")
            yield f"S2 cuts at {at}", changed(state, 1, stream=(WORDS.number(2, Cuts(cuts=(cut,))),)), True
    for nth, supervisor in enumerate(state.supervisors):
        if supervisor.stream and not supervisor.has_left:
            is_newest = nth == 1 or state.mark == NOT_YET
            for what, following in steps_of(state, nth, is_newest, rules):
                yield f"S{nth + 1} {what}", following, is_newest
    for nth, job in enumerate(state.jobs):
        yield from fates_of(state, nth, job, rules)


def steps_of(state: Model, nth: int, is_newest: bool, rules: Rules) -> Iterator[tuple[str, Model]]:
    """Looks at the epoch and decides; or does what it decided, whatever the epoch is by now."""
    this = state.supervisors[nth]
    if this.about_to:
        yield this.about_to, done(state, nth)
        return
    if not is_newest:
        yield "sees a newer epoch", changed(state, nth, has_left=True)
        return
    view = view_of(state, nth)
    live = [(number, job) for number, job in enumerate(state.jobs) if job.phase in ("pending", "running")]
    stale = tuple(str(number) for number, job in live if job.attempt != view.attempt)
    for action in wanted(rules, view, stale)[:1]:
        yield f"wants {action}", decided(state, nth, action)


def decided(state: Model, nth: int, action: Wanted) -> Model:
    if isinstance(action, Start):
        return changed(state, nth, about_to="intent", number=action.attempt)
    if isinstance(action, Resubmit):
        return changed(state, nth, about_to="sbatch", number=action.attempt)
    if isinstance(action, Adopt):
        return changed(state, nth, about_to="record", number=int(action.job_id))
    if isinstance(action, Lost):
        return changed(state, nth, last_end=action.detail)
    assert isinstance(action, CancelJobs), action
    jobs = tuple(
        job._replace(phase="cancelled") if str(number) in action.job_ids else job for number, job in enumerate(state.jobs)
    )
    return state._replace(jobs=jobs)


def done(state: Model, nth: int) -> Model:
    """The deed. Behind an intent and behind a submission it looks at its epoch again: that is the next move."""
    this = state.supervisors[nth]
    if this.about_to == "intent":
        intent = Intent(writer=WRITER, attempt=this.number, token="t", reason="")
        word = WORDS.number(nth + 1, intent)
        return changed(state, nth, stream=(*this.stream, word), last_end="", about_to="", number=0)
    if this.about_to == "sbatch":
        submitted = state._replace(jobs=(*state.jobs, Job(this.number, "pending")))
        return changed(submitted, nth, about_to="", number=0)
    record = Submitted(writer=WRITER, attempt=state.jobs[this.number].attempt, job_id=str(this.number))
    return changed(state, nth, stream=(*this.stream, WORDS.number(nth + 1, record)), about_to="", number=0)


def changed(state: Model, nth: int, **values: object) -> Model:
    supervisors = list(state.supervisors)
    supervisors[nth] = supervisors[nth]._replace(**values)
    return state._replace(supervisors=(supervisors[0], supervisors[1]))


def fates_of(state: Model, nth: int, job: Job, rules: Rules) -> Iterator[tuple[str, Model, bool]]:
    newest = max(state.leases, default=0)
    if job.phase == "pending":
        is_free = job.attempt > newest or (not rules.leases_are_exclusive and job.attempt == newest)
        phase = "running" if is_free else "left"
        leases = (*state.leases, job.attempt) if phase == "running" else state.leases
        yield f"job {nth} starts: {phase}", with_job(state, nth, phase)._replace(leases=leases), True
    elif job.phase == "running" and job.attempt < newest:
        yield f"job {nth} sees that it is superseded", with_job(state, nth, "left"), True
    if job.phase == "running" and not any(other.phase == "failed" for other in state.jobs):
        yield f"job {nth} dies", with_job(state, nth, "failed"), False


def with_job(state: Model, nth: int, phase: str) -> Model:
    return state._replace(jobs=(*state.jobs[:nth], state.jobs[nth]._replace(phase=phase), *state.jobs[nth + 1 :]))


# --- what must never be ----------------------------------------------------------------------------------------------


def violations(state: Model) -> set[str]:
    found = set[str]()
    running = [job.attempt for job in state.jobs if job.phase == "running"]
    if len(set(running)) < len(running):
        found.add("two live holders of one attempt")
    counted = known(state, 1) if state.supervisors[1].stream else (known(state, 0) if state.mark == NOT_YET else ())
    intended = {item.record.attempt for item in WORDS.items(counted) if isinstance(item.record, Intent)}
    nobody_failed = not any(job.phase == "failed" for job in state.jobs)
    healthy = [attempt for attempt in running if attempt in intended]
    if nobody_failed and any(newer > attempt for attempt in healthy for newer in intended):
        found.add("a role that works, by an intent that counts, is superseded")
    return found


def is_complete(state: Model) -> bool:
    """The newest supervisor has nothing to do, and exactly one job runs, by its newest intent, with the newest lease."""
    nth = 0 if state.mark == NOT_YET else 1
    if not state.supervisors[nth].stream or state.supervisors[nth].about_to:
        return False
    view, live = view_of(state, nth), [job for job in state.jobs if job.phase in ("pending", "running")]
    return [job.attempt for job in live] == [view.attempt] == [max(state.leases, default=0)] and live[0].phase == "running"


def explored(rules: Rules, *, until_broken: bool = False) -> Explored[Model, str]:
    return explore(START, lambda state: moves(state, rules), violations, is_complete, until_broken=until_broken)


def test_two_supervisors_end_with_one_job_whatever_the_older_one_still_does() -> None:
    found = explored(Rules())
    found.check()
    assert len(found.came_by) > 200, "so few interleavings are not the model that was written"


@pytest.mark.parametrize(
    "broken",
    [
        Rules(leases_are_exclusive=False),
        Rules(decide=lambda world: [action for action in decide(world) if not isinstance(action, Lost)]),
    ],
    ids=["leases are not exclusive", "never sees a loss"],
)
def test_each_rule_of_supervisors_is_needed(broken: Rules) -> None:
    """Without it the same exploration finds a fault or a dead end, so the check can fail."""
    found = explored(broken, until_broken=True)
    assert found.broken or found.trapped
