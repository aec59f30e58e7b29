"""Routing replay against a float64 computation of the whole model that is told which experts to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import MilesError
from miles_core.learner.batching import Microbatch
from miles_core.learner.corrections import mismatch_metrics
from miles_core.learner.routing import COLD, changed_metric, freeze_routers, load_metrics
from miles_core.learner.trainer import UNREPLAYED_EVERY, Policy, Trainer
from miles_core.recipe import LearnerSpec
from miles_core.records import Version
from miles_core.rollout.engine import Request
from miles_core.rollout.torch_engine import TorchEngine
from miles_core.routers import FAMILIES, Experts, find_routers
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_batching import microbatches, trajectory
from tests.unit.test_expert_record import own_choices
from tests.unit.test_trainer import assert_same_bytes, finish, make_batch, sealed, start
from tests.unit.tiny_models import MIXTURES, Kind, save_tiny_model, tiny_model

LAYERS, TOP_K, EXPERTS = 2, 2, 8


def mixture(seed: int = 0, **changes: Any) -> Any:
    return tiny_model("qwen3_moe", seed, **changes)


def with_record(row: Trajectory, model: Any) -> Trajectory:
    """The row as sampled by `model`: its experts, and its logprobs."""
    tokens = torch.from_numpy(row.tokens).long()
    with torch.no_grad():
        scores = torch.log_softmax(model(tokens[None]).logits[0] / row.temperature, dim=-1)
    logprobs = np.concatenate([[0], scores[torch.arange(len(tokens) - 1), tokens[1:]].numpy()]) * row.loss_mask
    return replace(row, experts=own_choices(model, tokens[:-1]).astype(np.uint8), logprobs=logprobs.astype(np.float32))


def rows_of(model: Any, count: int = 5) -> list[Trajectory]:
    return [with_record(row, model) for row in make_batch(1)[0][:count]]


def only_batch(rows: list[Trajectory]) -> Microbatch:
    (batch,) = microbatches(list(range(len(rows))), rows, np.linspace(-1, 1, len(rows)))
    return batch


def run(policy: Policy, batch: Microbatch) -> torch.Tensor:
    with torch.no_grad():
        return policy(batch)[0]


# The reference: Qwen3-MoE in float64, written out, one row at a time.


def norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * hidden / torch.sqrt((hidden**2).mean(dim=-1, keepdim=True) + epsilon)


def rotated(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """[T, heads, D] at positions 0..T-1."""
    half = heads.shape[-1] // 2
    angles = torch.arange(len(heads), dtype=torch.float64)[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(weights: dict[str, torch.Tensor], prefix: str, hidden: torch.Tensor, config: Any) -> torch.Tensor:
    theta, size, length = config.rope_parameters["rope_theta"], config.head_dim, len(hidden)

    def heads(name: str) -> torch.Tensor:
        return (hidden @ weights[f"{prefix}.{name}_proj.weight"].T).view(length, -1, size)

    query = rotated(norm(heads("q"), weights[f"{prefix}.q_norm.weight"], config.rms_norm_eps), theta)
    key = rotated(norm(heads("k"), weights[f"{prefix}.k_norm.weight"], config.rms_norm_eps), theta)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), heads("v").repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
    return mixed.reshape(length, -1) @ weights[f"{prefix}.o_proj.weight"].T


def experts_of(
    weights: dict[str, torch.Tensor], prefix: str, hidden: torch.Tensor, ids: torch.Tensor, normalised: bool
) -> torch.Tensor:
    """ids [T, k]: what each position is sent to."""
    chosen = (hidden @ weights[f"{prefix}.gate.weight"].T).softmax(dim=-1).gather(-1, ids)
    if normalised:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    rows = []
    for position, state in enumerate(hidden):
        outputs = []
        for expert in ids[position].tolist():
            gate, up = (weights[f"{prefix}.experts.gate_up_proj"][expert] @ state).chunk(2)
            outputs.append(weights[f"{prefix}.experts.down_proj"][expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append((chosen[position][:, None] * torch.stack(outputs)).sum(dim=0))
    return torch.stack(rows)


def reference(weights: dict[str, torch.Tensor], config: Any, tokens: torch.Tensor, experts: Experts) -> torch.Tensor:
    """[T, vocabulary] log softmax at temperature 1; experts [T, layers, k]."""
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        prefix, epsilon = f"model.layers.{layer}", config.rms_norm_eps
        before = norm(hidden, weights[f"{prefix}.input_layernorm.weight"], epsilon)
        hidden = hidden + attention(weights, f"{prefix}.self_attn", before, config)
        after = norm(hidden, weights[f"{prefix}.post_attention_layernorm.weight"], epsilon)
        ids = torch.from_numpy(experts[:, layer].astype(np.int64))
        hidden = hidden + experts_of(weights, f"{prefix}.mlp", after, ids, config.norm_topk_prob)
    hidden = norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    return (hidden @ weights["model.embed_tokens.weight"].T).log_softmax(dim=-1)


def reference_targets(weights: dict[str, torch.Tensor], config: Any, rows: list[Trajectory]) -> torch.Tensor:
    """Logprobs of the sampled tokens in the order of a microbatch: longest context first."""
    parts = []
    for row in sorted(rows, key=lambda row: -int(np.flatnonzero(row.loss_mask)[-1])):
        assert row.experts is not None
        sampled = torch.from_numpy(np.flatnonzero(row.loss_mask))
        tokens = torch.from_numpy(row.tokens).long()
        scores = reference(weights, config, tokens[:-1], row.experts)
        parts.append(scores[sampled - 1, tokens[sampled]])
    return torch.cat(parts)


def exact_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().double().requires_grad_() for name, tensor in model.named_parameters()}


# Tests


@pytest.mark.parametrize("normalised", [True, False])
def test_with_the_weights_that_sampled_replay_changes_nothing(normalised: bool) -> None:
    model = mixture(norm_topk_prob=normalised)
    policy, batch = Policy(model), only_batch(rows_of(model))
    replayed, own = run(policy, batch), run(policy, batch.without_record())
    assert torch.equal(replayed, own)
    assert ((replayed - batch.rollout_logprobs).exp() - 1).abs().max() < 1e-6
    assert policy.routing is not None and policy.routing.changed == (0, 0), "of the last pass, which replayed nothing"


@pytest.mark.parametrize("normalised", [True, False])
def test_other_weights_take_the_recorded_experts_and_their_gradient_flows_through_those(normalised: bool) -> None:
    sampled_by, model = mixture(norm_topk_prob=normalised), mixture(seed=1, norm_topk_prob=normalised)
    rows = rows_of(sampled_by)
    policy, batch, weights = Policy(model), only_batch(rows), exact_weights(model)
    found, _ = policy(batch)
    expected = reference_targets(weights, model.config, rows)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    assert (run(policy, batch.without_record()) - found).abs().max() > 0.1, "the routers would have chosen otherwise"
    factors = torch.linspace(-1, 1, len(found))
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert gradient is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), gradient, rtol=0, atol=2e-5 * float(gradient.norm()))
    assert all(parameter.grad.norm() > 0 for name, parameter in model.named_parameters() if "gate.weight" in name)


def sampled_in_bfloat16(count: int) -> list[Trajectory]:
    """Rows of one turn from a bfloat16 engine, with its logprobs and its record."""
    engine = TorchEngine(
        mixture().bfloat16(), end_id=-1, slots=count, max_tokens=96, version=Version(0, 0), record_experts=True
    )  # fmt: skip
    rng, asked = np.random.default_rng(0), {}
    for number in range(count):
        key = str(number)
        asked[key] = tuple(rng.integers(7, 300, rng.integers(1, 20)).tolist())
        engine.add(Request(key, asked[key], 48, 1.0, seed=number))
    rows = []
    while engine.running:
        for turn in engine.step():
            before = asked[turn.session_key]
            row = trajectory([0] * len(before) + [1] * len(turn.tokens))
            logprobs = np.concatenate([np.zeros(len(before), np.float32), turn.logprobs])
            tokens = np.array([*before, *turn.tokens], dtype=np.int32)
            rows.append(replace(row, tokens=tokens, logprobs=logprobs, experts=turn.experts))
    return rows


def test_replay_removes_the_tail_between_a_bfloat16_rollout_and_a_float32_learner() -> None:
    batch, policy = only_batch(sampled_in_bfloat16(64)), Policy(mixture())
    replayed = mismatch_metrics(run(policy, batch), batch.rollout_logprobs)
    assert policy.routing is not None and 0.001 < policy.routing.changed[0] / policy.routing.changed[1] < 0.1
    own = mismatch_metrics(run(policy, batch.without_record()), batch.rollout_logprobs)
    assert own["k3"] > 5 * replayed["k3"] and own["logprob_gap_max"] > 5 * replayed["logprob_gap_max"]


def test_what_replay_changes_is_counted_at_recorded_positions_alone() -> None:
    model, other = mixture(), mixture(seed=1)
    rows = rows_of(model)
    policy, batch = Policy(other), only_batch(rows)
    first = next(module for module in find_routers(other).modules)  # type: ignore[union-attr]
    run(policy, batch)
    assert policy.routing is not None and batch.experts is not None
    changed, replayed = policy.routing.changed
    contexts = [int(np.flatnonzero(row.loss_mask)[-1]) for row in rows]
    assert replayed == LAYERS * sum(contexts) < batch.tokens.numel() * LAYERS, "padding is not counted"
    assert 0.5 < changed / replayed <= 1
    turned = batch.experts.flip(-1)
    run(Policy(model), replace(batch, experts=turned))
    policy = Policy(mixture())
    run(policy, replace(batch, experts=turned))
    assert policy.routing is not None and policy.routing.changed == (0, replayed), "a set has no order"
    assert len(first._forward_hooks) == 1
    assert changed_metric(torch.tensor([[1, 4], [2, 4]])) == {"routing_changed_frac": 0.375}
    assert changed_metric(torch.tensor([[0, 0]])) == {"routing_changed_frac": 0.0}


def test_rows_without_a_record_take_the_routers_own_choice() -> None:
    model, other = mixture(), mixture(seed=1)
    rows = rows_of(model)
    rows[0], rows[3] = replace(rows[0], experts=None), replace(rows[3], experts=None)
    found, fresh = run(Policy(other), only_batch(rows)), mixture(seed=1)
    expected = [
        row if row.experts is not None else replace(row, experts=own_choices(fresh, torch.from_numpy(row.tokens[:-1]).long()))
        for row in rows
    ]
    exact = reference_targets(exact_weights(fresh), fresh.config, expected)
    torch.testing.assert_close(found.double(), exact.detach(), rtol=0, atol=2e-5)
    missing = sum(int(np.flatnonzero(rows[row].loss_mask)[-1]) for row in (0, 3))
    routers = find_routers(fresh)
    assert routers is not None and load_metrics(rows, routers)["routing_missing_tokens"] == missing


def test_how_rows_are_split_does_not_change_what_they_replay() -> None:
    rows, policy = rows_of(mixture()), Policy(mixture(seed=1))
    together = run(policy, only_batch(rows))
    order = sorted(range(len(rows)), key=lambda row: -int(np.flatnonzero(rows[row].loss_mask)[-1]))
    alone = torch.cat([run(policy, only_batch([rows[row]])) for row in order])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-5)


def test_a_filler_replays_too() -> None:
    batch, policy = only_batch(rows_of(mixture())), Policy(mixture(seed=1))
    assert torch.equal(run(policy, batch.as_filler()), run(policy, batch))


def test_loads_are_counted_by_layer_up_to_the_last_sampled_token() -> None:
    routers = find_routers(mixture())
    assert routers is not None
    row = make_batch(1)[0][0]
    context = int(np.flatnonzero(row.loss_mask)[-1])
    experts = np.zeros((len(row.tokens) - 1, LAYERS, TOP_K), np.uint8)
    experts[:, :, 1] = 1
    experts[context:] = 7
    found = load_metrics([replace(row, experts=experts)], routers)
    # Two of eight experts carry all: a load of 4 each, 0 for the others.
    assert found["routing_load_peak"] == pytest.approx(EXPERTS / TOP_K)
    assert found["routing_load_cv"] == pytest.approx(np.std([4, 4, 0, 0, 0, 0, 0, 0]))
    assert found["routing_cold_frac"] == 0.75 and found["routing_missing_tokens"] == 0 and COLD < 1
    even = np.broadcast_to((np.arange(len(experts))[:, None, None] * TOP_K + np.arange(TOP_K)) % EXPERTS, experts.shape)
    long = replace(row, experts=even.astype(np.uint8)[: context - context % 4])
    assert load_metrics([long], routers)["routing_load_cv"] == 0
    assert set(load_metrics([row], routers).values()) == {0.0, float(context)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("mixture") / "base", "qwen3_moe")


def recorded_batch(model: Any) -> tuple[list[Trajectory], Any]:
    rows, advantages = make_batch(1)
    return [with_record(row, model) for row in rows], advantages


def test_a_record_of_another_model_is_refused_by_name(folder: Path) -> None:
    trainer = Trainer(folder, LearnerSpec(), "float32")
    rows, advantages = recorded_batch(mixture())
    assert rows[2].experts is not None
    for wrong in (rows[2].experts + np.uint8(EXPERTS), rows[2].experts[:, :1]):
        with pytest.raises(MilesError, match=r"1-0/2@rollout-0\.a1 was sampled by another model"):
            trainer.train([*rows[:2], replace(rows[2], experts=wrong), *rows[3:]], advantages, 1)


def test_metrics_say_what_replay_removes(folder: Path) -> None:
    trainer = Trainer(folder, LearnerSpec(lr=0.0), "float32")
    rows, advantages = recorded_batch(mixture())
    same = trainer.train(rows, advantages, 1)
    assert same["k3"] < 1e-9 and same["k3_no_replay"] == same["k3"] and same["routing_changed_frac"] == 0
    assert same["logprob_gap_max"] == same["logprob_gap_max_no_replay"] < 1e-5
    assert same["routing_missing_tokens"] == 0 and same["routing_load_peak"] > 1 and same["routing_load_cv"] > 0
    scrambled = [replace(row, experts=(row.experts + np.uint8(1)) % np.uint8(EXPERTS)) for row in rows]  # type: ignore[operator]
    other = trainer.train(scrambled, advantages, 1)
    assert other["k3_no_replay"] == same["k3"] < 1e-9 < other["k3"] and other["routing_changed_frac"] > 0.9
    between = trainer.train(rows, advantages, 2)
    assert set(same) - set(between) == {"k3_no_replay", "logprob_gap_max_no_replay"}
    assert set(trainer.train(rows, advantages, 1 + UNREPLAYED_EVERY)) == set(same)


def test_without_replay_and_without_experts_nothing_is_measured(folder: Path, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path / "dense")
    rows, advantages = recorded_batch(mixture(seed=1))
    off = Trainer(folder, LearnerSpec(routing_replay=False), "float32").train(rows, advantages, 1)
    assert off == Trainer(folder, LearnerSpec(routing_replay=False), "float32").train(*make_batch_like(rows, advantages), 1)
    plain = Trainer(dense, LearnerSpec(), "float32").train(*make_batch(1), 1)
    assert off.keys() == plain.keys() and not [name for name in plain if "rout" in name or "replay" in name]


def make_batch_like(rows: list[Trajectory], advantages: Any) -> tuple[list[Trajectory], Any]:
    return [replace(row, experts=None) for row in rows], advantages


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_replays_through_all_its_stages(folder: Path, stage: int) -> None:
    """Also where the weights of a router are parted: the gradient is that of the reference."""
    sampled_by = mixture(seed=1)
    rows, advantages = recorded_batch(sampled_by)
    spec = LearnerSpec.model_validate(
        {
            "minibatches": 1,
            "microbatch_tokens": 72,
            "zero_stage": stage,
            "grad_clip": 1e9,
            "tis_cap": 9e9,
            "freeze_router": False,
        }
    )
    metrics = Trainer(folder, spec, "float32").train(rows, advantages, 1)
    model = mixture()
    weights = exact_weights(model)
    used = [index for index in range(len(rows)) if advantages[index]]
    logp = reference_targets(weights, model.config, [rows[index] for index in used])
    order = sorted(used, key=lambda index: -int(np.flatnonzero(rows[index].loss_mask)[-1]))
    factors = torch.cat([torch.full((rows[index].num_sampled,), float(advantages[index])) for index in order])
    rollout = torch.cat([torch.from_numpy(rows[index].logprobs[rows[index].loss_mask == 1]) for index in order])
    ratio = (logp - rollout).detach().exp()
    loss = -(ratio * factors * logp).sum() / sum(row.num_sampled for row in rows)
    loss.backward()
    total = torch.cat([tensor.grad.flatten() for tensor in weights.values() if tensor.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(total), rel=1e-4)


def test_the_same_records_give_the_same_bytes_and_other_records_others(folder: Path) -> None:
    rows, advantages = recorded_batch(mixture(seed=1))
    own = recorded_batch(mixture())[0]

    def trained(experts_of: list[Trajectory]) -> dict[str, torch.Tensor]:
        trainer = Trainer(folder, LearnerSpec(lr=1e-3, ramp_steps=0, freeze_router=False), "float32")
        trainer.train([replace(row, experts=other.experts) for row, other in zip(rows, experts_of, strict=True)], advantages, 1)
        return trainer.state_tensors()

    first, again, other = trained(rows), trained(rows), trained(own)
    assert_same_bytes(first, again)
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], other["model.layers.0.mlp.gate.weight"])


def test_a_bfloat16_learner_replays_too(folder: Path) -> None:
    rows = sampled_in_bfloat16(16)
    advantages = np.where(np.arange(16) % 2 == 0, 1.0, -1.0)
    found = Trainer(folder, LearnerSpec(minibatches=1), "bfloat16").train(rows, advantages, 1)
    assert found["k3"] < 1e-3 and found["routing_changed_frac"] < 0.05 and found["routing_missing_tokens"] == 0
    assert 0 < found["grad_norm"] < np.inf


def uneven_batch() -> tuple[list[Trajectory], Any]:
    """Seven rows with signal in the second minibatch: of two ranks, one fills up."""
    rows, advantages = recorded_batch(mixture(seed=1))
    advantages[-1] = 0
    return rows, advantages


RANKS_SPEC = LearnerSpec(lr=1e-3, minibatches=2, microbatch_tokens=72)
RANKS_CODE = """
from tests.unit.test_routing import *
store = torch.distributed.FileStore(sys.argv[2] + "/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=int(sys.argv[3]), world_size=2)
os.environ["LOCAL_RANK"] = sys.argv[3]
for stage in (1, 3):
    trainer = Trainer(Path(sys.argv[1]), RANKS_SPEC.model_copy(update={"zero_stage": stage}), "float32")
    metrics = trainer.train(*uneven_batch(), 1)
    torch.save((metrics, trainer.state_tensors()), f"{sys.argv[2]}/{stage}-{sys.argv[3]}")
"""


def test_two_ranks_replay_as_one(folder: Path, tmp_path: Path) -> None:
    alone = Trainer(folder, RANKS_SPEC, "float32")
    expected = alone.train(*uneven_batch(), 1)
    assert expected["routing_changed_frac"] > 0.5 and "k3_no_replay" in expected
    ranks = [start(RANKS_CODE, folder, tmp_path, Path(rank)) for rank in ("0", "1")]
    for process in ranks:
        finish(process)
    for stage in (1, 3):
        (metrics, weights), (same, _) = (torch.load(tmp_path / f"{stage}-{rank}") for rank in (0, 1))
        # How rows lie in microbatches depends on the number of ranks.
        same_rows = expected | {"computed_frac": metrics["computed_frac"]}
        assert metrics == same == pytest.approx(same_rows, rel=1e-4, abs=1e-5)
        assert metrics["routing_changed_frac"] == expected["routing_changed_frac"]
        for name, tensor in alone.state_tensors().items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)


# --- families, and routers that stay as they are


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("normalised", [True, False])
def test_every_family_weighs_replayed_experts_as_its_router_weighs_its_own(kind: Kind, normalised: bool) -> None:
    """Against float64, with the gradient of the router's weights; its own choice again is its own answer, bit for bit."""
    changes = {} if kind == "mixtral" else {"norm_topk_prob": normalised}
    routers = find_routers(tiny_model(kind, **changes))
    assert routers is not None and (len(routers.modules), routers.num_experts, routers.top_k) == (LAYERS, EXPERTS, TOP_K)
    router: Any = routers.modules[1]
    hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    output = router(hidden)
    again = routers.family.choose(router, output, routers.family.chosen(output))
    assert all(torch.equal(mine, own) for mine, own in zip(again, output, strict=True))
    ids = torch.arange(14).reshape(7, 2) % EXPERTS
    _, weights, _ = routers.family.choose(router, output, ids)
    exact = router.weight.detach().double().requires_grad_()
    expected = (hidden.double() @ exact.T).softmax(dim=-1).gather(-1, ids)
    if kind == "mixtral" or normalised:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    slope = torch.linspace(-1, 1, 14).reshape(7, 2)
    (weights * slope).sum().backward()
    (expected * slope).sum().backward()
    assert exact.grad is not None and exact.grad.norm() > 1e-3
    torch.testing.assert_close(router.weight.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["olmoe", "mixtral"])
def test_other_families_are_recorded_and_replayed(kind: Kind) -> None:
    model, other = tiny_model(kind), tiny_model(kind, seed=1)
    batch = only_batch(rows_of(model))
    policy = Policy(model)
    assert torch.equal(run(policy, batch), run(policy, batch.without_record()))
    moved = Policy(other)
    found = run(moved, batch)
    assert moved.routing is not None and moved.routing.changed[0] / moved.routing.changed[1] > 0.3
    assert (run(moved, batch.without_record()) - found).abs().max() > 1e-3
    engine = TorchEngine(model, end_id=-1, slots=2, max_tokens=64, version=Version(0, 0), record_experts=True)
    engine.add(Request("a", (8, 9, 10), 12, 1.0, seed=0))
    turns = []
    while engine.running:
        turns += engine.step()
    (turn,) = turns
    tokens = torch.tensor([8, 9, 10, *turn.tokens])
    np.testing.assert_array_equal(turn.experts, own_choices(tiny_model(kind), tokens[:-1]))


def router_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in trainer.state_tensors().items() if name.endswith("gate.weight")}


