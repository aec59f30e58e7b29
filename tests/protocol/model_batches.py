"""The model of act and cut (I5, I7, I8): two orchestrator attempts x two learner attempts, none of which ever stops.

Who decides is the code: `deliverable` and `cut_is_due` what a reader takes and when a cut is due; State, Planner and StepLog's
Lineage what an orchestrator writes; Lineage, `opening_record`, `check_only_one`, `check_same`, `check_batch` and `is_published`
what a learner does. The model adds only what nobody decides: who goes next, how far a read reaches (any prefix that is not
shorter than before), which group is complete first, and with which published version it was sampled. Leases are seen at once;
a read begun 2 x visibility_s after a lease was seen shows at least what was written when that lease appeared.

With a rollback (I8) the second attempts begin behind one to the base model, when both roles were retired, and the first ones
know nothing of it, ever. Not modelled here: checkpoints, retention, replicas and graders (model_orders.py), Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from miles_core.errors import MilesError
from miles_core.grading.base import Grade
from miles_core.learner.consume import check_batch, check_only_one, check_same
from miles_core.learner.loop import is_published, is_replay, opening_record
from miles_core.orchestrator.planner import Planner
from miles_core.orchestrator.state import Receiver, State
from miles_core.policy.lineage import Lineage
from miles_core.records import (
    Batch,
    Cut,
    Cuts,
    Drop,
    Graded,
    GradeEntry,
    GradeOrder,
    GroupIssued,
    Order,
    Rollback,
    ShardEntry,
    ShardSealed,
    StepDone,
    Version,
    digest_record,
    sample_id,
    trajectory_id,
)
from miles_core.rollbacks import Rollbacks
from miles_core.store import follow
from tests.protocol.exploring import Explored, Words, explore
from tests.protocol.simulation import simulated_recipe

Stream = tuple[int, ...]
O1, O2, L1, L2 = range(4)
NAMES = ("O1", "O2", "L1", "L2")
WRITERS = ("orchestrator-0", "orchestrator-0", "learner-0", "learner-0")
NOT_YET = -1
REPLICA, GRADER = Receiver("rollout-0", 1), Receiver("grader-0", 1)
BASE_DIGEST = "base"
NONE, BACK = Rollbacks(), Rollbacks([
    Rollback(number=1, step=0, last_step=9, groups=0, missing="x", unix_s=0.0, attempts=dict.fromkeys(WRITERS, 1))
])  # fmt: skip
WORDS = Words()


class Model(NamedTuple):
    """Everything that was written and what each attempt was delivered."""

    streams: tuple[Stream, ...]
    """By attempt; () until it opened."""
    marks: tuple[int, int]
    """Records of O1 (L1) when the lease of O2 (L2) appeared; NOT_YET before."""
    seen: tuple[tuple[int, int], ...]
    """By attempt: records of the other role's attempt 1 and 2 that it was delivered."""


class Action(NamedTuple):
    """What an attempt does: lease, open (number = cut), read (number = prefix of the newest attempt), write (number = word)."""

    what: str
    who: int
    number: int = 0


@dataclass(frozen=True, eq=False)
class Rules:
    """How much is explored, and the rules themselves: a test breaks one to see the check fail."""

    batches: int
    lag: int = 0
    """orchestrator.max_staleness."""
    rollback: bool = False
    """O2 and L2 begin behind a rollback: what O1 and L1 wrote does not count, their groups are dropped."""
    spare_groups: int = 0
    """So many groups may be dropped as stale."""
    looks_at_leases: bool = True
    cut_is_due: Callable[[int, int, float, float], bool] = follow.cut_is_due
    deliverable: Callable[[int, int, Mapping[int, Cut] | None], list[tuple[int, Cut | None]]] = follow.deliverable
    takes_over: bool = True
    """A successor folds what its predecessor left."""
    successors: Rollbacks | None = None
    """What they know of rollbacks, if that is not the truth."""

    @property
    def truth(self) -> Rollbacks:
        return BACK if self.rollback else NONE

    def known_to(self, who: int) -> Rollbacks:
        """What an attempt knows of rollbacks."""
        if who in (O1, L1):
            return NONE
        return self.truth if self.successors is None else self.successors

    @property
    def groups(self) -> list[str]:
        """Those that O1 has given out before anything else happens."""
        return [f"g{nth}.o1" for nth in range(1, self.batches * (2 if self.rollback else 1) + self.spare_groups + 1)]


