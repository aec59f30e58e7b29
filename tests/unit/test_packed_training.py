"""Rows that share positions train as rows by themselves do: same logprobs, same gradient, on all ranks and with less memory."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from miles_core.errors import MilesError
from miles_core.learner import batching
from miles_core.learner.batching import Microbatch, contexts, in_pieces, microbatch
from miles_core.learner.head import checkpoint_layers, score
from miles_core.learner.losses import Tokens, Totals, policy_loss
from miles_core.learner.packing import FAMILIES, plan
from miles_core.learner.trainer import Policy, Trainer
from miles_core.recipe import LearnerSpec
from miles_core.trajectories.schema import Trajectory
from tests.unit.test_packing import row
from tests.unit.test_routing import with_record
from tests.unit.tiny_models import save_tiny_model, tiny_config, tiny_model

SPEC = LearnerSpec(lr=0.0, minibatches=1, microbatch_tokens=64, grad_clip=1e9, freeze_router=False)
KINDS = ("qwen3", "qwen3_moe")
WAYS = tuple(itertools.product(KINDS, (1, 2, 3), (False, True)))
"""Model, ZeRO stage, gradient checkpointing."""
Found = tuple[dict[str, float], dict[str, torch.Tensor]]
"""Metrics and gradients of one update."""


def make_batch(kind: str = "qwen3") -> tuple[list[Trajectory], np.ndarray]:
    """4 prompts under one prefix x 4 samples of 1 to 9 tokens, some of which begin alike; a group without signal; a record that
    differs from that of the other samples from within the prompt on."""
    draw, rows = np.random.default_rng(0), []
    prefix = draw.integers(0, 64, 8).tolist()
    for group in range(4):
        prompt = [*prefix, *draw.integers(0, 64, 5).tolist()]
        answers = [draw.integers(0, 3, int(draw.integers(1, 10))).tolist() for _ in range(4)]
        rows += [replace(row([*prompt, *answer], 13), group_id=f"g{group}", temperature=0.8) for answer in answers]
    rows = [replace(each, logprobs=draw.normal(-5, 0.5, len(each.tokens)).astype(np.float32)) for each in rows]
    if kind == "qwen3_moe":
        sampled_by = tiny_model("qwen3_moe", 1)
        rows = [with_record(each, sampled_by) for each in rows]
        other = rows[5].experts
        assert other is not None
        rows[5] = replace(
            rows[5], experts=np.where(np.arange(len(other))[:, None, None] < 9, other, 7 - other).astype(np.uint8)
        )
    advantages = draw.normal(size=16)
    advantages[4 * 3 :] = 0
    return rows, advantages


def reference(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Gradient of the batch without DeepSpeed, every row by itself."""
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder)).eval()
    rows, advantages = make_batch(kind)
    totals = Totals(tokens=sum(each.num_sampled for each in rows), episodes=len(rows))
    for stack in plan(list(range(len(rows))), rows, 8192, 1, None)[0]:
        micro = microbatch(stack, rows, advantages)
        logp, _ = policy(micro)
        columns = (logp, logp.detach(), micro.rollout_logprobs, micro.advantages, micro.mask, micro.rows)
        policy_loss(Tokens(*columns, num_rows=micro.num_rows), totals, SPEC).loss.backward()
    return {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}


