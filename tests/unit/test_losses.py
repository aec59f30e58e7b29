"""Every objective's loss and gradient against float64 numpy (objective_reference.py), and inputs at the edge."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_core.learner.advantages import advantages
from miles_core.learner.losses import PolicyLoss, Tokens, Totals, episode_parts, minibatch_totals, policy_loss
from miles_core.presets import PRESETS
from miles_core.recipe import LearnerSpec
from tests.unit.objective_reference import CORRECTIONS, LOSSES, Array, Case, Result, Weights, grpo_paper, random_case

EXTREMES = [1000.0, -1000.0, math.inf, -math.inf, math.nan]


def spec_of(objective: str, **changes: object) -> LearnerSpec:
    if objective in ("dr_grpo", "rloo"):
        changes = {"loss_divisor_tokens": 72, **changes}
    return LearnerSpec.model_validate({"objective": objective, **changes})


def flatten(case: Case, spec: LearnerSpec) -> Tokens:
    """All rows of a case in float64, `logp` with gradient."""
    lengths = torch.from_numpy(case.lengths)
    per_row = advantages(torch.from_numpy(case.rewards), lengths.reshape(case.rewards.shape), spec.advantage).reshape(-1)
    logp, old, rollout = (torch.from_numpy(np.concatenate(rows)) for rows in (case.logp, case.old, case.rollout))
    rows = torch.repeat_interleave(torch.arange(len(case.logp)), lengths)
    return Tokens(
        logp.requires_grad_(), old, rollout, per_row[rows], torch.ones_like(rows, dtype=torch.bool), rows, len(lengths)
    )


def totals_of(case: Case, spec: LearnerSpec) -> Totals:
    lengths = torch.from_numpy(case.lengths)
    per_row = advantages(torch.from_numpy(case.rewards), lengths.reshape(case.rewards.shape), spec.advantage).reshape(-1)
    groups = np.repeat(np.arange(case.rewards.shape[0]), case.rewards.shape[1])
    episodes = map(str, range(len(groups)))
    rows = zip(map(str, groups), episodes, case.lengths.tolist(), per_row.tolist(), strict=True)
    return minibatch_totals(list(rows), spec.flat_groups)


def found_by(case: Case, spec: LearnerSpec) -> tuple[PolicyLoss, Array]:
    tokens = flatten(case, spec)
    found = policy_loss(tokens, totals_of(case, spec), spec)
    found.loss.backward()
    assert found.loss.dtype == torch.float64
    assert tokens.logp.grad is not None
    return found, tokens.logp.grad.numpy()


def assert_equal(found: tuple[PolicyLoss, Array], expected: Result) -> None:
    assert float(found[0].loss.detach()) == pytest.approx(expected[0], rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(found[1], np.concatenate(expected[1]), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("objective", LOSSES)
def test_loss_and_gradient_of_every_objective_equal_the_reference(objective: str, correction: str) -> None:
    spec = spec_of(objective, correction=correction)
    for seed in range(4):
        drift = 1e-3 if objective == "gspo" else 0.3
        case = random_case(seed, drift=drift)
        found = found_by(case, spec)
        assert_equal(found, LOSSES[objective](case, CORRECTIONS[correction]))
        assert objective == "cispo" or found[0].clipped > 0
        assert found[0].nonfinite == 0


def test_explicit_pieces_give_the_papers_grpo() -> None:
    case = random_case(0)
    spec = spec_of("grpo", clip_high=0.2, aggregation="sequence_mean", correction="none")
    assert_equal(found_by(case, spec), grpo_paper(case, CORRECTIONS["none"]))


def test_a_clipped_token_gives_no_gradient_but_with_cispo() -> None:
    case = replace(random_case(0, groups=1, flat=()), rewards=np.array([[1.0, 0, 0, 0]]))
    case = replace(case, logp=[row + 3.0 for row in case.old])
    for objective, flows in (("grpo", False), ("cispo", True)):
        found, gradient = found_by(case, spec_of(objective))
        first = gradient[: case.lengths[0]]
        assert bool((first != 0).all()) is flows and (first == 0).all() != flows
        assert found.clipped == (sum(case.lengths) if objective == "cispo" else case.lengths[0])


def frozen_loss(objective: str, tokens: Tokens, totals: Totals) -> torch.Tensor:
    """Every preset's loss with `tis` as it is, in one piece: whoever changes an operation or its order sees it here."""
    preset = PRESETS[objective]  # type: ignore[index]
    rows, logp, old = tokens.rows, tokens.logp, tokens.logp_old
    sizes = torch.zeros(tokens.num_rows).index_add(0, rows, torch.ones_like(logp))[rows]
    log_ratio = logp - old
    if objective == "gspo":
        mean = torch.zeros(tokens.num_rows).index_add(0, rows, log_ratio.detach())[rows] / sizes
        log_ratio = mean + logp - logp.detach()
    ratio = log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(1 - preset.clip_low, 1 + preset.clip_high)
    if objective == "cispo":
        gain = bounded.detach() * tokens.advantages * logp
    else:
        gain = torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)
    per_token = -(old - tokens.logp_rollout).clamp(-20, 20).exp().clamp(max=2.0) * gain
    if preset.aggregation == "sequence_mean":
        return (per_token / sizes).sum() / totals.episodes
    return per_token.sum() / (totals.tokens if preset.aggregation == "token_mean" else totals.episodes * 72)


