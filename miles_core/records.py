"""Every record of every journal, in one closed list: the protocol's vocabulary.

Who writes what (design section 2): the supervisor its decisions about jobs; the orchestrator everything about groups and
batches; a rollout replica and a grader what they made; the learner its steps, versions and checkpoints; the evaluator its
points. Journals whose successor cuts its predecessor (supervisor, orchestrator, learner, evaluator) open with `Cuts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, TypeAdapter

from miles_core.grading.base import Grade
from miles_core.recipe.closed import Closed, is_none
from miles_core.store.publish import digest_bytes


class Version(NamedTuple):
    """A policy version's identity but for its digest: the step that made it and the learner attempt (I7)."""

    step: int
    attempt: int


class Cut(Closed):
    """Nothing of `writer`'s attempt beyond `bytes` of its stream is ever accepted (I5)."""

    writer: str
    attempt: int
    bytes: int
    hash: str
    """xxh3-128 of the stream up to `bytes`."""


class Cuts(Closed):
    """First record of a self-cutting journal: one cut for every lower attempt of the same writer, ascending."""

    kind: Literal["cuts"] = "cuts"
    cuts: tuple[Cut, ...] = ()


# --- orchestrator's journal ------------------------------------------------------------------------------------------


class GroupIssued(Closed):
    """A group is open from here until a Batch or a Drop names it."""

    kind: Literal["group"] = "group"
    group_id: str
    """`g<number>.o<orchestrator attempt>`."""
    task_seed: int
    num_samples: int
    bucket: str = ""
    """Task class, for per-bucket figures."""


class Order(Closed):
    """Samples of one group for one replica attempt. Journaled first, then copied to orders/<receiver>/ (I6)."""

    kind: Literal["order"] = "order"
    order_id: str
    receiver: str
    receiver_attempt: int
    group_id: str
    task_seed: int
    samples: tuple[int, ...]
    """Indices in the group; sample_id = `<group_id>/<index>`."""
    seed: int
    """Sampling seed of index i is (seed, i)."""
    temperature: float
    min_step: int = 0
    """The receiver samples only with versions of at least this step (lag limit, sources O4)."""


class TrajectoryRef(Closed):
    """Where a trajectory is: a row of a shard that a replica's accepted manifest announces."""

    trajectory_id: str
    shard: str
    """Path below the run directory."""
    row: int
    shard_digest: str


class GradeOrder(Closed):
    """Trajectories for one grader attempt; journaled, then copied like an Order."""

    kind: Literal["grade_order"] = "grade_order"
    order_id: str
    receiver: str
    receiver_attempt: int
    items: tuple[TrajectoryRef, ...]


class GradeRef(Closed):
    """Which grade of a trajectory counts: the orchestrator's decision."""

    trajectory_id: str
    grader: str
    grader_attempt: int
    grade: Grade


class GradesChosen(Closed):
    """Grades that count from here on."""

    kind: Literal["grades_chosen"] = "grades_chosen"
    grades: tuple[GradeRef, ...]


class WriterCut(Closed):
    """The orchestrator's cut of one attempt of a replica or grader."""

    kind: Literal["writer_cut"] = "writer_cut"
    cut: Cut


DropReason = Literal["stale", "incomplete", "ungraded", "unknown_version", "no_spread", "run_ended", "rolled_back"]
DROP_REASONS: tuple[str, ...] = get_args(DropReason)


class Drop(Closed):
    """A group leaves without training; `rolled_back`: from a batch that a rollback voided, `no_spread`: another one is
    sampled in its place."""

    kind: Literal["drop"] = "drop"
    group_id: str
    reason: DropReason
    detail: str = ""
    """Which sample, version or bound, for people."""
    reward: float | None = Field(default=None, exclude_if=is_none)
    """Of `no_spread`: what each of its samples got."""


class BatchMember(Closed):
    """One trajectory of a batch."""

    ref: TrajectoryRef
    oldest_step: int
    """Oldest step of any version that sampled one of its tokens; of an abandoned one as Rollbacks.counted_step has it."""
    reward: float
    """Value of the grade that counts."""
    weight: float = 1.0
    """How much it counts by the age and the certainty of its grade (grading/weights.py)."""
    quality: float | None = Field(default=None, exclude_if=is_none)
    """Of that grade; not written where there is none."""


class BatchGroup(Closed):
    """One group of a batch: all its samples."""

    group_id: str
    members: tuple[BatchMember, ...]

    @property
    def rewards(self) -> list[float]:
        """Of each episode once: trajectories of one sample are siblings and share its reward."""
        return list({member.ref.trajectory_id.partition("@")[0]: member.reward for member in self.members}.values())


