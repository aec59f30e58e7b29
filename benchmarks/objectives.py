"""The learner's objectives against verl's and TRL's own code: advantages, correction weights, losses, gradients on one batch.

    python benchmarks/objectives.py --install DIR     # once: a venv with verl 0.9.1, TRL 1.16.0 (1.6 GB with torch for CPU)
    python benchmarks/objectives.py --peers DIR       # compares, prints a table, writes benchmarks/objectives.json

The batch: 8 groups of 8 rows of 1 to 40 tokens, float64, one group without spread. Compared is what both sides define alike,
each peer called with the settings that make it so (dual clip of verl out of reach; TRL's GRPOTrainer._compute_loss with a model
that returns the batch's logprobs). The critic's batch has gaps of tokens that nobody sampled. TRL's advantages are inside its
generation step and its PPO in its training loop: they cannot be called. Differences are
the largest absolute one, and that over the largest absolute value of ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PACKAGES = ("torch==2.13.0", "verl==0.9.1", "trl==1.16.0")
OUTPUT = Path(__file__).with_suffix(".json")
GROUPS, SAMPLES, LONGEST = 8, 8, 40
Array = npt.NDArray[np.float64]
Found = dict[str, Array]
"""Results by name: `advantage/...`, `weights/...` and `gradient/...` as [rows, LONGEST], `loss/...` as [1]."""

NOTES = {
    ("advantage/group_std", "verl 0.9.1"): "std + 1e-4 here, + 1e-6 there",
    ("advantage/batch_whitened", "verl 0.9.1"): "1e-8 in the mean's divisor there",
    ("advantage/gae", "verl 0.9.1"): "1e-8 in the mean's divisor there",
    **{
        (f"{what}/{name}", "verl 0.9.1"): "1e-8 in a row's length there"
        for what in ("loss", "gradient")
        for name in ("grpo paper", "gspo", "gspo uncorrected")
    },
    ("gradient/gspo", "TRL 1.16.0"): "each token has its own weight here, its row's mean weight there",
}


def make_batch(seed: int = 0) -> Found:
    """Padded on the right: rewards [groups, samples]; mask and logprobs [rows, LONGEST]."""
    rng = np.random.default_rng(seed)
    rows = GROUPS * SAMPLES
    mask = (np.arange(LONGEST) < rng.integers(1, LONGEST + 1, rows)[:, None]).astype(np.float64)
    rewards = rng.integers(0, 2, (GROUPS, SAMPLES)) + rng.normal(0, 0.05, (GROUPS, SAMPLES))
    rewards[3] = 1.0
    old = -rng.exponential(1.0, mask.shape) * mask
    return {
        "rewards": rewards,
        "mask": mask,
        "old": old,
        "logp": old + rng.normal(0, 0.25, mask.shape) * mask,
        "near": old + rng.normal(0, 1e-3, mask.shape) * mask,
        "rollout": old - rng.normal(0, 0.4, mask.shape) * mask,
    } | make_values(mask, rng)


def make_values(mask: Array, rng: np.random.Generator) -> Found:
    """For a critic: which tokens of a row were sampled (the last one always is), values at the start of a step and now."""
    ends = mask.cumsum(axis=1) == mask.sum(axis=1, keepdims=True)
    sampled = mask * np.where(ends, 1, rng.integers(0, 2, mask.shape))
    values = rng.normal(0, 1, mask.shape) * sampled
    return {"sampled": sampled, "values": values, "values_now": values + rng.normal(0, 0.3, mask.shape) * sampled}


# --- ours


def ours(batch: Found) -> Found:
    """By the modules of miles_core.learner."""
    from miles_core.learner.advantages import advantages
    from miles_core.learner.corrections import correction_weights
    from miles_core.learner.segments import Segments
    from miles_core.presets import Advantage
    from miles_core.recipe import LearnerSpec

    mask, rewards = torch.from_numpy(batch["mask"]), torch.from_numpy(batch["rewards"])
    lengths = mask.sum(dim=1).reshape(rewards.shape)
    inside = mask.flatten() > 0
    rows = torch.arange(len(mask)).repeat_interleave(LONGEST)
    segments = Segments(rows, len(mask), inside)
    log_weight = torch.from_numpy(batch["old"] - batch["rollout"]).flatten()
    found: Found = {}
    kinds: tuple[Advantage, ...] = ("group_std", "group_mean", "leave_one_out", "batch_whitened")
    for kind in kinds:
        found[f"advantage/{kind}"] = (advantages(rewards, lengths, kind).reshape(-1, 1) * mask).numpy()
    for correction in ("tis", "mis_token", "mis_sequence"):
        weights = correction_weights(log_weight, segments, LearnerSpec.model_validate({"correction": correction}))
        found[f"weights/{correction}"] = (weights.reshape(mask.shape) * mask).numpy()
    for name, (fields, logp) in our_losses().items():
        loss, gradient = our_loss(batch, LearnerSpec.model_validate(fields), logp)
        found[f"loss/{name}"], found[f"gradient/{name}"] = loss, gradient
    return found | our_critic(batch)


GAMMA, GAE_LAMBDA, VALUE_CLIP = 0.99, 0.95, 0.2


def our_critic(batch: Found) -> Found:
    """Advantages, returns, and the critic's loss as a mean over tokens."""
    from miles_core.learner.critic import Targets, gae, value_loss, whitening

    inside = batch["sampled"] > 0
    raw = np.zeros_like(batch["values"])
    for row, reward in enumerate(batch["rewards"].ravel()):
        raw[row, inside[row]] = gae(batch["values"][row, inside[row]], float(reward), GAMMA, GAE_LAMBDA)
    mean, scale = whitening(raw[inside])
    returns = (raw + batch["values"]) * inside
    values = torch.from_numpy(batch["values_now"]).requires_grad_()
    targets = Targets(torch.from_numpy(batch["values"]), torch.from_numpy(returns))
    loss = value_loss(values, targets, torch.from_numpy(inside), VALUE_CLIP)[0] / inside.sum()
    found: Found = {"advantage/gae": (raw - mean) * scale * inside, "returns/gae": returns}
    keep(found, "critic", loss, values)
    return found