@pytest.mark.parametrize("objective", LOSSES)
def test_loss_and_gradient_of_every_objective_are_as_ever_to_the_last_bit(objective: str) -> None:
    spec, case = spec_of(objective), random_case(7, drift=1e-3 if objective == "gspo" else 0.3)
    columns = {name: getattr(flatten(case, spec), name).detach() for name in ("logp", "logp_old", "logp_rollout", "advantages")}
    totals, results = totals_of(case, spec), []
    for call in (lambda tokens: policy_loss(tokens, totals, spec).loss, lambda tokens: frozen_loss(objective, tokens, totals)):
        single = {name: column.float() for name, column in columns.items()}
        single["logp"].requires_grad_()
        tokens = replace(flatten(case, spec), **single)
        loss = call(tokens)
        loss.backward()
        assert tokens.logp.grad is not None
        results.append((loss.detach(), tokens.logp.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("objective", LOSSES)
def test_microbatches_add_up(objective: str) -> None:
    case, spec = random_case(3), spec_of(objective)
    whole, expected = found_by(case, spec)
    tokens, totals = flatten(case, spec), totals_of(case, spec)
    total = torch.zeros((), dtype=torch.float64)
    for begin, end in ((0, 1), (1, 7), (7, 20)):
        inside = (tokens.rows >= begin) & (tokens.rows < end)
        part = {name: getattr(tokens, name)[inside] for name in ("logp", "logp_old", "logp_rollout", "advantages", "mask")}
        total = total + policy_loss(Tokens(**part, rows=tokens.rows[inside] - begin, num_rows=end - begin), totals, spec).loss
    total.backward()
    assert float(total.detach()) == pytest.approx(float(whole.loss.detach()), rel=1e-12, abs=1e-15)
    assert tokens.logp.grad is not None
    np.testing.assert_allclose(tokens.logp.grad.numpy(), expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("objective", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_values_stay_finite_and_are_counted(objective: str, correction: str, dtype: torch.dtype) -> None:
    spec = spec_of(objective, correction=correction, veto=1e-4)
    for extreme in EXTREMES:
        for where in range(4):
            columns = [torch.full((5,), value, dtype=dtype) for value in (-1.1, -1.0, -1.2, 0.5)]
            columns[where][2] = extreme
            logp = columns[0].requires_grad_()
            rows = torch.tensor([0, 0, 1, 1, 2])
            tokens = Tokens(logp, *columns[1:], torch.ones(5, dtype=torch.bool), rows, 3)
            found = policy_loss(tokens, Totals(5, 3), spec)
            found.loss.backward()
            assert torch.isfinite(found.loss)
            assert logp.grad is not None and torch.isfinite(logp.grad).all()
            assert math.isfinite(found.ratio_deviation)
            assert found.nonfinite == (0 if math.isfinite(extreme) else 1)


@pytest.mark.parametrize("objective", LOSSES)
def test_extreme_ratios_without_an_advantage_give_exact_zeros(objective: str) -> None:
    logp = torch.tensor(EXTREMES, requires_grad=True)
    zeros = torch.zeros(5)
    tokens = Tokens(logp, zeros, zeros, zeros, torch.ones(5, dtype=torch.bool), torch.tensor([0, 1, 2, 3, 4]), 5)
    found = policy_loss(tokens, Totals(5, 5), spec_of(objective))
    found.loss.backward()
    assert float(found.loss.detach()) == 0 and logp.grad is not None and not logp.grad.any()


@pytest.mark.parametrize("spec", [*map(spec_of, LOSSES), spec_of("grpo", aggregation="sequence_mean")], ids=str)
def test_a_left_out_token_changes_no_other_gradient(spec: LearnerSpec) -> None:
    """Its divisors still count it; only a ratio over the whole row is another without it."""
    case = random_case(3)
    tokens = flatten(case, spec)
    rollout = tokens.logp_rollout.clone()
    rollout[5] = math.nan
    broken = policy_loss(replace(tokens, logp_rollout=rollout), Totals(90, 20), spec)
    broken.loss.backward()
    assert tokens.logp.grad is not None
    left_out = tokens.logp.grad.clone()
    assert left_out[5] == 0 and broken.nonfinite == 1
    tokens.logp.grad = None
    policy_loss(tokens, Totals(90, 20), spec).loss.backward()
    same = torch.ones_like(left_out, dtype=torch.bool)
    same[tokens.rows == tokens.rows[5]] = spec.ratio == "token"
    same[5] = False
    torch.testing.assert_close(left_out[same], tokens.logp.grad[same], rtol=1e-12, atol=0)


@pytest.mark.parametrize("objective", LOSSES)
def test_nothing_and_all_masked_give_zero(objective: str) -> None:
    spec = spec_of(objective)
    for count, mask in ((0, True), (6, False)):
        logp = torch.full((count,), -1.0, requires_grad=True)
        column = torch.full((count,), -1.0)
        tokens = Tokens(logp, column, column, column, torch.full((count,), mask), torch.zeros(count, dtype=torch.int64), 1)
        found = policy_loss(tokens, Totals(6, 1), spec)
        found.loss.backward()
        assert float(found.loss.detach()) == 0 and (found.clipped, found.ratio_deviation, found.nonfinite) == (0, 0, 0)
        assert logp.grad is None or not logp.grad.any()


@pytest.mark.parametrize("objective", LOSSES)
def test_one_token_is_enough(objective: str) -> None:
    case = Case(np.array([[1.0, -1.0]]), *[[np.array([-1.0]), np.array([-2.0])]] * 3)
    found, gradient = found_by(case, spec_of(objective))
    assert math.isfinite(float(found.loss.detach())) and gradient[0] < 0 < gradient[1]


@pytest.mark.parametrize("objective", LOSSES)
def test_no_gradient_reaches_the_old_policy_or_the_rollout(objective: str) -> None:
    tokens = flatten(random_case(1), spec_of(objective))
    tokens.logp_old.requires_grad_()
    tokens.logp_rollout.requires_grad_()
    policy_loss(tokens, Totals(90, 20), spec_of(objective)).loss.backward()
    assert tokens.logp.grad is not None and tokens.logp.grad.any()
    assert tokens.logp_old.grad is None and tokens.logp_rollout.grad is None


def test_groups_without_signal_are_in_the_divisor_or_not() -> None:
    rows = [("a", "1", 3, 0.0), ("a", "2", 4, 0.0), ("b", "3", 5, 0.0), ("b", "4", 0, 1.0), ("b", "5", 2, -1.0)]
    assert minibatch_totals(rows, "counted") == Totals(tokens=14, episodes=4)
    assert minibatch_totals(rows, "left_out") == Totals(tokens=7, episodes=2)


def test_siblings_are_one_episode_in_the_mean() -> None:
    """Rows of 2, 3 and 4 sampled tokens, the first two of one episode: divided by 5, 5 and 4."""
    sizes = [2, 3, 4]
    rows = [("g", episode, size, 1.0) for episode, size in zip("aab", sizes, strict=True)]
    assert minibatch_totals(rows, "counted") == Totals(tokens=9, episodes=2)
    parts = episode_parts([(episode, size) for _, episode, size, _ in rows])
    assert parts is not None and parts.tolist() == [2 / 5, 3 / 5, 1.0]
    assert episode_parts([("a", 2), ("b", 0)]) is None
    assert episode_parts([("a", 0), ("a", 0)]).tolist() == [0, 0]  # type: ignore[union-attr]
    spec = spec_of("grpo", aggregation="sequence_mean", correction="none", kl_coef=0.1)
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    zeros = torch.zeros(9)
    base = torch.where(index < 2, 1.0, 0.0)
    advantages = -torch.tensor([2.0, 2, 3, 3, 3, 0, 0, 0, 0])
    tokens = Tokens(zeros.clone(), zeros, zeros, advantages, torch.ones(9, dtype=torch.bool), index, 3, logp_base=base)
    share = torch.from_numpy(parts)[index].float()
    whole = replace(tokens, advantages=advantages * share, kl_weights=share)
    k3 = math.e - 2
    assert float(policy_loss(whole, Totals(9, 1), spec).loss) == pytest.approx(13 / 5 + 0.1 * k3)
    assert float(policy_loss(tokens, Totals(9, 1), spec).loss) == pytest.approx(5.0 + 0.1 * 2 * k3), "each a mean of its own"


def test_a_constant_divisor_that_nobody_gave_is_a_named_error() -> None:
    spec = LearnerSpec(objective="dr_grpo")
    with pytest.raises(ValueError, match="loss_divisor_tokens"):
        policy_loss(flatten(random_case(0), spec), Totals(1, 1), spec)


# --- the pull towards the base model


@pytest.mark.parametrize("objective", LOSSES)
def test_the_pull_to_the_base_model_equals_the_reference(objective: str) -> None:
    """GRPO, eq. 4, under the preset's own mean and with a weight for each row."""
    case, plain, spec = random_case(4), spec_of(objective), spec_of(objective, kl_coef=0.1)
    rng = np.random.default_rng(9)
    base = [row + rng.normal(0, 0.4, row.size) for row in case.old]
    row_weights = rng.uniform(0.5, 1.5, len(base))
    tokens = replace(
        flatten(case, spec),
        logp_base=torch.from_numpy(np.concatenate(base)),
        kl_weights=torch.from_numpy(np.repeat(row_weights, case.lengths)),
    )
    totals = totals_of(case, spec)
    found = policy_loss(tokens, totals, spec)
    found.loss.backward()
    loss, gradient, pull = LOSSES[objective](case, CORRECTIONS["tis"]), [], 0.0
    divisors = {
        "token_mean": [totals.tokens] * len(base),
        "sequence_mean": [totals.episodes * size for size in case.lengths],
        "constant": [totals.episodes * 72] * len(base),
    }[plain.aggregation]
    for i, (logp, there) in enumerate(zip(case.logp, base, strict=True)):
        q = np.exp(there - logp)
        pull += 0.1 * row_weights[i] * float((q - np.log(q) - 1).sum()) / divisors[i]
        gradient.append(loss[1][i] + 0.1 * row_weights[i] * (1 - q) / divisors[i])
    assert tokens.logp.grad is not None
    assert_equal((found, tokens.logp.grad.numpy()), (loss[0] + pull, gradient))
    ratios = np.exp(np.concatenate(base) - np.concatenate(case.logp))
    assert found.kl_base == pytest.approx(float((ratios - np.log(ratios) - 1).sum()))


def test_the_base_model_is_not_pulled_to_itself() -> None:
    tokens = flatten(random_case(0), spec_of("grpo"))
    tokens = replace(tokens, logp_base=tokens.logp.detach().clone())
    with_pull = policy_loss(tokens, Totals(90, 20), spec_of("grpo", kl_coef=10.0))
    assert with_pull.kl_base == 0 and torch.equal(with_pull.loss, policy_loss(tokens, Totals(90, 20), spec_of("grpo")).loss)


@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_values_of_the_base_model_stay_finite_and_are_counted(extreme: float) -> None:
    logp = torch.full((3,), -1.0, requires_grad=True)
    column = torch.full((3,), -1.0)
    base = torch.tensor([-1.0, extreme, -2.0])
    tokens = Tokens(logp, column, column, column, torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]), 2, base)
    found = policy_loss(tokens, Totals(3, 2), spec_of("grpo", kl_coef=0.1))
    found.loss.backward()
    assert torch.isfinite(found.loss) and math.isfinite(found.kl_base)
    assert logp.grad is not None and torch.isfinite(logp.grad).all()
    assert found.nonfinite == (0 if math.isfinite(extreme) else 1)


def test_a_pull_without_the_base_models_logprobs_is_a_named_error() -> None:
    with pytest.raises(ValueError, match="kl_coef needs the logprobs of the base model"):
        policy_loss(flatten(random_case(0), spec_of("grpo")), Totals(90, 20), spec_of("grpo", kl_coef=0.1))


@pytest.mark.parametrize("objective", sorted(set(LOSSES) - {"cispo"}))
def test_the_references_gradient_is_the_slope_of_its_loss(objective: str) -> None:
    """By finite differences; CISPO's gradient is not one of its loss, since it stops at the ratio."""
    none: Weights = CORRECTIONS["none"]
    case = random_case(5, drift=1e-4 if objective == "gspo" else 0.05)
    _, gradients = LOSSES[objective](case, none)
    for row, position in ((0, 0), (8, -1), (19, 0)):
        moved = []
        for step in (1e-6, -1e-6):
            logp = [values.copy() for values in case.logp]
            logp[row][position] += step
            moved.append(LOSSES[objective](replace(case, logp=logp), none)[0])
        assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(gradients[row][position], rel=1e-4, abs=1e-9)