@pytest.mark.parametrize("stage", [1, 3])
def test_routers_keep_the_base_models_weights_unless_told_otherwise(folder: Path, tmp_path: Path, stage: int) -> None:
    """Over a checkpoint, too; everything else is trained."""
    rows, advantages = recorded_batch(mixture(seed=1))
    spec = LearnerSpec.model_validate({"lr": 1e-2, "ramp_steps": 0, "zero_stage": stage})
    trainer = Trainer(folder, spec, "float32")
    before, routers = trainer.state_tensors(), router_weights(trainer)
    assert len(routers) == LAYERS
    trainer.train(rows, advantages, 1)
    trainer.save(tmp_path)
    resumed = Trainer(folder, spec, "float32")
    resumed.load(tmp_path, sealed(tmp_path))
    for each in (trainer, resumed):
        each.train(rows, advantages, 2)
        assert_same_bytes(router_weights(each), routers)
    after = resumed.state_tensors()
    assert_same_bytes(trainer.state_tensors(), after)
    assert all(torch.equal(after[name], before[name]) == (name in routers) for name in before)
    free = Trainer(folder, spec.model_copy(update={"freeze_router": False}), "float32")
    free.train(rows, advantages, 1)
    assert not any(torch.equal(tensor, routers[name]) for name, tensor in router_weights(free).items())


def test_a_mixture_of_unknown_routers_is_refused_unless_they_are_to_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze_routers(tiny_model("llama"))
    monkeypatch.delitem(FAMILIES, "olmoe")
    with pytest.raises(MilesError, match=r"family olmoe are not known here .*set freeze_router: false"):
        freeze_routers(tiny_model("olmoe"))