def one_update(folder: Path, kind: str, stage: int, again: bool) -> Found:
    """Of a trainer that packs, and makes the logits of 5 positions at a time."""
    from deepspeed.utils import safe_get_full_optimizer_state

    changes = {"zero_stage": stage, "gradient_checkpointing": again}
    trainer = Trainer(folder / kind, SPEC.model_copy(update=changes), "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "PIECE_ELEMENTS", 5 * trainer._module.model.config.vocab_size)
        metrics = trainer.train(*make_batch(kind), 1)
    # AdamW's first moment after its first step.
    moments = {name: safe_get_full_optimizer_state(each, "exp_avg") for name, each in trainer._module.named_parameters()}
    return metrics, {name: moment / (1 - SPEC.beta1) for name, moment in moments.items()}


def act_as_rank(folder: Path, rank: int) -> None:
    """One of two."""
    import os

    store = torch.distributed.FileStore(str(folder / "store"), 2)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.save([one_update(folder, *way) for way in WAYS], folder / f"found{rank}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        save_tiny_model(root / kind, kind)  # type: ignore[arg-type]
    return root


@pytest.fixture(scope="module")
def of_two_ranks(folder: Path) -> list[list[Found]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.protocol.learner_imports"])
    ranks = [context.Process(target=act_as_rank, args=(folder, rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(540)
    assert [process.exitcode for process in ranks] == [0, 0]
    return [torch.load(folder / f"found{rank}") for rank in range(2)]


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {kind: reference(folder / kind, kind) for kind in KINDS}


def assert_same(found: Found, expected: dict[str, torch.Tensor]) -> None:
    metrics, gradients = found
    assert metrics["ratio_deviation_start"] < 1e-6 and metrics["computed_frac"] < 0.75
    norm = float(torch.cat([each.flatten() for each in expected.values()]).norm())
    assert gradients.keys() == expected.keys() and metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5 * norm)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_takes_the_step_that_rows_by_themselves_take(
    folder: Path, references: dict[str, dict[str, torch.Tensor]], way: tuple[str, int, bool]
) -> None:
    assert_same(one_update(folder, *way), references[way[0]])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_so_do_two_ranks(
    of_two_ranks: list[list[Found]], references: dict[str, dict[str, torch.Tensor]], way: tuple[str, int, bool]
) -> None:
    for found in of_two_ranks:
        assert_same(found[WAYS.index(way)], references[way[0]])


# --- the forward pass


def both(rows: list[Trajectory]) -> tuple[Microbatch, Microbatch]:
    """All rows in one forward pass, sharing positions and by themselves."""
    made = []
    for pairs in (1e9, None):
        ((stack,),) = plan(list(range(len(rows))), rows, 8192, 1, pairs)
        made.append(microbatch(stack, rows, np.arange(len(rows), dtype=float)))
    assert made[0].tokens.numel() < 0.6 * made[1].tokens.numel()
    return made[0], made[1]


def by_row(batch: Microbatch, values: torch.Tensor) -> torch.Tensor:
    """In an order that does not depend on where the rows are; advantages number the rows."""
    return values[np.lexsort((batch.where[batch.slots].numpy(), batch.advantages.numpy()))]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_that_shares_gives_the_logprobs_and_entropies_of_rows_by_themselves(family: str) -> None:
    sizes = {name: value for name, value in tiny_config("llama").to_diff_dict().items() if name != "model_type"}
    config = AutoConfig.for_model(family, **sizes | {"head_dim": 8, "sliding_window": None})
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config), replay=False).eval()
    assert policy.model.config._attn_implementation == "sdpa"
    shared, alone = both(make_batch()[0])
    with torch.no_grad():
        for found, expected in zip(policy(shared), policy(alone), strict=True):
            torch.testing.assert_close(by_row(shared, found), by_row(alone, expected), rtol=0, atol=1e-5)


def test_a_bfloat16_learner_shares_as_well() -> None:
    shared, alone = both(make_batch()[0])
    policy = Policy(tiny_model().bfloat16()).eval()
    with torch.no_grad():
        found, expected = by_row(shared, policy(shared)[0]), by_row(alone, policy(alone)[0])
    assert (found - expected).abs().mean() < 0.02


@pytest.mark.parametrize("kind", ["window", "family"])
def test_a_model_that_cannot_share_says_so_and_trains_row_by_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    changes: dict[str, Any] = (
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} if kind == "window" else {}
    )
    if kind == "family":
        monkeypatch.setattr("miles_core.learner.packing.FAMILIES", frozenset())
    with caplog.at_level(logging.INFO, "miles"):
        trainer = Trainer(save_tiny_model(tmp_path / "model", **changes), SPEC, "float32")
    reason = "the model has layers of sliding_attention" if kind == "window" else "family qwen3 is not known"
    assert [record for record in caplog.records if reason in record.getMessage()]
    metrics = trainer.train(*make_batch(), 1)
    assert metrics["computed_frac"] >= 1 and metrics["ratio_deviation_start"] < 1e-6 and metrics["grad_norm"] > 0


# --- memory


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive together, and the largest of them in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest = self._alive = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        import weakref

        storage: Any = tensor.untyped_storage()
        if getattr(storage, "is_counted", False):
            return
        storage.is_counted = True
        size = storage.nbytes()
        self._alive += size
        self.peak_bytes, self.largest = max(self.peak_bytes, self._alive), max(self.largest, tensor.numel())
        weakref.finalize(storage, functools.partial(self._free, size))

    def _free(self, size: int) -> None:
        self._alive -= size


def scored(positions: int) -> tuple[list[torch.Tensor], PeakMemory]:
    """Logprobs, entropies and gradients of a head with a vocabulary of 2000, and what they took."""
    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(16, 2000), torch.randn(positions, 16, requires_grad=True)
    slots = torch.arange(positions).repeat_interleave(2)
    zeros = torch.zeros(len(slots))
    batch = Microbatch(
        tokens=torch.zeros(1, positions), where=torch.arange(positions), temperatures=torch.linspace(0.5, 1.5, positions),
        slots=slots, targets=torch.randint(2000, slots.shape), rows=slots, num_rows=positions, rollout_logprobs=zeros,
        advantages=zeros, mask=zeros.bool(), copies=torch.ones(1, positions),
    )  # fmt: skip
    with PeakMemory() as memory:
        logprobs, entropies = score(layer, hidden, in_pieces(batch, positions, 2000))
        (logprobs * torch.linspace(-1, 1, len(slots))).sum().backward()
    gradients = [each.grad for each in (hidden, layer.weight, layer.bias) if each.grad is not None]
    return [logprobs.detach(), entropies, *gradients], memory


def test_logits_in_pieces_are_the_same_and_take_the_memory_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, all_at_once = scored(200)
    monkeypatch.setattr(batching, "PIECE_ELEMENTS", 14_000)
    pieces, memory = scored(200)
    assert len(whole) == len(pieces) == 5
    for found, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert all_at_once.largest == 200 * 2000 and memory.largest <= max(14_000, 16 * 2000)
    assert memory.peak_bytes < all_at_once.peak_bytes / 4
    _, twice = scored(400)
    assert twice.peak_bytes < 1.2 * memory.peak_bytes


def test_gradient_checkpointing_takes_less_memory_and_a_model_without_layers_for_it_is_refused() -> None:
    batch, peaks, gradients = contexts([list(range(60))] * 20, 1.0), [], []
    for again in (False, True):
        policy = Policy(tiny_model(num_hidden_layers=6)).eval()
        if again:
            checkpoint_layers(policy.model)
        with PeakMemory() as memory:
            policy(batch)[0].sum().backward()
        peaks.append(memory.peak_bytes)
        gradients.append(policy.model.model.layers[0].mlp.up_proj.weight.grad)
    assert peaks[1] < 0.5 * peaks[0]
    assert torch.equal(gradients[0], gradients[1]) and gradients[0].norm() > 0
    bare = torch.nn.Linear(1, 1)
    bare.config = tiny_config("qwen3")
    with pytest.raises(MilesError, match="gradient_checkpointing: the model's family qwen3 has no layers"):
        checkpoint_layers(bare)
