"""When which decision is taken: choose grades, drop, batch, give out again, issue, grade. Every decision is one record.

`emit` must append the record to the journal and apply it to the state before it returns, so that each decision sees those
before it. The planner itself keeps only what follows from the state: which complete groups wait for a version, which are
ready; a successor's planner starts empty and is filled by the rebuilt state.

Invariants: batch k is the first `prompts` ready groups in issue order; its staleness is fixed here and within the bound; a
group leaves by a Batch or by a Drop with a reason; groups without spread that are replaced leave room like any other drop,
so capacity holds, and no more of them between two batches than the bound. No grade is never a zero: what nobody can grade is
dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from miles_core.grading.weights import grade_weights
from miles_core.orchestrator.decide import Balancer, derive_seed, min_step, most_replaced, num_to_issue, oldest_step, staleness
from miles_core.orchestrator.state import Group, Key, Listed, Receiver, State
from miles_core.recipe import GradeWeightsSpec, Recipe
from miles_core.records import (
    Batch,
    BatchGroup,
    BatchMember,
    Drop,
    DropReason,
    GradeOrder,
    GradeRef,
    GradesChosen,
    GroupIssued,
    Order,
    RunEnded,
    TrajectoryRef,
    Version,
)
from miles_core.rollbacks import Rollbacks
from miles_core.run import rollout_writers

Emitted = GroupIssued | Order | GradeOrder | GradesChosen | Drop | Batch | RunEnded


class Planner:
    """Decides for one orchestrator attempt."""

    def __init__(
        self,
        recipe: Recipe,
        attempt: int,
        state: State,
        *,
        knows: Callable[[Version], bool],
        emit: Callable[[Emitted], None],
        rollbacks: Rollbacks | None = None,
    ) -> None:
        """`knows`: whether an accepted step made a version."""
        self._rollbacks = rollbacks or Rollbacks()
        self._recipe, self._attempt, self._state, self._knows, self._emit = recipe, attempt, state, knows, emit
        self._ready: list[tuple[int, str]] = []
        self._waiting: dict[str, float] = {}
        self._limits = _sample_limits(recipe)
        self._most_replaced = most_replaced(recipe)

    @property
    def num_ready(self) -> int:
        """Complete groups that the next batches are made of."""
        return len(self._ready)

    @property
    def waiting(self) -> list[str]:
        """Complete groups that name a version not yet known."""
        return list(self._waiting)

    def decide(self, now_s: float, rollouts: Sequence[Receiver], graders: Sequence[Receiver]) -> None:
        """One round. `rollouts` and `graders` are the attempts that may get work now."""
        self._drop_rolled_back()
        self._choose_grades()
        self._sort_completed(now_s)
        self._form_batches()
        self._give_out(rollouts)
        self._grade(graders)

    def end_run(self) -> None:
        """Closes what is open, then says so; again after a restart it adds nothing."""
        self._drop_rolled_back()
        for group_id in list(self._state.groups):
            self._drop(group_id, "run_ended", f"step {self._recipe.steps} is trained")
        if not self._state.ended:
            self._emit(RunEnded(state="COMPLETED", steps=self._recipe.steps))

    def _drop_rolled_back(self) -> None:
        """Before anything else: nothing of a voided batch or of a lost shard is trained."""
        for group_id, why in list(self._state.rolled_back.items()):
            self._drop(group_id, "rolled_back", why)

    # --- admission ---------------------------------------------------------------------------------------------------

    def _choose_grades(self) -> None:
        if self._state.answered:
            self._emit(GradesChosen(grades=tuple(self._state.answered.values())))

    def _sort_completed(self, now_s: float) -> None:
        """Complete groups become ready once every version they name is known; unknown for too long: dropped."""
        for group_id in self._state.completed:
            self._waiting[group_id] = now_s
        self._state.completed.clear()
        for group_id, since in list(self._waiting.items()):
            group = self._state.groups[group_id]
            unknown = self._unknown_version(group)
            if unknown is None:
                del self._waiting[group_id]
                self._admit(group)
            elif now_s - since > self._recipe.orchestrator.version_wait_s:
                del self._waiting[group_id]
                self._drop(group_id, "unknown_version", f"no accepted step made version {tuple(unknown)}")

    def _unknown_version(self, group: Group) -> Version | None:
        versions = {version for listed in _listed(group) for version in listed.entry.versions}
        return next((version for version in sorted(versions) if not self._knows(version)), None)

    def _admit(self, group: Group) -> None:
        group_id, step = group.issued.group_id, self._state.last_batch + 1
        age = staleness(step, _oldest_steps(group, self._rollbacks))
        if age > self._recipe.orchestrator.max_staleness:
            self._drop(group_id, "stale", f"{age} for batch {step}, bound {self._recipe.orchestrator.max_staleness}")
        elif self._is_replaced(group):
            reward = _grades(group)[0].grade.value
            number = len(self._state.replaced) + 1
            detail = f"all samples got {reward:g}; replacement {number} of at most {self._most_replaced} for batch {step}"
            self._emit(Drop(group_id=group_id, reason="no_spread", detail=detail, reward=reward))
        else:
            heapq.heappush(self._ready, (group.number, group_id))

    def _is_replaced(self, group: Group) -> bool:
        """Whether another group is sampled in place of this one, which has no signal (DAPO's dynamic sampling)."""
        flat = len({grade.grade.value for grade in _grades(group)}) == 1
        return flat and len(self._state.replaced) < self._most_replaced

    def _form_batches(self) -> None:
        spec = self._recipe.orchestrator
        while self._state.last_batch < self._recipe.steps and len(self._ready) >= spec.prompts:
            chosen = [heapq.heappop(self._ready)[1] for _ in range(spec.prompts)]
            groups = [self._state.groups[group_id] for group_id in chosen]
            step, weights = self._state.last_batch + 1, self._recipe.grader.weights
            self._emit(make_batch(groups, step, self._attempt, self._rollbacks, weights))
            left, self._ready = self._ready, []
            for _, group_id in left:
                self._admit(self._state.groups[group_id])

    # --- work --------------------------------------------------------------------------------------------------------

    def _give_out(self, rollouts: Sequence[Receiver]) -> None:
        """Lost samples first, whoever has how much: a batch waits for them. Then new groups, to those with room."""
        if self._state.lost and rollouts:
            self._give_out_again(Balancer((receiver, self._state.load(receiver)) for receiver in rollouts))
        num_new = self._num_to_issue()
        if num_new and rollouts:
            loads = ((receiver, self._state.load(receiver)) for receiver in rollouts)
            self._issue(num_new, Balancer(loads, limits=self._limits))

    def _num_to_issue(self) -> int:
        spec = self._recipe.orchestrator
        return num_to_issue(
            open_groups=len(self._state.groups), last_batch=self._state.last_batch, trained_step=self._state.trained_step,
            prompts=spec.prompts, capacity_batches=spec.capacity_batches, steps=self._recipe.steps,
        )  # fmt: skip

    def _give_out_again(self, balancer: Balancer[Receiver]) -> None:
        by_group: dict[str, list[int]] = {}
        for key in self._state.lost:
            by_group.setdefault(key.group_id, []).append(key.nth)
        for group in sorted((self._state.groups[group_id] for group_id in by_group), key=lambda group: group.number):
            indices = sorted(by_group[group.issued.group_id])
            if self._is_exhausted(group, indices):
                continue
            tried = {order.receiver for index in indices for order in group.samples[index].orders}
            receiver = balancer.pick(len(indices), avoid=tried)
            if receiver is not None:
                self._order(receiver, group, tuple(indices))

    def _is_exhausted(self, group: Group, indices: list[int]) -> bool:
        for index in indices:
            sample = group.samples[index]
            if sample.attempts >= self._recipe.rollout.sample_attempts:
                key = Key(group.issued.group_id, index)
                self._drop(key.group_id, "incomplete", f"{key}: {sample.attempts} attempts; the last: {sample.failure}")
                return True
        return False

    def _issue(self, num_groups: int, balancer: Balancer[Receiver]) -> None:
        num_samples = self._recipe.orchestrator.samples
        for _ in range(num_groups):
            receiver = balancer.pick(num_samples)
            if receiver is None:
                return
            number = self._state.next_group
            group = GroupIssued(
                group_id=f"g{number}.o{self._attempt}",
                task_seed=derive_seed(self._recipe.seed, "task", number),
                num_samples=num_samples,
                bucket=self._recipe.environment.family,
            )
            self._emit(group)
            self._order(receiver, self._state.groups[group.group_id], tuple(range(num_samples)))

    def _order(self, receiver: Receiver, group: Group, indices: tuple[int, ...]) -> None:
        spec = self._recipe.orchestrator
        self._emit(
            Order(
                order_id=f"r{self._state.next_order}.o{self._attempt}",
                receiver=receiver.writer,
                receiver_attempt=receiver.attempt,
                group_id=group.issued.group_id,
                task_seed=group.issued.task_seed,
                samples=indices,
                # The same draw for a sample given out again: a new one would favour what finishes quickly.
                seed=derive_seed(self._recipe.seed, "sampling", group.number),
                temperature=self._recipe.rollout.temperature,
                min_step=min_step(
                    last_batch=self._state.last_batch,
                    groups_ahead=self._state.groups_ahead(group),
                    prompts=spec.prompts,
                    max_staleness=spec.max_staleness,
                ),
            )
        )

    def _grade(self, graders: Sequence[Receiver]) -> None:
        if not self._state.ungraded or not graders:
            return
        balancer = Balancer((receiver, self._state.grade_load(receiver)) for receiver in graders)
        items: dict[Receiver, list[TrajectoryRef]] = {}
        for key in list(self._state.ungraded):
            if key not in self._state.ungraded:
                continue
            sample = self._state.sample(key)
            tries = len(sample.grade_orders)
            if tries >= self._recipe.grader.attempts:
                self._drop(key.group_id, "ungraded", f"{key}: {tries} attempts; the last: {sample.failure}")
                continue
            receiver = balancer.pick(1, avoid={order.receiver for order in sample.grade_orders})
            if receiver is not None and sample.listed is not None:
                items.setdefault(receiver, []).append(sample.listed.ref)
        self._send_to_graders(items)

    def _send_to_graders(self, items: dict[Receiver, list[TrajectoryRef]]) -> None:
        for receiver, refs in items.items():
            self._emit(
                GradeOrder(
                    order_id=f"q{self._state.next_order}.o{self._attempt}",
                    receiver=receiver.writer,
                    receiver_attempt=receiver.attempt,
                    items=tuple(refs),
                )
            )

    def _drop(self, group_id: str, reason: DropReason, detail: str) -> None:
        self._emit(Drop(group_id=group_id, reason=reason, detail=detail))


def make_batch(
    groups: Sequence[Group], step: int, attempt: int, rollbacks: Rollbacks, weights: GradeWeightsSpec | None
) -> Batch:
    """Batch `step` of complete groups."""
    counted = iter(grade_weights([grade.grade for group in groups for grade in _grades(group)], weights))
    members = tuple(BatchGroup(group_id=group.issued.group_id, members=_members(group, rollbacks, counted)) for group in groups)
    oldest = [member.oldest_step for group in members for member in group.members]
    return Batch(step=step, batch_id=f"b{step}.o{attempt}", groups=members, staleness=staleness(step, oldest))


def _members(group: Group, rollbacks: Rollbacks, weights: Iterator[float]) -> tuple[BatchMember, ...]:
    return tuple(
        BatchMember(
            ref=listed.ref,
            oldest_step=oldest_step(listed.entry.versions, rollbacks),
            reward=grade.grade.value,
            weight=next(weights),
            quality=grade.grade.quality,
        )
        for listed, grade in zip(_listed(group), _grades(group), strict=True)
    )


def _listed(group: Group) -> list[Listed]:
    return [sample.listed for sample in group.samples if sample.listed is not None]


def _grades(group: Group) -> list[GradeRef]:
    return [sample.grade for sample in group.samples if sample.grade is not None]


def _oldest_steps(group: Group, rollbacks: Rollbacks) -> list[int]:
    return [oldest_step(listed.entry.versions, rollbacks) for listed in _listed(group)]


def _sample_limits(recipe: Recipe) -> dict[str, int]:
    """Samples a replica may own: its slots, and one group more so that no slot waits for an order.

    What it could not sample yet is better issued later: another replica may be free first, and the versions are fresher.
    """
    slots = {pool.name: pool.slots for pool in recipe.rollout.pools}
    return {writer: slots[pool] + recipe.orchestrator.samples for writer, pool in rollout_writers(recipe)}