class Batch(Closed):
    """Batch k: admits its groups and fixes their staleness. Trained as step k (I7)."""

    kind: Literal["batch"] = "batch"
    step: int
    batch_id: str
    """`b<k>.o<orchestrator attempt>`."""
    groups: tuple[BatchGroup, ...]
    staleness: int
    """(k-1) - oldest step over all members; at most the recipe's bound."""


class RunEnded(Closed):
    """Last record of an orchestrator that finished: every group is in a batch or dropped."""

    kind: Literal["run_ended"] = "run_ended"
    state: Literal["COMPLETED"]
    steps: int


class LivenessEntry(Closed):
    """What the orchestrator saw of one attempt's heartbeat."""

    writer: str
    attempt: int
    verdict: Literal["unknown", "alive", "dead"]
    state: str = ""
    progress: int = 0
    load: int = 0
    version: Version | None = None
    reading: Version | None = None
    silent_s: float = 0.0


class LivenessTable(Closed):
    """`orchestrator/liveness.json`, replaced by rename: the one reading of replica heartbeats, for everybody else (I4)."""

    attempt: int
    """The orchestrator's attempt."""
    counter: int
    entries: tuple[LivenessEntry, ...]


class Stop(Closed):
    """Copied to every receiver at the end: finish nothing, write the completion record and leave."""

    kind: Literal["stop"] = "stop"
    reason: str


# --- rollout replicas and graders ------------------------------------------------------------------------------------


class ShardEntry(Closed):
    """What the orchestrator must know of a row without opening the shard."""

    trajectory_id: str
    sample_id: str
    group_id: str
    order_id: str
    row: int
    status: Literal["complete", "truncated", "failed"]
    failure_kind: Literal["none", "infrastructure", "environment", "model"] = "none"
    versions: tuple[Version, ...]
    """Distinct versions that sampled its tokens."""
    num_tokens: int
    num_sampled_tokens: int


class ShardSealed(Closed):
    """A shard exists from here on."""

    kind: Literal["shard"] = "shard"
    path: str
    """Below the run directory."""
    size_bytes: int
    digest: str
    """xxh3-128 of the file."""
    rows: tuple[ShardEntry, ...]


class Returned(Closed):
    """Samples of an order that were never started: the owner gives them back (I10)."""

    kind: Literal["returned"] = "returned"
    order_id: str
    samples: tuple[int, ...]


class Leaving(Closed):
    """This attempt takes nothing more: its slice ends, or it was told to leave (I10)."""

    kind: Literal["leaving"] = "leaving"


class GradeEntry(Closed):
    """A grader's answer for one trajectory; `grade` None = no grade, with the reason."""

    trajectory_id: str
    grade: Grade | None
    error: str = ""


class Graded(Closed):
    """Answers to (part of) a grade order."""

    kind: Literal["graded"] = "graded"
    order_id: str
    entries: tuple[GradeEntry, ...]


# --- learner and evaluator -------------------------------------------------------------------------------------------


class StepDone(Closed):
    """Batch k was trained. k = 0: the base model was loaded (batch_id and manifest_digest empty)."""

    kind: Literal["step"] = "step"
    step: int
    batch_id: str
    manifest_digest: str
    """digest_record of the Batch."""
    weights_digest: str
    """Digest of the policy's tensors after the step."""
    staleness: int
    mean_reward: float
    replay: bool = False
    """Trained again after a recovery, to reach the last accepted step."""
    metrics: dict[str, float] = Field(default_factory=dict)


class Published(Closed):
    """Version (step, attempt) is whole on disk."""

    kind: Literal["published"] = "published"
    version: Version
    weights_digest: str
    folder: str
    """Below the run directory."""
    manifest_digest: str
    """xxh3-128 of its manifest file."""
    size_bytes: int
    """Written for it."""
    full_bytes: int | None = None
    """What a full anchor of it takes; None: as much as was written."""
    base: Version | None = None
    """The version that this delta applies to; None for a full anchor."""


class FileDigest(Closed):
    """A file with its size and digest."""

    name: str
    size_bytes: int
    digest: str