def our_losses() -> dict[str, tuple[dict[str, Any], str]]:
    """LearnerSpec's fields, and which logprobs: GSPO's clip is so narrow that it is compared near the old policy."""
    return {
        "grpo": ({"objective": "grpo"}, "logp"),
        "grpo paper": ({"objective": "grpo", "clip_high": 0.2, "aggregation": "sequence_mean"}, "logp"),
        "dr_grpo": ({"objective": "dr_grpo", "loss_divisor_tokens": LONGEST}, "logp"),
        "gspo": ({"objective": "gspo"}, "near"),
        "gspo uncorrected": ({"objective": "gspo", "correction": "none"}, "near"),
        "cispo": ({"objective": "cispo"}, "logp"),
        "rloo": ({"objective": "rloo", "loss_divisor_tokens": LONGEST}, "logp"),
        "reinforce_pp": ({"objective": "reinforce_pp"}, "logp"),
    }


def our_loss(batch: Found, spec: Any, name: str) -> tuple[Array, Array]:
    """Loss [1] and gradient [rows, LONGEST] of the whole batch as one minibatch, with the recipe's advantages and weights."""
    from miles_core.learner.advantages import advantages
    from miles_core.learner.losses import Tokens, Totals, policy_loss

    inside = torch.from_numpy(batch["mask"]).flatten() > 0
    rewards = torch.from_numpy(batch["rewards"])
    per_row = advantages(rewards, torch.from_numpy(batch["mask"].sum(axis=1)).reshape(rewards.shape), spec.advantage).flatten()
    rows = torch.arange(len(batch["mask"])).repeat_interleave(LONGEST)
    logp = torch.from_numpy(batch[name]).flatten().requires_grad_()
    old, rollout = (torch.from_numpy(batch[column]).flatten() for column in ("old", "rollout"))
    tokens = Tokens(logp, old, rollout, per_row[rows], inside, rows, len(batch["mask"]))
    found = policy_loss(tokens, Totals(tokens=float(inside.sum()), episodes=len(batch["mask"])), spec)
    found.loss.backward()
    assert logp.grad is not None
    return found.loss.detach().reshape(1).numpy(), logp.grad.reshape(batch["mask"].shape).numpy()


# --- theirs, run by the venv's python


def verl_side(batch: Found, our: Found) -> Found:
    """verl 0.9.1. A loss gets our advantages and weights, so that their differences do not show twice."""
    return verl_advantages_and_weights(batch) | verl_losses(batch, our) | verl_critic(batch, our)


