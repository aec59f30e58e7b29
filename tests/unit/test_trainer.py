"""The DeepSpeed trainer: bit-exact continuation, gradients that ignore how rows are split, weights that go out whole."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.errors import DigestMismatch, MilesError
from miles_core.learner.batching import microbatch, with_signal
from miles_core.learner.checkpoints import list_files, seal
from miles_core.learner.losses import Tokens, Totals, policy_loss
from miles_core.learner.packing import plan
from miles_core.learner.trainer import CHECKPOINT_TAG, Dtype, Policy, Trainer, learning_rate
from miles_core.recipe import LearnerSpec, LoraSpec
from miles_core.records import FileDigest
from miles_core.store.fs import FileSystem
from miles_core.trajectories.schema import Trajectory
from tests.unit.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SPEC = LearnerSpec(lr=1e-2, minibatches=2, microbatch_tokens=72)
LORA = LoraSpec(rank=4, alpha=8)
GROUPS, SAMPLES = 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "base")


def make_row(seed: int, group: int, index: int) -> Trajectory:
    """Up to 24 random tokens of which about a half are sampled, with a hole as a tool's answer leaves it."""
    rng = np.random.default_rng([seed, group, index])
    length = int(rng.integers(10, 25))
    mask = (np.arange(length) >= length // 2).astype(np.uint8)
    mask[length // 2 + 2] = 0
    return Trajectory(
        trajectory_id=f"{seed}-{group}/{index}@rollout-0.a1",
        sample_id=f"{seed}-{group}/{index}",
        group_id=f"{seed}-{group}",
        order_id="o",
        producer="rollout-0",
        producer_attempt=1,
        task_seed=0,
        tokens=rng.integers(0, 64, length).astype(np.int32),
        loss_mask=mask,
        logprobs=((rng.normal(-5.5, 0.5, length)) * mask).astype(np.float32),
        versions=(),
        turns=(),
        temperature=1.0,
        status="complete",
    )


def make_batch(seed: int) -> tuple[list[Trajectory], npt.NDArray[np.float64]]:
    """16 rows of 4 groups; the second group has no signal."""
    rows = [make_row(seed, group, index) for group in range(GROUPS) for index in range(SAMPLES)]
    advantages = np.random.default_rng(seed).normal(size=(GROUPS, SAMPLES))
    advantages[1] = 0
    return rows, advantages.flatten()


def train(trainer: Trainer, steps: range) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for step in steps:
        metrics = trainer.train(*make_batch(step), step)
    return metrics


def assert_same_bytes(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    changed = [name for name in first if first[name].numpy().tobytes() != second[name].numpy().tobytes()]
    assert not changed


def sealed(folder: Path) -> list[FileDigest]:
    """What a journal would announce of a checkpoint."""
    return [seal(FileSystem(), folder, name) for name in list_files(folder)]


def start(code: str, *arguments: Path, **environment: str) -> subprocess.Popen[str]:
    """A fresh process that runs `code` with this module's names."""
    command = [sys.executable, "-c", f"from tests.unit.test_trainer import *\n{code}", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=540)
    assert process.returncode == 0, errors[-3000:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_trainer_goes_on_bit_exactly(folder: Path, tmp_path: Path, dtype: Dtype) -> None:
    straight = Trainer(folder, SPEC, dtype)
    train(straight, range(1, 3))
    straight.save(tmp_path)
    train(straight, range(3, 5))
    resumed = Trainer(folder, SPEC, dtype)
    resumed.load(tmp_path, sealed(tmp_path))
    train(resumed, range(3, 5))
    first, second = straight.state_tensors(), resumed.state_tensors()
    assert {tensor.dtype for tensor in first.values()} == {getattr(torch, dtype)}
    assert_same_bytes({k: v.float() for k, v in first.items()}, {k: v.float() for k, v in second.items()})


def test_a_new_process_goes_on_bit_exactly(folder: Path, tmp_path: Path) -> None:
    straight = Trainer(folder, SPEC, "float32")
    train(straight, range(1, 3))
    straight.save(tmp_path / "saved")
    train(straight, range(3, 5))
    code = """
trainer = Trainer(Path(sys.argv[1]), SPEC, "float32")
trainer.load(Path(sys.argv[2]), sealed(Path(sys.argv[2])))
train(trainer, range(3, 5))
torch.save(trainer.state_tensors(), sys.argv[3])
"""
    finish(start(code, folder, tmp_path / "saved", tmp_path / "weights.pt"))
    assert_same_bytes(straight.state_tensors(), torch.load(tmp_path / "weights.pt"))


SLOW = SPEC.model_copy(update={"lr": 1e-3})
"""AdamW turns rounding in a gradient near 0 into a part of the learning rate."""
STAGES = {str(stage): SLOW.model_copy(update={"zero_stage": stage}) for stage in (1, 2, 3)}
PPO = LearnerSpec.model_validate(
    {"objective": "ppo", "zero_stage": 3, "critic": {"gae_lambda": 0.9}, **SLOW.model_dump(include={"lr", "microbatch_tokens"})}
)
ON_RANKS: dict[str, tuple[LearnerSpec, LoraSpec | None]] = {
    **{stage: (spec, None) for stage, spec in STAGES.items()},
    **{f"lora{stage}": (spec, LORA) for stage, spec in STAGES.items()},
    "critic": (PPO, None),
}
RANKS_CODE = """
store = torch.distributed.FileStore(sys.argv[2] + "/store", 2)
torch.distributed.init_process_group("gloo", store=store, rank=int(sys.argv[3]), world_size=2)
os.environ["LOCAL_RANK"] = sys.argv[3]
for name, (spec, lora) in ON_RANKS.items():
    straight = Trainer(Path(sys.argv[1]), spec, "float32", lora=lora)
    metrics = train(straight, range(1, 3))
    weights = straight.state_tensors()
    saved = Path(sys.argv[2]) / f"saved{name}"
    straight.save(saved)
    torch.distributed.barrier()
    train(straight, range(3, 5))
    resumed = Trainer(Path(sys.argv[1]), spec, "float32", lora=lora)
    resumed.load(saved, sealed(saved))
    train(resumed, range(3, 5))
    torch.save((metrics, weights, straight.state_tensors(), resumed.state_tensors()), f"{sys.argv[2]}/{name}-{sys.argv[3]}")
"""


@pytest.mark.timeout(600)
def test_two_ranks_give_the_weights_and_metrics_of_one_and_go_on_bit_exactly(folder: Path, tmp_path: Path) -> None:
    """All weights, and an adapter alone."""
    ranks = [start(RANKS_CODE, folder, tmp_path, Path(rank)) for rank in ("0", "1")]
    for process in ranks:
        finish(process)
    for case, (spec, lora) in ON_RANKS.items():
        alone = Trainer(folder, spec.model_copy(update={"zero_stage": 1}), "float32", lora=lora)
        expected = train(alone, range(1, 3))
        (metrics, weights, straight, resumed), other = (torch.load(tmp_path / f"{case}-{rank}") for rank in (0, 1))
        for name, tensor in alone.state_tensors().items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
        # How rows lie in microbatches depends on the number of ranks.
        same_rows = expected | {"computed_frac": metrics["computed_frac"]}
        assert metrics == other[0] == pytest.approx(same_rows, rel=1e-4, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert_same_bytes(straight, resumed)
        assert other[1] == {}, "only rank 0 gives the weights away"


def test_the_same_inputs_give_the_same_bytes(folder: Path) -> None:
    first, second = (Trainer(folder, SPEC, "float32") for _ in range(2))
    before = first.state_tensors()
    assert train(first, range(1, 4)) == train(second, range(1, 4))
    assert_same_bytes(first.state_tensors(), second.state_tensors())
    assert not torch.equal(before["model.embed_tokens.weight"], first.state_tensors()["model.embed_tokens.weight"])


def test_without_a_learning_rate_nothing_moves_and_every_ratio_is_one(folder: Path) -> None:
    trainer = Trainer(folder, SPEC.model_copy(update={"lr": 0.0}), "float32")
    before = trainer.state_tensors()
    metrics = train(trainer, range(1, 3))
    assert metrics["updates"] == 2 and metrics["grad_norm"] > 0
    assert metrics["ratio_deviation_max"] < 1e-6 and metrics["clip_frac"] == 0
    assert_same_bytes(before, trainer.state_tensors())


def test_a_step_without_signal_changes_nothing_and_the_next_one_trains(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    before = trainer.state_tensors()
    rows, advantages = make_batch(1)
    metrics = trainer.train(rows, np.zeros_like(advantages), 1)
    assert metrics["updates"] == metrics["tokens"] == metrics["loss"] == 0
    assert all(np.isfinite(value) for value in metrics.values())
    assert_same_bytes(before, trainer.state_tensors())
    following = trainer.train(rows, advantages, 2)
    assert following["updates"] == 2 and following.keys() == metrics.keys()


def test_a_minibatch_without_signal_is_no_update(folder: Path) -> None:
    rows, advantages = make_batch(1)
    advantages[: 2 * SAMPLES] = 0
    assert Trainer(folder, SPEC, "float32").train(rows, advantages, 1)["updates"] == 1


def test_rewarded_tokens_become_likelier_and_the_others_less(folder: Path) -> None:
    trainer = Trainer(folder, SPEC.model_copy(update={"lr": 3e-3, "ramp_steps": 0}), "float32")
    rows, _ = make_batch(1)
    advantages = np.where(np.arange(len(rows)) % 2 == 0, 1.0, -1.0)

    def sampled_logprobs() -> npt.NDArray[np.float64]:
        found = trainer.logprobs([row.tokens.tolist() for row in rows])
        return np.array([values[row.loss_mask[1:] == 1].mean() for row, values in zip(rows, found, strict=True)])

    before = sampled_logprobs()
    for step in range(1, 5):
        trainer.train(rows, advantages, step)
    gain = sampled_logprobs() - before
    assert (gain[advantages > 0] > 0).all()
    assert gain[advantages < 0].mean() < 0


def reference_gradient(folder: Path, budget: int, *, drop: bool) -> dict[str, torch.Tensor]:
    """Gradient of one update over the whole batch, without DeepSpeed; with rows of advantage 0 or without."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder)).eval()
    rows, advantages = make_batch(1)
    kept = with_signal(list(range(len(rows))), rows, advantages) if drop else list(range(len(rows)))
    totals = Totals(tokens=sum(row.num_sampled for row in rows), episodes=len(rows))
    for stack in plan(kept, rows, budget, 1, None)[0]:
        micro = microbatch(stack, rows, advantages)
        logp, _ = policy(micro)
        columns = (logp, logp.detach(), micro.rollout_logprobs, micro.advantages, micro.mask, micro.rows)
        policy_loss(Tokens(*columns, num_rows=micro.num_rows), totals, LearnerSpec()).loss.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in gradient.values()]).norm())


@pytest.mark.parametrize("budget", [1, 72, 120])
def test_the_gradient_ignores_how_rows_are_split_and_rows_without_signal(folder: Path, budget: int) -> None:
    whole, split = reference_gradient(folder, 8192, drop=False), reference_gradient(folder, budget, drop=True)
    for name, expected in whole.items():
        torch.testing.assert_close(split[name], expected, rtol=0, atol=1e-5 * norm(whole))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tokens", [48, 8192])
def test_deepspeed_sums_microbatches_to_the_same_gradient(folder: Path, stage: int, tokens: int) -> None:
    spec = LearnerSpec.model_validate({"minibatches": 1, "microbatch_tokens": tokens, "zero_stage": stage, "grad_clip": 1e9})
    metrics = Trainer(folder, spec, "float32").train(*make_batch(1), 1)
    assert metrics["grad_norm"] == pytest.approx(norm(reference_gradient(folder, 8192, drop=False)), rel=1e-5)


def test_an_update_is_adamw_on_the_clipped_gradient(folder: Path) -> None:
    spec = LearnerSpec(lr=1e-3, ramp_steps=0, minibatches=1, grad_clip=0.5)
    trainer = Trainer(folder, spec, "float32")
    trainer.train(*make_batch(1), 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    gradient = reference_gradient(folder, 8192, drop=True)
    for name, parameter in model.named_parameters():
        parameter.grad = gradient[f"model.{name}"]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    found = trainer.state_tensors()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
def test_weights_go_out_under_their_names_once_and_as_a_copy(tmp_path: Path, kind: Any) -> None:
    trainer = Trainer(save_tiny_model(tmp_path / kind, kind), SPEC, "float32")
    train(trainer, range(1, 2))
    tensors = trainer.state_tensors()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
    assert set(tensors) == {name for name, _ in model.named_parameters()}
    model.load_state_dict(tensors, strict=kind == "llama")
    tokens = list(range(12))
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float() / 0.7, dim=-1)
    expected = scores[torch.arange(11), torch.tensor(tokens[1:])].numpy()
    (found,) = trainer.logprobs([tokens], temperature=0.7)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        tensor.zero_()
    np.testing.assert_array_equal(trainer.logprobs([tokens], temperature=0.7)[0], found)


def test_logprobs_keep_the_order_and_lengths_of_the_lists(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 64, int(length)).tolist() for length in rng.integers(2, 30, 40)]
    found = trainer.logprobs(lists)
    assert [values.dtype for values in found] == [np.dtype(np.float32)] * 40
    assert [len(values) for values in found] == [len(tokens) - 1 for tokens in lists]
    for index in (0, 17, 39):
        np.testing.assert_allclose(found[index], trainer.logprobs([lists[index]])[0], atol=1e-5)


def test_an_on_policy_batch_shows_no_gap_at_its_own_temperature(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    rows, advantages = make_batch(1)
    on_policy = []
    for row in rows:
        (values,) = trainer.logprobs([row.tokens.tolist()], temperature=0.8)
        logprobs = np.concatenate([[0], values]) * row.loss_mask
        on_policy.append(replace(row, temperature=0.8, logprobs=logprobs.astype(np.float32)))
    metrics = trainer.train(on_policy, advantages, 1)
    assert metrics["logprob_gap_max"] < 1e-5 and metrics["ess"] == pytest.approx(1) and metrics["tis_clip_frac"] == 0
    assert trainer.train(rows, advantages, 2)["logprob_gap_max"] > 0.1
    signal = sum(row.num_sampled for row, advantage in zip(rows, advantages, strict=True) if advantage)
    assert metrics["tokens"] == signal and 0 < metrics["entropy"] < np.log(400)


def test_a_logprob_that_is_not_finite_is_left_out_and_counted(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    rows, advantages = make_batch(1)
    broken = rows[0].logprobs.copy()
    broken[np.flatnonzero(rows[0].loss_mask)[0]] = -np.inf
    metrics = trainer.train([replace(rows[0], logprobs=broken), *rows[1:]], advantages, 1)
    assert metrics["nonfinite_tokens"] == 1
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state_tensors().values())


def test_lost_weights_show_in_the_metrics(folder: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    metrics = trainer.train(make_batch(1)[0], np.full(GROUPS * SAMPLES, 1e38), 1)
    assert not all(np.isfinite(value) for value in metrics.values())


def test_the_learning_rate_follows_the_step() -> None:
    spec = LearnerSpec(lr=0.3, ramp_steps=3)
    assert [learning_rate(spec, step) for step in (1, 2, 3, 4, 100)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    assert learning_rate(LearnerSpec(lr=0.3, ramp_steps=0), 1) == 0.3
    falling = LearnerSpec(lr=0.3, ramp_steps=2, decay_steps=3)
    assert [learning_rate(falling, step) for step in (1, 2, 3, 4, 5, 100)] == pytest.approx([0.15, 0.3, 0.21, 0.12, 0.03, 0.03])


def test_wrong_inputs_are_refused(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    rows, advantages = make_batch(1)
    with pytest.raises(ValueError, match="step 7: 16 trajectories, but 15 advantages"):
        trainer.train(rows, advantages[1:], 7)
    with pytest.raises(MilesError, match="a checkpoint of 0 ranks, the learner has 1 now"):
        trainer.load(tmp_path, [])


def test_only_announced_files_with_the_announced_bytes_are_unpickled(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    names = trainer.save(tmp_path)
    files = sealed(tmp_path)
    assert sorted(names) == [file.name for file in files]
    model, optimizer = files
    with pytest.raises(DigestMismatch, match=r"model_states\.pt is not among the announced files"):
        Trainer(folder, SPEC, "float32").load(tmp_path, [optimizer])
    with pytest.raises(DigestMismatch, match=r"optim_states\.pt: digest .* announced x"):
        Trainer(folder, SPEC, "float32").load(tmp_path, [model, optimizer.model_copy(update={"digest": "x"})])


def test_a_disk_that_refuses_a_checkpoint_is_an_oserror_and_the_next_save_is_whole(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, SPEC, "float32")
    train(trainer, range(1, 2))
    full = tmp_path / "full" / CHECKPOINT_TAG
    full.mkdir(parents=True)
    (full / "mp_rank_00_model_states.pt").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        trainer.save(full.parent)
    trainer.save(tmp_path / "good")
    train(trainer, range(2, 3))
    resumed = Trainer(folder, SPEC, "float32")
    resumed.load(tmp_path / "good", sealed(tmp_path / "good"))
    train(resumed, range(2, 3))
    assert_same_bytes(trainer.state_tensors(), resumed.state_tensors())