def attempt_of(who: int) -> int:
    return 1 + who % 2


def other_role(who: int) -> int:
    """Attempt 1 of it."""
    return L1 if who in (O1, O2) else O1


def mark_of(state: Model, who: int) -> int:
    """When the newer lease of that attempt's role appeared."""
    return state.marks[who // 2]


def start() -> Model:
    base = StepDone(step=0, batch_id="", manifest_digest="", weights_digest=BASE_DIGEST, staleness=0, mean_reward=0.0)
    opening = WORDS.number(1, Cuts())
    return Model(((opening,), (), (opening, WORDS.number(1, base)), ()), (NOT_YET, NOT_YET), ((0, 0),) * 4)


def cut_of(stream: Stream) -> int:
    """Records of the predecessor that the first record of an opened stream lets count."""
    cuts: Cuts = WORDS.record(stream[0])
    return cuts.cuts[0].bytes


def inherited(state: Model, who: int) -> Stream:
    """What counts of an attempt's predecessor."""
    stream = state.streams[who]
    return state.streams[who - 1][: cut_of(stream)] if who in (O2, L2) and stream else ()


def delivered(state: Model, who: int) -> Stream:
    """What an attempt was delivered of the other role, in order."""
    first, (old, new) = other_role(who), state.seen[who]
    return state.streams[first][:old] + state.streams[first + 1][:new]


def accepted(state: Model, first: int) -> Stream | None:
    """Records of a role that count, before any rollback is thought of; None between its newer lease and the cut."""
    if mark_of(state, first) == NOT_YET:
        return state.streams[first]
    return inherited(state, first + 1) + state.streams[first + 1] if state.streams[first + 1] else None


# --- what an orchestrator decides ------------------------------------------------------------------------------------


@cache
def recipe(rules: Rules) -> Any:
    pools = ({"name": "main", "replicas": 1, "slots": 9},)
    return simulated_recipe(
        steps=rules.batches, rollout__pools=pools, grader__replicas=1, orchestrator__prompts=1, orchestrator__samples=2,
        orchestrator__capacity_batches=1.0, orchestrator__max_staleness=rules.lag, learner__correction="tis",
    )  # fmt: skip


def sealed(group: str, version: Version) -> ShardSealed:
    """The replica's word on a group's only sample; the shard's name is the version."""
    sample = sample_id(group, 0)
    row = ShardEntry(
        trajectory_id=trajectory_id(sample, *REPLICA), sample_id=sample, group_id=group, order_id=f"r{group[1:]}", row=0,
        status="complete", versions=(version,), num_tokens=2, num_sampled_tokens=1,
    )  # fmt: skip
    return ShardSealed(path=f"{version.step}-{version.attempt}", size_bytes=1, digest="d", rows=(row,))


def graded(order: GradeOrder) -> Graded:
    grade = Grade(value=1.0, std=0.0, source="model", timestamp=0.0)
    return Graded(
        order_id=order.order_id,
        entries=tuple(GradeEntry(trajectory_id=item.trajectory_id, grade=grade) for item in order.items),
    )


def issued(rules: Rules) -> Iterator[GroupIssued | Order]:
    """How O1 begins; every cut holds it."""
    for group in rules.groups:
        yield GroupIssued(group_id=group, task_seed=1, num_samples=1)
        yield Order(
            order_id=f"r{group[1:]}", receiver=REPLICA.writer, receiver_attempt=REPLICA.attempt, group_id=group, task_seed=1,
            samples=(0,), seed=1, temperature=1.0,
        )  # fmt: skip


@cache
def orchestrator_writes(
    rules: Rules, who: int, old: Stream, own: Stream, heard: Stream, group: str, version: Version
) -> Stream:
    """The Planner's next batch or drop, once a group was sampled with a version and graded."""
    rollbacks, emitted = rules.known_to(who), list[Any]()
    state, lineage = State(rollbacks), Lineage(rollbacks)
    for record in issued(rules):
        state.apply(record)
    state.take_over(WORDS.items(old if rules.takes_over else ()), rollbacks)
    for item in WORDS.items(own):
        state.apply(item.record)
    for item in WORDS.items(heard):
        lineage.fold(item)
    state.trained_step = lineage.newest_step

    def emit(record: Any) -> None:
        emitted.append(record)
        state.apply(record)

    planner = Planner(recipe(rules), attempt_of(who), state, knows=lineage.knows, emit=emit, rollbacks=rollbacks)
    state.fold(REPLICA, sealed(group, version))
    planner.decide(0.0, (), (GRADER,))
    for order in [record for record in emitted if isinstance(record, GradeOrder)]:
        state.fold(GRADER, graded(order))
    planner.decide(0.0, (), (GRADER,))
    decided = [record for record in emitted if isinstance(record, Batch | Drop)]
    if [record for record in decided if isinstance(record, Drop) and record.reason == "stale"][rules.spare_groups :]:
        return ()
    return tuple(WORDS.number(attempt_of(who), record) for record in decided[:1])


@cache
def published(rules: Rules, who: int, old: Stream, own: Stream) -> tuple[Version, ...]:
    """Versions that a learner attempt has published by then."""
    lineage = Lineage(rules.known_to(who))
    for item in WORDS.items(old):
        lineage.fold(item)
    steps = [record.step for _, _, record in WORDS.items(own) if isinstance(record, StepDone)]
    last = lineage.newest_step if old else -1
    return tuple(Version(step, attempt_of(who)) for step in steps if is_published(step, last))


def versions(state: Model, rules: Rules) -> set[Version]:
    """With which a replica may have sampled: it follows the learner's journal as everybody does."""
    old, mark = state.streams[L1], mark_of(state, L1)
    cut = cut_of(state.streams[L2]) if state.streams[L2] else 0
    read = old if mark == NOT_YET or not rules.looks_at_leases else old[: max(mark, cut)]
    return {*published(rules, L1, (), read), *published(rules, L2, inherited(state, L2), state.streams[L2])}


@cache
def groups(rules: Rules, *streams: Stream) -> list[str]:
    """Groups that anybody named, and one that nobody did: which of those is without meaning."""
    named = {fact.group for stream in streams for fact in of_kind(stream, Batch, Drop)}
    unnamed = [group for group in rules.groups if group not in named]
    return [*sorted(named), *unnamed[:1]]


# --- what a learner does ---------------------------------------------------------------------------------------------


@cache
def learner_writes(rules: Rules, who: int, old: Stream, own: Stream, heard: Stream) -> tuple[Stream, str]:
    """The next step record, and why there is none if that is a fault. Its checkpoint is the base model, always."""
    rollbacks, attempt = rules.known_to(who), attempt_of(who)
    lineage = Lineage(rollbacks)
    for item in WORDS.items(old if rules.takes_over else ()):
        lineage.fold(item)
    last = lineage.newest_step
    steps = [record.step for _, _, record in WORDS.items(own) if isinstance(record, StepDone)]
    if not steps:
        opening = opening_record(0, BASE_DIGEST, lineage)
        if opening is not None:
            return (WORDS.number(attempt, opening),), ""
    for item in WORDS.items(own):
        lineage.fold(item)
    step, ids, batches = max(steps, default=0) + 1, dict[int, str](), dict[int, Batch]()
    try:
        for item in WORDS.items(heard):
            if isinstance(item.record, Batch) and not rollbacks.voids(item.attempt, item.record):
                check_only_one(item.record, ids)
                batches[item.record.step] = item.record
        if step not in batches:
            return (), ""
        recorded = lineage.steps.get(step)
        check_same(batches[step], None if recorded is None else recorded.manifest_digest)
        check_batch(batches[step], rows(batches[step]), lineage, rules.lag)
    except MilesError as fault:
        return (), str(fault)
    return (WORDS.number(attempt, step_record(batches[step], is_replay(step, last))),), ""


def rows(batch: Batch) -> list[Any]:
    """What the shards hold: see `sealed`."""
    found = []
    for group in batch.groups:
        for member in group.members:
            step, attempt = map(int, member.ref.shard.split("-"))
            run = SimpleNamespace(step=step, attempt=attempt)
            found.append(SimpleNamespace(trajectory_id=member.ref.trajectory_id, group_id=group.group_id, versions=(run,)))
    return found


def step_record(batch: Batch, replay: bool) -> StepDone:
    digest = digest_record(batch)
    return StepDone(
        step=batch.step, batch_id=batch.batch_id, manifest_digest=digest, weights_digest=f"w{digest}",
        staleness=batch.staleness, mean_reward=1.0, replay=replay,
    )  # fmt: skip


# --- what may happen -------------------------------------------------------------------------------------------------


def moves(state: Model, rules: Rules) -> Iterator[tuple[Action, Model, bool]]:
    """All that may happen next."""
    for action in actions(state, rules):
        is_newest = action.what != "lease" and (action.who in (O2, L2) or mark_of(state, action.who) == NOT_YET)
        # Whoever retired one role for a rollback retires the other.
        yield action, after(state, action, rules), is_newest or (rules.rollback and action.what == "lease")


def actions(state: Model, rules: Rules) -> Iterator[Action]:
    for who, stream in enumerate(state.streams):
        if not stream:
            if mark_of(state, who) == NOT_YET:
                yield Action("lease", who)
            elif not rules.rollback or NOT_YET not in state.marks:
                yield from (
                    Action("open", who, cut) for cut in range(shown(state, who, rules), len(state.streams[who - 1]) + 1)
                )
            continue
        yield from (Action("write", who, word) for word in writes(state, who, rules))
        yield from (Action("read", who, read) for read in reads(state, who, rules))


def shown(state: Model, who: int, rules: Rules) -> int:
    """Records of its predecessor that a successor surely sees when the code lets it cut; the waits are in visibility_s."""
    waited_s = next(seconds for seconds in (0.0, 0.5, 1.0, 1.5, 2.0) if rules.cut_is_due(1, 2, seconds, 1.0))
    return mark_of(state, who) if waited_s >= 2.0 else 0


def writes(state: Model, who: int, rules: Rules) -> set[int]:
    """Records that an attempt may append now."""
    old, own, heard = inherited(state, who), state.streams[who], delivered(state, who)
    if who in (L1, L2):
        return set(learner_writes(rules, who, old, own, heard)[0])
    return {
        word
        for group in groups(rules, state.streams[O1], state.streams[O2])
        for version in versions(state, rules)
        for word in orchestrator_writes(rules, who, old, own, heard, group, version)
    }


def reads(state: Model, who: int, rules: Rules) -> Iterator[int]:
    """How far reads may reach that deliver something; negative: of attempt 2."""
    first = other_role(who)
    newest = [1] if mark_of(state, first) == NOT_YET else ([2] if rules.looks_at_leases else [1, 2])
    for attempt in newest:
        for read in range(len(state.streams[first + attempt - 1]) + 1):
            if now_seen(state, who, attempt, read, rules) != state.seen[who]:
                yield read if attempt == 1 else -read


def now_seen(state: Model, who: int, newest: int, read: int, rules: Rules) -> tuple[int, int]:
    """What an attempt is delivered in all, once so much of the newest one of the other role was read."""
    first_word = state.streams[other_role(who) + 1][0] if newest == 2 and read else NOT_YET
    return _seen_behind(rules, state.seen[who], newest, read, first_word)


@cache
def _seen_behind(rules: Rules, before: tuple[int, int], newest: int, read: int, first_word: int) -> tuple[int, int]:
    seen, current = list(before), 2 if before[1] else 1
    if newest < current:
        return before
    cuts = None if first_word == NOT_YET else {cut.attempt: cut for cut in WORDS.record(first_word).cuts}
    for attempt, cut in rules.deliverable(current, newest, cuts):
        seen[attempt - 1] = max(seen[attempt - 1], read if cut is None else cut.bytes)
    return seen[0], seen[1]


def after(state: Model, action: Action, rules: Rules) -> Model:
    """The state behind an action."""
    who = action.who
    if action.what == "lease":
        marks = list(state.marks)
        marks[who // 2] = len(state.streams[who - 1])
        return state._replace(marks=(marks[0], marks[1]))
    if action.what == "read":
        now = now_seen(state, who, 1 if action.number > 0 else 2, abs(action.number), rules)
        return state._replace(seen=(*state.seen[:who], now, *state.seen[who + 1 :]))
    word = action.number
    if action.what == "open":
        cut = Cut(writer=WRITERS[who], attempt=1, bytes=action.number, hash="")
        word = WORDS.number(2, Cuts(cuts=(cut,)))
    return state._replace(streams=(*state.streams[:who], (*state.streams[who], word), *state.streams[who + 1 :]))


# --- what must never be ----------------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """A batch, step or drop in a word."""

    step: int
    manifest: str
    group: str


_GROUP_OF: dict[str, str] = {}
"""By a batch's digest."""


def facts(record: Any) -> Facts:
    if isinstance(record, Batch):
        manifest = digest_record(record)
        _GROUP_OF[manifest] = record.groups[0].group_id
        return Facts(record.step, manifest, record.groups[0].group_id)
    if isinstance(record, Drop):
        return Facts(0, "", record.group_id)
    return Facts(record.step, record.manifest_digest, _GROUP_OF.get(record.manifest_digest, ""))


@cache
def of_kind(stream: Stream, *kinds: type) -> list[Facts]:
    return [facts(record) for record in map(WORDS.record, stream) if isinstance(record, kinds)]


def violations(state: Model, rules: Rules) -> set[str]:
    """What must never be, of what counts, and of what anybody was made to believe."""
    # While one role was rolled back and the other was not yet, nobody who knows has begun.
    has_begun = not rules.rollback or (mark_of(state, O1) == NOT_YET) == (mark_of(state, L1) == NOT_YET)
    found = set(_of_what_counts(rules, accepted(state, O1), accepted(state, L1) if has_begun else ()))
    found |= _of_what_was_trained(rules, state.streams[L1], state.streams[L2])
    for who in range(4):
        first, is_newest = other_role(who), who in (O2, L2) or mark_of(state, who) == NOT_YET
        if state.streams[first + 1] and state.seen[who][0] > cut_of(state.streams[first + 1]):
            found.add("a reader acted beyond a cut")
        if who in (L1, L2) and state.streams[who] and is_newest:
            fault = learner_writes(rules, who, inherited(state, who), state.streams[who], delivered(state, who))[1]
            found |= {f"the learner that counts refuses a batch that it was delivered: {fault}"} if fault else set()
    return found


@cache
def _of_what_counts(rules: Rules, batches: Stream | None, steps: Stream | None) -> set[str]:
    found, truth = set[str](), rules.truth
    if batches is not None:
        items = [item for item in WORDS.items(batches) if isinstance(item.record, Batch | Drop)]
        made = [
            facts(item.record)
            for item in items
            if isinstance(item.record, Batch) and not truth.voids(item.attempt, item.record)
        ]
        ends = [facts(item.record).group for item in items if not truth.voids(item.attempt, item.record)]
        if len({batch.step for batch in made}) < len(made) or len(set(ends)) < len(ends):
            found.add("a group or a step in two accepted batches, or in one and dropped")
        counted = [item for item in WORDS.items(steps or ()) if isinstance(item.record, StepDone) and item.record.step]
        trained = [facts(item.record) for item in counted if not truth.abandons(Version(item.record.step, item.attempt))]
        if not {step[:2] for step in trained} <= {batch[:2] for batch in made}:
            found.add("an accepted step of a batch that is not accepted")
        if len({step.step for step in trained}) < len({step[:2] for step in trained}):
            found.add("two manifests of an accepted step")
    return found


@cache
def _of_what_was_trained(rules: Rules, *streams: Stream) -> set[str]:
    everything = {step for stream in streams for step in of_kind(stream, StepDone) if step.step}
    steps_differ = len({step.step for step in everything}) == len(everything) or rules.rollback
    is_fine = steps_differ and len({step.group for step in everything}) == len(everything)
    return set() if is_fine else {"a step or a group trained twice, accepted or not"}


def is_complete(state: Model, rules: Rules) -> bool:
    """All batches are made and trained, by the newest attempts."""
    return _is_complete(rules, accepted(state, O1), accepted(state, L1))


@cache
def _is_complete(rules: Rules, batches: Stream | None, steps: Stream | None) -> bool:
    wanted = set(range(1, rules.batches + 1))
    if batches is None or steps is None:
        return False
    made = {
        item.record.step
        for item in WORDS.items(batches)
        if isinstance(item.record, Batch) and not rules.truth.voids(*item[::2])
    }
    lineage = Lineage(rules.truth)
    for item in WORDS.items(steps):
        lineage.fold(item)
    return made == wanted == set(lineage.steps) - {0}


@cache
def explored(rules: Rules, *, until_broken: bool = False) -> Explored[Model, Action]:
    return explore(
        start(), lambda state: moves(state, rules), lambda state: violations(state, rules),
        lambda state: is_complete(state, rules), until_broken=until_broken,
    )  # fmt: skip
