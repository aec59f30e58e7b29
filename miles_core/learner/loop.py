"""The learner: batch k becomes step k becomes version k, over any number of its own deaths (I7, I8).

Order of writes of one step: train, step record (synced), weights, manifest, `Published`, now and then a checkpoint. So a
version has a step record before it has bytes, and whatever a crash cuts off is made again by the successor: it loads the
newest valid checkpoint, trains the recorded batches up to the last accepted step again without publishing (records marked
`replay`), then publishes that step as a full anchor under its own attempt and goes on.

Failure: what is gone for good ends with a checkpoint, the completion record `needs_rollback` and NeedsRollback; superseded,
it leaves through LeaseLost; a signal lets the step in hand end, then it saves a checkpoint and leaves without a completion
record. The same inputs give the same bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from miles_core.errors import DigestMismatch, MilesError, NeedsRollback
from miles_core.grading.scaler import BatchScaler
from miles_core.learner.checkpoints import newest_valid, save_checkpoint
from miles_core.learner.consume import BatchFeed, read_batch
from miles_core.learner.episodes import Rows, row_advantages
from miles_core.learner.moderation import pull_factor, pull_weights
from miles_core.policy.lineage import Lineage
from miles_core.policy.manifest import (
    PROBE_TOLERANCE,
    Probe,
    TensorEntry,
    adapter_of,
    digest_entries,
    probe_dtype,
    tensor_entries,
)
from miles_core.policy.publisher import Publisher
from miles_core.recipe import Closed
from miles_core.records import Batch, FileDigest, StepDone, Version, digest_record
from miles_core.runtime.context import RoleContext
from miles_core.runtime.crash import crash_point
from miles_core.runtime.receiver import Patience
from miles_core.runtime.succession import open_journal
from miles_core.store.follow import Delivered
from miles_core.tracking.metrics import BusyMeter
from miles_core.trajectories.schema import Trajectory

if TYPE_CHECKING:
    import torch

log = logging.getLogger("miles")
T = TypeVar("T")
Rewards = npt.NDArray[np.float64]


class Trainer(Protocol):
    """What the loop needs of miles_core.learner.ranked, which does it on all ranks."""

    def train(
        self,
        trajectories: list[Trajectory],
        advantages: npt.NDArray[np.float32],
        step: int,
        staleness: int,
        kl_weights: npt.NDArray[np.float64] | None,
    ) -> dict[str, float]: ...

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]: ...

    def state_tensors(self) -> dict[str, torch.Tensor]: ...

    def save(self, folder: Path) -> tuple[FileDigest, ...]: ...

    def load(self, folder: Path, files: tuple[FileDigest, ...]) -> None: ...


class Learner:
    """One attempt of the learner, from its first journal record to its completion record."""

    def __init__(
        self,
        context: RoleContext,
        make_trainer: Callable[[], Trainer],
        probe_prompts: tuple[tuple[int, ...], ...],
        *,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._context, self._make_trainer, self._probe_prompts = context, make_trainer, probe_prompts
        self._unix_clock = unix_clock
        self._busy = BusyMeter(context.metrics)
        self._seconds: dict[str, float] = {}
        self._lineage = Lineage(context.rollbacks)
        scaler = context.recipe.learner.reward_scaler
        self._scaler = None if scaler is None else BatchScaler(scaler)
        self._publisher = Publisher(
            context.fs, context.paths, context.recipe.policy, run_id=context.run.run_id, learner_token=context.token,
            adapter=adapter_of(context.run),
        )  # fmt: skip
        self._step = 0
        """Steps in the trainer's weights."""
        self._replay_until = -1
        """Last step that an earlier attempt recorded."""
        self._saved_step = 0
        """Newest step that need not be saved again."""
        self._tensors: dict[str, torch.Tensor] = {}
        """The trainer's weights as of `_step`, until they are published."""
        self._entries: tuple[TensorEntry, ...] = ()
        self._digest = ""
        """Their weights digest."""

    def run(self) -> None:
        """Trains to the recipe's last step. Returns early when asked to leave. Raises NeedsRollback, LeaseLost, MilesError."""
        self._journal, accepted = open_journal(self._context)
        for item in accepted:
            self._lineage.fold(item)
        try:
            self._begin()
            self._train_steps()
            self._end()
        except NeedsRollback as missing:
            log.error("%s", missing)
            if self._saved_step < self._step:
                self._save_checkpoint()  # The rollback goes back to it: what is in hand is not lost with what is missing.
            self._finish("needs_rollback", str(missing))
            raise
        finally:
            self._busy.close()

    # --- start

    def _begin(self) -> None:
        """Weights of the newest valid checkpoint or of the base model; publishes them if nothing is left to train again."""
        self._set_state("loading")
        with self._timed("load", busy=False):
            self._trainer = self._make_trainer()
            self._load_checkpoint()
        last = self._lineage.newest_step
        self._replay_until = last
        note = (lambda batch: None) if self._scaler is None else self._scaler.note
        self._feed = BatchFeed(self._context, after_step=self._step, note=note)
        opening = opening_record(self._step, self._digest, self._lineage)
        if opening is None:
            log.info("recovering: from step %d, training batches %d to %d again", self._step, self._step + 1, last)
            return
        if opening.replay:
            self._compare(opening)
        self._write(opening, f"the record of step {opening.step}")
        self._crash_point("after_step_record")
        self._publish()

    def _load_checkpoint(self) -> None:
        found = newest_valid(self._context.paths, self._lineage)
        if found is None:
            if self._lineage.checkpoints:
                log.warning("no checkpoint is usable: starting again from the base model")
            self._take_weights()
            return
        checkpoint, folder = found
        self._trainer.load(folder, checkpoint.files)
        self._take_weights()
        if self._digest != checkpoint.weights_digest:
            raise DigestMismatch(
                f"{folder}: its files are as announced, but they load as weights {self._digest} instead of "
                f"{checkpoint.weights_digest}; was it saved by another version of the code?"
            )
        self._step = self._saved_step = checkpoint.step
        log.info("loaded the checkpoint of step %d", checkpoint.step)

    # --- steps

    def _train_steps(self) -> None:
        while self._step < self._context.recipe.steps and not self._context.leave.is_set():
            following = self._step + 1
            recorded = self._lineage.steps.get(following)
            self._set_state(f"waiting: batch {following}")
            started = self._unix_clock()
            batch = self._feed.wait(following, None if recorded is None else recorded.manifest_digest)
            self._seconds = {"wait_s": self._unix_clock() - started}
            if batch is not None:
                self._do_step(batch)

    def _do_step(self, batch: Batch) -> None:
        replay = is_replay(batch.step, self._replay_until)
        self._set_state(f"{'replaying' if replay else 'training'}: batch {batch.step}")
        with self._timed("read"):
            rows = read_batch(self._context, batch, self._lineage)
        record = self._train(batch, rows, replay)
        if replay:
            self._compare(record)
        self._write(record, f"the record of step {batch.step}")
        self._crash_point("after_step_record")
        if is_published(batch.step, self._replay_until):
            self._publish()
        if batch.step % self._context.recipe.learner.checkpoint_every == 0:
            self._save_checkpoint()
        self._report(record)

    def _train(self, batch: Batch, rows: Rows, replay: bool) -> StepDone:
        crash_point("learner", "before_train", batch.step, self._context.attempt)
        spec = self._context.recipe.learner
        rewards, kl_weights, scaler_metrics = self._scale(batch.step, rows)
        with self._timed("train"):
            advantages, found = row_advantages(rows, rewards, self._context.recipe)
            kl_weights = pull_weights(spec, batch.staleness, kl_weights, len(rows.trajectories))
            metrics = self._trainer.train(rows.trajectories, advantages, batch.step, batch.staleness, kl_weights)
            metrics |= scaler_metrics | found
            if spec.kl_coef > 0:
                metrics["kl_coef"] = spec.kl_coef * pull_factor(spec, batch.staleness)
            self._take_weights()
        self._step = batch.step
        self._context.progress += 1
        self._crash_point("after_train")
        wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if wrong:
            raise MilesError(
                f"step {batch.step} ({batch.batch_id}) gave {wrong}: the weights are not trusted and the step is not recorded; "
                f"a lower learner.lr or learner.grad_clip may help"
            )
        return StepDone(
            step=batch.step,
            batch_id=batch.batch_id,
            manifest_digest=digest_record(batch),
            weights_digest=self._digest,
            staleness=batch.staleness,
            mean_reward=rows.mean_reward,
            replay=replay,
            metrics=metrics,
        )

    def _scale(self, step: int, rows: Rows) -> tuple[Rewards, Rewards | None, dict[str, float]]:
        """Rewards [groups, episodes] that advantages are made of, gradient weights [N] (None: 1), and metrics."""
        if self._scaler is None:
            return rows.rewards, None, {}
        scaled = self._scaler.scale(step, rows.rewards)
        return scaled.rewards, rows.by_row(scaled.gradient_weights), scaled.metrics

    def _compare(self, record: StepDone) -> None:
        """Says whether a step made again is bit-exact. Another digest is no error: the new attempt's step counts."""
        accepted = self._lineage.steps[record.step]
        exact = accepted.weights_digest == record.weights_digest
        self._context.metrics.log("replay", step=record.step, bit_exact=exact)
        if exact:
            log.info("step %d again: bit-exact", record.step)
        else:
            log.warning("step %d again: weights %s, before %s", record.step, record.weights_digest, accepted.weights_digest)

    def _publish(self) -> None:
        version = Version(self._step, self._context.attempt)
        self._set_state(f"publishing: version {version.step}")

        def attempt_it() -> Closed:
            self._context.before_write()
            return self._publisher.write(prepared, after_data=lambda: self._crash_point("after_publish_data"))

        self._crash_point("before_publish")
        with self._timed("publish"):
            prepared = self._publisher.prepare(version, self._tensors, self._entries, self._probe())
            self._write(self._insist(f"publishing version {tuple(version)}", attempt_it), "the record of a version")
        self._tensors = {}
        self._context.version = version
        self._crash_point("after_publish")

    def _take_weights(self) -> None:
        self._tensors = {}  # The publisher keeps a copy already; a third one need not fit.
        self._tensors = self._trainer.state_tensors()
        self._entries = tensor_entries(self._tensors)
        self._digest = digest_entries(self._entries)

    def _probe(self) -> Probe:
        recipe = self._context.recipe
        dtype = probe_dtype(recipe.model.dtype, recipe.rollout_dtype)
        answers = self._trainer.logprobs([list(prompt) for prompt in self._probe_prompts])
        return Probe(
            prompts=self._probe_prompts,
            logprobs=tuple(tuple(float(value) for value in answer) for answer in answers),
            dtype=dtype,
            tolerance=PROBE_TOLERANCE[dtype],
        )

    def _save_checkpoint(self) -> None:
        version = Version(self._step, self._context.attempt)
        self._set_state(f"saving: step {version.step}")

        def attempt_it() -> Closed:
            self._context.before_write()
            return save_checkpoint(self._context.fs, self._context.paths, version, self._digest, self._trainer.save)

        self._crash_point("before_checkpoint")
        with self._timed("checkpoint"):
            saved = self._insist(f"the checkpoint of step {version.step}", attempt_it)
            self._crash_point("after_checkpoint_files")
            self._write(saved, "the record of a checkpoint")
        self._saved_step = self._step
        self._crash_point("after_checkpoint")

    def _end(self) -> None:
        """After the last step: done. Otherwise it leaves, with what is in hand saved."""
        if self._saved_step < self._step:
            self._save_checkpoint()
        self._set_state("leaving")
        if self._step == self._context.recipe.steps:
            self._finish("completed")
            log.info("done: %d steps", self._step)
        else:
            self._insist("the journal", self._journal.flush)
            log.info("leaving at step %d of %d", self._step, self._context.recipe.steps)

    def _finish(self, outcome: Literal["completed", "needs_rollback"], detail: str = "") -> None:
        """The completion record, which only the current attempt may write."""

        def attempt_it() -> None:
            self._context.leases.check(self._context.writer, self._context.attempt)
            self._context.finish(self._journal, outcome, detail)

        self._insist("the completion record", attempt_it)

    # --- writing and telling

    def _write(self, record: Closed, what: str) -> None:
        """Appends one record, synced, and takes it into the own lineage."""
        self._journal.append(record)
        self._insist(what, self._journal.flush)
        self._lineage.fold(Delivered(self._context.attempt, self._journal.bytes, record))

    def _insist(self, what: str, action: Callable[[], T]) -> T:
        """Tries again while the filesystem refuses: a successor would find it no better. Raises DeadlineExceeded."""
        patience, results = Patience(self._context, what), list[T]()
        while not patience.attempt(lambda: results.append(action())):
            self._set_state(patience.blocked)
            self._context.pause()
        return results[0]

    def _set_state(self, state: str) -> None:
        self._context.state = state

    def _crash_point(self, name: str) -> None:
        crash_point("learner", name, self._step, self._context.attempt)

    @contextmanager
    def _timed(self, what: str, *, busy: bool = True) -> Iterator[None]:
        """Seconds for the step's point, and a busy span."""
        started = self._unix_clock()
        try:
            yield
        finally:
            ended = self._unix_clock()
            self._seconds[f"{what}_s"] = ended - started
            if busy:
                self._busy.add(started, ended)

    def _report(self, record: StepDone) -> None:
        seconds = {name: round(value, 4) for name, value in self._seconds.items()}
        own = record.model_dump(include={"step", "staleness", "mean_reward", "replay"})
        self._context.metrics.log("step", **{**record.metrics, **own, **seconds, "attempt": self._context.attempt})
        log.info("step %d reward=%.4f staleness=%d %s", record.step, record.mean_reward, record.staleness, seconds)


def opening_record(step: int, digest: str, lineage: Lineage) -> StepDone | None:
    """What an attempt that begins with the weights of `step` records, and publishes, before it trains.

    None: later steps were accepted, so it first trains their batches again. At the last accepted step it restates that: a
    version exists by a step record of its own attempt, also when no batch is trained again to reach it. Else it is step 0, the
    base model.
    """
    if lineage.newest_step > step:
        return None
    if lineage.newest_step == step:
        return lineage.steps[step].model_copy(update={"replay": True, "weights_digest": digest, "metrics": {}})
    return StepDone(step=0, batch_id="", manifest_digest="", weights_digest=digest, staleness=0, mean_reward=0.0)


def is_replay(step: int, replay_until: int) -> bool:
    """Whether an earlier attempt recorded this step; `replay_until`: the last that one did."""
    return step <= replay_until


def is_published(step: int, replay_until: int) -> bool:
    """What is trained again is not published again, but for the last one (I8)."""
    return step >= replay_until