class CheckpointSaved(Closed):
    """A checkpoint whose files were verified by their writer (I17)."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    folder: str
    files: tuple[FileDigest, ...]
    weights_digest: str


class EvaluationPoint(Closed):
    """One greedy evaluation of one version."""

    kind: Literal["evaluation"] = "evaluation"
    version: Version
    weights_digest: str
    num_problems: int
    greedy_score: float
    """Mean value in [0, 1]."""
    seconds: float


# --- supervisor ------------------------------------------------------------------------------------------------------


class Intent(Closed):
    """Attempt `attempt` of `writer` shall run; written before sbatch (I13). The newest intent wins (I3)."""

    kind: Literal["intent"] = "intent"
    writer: str
    attempt: int
    token: str
    reason: str
    exclude: tuple[str, ...] = ()


class Submitted(Closed):
    """The scheduler took an intent (or was found to have taken it)."""

    kind: Literal["submitted"] = "submitted"
    writer: str
    attempt: int
    job_id: str
    adopted: bool = False
    """Found by its token after an ambiguous answer or a restart."""


class JobEnded(Closed):
    """A job was seen ended, as evidence."""

    kind: Literal["job_ended"] = "job_ended"
    writer: str
    attempt: int
    job_id: str
    cause: str
    state: str
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    reason: str = ""


class Incident(Closed):
    """Something a person will ask about: node lost, role replaced, stall, refused submission, down node."""

    kind: Literal["incident"] = "incident"
    what: str
    writer: str = ""
    detail: str = ""
    unix_s: float = 0.0


class Deleted(Closed):
    """One object that retired (I12)."""

    what: Literal["version", "checkpoint", "shard"]
    name: str
    """Its folder or file, below the run directory."""
    size_bytes: int
    digest: str
    """Of a version its manifest's, of a checkpoint its record's, of a shard its file's."""


class Deletion(Closed):
    """These objects are deleted from here on; their bytes go after this record is on disk, before the next one is written."""

    kind: Literal["deletion"] = "deletion"
    items: tuple[Deleted, ...]


class Rollback(Closed):
    """Steps behind `step` are abandoned (I8): `supervisor/rollback-<number>.json`, and its copy in the supervisor's journal."""

    kind: Literal["rollback"] = "rollback"
    number: int
    """From 1 on."""
    step: int
    """The newest usable checkpoint; 0: the base model."""
    last_step: int
    """Last accepted step before it."""
    groups: int
    """Groups of the batches behind `step`: dropped as rolled_back."""
    missing: str
    """What the run could not go on without."""
    lost: tuple[str, ...] = ()
    """Shards of those batches that were gone or damaged: nothing is trained from them any more."""
    attempts: dict[str, int]
    """Newest attempt of every writer before it; they all ended. What later attempts write belongs to the new branch."""
    unix_s: float


class RunClosed(Closed):
    """The supervisor's last word on a run, unless a Rollback follows."""

    kind: Literal["run_closed"] = "run_closed"
    state: Literal["COMPLETED", "CANCELLED", "NEEDS_ROLLBACK"]
    detail: str = ""
    unix_s: float = 0.0


class Drained(Closed):
    """All jobs of the run left on request, and nobody is started any more; the next Intent takes the run up again."""

    kind: Literal["drained"] = "drained"
    cancelled: tuple[str, ...] = ()
    """Writers that did not leave by themselves and were cancelled."""
    unix_s: float = 0.0


class Done(Closed):
    """Completion record `done/<writer>.json`: a role is done when this says so (I14)."""

    kind: Literal["done"] = "done"
    writer: str
    attempt: int
    outcome: Literal["completed", "needs_rollback"]
    detail: str = ""
    journal_bytes: int
    """Final stream position and hash of its journal."""
    journal_hash: str


Record = Annotated[
    Cuts | GroupIssued | Order | GradeOrder | GradesChosen | WriterCut | Drop | Batch | RunEnded | Stop
    | ShardSealed | Returned | Leaving | Graded
    | StepDone | Published | CheckpointSaved | EvaluationPoint
    | Intent | Submitted | JobEnded | Incident | Deletion | Rollback | Drained | RunClosed,
    Field(discriminator="kind"),
]  # fmt: skip
_RECORD: TypeAdapter[Any] = TypeAdapter(Record)


def parse_record(payload: bytes) -> Any:
    """The record of a frame's payload. ValidationError (a ValueError) for a kind or a field that is not in this module."""
    return _RECORD.validate_json(payload)


def digest_record(record: Closed) -> str:
    """xxh3-128 of a record's JSON, as it stands in a journal."""
    return digest_bytes(record.model_dump_json().encode())


def sample_id(group_id: str, index: int) -> str:
    """Id of one sample of a group."""
    return f"{group_id}/{index}"


def number_of(identifier: str) -> int:
    """12 of the group or order id `g12.o3`; groups are numbered in issue order. ValueError for an id of another form."""
    return int(identifier[1:].partition(".")[0])


def trajectory_id(sample: str, producer: str, attempt: int) -> str:
    """Id of one attempt's trajectory of a sample."""
    return f"{sample}@{producer}.a{attempt}"


def split_writer(writer: str) -> tuple[str, int]:
    """`rollout-3` -> ("rollout", 3)."""
    role, _, replica = writer.rpartition("-")
    return role, int(replica)
