"""The experimental balance loss for routers: against float64, over microbatches, with beta, in the trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import MilesError
from miles_core.learner.balance import RouterBalance, make_balance
from miles_core.learner.batching import Microbatch
from miles_core.learner.trainer import Policy, Trainer
from miles_core.recipe import BalanceSpec, LearnerSpec
from miles_core.routers import find_routers
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_batching import microbatches
from tests.unit.test_routing import EXPERTS, LAYERS, TOP_K, mixture, recorded_batch
from tests.unit.test_trainer import assert_same_bytes, sealed
from tests.unit.tiny_models import save_tiny_model, tiny_model

SPEC = LearnerSpec.model_validate(
    {"lr": 3e-3, "ramp_steps": 0, "minibatches": 1, "freeze_router": False, "balance": {"coef": 1.0}}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("mixture") / "base", "qwen3_moe")


def batches_of(rows: list[Trajectory], size: int) -> list[Microbatch]:
    return microbatches(list(range(len(rows))), rows, np.ones(len(rows)), 24 * size)


def balance_of(model: Any) -> tuple[Policy, RouterBalance]:
    policy, routers = Policy(model), find_routers(model)
    assert routers is not None
    return policy, RouterBalance(routers, BalanceSpec())


def gradient_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def balance_loss(rows: list[Trajectory], size: int, *, filler: bool = False) -> tuple[float, dict[str, torch.Tensor], Any]:
    """Of one minibatch in microbatches of `size` rows; what its gradient is, and the routers' inputs and choices."""
    model = mixture(seed=1)
    policy, balance = balance_of(model)
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for module in find_routers(model).modules:  # type: ignore[union-attr]
        module.register_forward_hook(lambda _, inputs, output: seen[-1].append((inputs[0].detach(), output[2])))
    batches = batches_of(rows, size)
    batches += [batches[0].as_filler()] if filler else []
    balance.begin(1)
    with torch.no_grad():
        for micro in batches:
            seen.append([])
            policy(micro)
            balance.count(0, micro)
    balance.share(lambda counts: counts)
    total = 0.0
    for micro in batches:
        seen.append([])
        policy(micro)
        part = balance.part(0, micro)
        part.backward()
        total += float(part.detach())
    return total, gradient_of(model), (model, batches, seen[: len(batches)])


def test_the_loss_equals_its_definition_with_the_gradient_of_the_routers() -> None:
    rows = recorded_batch(mixture())[0]
    total, gradient, (model, (micro,), (layers,)) = balance_loss(rows, len(rows))
    real = micro.copies.flatten() > 0
    assert int(real.sum()) == sum(int(np.flatnonzero(row.loss_mask)[-1]) for row in rows), "every position of a context, once"
    terms = []
    for (hidden, chosen), module in zip(layers, find_routers(model).modules, strict=True):  # type: ignore[union-attr]
        shares = torch.bincount(chosen[real].flatten(), minlength=EXPERTS).double() / (TOP_K * real.sum())
        weight = module.weight.detach().double().requires_grad_()
        terms.append((weight, EXPERTS * ((hidden[real].double() @ weight.T).softmax(dim=-1) @ shares).mean()))
    expected = sum(term for _, term in terms) / LAYERS
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    # The last layer's router gets its gradient from its own term alone.
    expected.backward()
    name = f"model.layers.{LAYERS - 1}.mlp.gate.weight"
    torch.testing.assert_close(gradient[name].double(), terms[-1][0].grad, rtol=1e-3, atol=1e-6)


def test_parts_add_up_however_rows_lie_and_a_filler_adds_nothing() -> None:
    rows = recorded_batch(mixture())[0]
    whole, expected, _ = balance_loss(rows, len(rows))
    split, found, _ = balance_loss(rows, 3, filler=True)
    assert split == pytest.approx(whole, rel=1e-5)
    size = torch.cat([part.flatten() for part in expected.values()]).norm()
    for name, part in expected.items():
        torch.testing.assert_close(found[name], part, rtol=0, atol=1e-5 * float(size))


def test_beta_is_loose_while_the_policy_moves_and_0_before_anything_is_known() -> None:
    _, balance = balance_of(mixture())
    assert (balance.beta, balance.factor) == (0.0, 0.0)
    balance.grad_norm = 2.0
    assert balance.beta == pytest.approx(math.exp(-2.0)) and balance.factor == pytest.approx(0.01 * math.exp(-2.0))
    balance.grad_norm = 0.0
    assert balance.beta == 1.0


def test_routers_become_more_even_and_it_goes_on_bit_exactly(folder: Path, tmp_path: Path) -> None:
    rows, advantages = recorded_batch(mixture())
    spec = SPEC.model_copy(update={"balance": BalanceSpec(coef=1.0, rate=0.01)})
    straight = Trainer(folder, spec, "float32")
    first = straight.train(rows, advantages * 1e-3, 1)
    assert first["balance_beta"] == 0 and first["balance_loss"] > 1
    plain = Trainer(folder, SPEC.model_copy(update={"balance": None}), "float32")
    plain.train(rows, advantages * 1e-3, 1)
    assert_same_bytes(plain.state_tensors(), straight.state_tensors())
    straight.train(rows, advantages * 1e-3, 2)
    straight.save(tmp_path)
    last = [straight.train(rows, advantages * 1e-3, step) for step in range(3, 9)][-1]
    assert last["balance_loss"] - 1 < 0.8 * (first["balance_loss"] - 1) and 0 < last["balance_beta"] < 1
    resumed = Trainer(folder, spec, "float32")
    resumed.load(tmp_path, sealed(tmp_path))
    assert [resumed.train(rows, advantages * 1e-3, step) for step in range(3, 9)][-1] == last
    assert_same_bytes(straight.state_tensors(), resumed.state_tensors())


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(ValueError, match=r"learner.balance moves the routers, but freeze_router keeps them"):
        LearnerSpec.model_validate({"balance": {}})
    with pytest.raises(MilesError, match=r"learner.balance: the model has no routers"):
        make_balance(tiny_model("llama"), BalanceSpec())
    assert make_balance(tiny_model("llama"), None) is None