def verl_critic(batch: Found, our: Found) -> Found:
    """A gap costs nothing there either: values and carry pass over it."""
    from verl.trainer.ppo import core_algos

    sampled, values = torch.from_numpy(batch["sampled"]), torch.from_numpy(batch["values"])
    last = sampled * (sampled.cumsum(dim=1) == sampled.sum(dim=1, keepdim=True))
    scores = last * torch.from_numpy(batch["rewards"]).reshape(-1, 1)
    advantages, returns = core_algos.compute_gae_advantage_return(scores, values, sampled, GAMMA, GAE_LAMBDA)
    found: Found = {"advantage/gae": (advantages * sampled).numpy(), "returns/gae": (returns * sampled).numpy()}
    now = torch.from_numpy(batch["values_now"]).requires_grad_()
    loss, _ = core_algos.compute_value_loss(now, torch.from_numpy(our["returns/gae"]), values, sampled, VALUE_CLIP)
    keep(found, "critic", loss, now)
    return found


def verl_advantages_and_weights(batch: Found) -> Found:
    """An outcome's reward stands on a row's last token."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    mask, rewards = torch.from_numpy(batch["mask"]), torch.from_numpy(batch["rewards"])
    last = mask * (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))
    scores, index = last * rewards.reshape(-1, 1), np.repeat(np.arange(GROUPS), SAMPLES)
    found: Found = {}
    for name, call in {
        "group_std": lambda: core_algos.compute_grpo_outcome_advantage(scores.clone(), mask, index),
        "group_mean": lambda: core_algos.compute_grpo_outcome_advantage(
            scores.clone(), mask, index, norm_adv_by_std_in_grpo=False
        ),
        "leave_one_out": lambda: core_algos.compute_rloo_outcome_advantage(scores.clone(), mask, index),
        "batch_whitened": lambda: core_algos.compute_reinforce_plus_plus_outcome_advantage(
            scores.clone(), mask, config=SimpleNamespace(gamma=1.0)
        ),
    }.items():
        found[f"advantage/{name}"] = call()[0].numpy()
    log_weight = torch.from_numpy(batch["old"] - batch["rollout"])
    for name, level, bounds in (
        ("tis", "token", 2.0), ("mis_token", "token", "0.5_5.0"), ("mis_sequence", "sequence", "0.5_2.0")
    ):  # fmt: skip
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_weight, mask, level, bounds)
        found[f"weights/{name}"] = weights.numpy()
    return found


def verl_losses(batch: Found, our: Found) -> Found:
    """By name: policy loss, clip, aggregation, logprobs."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    mask = torch.from_numpy(batch["mask"])
    found: Found = {}
    for name, (kind, low, high, aggregation, logp) in {
        "grpo": ("vanilla", 0.2, 0.28, "token-mean", "logp"),
        "grpo paper": ("vanilla", 0.2, 0.2, "seq-mean-token-mean", "logp"),
        "dr_grpo": ("vanilla", 0.2, 0.2, "seq-mean-token-sum-norm", "logp"),
        "gspo": ("gspo", 3e-4, 4e-4, "seq-mean-token-mean", "near"),
        "gspo uncorrected": ("gspo", 3e-4, 4e-4, "seq-mean-token-mean", "near"),
        "cispo": ("cispo", 1.0, 4.0, "token-mean", "logp"),
        "rloo": ("vanilla", 0.2, 0.2, "seq-mean-token-sum-norm", "logp"),
        "reinforce_pp": ("vanilla", 0.2, 0.2, "token-mean", "logp"),
    }.items():
        settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 1e9, "rollout_n": SAMPLES}
        config = ActorConfig(strategy="fsdp", use_dynamic_bsz=True, **settings)
        values = torch.from_numpy(batch[logp]).requires_grad_()
        loss, _ = core_algos.get_policy_loss_fn(kind)(
            torch.from_numpy(batch["old"]), values, advantage_of(our, name), mask, aggregation, config,
            weights_of(our, name),
        )  # fmt: skip
        keep(found, name, loss, values)
    return found


