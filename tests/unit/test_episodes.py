"""What a group's statistics are made of: episodes once however many rows they gave, ranked and weighted by their grades."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import MilesError, RecipeError
from miles_core.grading.base import Estimate, Grade, judged
from miles_core.grading.ranking import make_ranker
from miles_core.grading.weights import grade_weights
from miles_core.learner.episodes import Rows, make_rows, row_advantages
from miles_core.learner.redistribution import CAP, redistribute
from miles_core.presets import GROUP_ADVANTAGES
from miles_core.recipe import GradeWeightsSpec, Recipe, load_recipe
from miles_core.records import Batch, BatchGroup, BatchMember, TrajectoryRef
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_batching import trajectory

Array = npt.NDArray[np.float64]
Spec = tuple[str, float]
"""Name of an episode, `a`, or of one of its rows, `a#1`, and its reward."""


def batch_of(*groups: list[Spec], **columns: list[float]) -> Rows:
    """Rows of 3 sampled tokens each; `columns`: weight and quality of each row."""
    members: list[tuple[int, BatchMember]] = []
    rows: list[Trajectory] = []
    for number, group in enumerate(groups):
        for name, reward in group:
            sample, _, leaf = name.partition("#")
            identifier = f"g{number}.o1/{sample}@rollout-0.a1" + (f"#{leaf}" if leaf else "")
            ref = TrajectoryRef(trajectory_id=identifier, shard="s", row=len(rows), shard_digest="d")
            more = {key: values[len(rows)] for key, values in columns.items() if not math.isnan(values[len(rows)])}
            members.append((number, BatchMember(ref=ref, oldest_step=0, reward=reward, **more)))
            row = trajectory([0, 1, 1, 1], group=f"g{number}.o1")
            rows.append(replace(row, trajectory_id=identifier, sample_id=f"g{number}.o1/{sample}"))
    made = tuple(
        BatchGroup(group_id=f"g{number}.o1", members=tuple(member for at, member in members if at == number))
        for number in range(len(groups))
    )
    return make_rows(Batch(step=1, batch_id="b1.o1", groups=made, staleness=0), rows)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("chain_sum", overrides)


def advantages_of(rows: Rows, *overrides: str) -> list[float]:
    return list(map(float, row_advantages(rows, rows.rewards, recipe(*overrides))[0]))


# --- siblings


def test_siblings_count_once_and_share_the_advantage() -> None:
    rows = batch_of([("a#0", 1.0), ("a#1", 1.0), ("b", 0.5)])
    assert rows.rewards.tolist() == [[1.0, 0.5]] and rows.mean_reward == 0.75
    assert advantages_of(rows, "learner.objective=dr_grpo") == [0.25, 0.25, -0.25]


def test_siblings_of_different_rewards_are_refused_with_both_names() -> None:
    with pytest.raises(MilesError, match=r"siblings of episode g0.o1/a have rewards 1.0 \(.*a1#0\) and 0.0 \(.*a1#1\)"):
        batch_of([("a#0", 1.0), ("a#1", 0.0), ("b", 0.5)])


def test_groups_have_equally_many_episodes_whatever_rows_they_have() -> None:
    rows = batch_of([("a#0", 1.0), ("a#1", 1.0), ("b", 0.0)], [("a", 0.0), ("b", 1.0)])
    assert rows.episodes.tolist() == [0, 0, 1, 2, 3] and rows.total([1, 2, 3, 4, 5]).tolist() == [[3, 3], [4, 5]]
    with pytest.raises(MilesError, match=r"its groups have \[1, 2\] episodes"):
        batch_of([("a#0", 1.0), ("a#1", 1.0)], [("a", 0.0), ("b", 1.0)])


def test_tokens_of_all_siblings_weigh_in_a_batch_that_is_whitened() -> None:
    """By tokens: 6 of reward 1 in two rows, 3 of reward 0."""
    rows = batch_of([("a#0", 1.0), ("a#1", 1.0), ("b", 0.0)])
    tokens = np.array([1.0] * 6 + [0.0] * 3)
    expected = (np.array([1.0, 1.0, 0.0]) - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(advantages_of(rows, "learner.objective=reinforce_pp"), expected, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.lists(st.floats(0, 1, width=16), min_size=4, max_size=4), min_size=1, max_size=4),
    copies=st.integers(1, 3),
)
def test_a_groups_advantages_have_mean_0_and_variance_1_over_episodes(rewards: list[list[float]], copies: int) -> None:
    """And exactly none where all are equal; however many rows an episode gave."""
    groups = [[(f"{nth}#{copy}", reward) for nth, reward in enumerate(group) for copy in range(copies)] for group in rewards]
    rows = batch_of(*groups)
    found = np.array(advantages_of(rows)).reshape(len(rewards), 4, copies)
    assert (found == found[:, :, :1]).all()
    for own, group in zip(found[:, :, 0], rewards, strict=True):
        if len(set(group)) == 1:
            assert not own.any()
        else:
            assert own.mean() == pytest.approx(0, abs=1e-5)
            std = np.std(group, ddof=1)
            assert own.std(ddof=1) == pytest.approx(std / (std + 1e-4), rel=1e-4)


# --- groupwise advantage redistribution


def reference(advantages: list[float], qualities: list[float]) -> list[float]:
    """One group, from the description: rank the passing answers, factor 0.5 to 1.5, re-centre to mean zero."""
    passing = [index for index, value in enumerate(advantages) if value > 0]
    moved = list(advantages)
    for index in passing:
        worse = sum(qualities[other] < qualities[index] for other in passing)
        equal = sum(qualities[other] == qualities[index] for other in passing if other != index)
        moved[index] *= 0.5 + (worse + equal / 2) / (len(passing) - 1)
    mean = sum(moved) / len(moved)
    return [value - mean for value in moved]


def test_better_passing_answers_get_more_and_the_rest_as_much_as_before() -> None:
    advantages, qualities = [0.75, 0.75, 0.75, -1.0, -1.25], [3.0, 1.0, 2.0, 99.0, 98.0]
    (found,), metrics = redistribute(np.array([advantages]), np.array([qualities]))
    np.testing.assert_allclose(found, [0.75 * 1.5, 0.75 * 0.5, 0.75, -1.0, -1.25], rtol=1e-12)
    assert metrics == {"redistributed_frac": 1.0, "ranking_missing_frac": 0.0}


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.integers(0, 4), min_size=3, max_size=8),
    qualities=st.lists(st.integers(-3, 3), min_size=8, max_size=8),
)
def test_redistribution_equals_the_reference(rewards: list[int], qualities: list[int]) -> None:
    advantages = np.array(rewards, dtype=float) - np.mean(rewards)
    ranked = np.array(qualities[: len(rewards)], dtype=float)
    ((found,), metrics) = redistribute(advantages[None], ranked[None])
    if (advantages > 0).sum() < 2:
        assert (found == advantages).all() and metrics["redistributed_frac"] == 0
        return
    np.testing.assert_allclose(found, reference(advantages.tolist(), ranked.tolist()), rtol=1e-12, atol=1e-12)
    assert found.mean() == pytest.approx(0, abs=1e-12)
    shift = (found - advantages)[advantages <= 0]
    np.testing.assert_allclose(shift, shift[0], atol=1e-12)
    assert ((found - shift[0])[advantages > 0] <= CAP * advantages[advantages > 0] + 1e-12).all()


@pytest.mark.parametrize("how", GROUP_ADVANTAGES)
def test_without_a_ranking_the_advantage_is_the_plain_one_to_the_last_bit(how: str) -> None:
    specs = [[("a", 1.0), ("b", 1.0), ("c", 0.3)], [("a", 1.0), ("b", 1.0), ("c", 0.0)]]
    setting = f"learner.advantage={how}"
    plain = advantages_of(batch_of(*specs), setting)
    down = batch_of(*specs)
    found, metrics = row_advantages(down, down.rewards, recipe(setting, "grader.ranking=brevity"))
    assert found.tolist() == plain and metrics == {"redistributed_frac": 0.0, "ranking_missing_frac": 1.0}
    half = batch_of(*specs, quality=[2.0, 1.0, 0.0, math.nan, 1.0, 0.0])
    found, metrics = row_advantages(half, half.rewards, recipe(setting, "grader.ranking=brevity"))
    assert found.tolist()[3:] == plain[3:] and metrics == {"redistributed_frac": 0.5, "ranking_missing_frac": 0.5}
    assert found[0] > found[1] > 0 and found[:3].sum() == pytest.approx(0, abs=1e-6)


def own_ranker(row: Any) -> float:
    return float(row.tokens[-1])


def test_rankers_are_found_by_name_and_refused_where_they_are_not_there() -> None:
    assert make_ranker("brevity")(trajectory([0, 1, 1])) == -2.0
    assert make_ranker(f"{__name__}:own_ranker")(trajectory([0, 1], index=2)) == 201.0
    for name, message in (("nowhere:f", "cannot be imported here"), (f"{__name__}:nothing", "has no class or function")):
        with pytest.raises(RecipeError, match=message):
            make_ranker(name)
    with pytest.raises(RecipeError, match=r"grader\.ranking"):
        recipe("grader.ranking=longest")
    with pytest.raises(RecipeError, match=r"grader.ranking=brevity moves advantage within a group"):
        recipe("grader.ranking=brevity", "learner.objective=reinforce_pp")


# --- weights by age and std


def grade(value: float = 1.0, std: float = 0.0, at_s: float = 0.0) -> Grade:
    return Grade(value=value, std=std, source="test", timestamp=at_s)


def test_weights_fall_with_age_and_with_the_standard_deviation() -> None:
    spec = GradeWeightsSpec()
    half_life_s = math.log(2) / 1e-4
    assert half_life_s / 3600 == pytest.approx(1.93, abs=0.01), "about 1.9 hours, as the source says"
    grades = [grade(at_s=5e8), grade(at_s=5e8 - half_life_s), grade(at_s=5e8, std=0.15), grade(at_s=5e8 - half_life_s, std=0.3)]
    assert grade_weights(grades, spec) == pytest.approx([1.0, 0.5, 0.5, 0.5 / 5])
    assert grade_weights(grades, None) == [1.0] * 4 and grade_weights([], spec) == []
    assert grade_weights(grades, GradeWeightsSpec(per_s=0))[:2] == [1.0, 1.0]


def test_a_weight_multiplies_the_samples_advantage_and_nothing_else() -> None:
    rows = batch_of([("a", 1.0), ("b", 0.0)], weight=[0.5, 1.0])
    assert advantages_of(rows, "learner.objective=dr_grpo") == [0.5, -0.5], "without the setting a weight has no effect"
    found, metrics = row_advantages(rows, rows.rewards, recipe("learner.objective=dr_grpo", "grader.weights={}"))
    assert found.tolist() == [0.25, -0.5] and metrics == {"grade_weight_mean": 0.75}
    with pytest.raises(RecipeError, match=r"grader.weights multiplies the advantage of a sample"):
        recipe("grader.weights={}", "learner.objective=ppo")


def test_a_member_without_a_quality_is_written_as_before_there_was_one() -> None:
    ref = TrajectoryRef(trajectory_id="t", shard="s", row=0, shard_digest="d")
    plain = BatchMember(ref=ref, oldest_step=0, reward=1.0)
    assert set(plain.model_dump()) == {"ref", "oldest_step", "reward", "weight"}
    ranked = BatchMember(ref=ref, oldest_step=0, reward=1.0, quality=0.25)
    assert BatchMember.model_validate_json(ranked.model_dump_json()) == ranked
    assert BatchMember.model_validate_json(plain.model_dump_json()) == plain


class Unsure:
    source = "unsure/1"

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def value(self, task_seed: int, facts: dict[str, Any]) -> Any:
        return self._answer


def test_a_verifier_may_say_how_sure_it_is() -> None:
    assert judged(Unsure(0.5), 0, {}) == (0.5, 0.0)
    assert judged(Unsure(Estimate(0.5, 0.1)), 0, {}) == (0.5, 0.1)
    refused = {"std nan": (0.5, math.nan), "std -0.1": (0.5, -0.1), "gave 1.5": (1.5, 0.0), "gave nan": (math.nan, 0.0)}
    for message, answer in refused.items():
        with pytest.raises(ValueError, match=message):
            judged(Unsure(Estimate(*answer)), 0, {})