def trl_side(batch: Found, our: Found) -> Found:
    """TRL 1.16.0: the loss method of its trainer, bound to what it reads of a trainer."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    mask = torch.from_numpy(batch["mask"])
    found: Found = {}
    for name, (loss_type, level, low, high, logp) in {
        "grpo": ("dapo", "token", 0.2, 0.28, "logp"),
        "grpo paper": ("grpo", "token", 0.2, 0.2, "logp"),
        "dr_grpo": ("dr_grpo", "token", 0.2, 0.2, "logp"),
        "gspo": ("grpo", "sequence", 3e-4, 4e-4, "near"),
        "gspo uncorrected": ("grpo", "sequence", 3e-4, 4e-4, "near"),
        "cispo": ("cispo", "token", 1.0, 5.0, "logp"),
    }.items():
        values = torch.from_numpy(batch[logp]).requires_grad_()
        trainer = trl_trainer(values, loss_type, level, low, high)
        inputs = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": advantage_of(our, name), "old_per_token_logps": torch.from_numpy(batch["old"]),
            "importance_sampling_ratio": weights_of(our, name), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        keep(found, name, GRPOTrainer._compute_loss(trainer, None, inputs), values)
    return found


def trl_trainer(values: torch.Tensor, loss_type: str, level: str, low: float, high: float) -> Any:
    """The attributes of a GRPOTrainer that its loss reads; a fresh one each time."""
    accelerator = SimpleNamespace(num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **named: (values, torch.zeros_like(values), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level,
        beta=0.0, loss_type=loss_type, epsilon_low=low, epsilon_high=high, use_vllm=True,
        vllm_importance_sampling_correction=True, model=SimpleNamespace(training=True), max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1, args=SimpleNamespace(delta=None, steps_per_generation=1),
        _entropy_bonus_enabled=False, accelerator=accelerator, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip


def advantage_of(our: Found, name: str) -> torch.Tensor:
    """The advantages that our loss of that name was given, by token."""
    kinds = {"dr_grpo": "group_mean", "rloo": "leave_one_out", "reinforce_pp": "batch_whitened"}
    return torch.from_numpy(our[f"advantage/{kinds.get(name, 'group_std')}"])


def weights_of(our: Found, name: str) -> torch.Tensor:
    """The factors that our loss of that name gave each token."""
    weights = torch.from_numpy(our["weights/tis"])
    return torch.ones_like(weights) if name.endswith("uncorrected") else weights


def keep(found: Found, name: str, loss: torch.Tensor, values: torch.Tensor) -> None:
    """Loss and gradient."""
    loss.backward()
    assert values.grad is not None
    found[f"loss/{name}"], found[f"gradient/{name}"] = loss.detach().reshape(1).numpy(), values.grad.numpy()


SIDES: dict[str, Callable[[Found, Found], Found]] = {"verl 0.9.1": verl_side, "TRL 1.16.0": trl_side}


# --- the comparison


def theirs(peers: Path, batch: Found, our: Found) -> dict[str, Found]:
    """Both sides' results from the other venv's python; arrays travel as .npz, no pickles."""
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "batch.npz"), **batch)  # type: ignore[arg-type]
        np.savez(Path(folder, "our.npz"), **our)  # type: ignore[arg-type]
        for side in SIDES:
            command = [str(peers / "bin" / "python"), __file__, "--side", side, "--exchange", folder]
            subprocess.run(command, check=True, timeout=600)
            results[side] = dict(np.load(Path(folder, "their.npz")))
    return results


def compare(our: Found, their: dict[str, Found]) -> list[dict[str, Any]]:
    """A row of the table for each result and peer that has it."""
    rows = []
    for name, expected in our.items():
        for side, found in their.items():
            if name in found:
                absolute = float(np.abs(found[name] - expected).max())
                relative = absolute / float(np.abs(expected).max())
                note = NOTES.get((name, side), "")
                rows.append({"what": name, "peer": side, "absolute": absolute, "relative": relative, "note": note})
    return rows


def install(folder: Path) -> None:
    """A venv with the peers. Several GB where pip's default torch is the CUDA build: point pip at a CPU wheel first."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", *PACKAGES], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR")
    parser.add_argument("--peers", type=Path, metavar="DIR")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        batch, our = (dict(np.load(options.exchange / name)) for name in ("batch.npz", "our.npz"))
        np.savez(options.exchange / "their.npz", **SIDES[options.side](batch, our))  # type: ignore[arg-type]
    elif options.install:
        install(options.install)
    elif options.peers:
        batch = make_batch()
        our = ours(batch)
        rows = compare(our, theirs(options.peers, batch, our))
        for row in rows:
            print(f"{row['what']:26} {row['peer']:12} {row['absolute']:9.1e} {row['relative']:9.1e}  {row['note']}")
        OUTPUT.write_text(json.dumps({"packages": PACKAGES, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    else:
        parser.error("give --install DIR or --peers DIR")


if __name__ == "__main__":
    main()
