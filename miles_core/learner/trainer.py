"""The learner's DeepSpeed engine: trajectories and advantages in, new weights out.

One batch is one step: at most `minibatches` optimizer updates over whole groups. `logp_old` of every trained token is
computed under the weights at the start of the step; each update's loss is an average over its whole minibatch (losses.py), and
rows without signal (advantage 0) are counted in it but never computed, since they add nothing. With a critic (critic.py)
rewards come in the place of advantages, and every row is computed.

Invariants: the same state and inputs give the same bytes, however the rows lie in microbatches the same gradient; the
learning rate is a function of the step's number and the batch's staleness; a step in which no row has signal changes
nothing and is still a step.
Every rank calls every method, with the same arguments; rows are dealt over the ranks here.

Failure: an update that is not finite is not hidden but returned as a metric that is not finite: the weights are lost then,
and the caller must not use them. Everything slow or fragile in DeepSpeed's start is avoided: no extension is compiled
(client torch AdamW, no shm_comm), and a single process needs no port and no launcher.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from miles_core.adapters import adapter_tensors, add_adapter, base_only
from miles_core.errors import MilesError
from miles_core.learner.balance import make_balance
from miles_core.learner.batching import (
    Microbatch,
    contexts,
    in_live_groups,
    in_pieces,
    of_rank,
    split_groups,
    with_signal,
)
from miles_core.learner.corrections import cut_tokens, mismatch_metrics
from miles_core.learner.critic import CHECKPOINT_TAG as CRITIC_TAG
from miles_core.learner.critic import Critic, Targets, ValueModel
from miles_core.learner.head import checkpoint_layers, hidden_states, score
from miles_core.learner.losses import PolicyLoss, Tokens, Totals, episode_parts, minibatch_totals, policy_loss
from miles_core.learner.moderation import rate_factor
from miles_core.learner.packing import Indexes, computed_frac, pairs_per_token, plan, why_not_shared
from miles_core.learner.routing import RoutingReplay, changed_metric, freeze_routers, load_metrics, without_replay
from miles_core.learner.segments import Segments
from miles_core.recipe import CriticSpec, LearnerSpec, LoraSpec
from miles_core.records import FileDigest
from miles_core.routers import find_routers
from miles_core.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from miles_core.learner.engine_files import EngineFiles

log = logging.getLogger("miles")

Dtype = Literal["float32", "bfloat16"]
CHECKPOINT_TAG = "engine"
MAX_BUCKET_ELEMENTS = 200_000_000
"""Bound of a gradient reduction's buffer."""
LOGPROB_ROWS = 16
"""Rows per forward pass of logprobs()."""
UNREPLAYED_EVERY = 5
"""Steps between two forward passes without routing replay, which only measure what replay removes: one pass took 22 % of a
step's CPU time (chain_sum_moe, 128 rows), so it is 4 % at every fifth step. Steps 1, 6, 11, ..."""


class Policy(torch.nn.Module):
    """A causal language model that gives logprobs of chosen tokens; only their positions reach the head.

    With `replay` the routers of a mixture of experts take the experts that a microbatch brings along.
    """

    def __init__(self, model: Any, *, replay: bool = True) -> None:
        super().__init__()
        self.model = model
        routers = find_routers(model) if replay else None
        self.routing = None if routers is None else RoutingReplay(routers)

    def forward(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] float32 log softmax(logits / temperature) of the targets, and [N] the entropy of that softmax (no gradient)."""
        if self.routing is not None:
            self.routing.begin(batch.experts)
        hidden = hidden_states(self.model.base_model, batch)
        return score(self.model.get_output_embeddings(), hidden, batch)


class Trainer:
    """See module. Changes the process: initialises torch.distributed and asks torch for deterministic algorithms."""

    def __init__(
        self,
        model_folder: Path,
        spec: LearnerSpec,
        dtype: Dtype,
        *,
        device: str = "cpu",
        lora: LoraSpec | None = None,
        seed: int = 0,
    ) -> None:
        """`lora`: what is trained instead of the model; its start follows from `seed`."""
        self._spec, self._lora = spec, lora
        self._engine = _make_engine(model_folder, spec, dtype, device, lora, seed)
        self._module: Policy = self._engine.module
        self._device: torch.device = self._engine.device
        self._base: Callable[[Microbatch], torch.Tensor] | None = None
        if spec.kl_coef > 0:
            self._base = _base_policy(model_folder, dtype, self._device) if lora is None else self._without_adapter
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._balance = make_balance(self._module.model, spec.balance)
        config = self._module.model.config
        self._vocabulary: int = config.vocab_size
        reason = why_not_shared(config)
        self._pairs = pairs_per_token(config) if reason is None else None
        if reason is not None and self._rank == 0:
            log.info("every row is computed by itself, also what it shares with others: %s", reason)
        self._critic = None if spec.critic is None else self._make_critic(model_folder, spec.critic, dtype)
        self._more_metrics = [] if self._base is None else ["kl_base"]
        self._more_metrics += [] if self._balance is None else ["balance_loss", "balance_beta"]
        self._engines = {CHECKPOINT_TAG: self._engine} | ({} if self._critic is None else {CRITIC_TAG: self._critic.engine})

    def train(
        self,
        trajectories: Sequence[Trajectory],
        advantages: npt.NDArray[np.floating],
        step: int,
        staleness: int = 0,
        kl_weights: npt.NDArray[np.floating] | None = None,
    ) -> dict[str, float]:
        """Trains one batch as step `step` (from 1). Returns metrics; one that is not finite means that the weights are lost.

        `advantages`: of each trajectory; with a critic its reward.
        `kl_weights`: of each trajectory, what multiplies its pull towards the base model; None: 1.
        """
        if len(trajectories) != len(advantages):
            raise ValueError(f"step {step}: {len(trajectories)} trajectories, but {len(advantages)} advantages")
        rate = learning_rate(self._spec, step, staleness)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        if self._module.routing is not None:
            self._module.routing.check(trajectories)
        if self._spec.aggregation == "sequence_mean":
            shares = episode_parts([(row.sample_id, row.num_sampled) for row in trajectories])
            if shares is not None:
                advantages, kl_weights = advantages * shares, shares if kl_weights is None else kl_weights * shares
        parts = split_groups(trajectories, self._spec.minibatches)
        totals = [self._totals(part, trajectories, advantages) for part in parts]
        budget = self._spec.microbatch_tokens
        moving = [self._moving(part, trajectories, advantages) for part in parts]
        plans = [plan(rows, trajectories, budget, self._world, self._pairs) for rows in moving]
        batches = [
            [
                micro.to(self._device)
                for micro in of_rank(stacks, self._rank, trajectories, advantages, kl_weights, self._vocabulary)
            ]
            for stacks in plans
        ]
        judged: dict[str, float] = {}
        targets: list[list[Targets]] = []
        if self._critic is not None:
            batches, targets, judged = self._critic.judge(batches)
        old, metrics = self._old_logprobs(batches, unreplayed=(step - 1) % UNREPLAYED_EVERY == 0)
        metrics["computed_frac"] = computed_frac(plans, trajectories)
        if self._module.routing is not None:
            metrics |= load_metrics(trajectories, self._module.routing.routers)
        updates = [
            self._update(number, batch, logprobs, total)
            for number, (batch, logprobs, total) in enumerate(zip(batches, old, totals, strict=True))
            if batch
        ]
        if self._critic is not None:
            factor = rate_factor(self._spec, step, staleness)
            judged |= self._critic.train(batches, targets, [total.tokens for total in totals], factor)
        return {**metrics, **judged, **_mean_update(updates, self._more_metrics), "lr": rate}

    def logprobs(self, token_lists: Sequence[Sequence[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        """log softmax(logits / temperature) of every token but the first of each list: float32 [len - 1] each."""
        results: list[npt.NDArray[np.float32]] = []
        for begin in range(0, len(token_lists), LOGPROB_ROWS):
            chunk = token_lists[begin : begin + LOGPROB_ROWS]
            with torch.no_grad():
                batch = contexts(chunk, temperature)
                values, _ = self._engine(in_pieces(batch, len(batch.targets), self._vocabulary).to(self._device))
            lengths = [len(tokens) - 1 for tokens in chunk]
            results += [part.cpu().numpy() for part in values.split(lengths)]
        return results

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of what is trained in CPU memory, in the model's dtype, on rank 0; the other ranks get nothing.

        The weights under their Hugging Face names, tied ones once; or the adapter alone (adapters.py).
        """
        adapter = adapter_tensors(self._module.model)
        with _gathered(list(adapter.values()) or list(self._module.parameters()), self._spec.zero_stage):
            if self._rank:
                return {}
            unique: dict[int, tuple[str, torch.Tensor]] = {}
            for name, tensor in (adapter or self._module.model.state_dict(keep_vars=True)).items():
                unique.setdefault(id(tensor), (name, tensor))
            return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in unique.values()}

    def save(self, folder: Path) -> tuple[str, ...]:
        """Puts this rank's part of all that load() needs to go on bit-exactly into `folder`; returns the names of its files.

        Raises OSError when all ranks are through with each other, so that all may save again.
        """
        for tag, engine in self._engines.items():
            excluded = self._lora is not None
            state = self._own_state(tag)
            engine.save_checkpoint(
                str(folder), tag=tag, client_state=state, save_latest=False, exclude_frozen_parameters=excluded
            )
        return tuple(name for engine in self._engines.values() for name in _files_of(engine).write(folder))

    def load(self, folder: Path, files: Sequence[FileDigest]) -> None:
        """Takes the state of a folder that as many ranks filled with save(). Only `files` are unpickled, each checked (I17)."""
        ranks = sum(file.name.startswith(f"{CHECKPOINT_TAG}/") and file.name.endswith("optim_states.pt") for file in files)
        if ranks != self._world:
            raise MilesError(
                f"{folder} holds a checkpoint of {ranks} ranks, the learner has {self._world} now; set nodes and tasks of "
                f"resources.learner back"
            )
        for tag, engine in self._engines.items():
            _files_of(engine).expect(folder, files)
            # Of an adapter's run the frozen base model is not in it.
            is_whole = self._lora is None or engine is not self._engine
            _, state = engine.load_checkpoint(str(folder), tag=tag, load_module_strict=is_whole)
            if self._balance is not None and tag == CHECKPOINT_TAG:
                self._balance.grad_norm = state["grad_norm"]

    def _own_state(self, tag: str) -> dict[str, float]:
        """What a checkpoint holds beside the engine's state."""
        return {"grad_norm": self._balance.grad_norm} if self._balance is not None and tag == CHECKPOINT_TAG else {}

    def _make_critic(self, model_folder: Path, spec: CriticSpec, dtype: Dtype) -> Critic:
        engine = _engine_around(ValueModel(_load_model(model_folder, dtype)), self._spec, dtype)
        return Critic(engine, spec, self._everywhere, self._world)

    def _totals(self, part: Indexes, trajectories: Sequence[Trajectory], advantages: npt.NDArray[np.floating]) -> Totals:
        """What the loss of one minibatch is divided by. Per rank, because DeepSpeed averages over the ranks."""
        rows = [
            (each.group_id, each.sample_id, each.num_sampled, float(advantages[row]))
            for row, each in ((row, trajectories[row]) for row in part)
        ]
        whole = minibatch_totals(rows, self._spec.flat_groups)
        return Totals(tokens=whole.tokens / self._world, episodes=whole.episodes / self._world)

    def _moving(self, part: Indexes, trajectories: Sequence[Trajectory], advantages: npt.NDArray[np.floating]) -> Indexes:
        """The rows of a minibatch that move the weights: those with signal, and all that are pulled to the base model or
        have a value to be learned."""
        if self._base is None and self._critic is None:
            return with_signal(part, trajectories, advantages)
        rows = part if self._spec.flat_groups == "counted" else in_live_groups(part, trajectories, advantages)
        return [row for row in rows if trajectories[row].num_sampled > 0]

    def _old_logprobs(
        self, batches: list[list[Microbatch]], *, unreplayed: bool
    ) -> tuple[list[list[torch.Tensor]], dict[str, float]]:
        """Logprobs at the start of the step, by minibatch and microbatch, and how they differ from the rollout's.

        `unreplayed`: of a mixture of experts, also how much they would differ without routing replay.
        """
        routing = self._module.routing
        old: list[list[torch.Tensor]] = []
        seen: list[torch.Tensor] = [torch.zeros(0, 5)]
        changed: list[tuple[int, int]] = [(0, 0)]
        if self._balance is not None:
            self._balance.begin(len(batches))
        with torch.no_grad():
            for batch in batches:
                old.append([])
                for micro in batch:
                    logprobs, entropy = self._engine(micro)
                    if self._balance is not None:
                        self._balance.count(len(old) - 1, micro)
                    old[-1].append(logprobs)
                    if routing is not None and micro.mask.any():
                        changed.append(routing.changed)
                    own = self._engine(micro.without_record())[0] if routing is not None and unreplayed else logprobs
                    columns = [logprobs, micro.rollout_logprobs, entropy, own, self._cut(micro, logprobs)]
                    seen.append(torch.stack(columns, dim=1)[micro.mask].cpu())
        if self._balance is not None:
            self._balance.share(self._everywhere)
        logp_old, logp_rollout, entropies, logp_own, cut = self._everywhere(torch.cat(seen)).unbind(dim=1)
        tokens = logp_old.numel()
        found = mismatch_metrics(logp_old, logp_rollout, cut)
        if routing is not None:
            found |= changed_metric(self._everywhere(torch.tensor(changed)))
        if routing is not None and unreplayed:
            found |= without_replay(mismatch_metrics(logp_own, logp_rollout))
        return old, {
            **found,
            "entropy": float(entropies.mean()) if tokens else 0.0,
            "tokens": float(tokens),
        }

    def _cut(self, micro: Microbatch, logp_old: torch.Tensor) -> torch.Tensor:
        """[N] 1 where the correction cut a token's weight, 0 elsewhere."""
        log_weight = logp_old - micro.rollout_logprobs
        segments = Segments(micro.rows, micro.num_rows, micro.mask & torch.isfinite(log_weight))
        return cut_tokens(log_weight, segments, self._spec).to(log_weight.dtype)

    def _everywhere(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in rank order."""
        if self._world == 1:
            return rows
        parts: list[torch.Tensor] = [rows] * self._world
        torch.distributed.all_gather_object(parts, rows)
        return torch.cat(parts)

    def _update(self, number: int, batch: list[Microbatch], old: list[torch.Tensor], totals: Totals) -> dict[str, float]:
        """One optimizer update: minibatch `number` of the step."""
        losses, uneven = [], 0.0
        for micro, logp_old in zip(batch, old, strict=True):
            found = self._loss(micro, logp_old, totals)
            loss = found.loss
            if self._balance is not None:
                part = self._balance.part(number, micro)
                loss, uneven = loss + self._balance.factor * self._world * part, uneven + float(part.detach())
            self._engine.backward(loss)
            losses.append(found)
        self._engine.step()
        row = [
            sum(float(found.loss.detach()) for found in losses) / self._world,
            sum(found.clipped for found in losses),
            sum(found.nonfinite for found in losses),
            sum(int(micro.mask.sum()) for micro in batch),
            sum(found.kl_base for found in losses),
            uneven,
            max(found.ratio_deviation for found in losses),
        ]
        sums = self._everywhere(torch.tensor([row], dtype=torch.float64))
        total, clipped, nonfinite, tokens, kl_base, uneven = (float(value) for value in sums[:, :6].sum(dim=0))
        grad_norm = float(self._engine.get_global_grad_norm())
        balance = {}
        if self._balance is not None:
            balance = {"balance_loss": uneven, "balance_beta": self._balance.beta}
            self._balance.grad_norm = grad_norm
        return {
            "loss": total,
            "grad_norm": grad_norm,
            "clip_frac": clipped / tokens,
            "ratio_deviation_max": float(sums[:, 6].max()),
            "nonfinite_tokens": nonfinite,
            **({} if self._base is None else {"kl_base": kl_base / tokens}),
            **balance,
        }

    def _without_adapter(self, micro: Microbatch) -> torch.Tensor:
        """[N] the base model's logprobs, with its own routing."""
        with torch.no_grad(), base_only(self._module.model):
            logprobs: torch.Tensor = self._engine(micro.without_record())[0]
        return logprobs

    def _loss(self, micro: Microbatch, logp_old: torch.Tensor, totals: Totals) -> PolicyLoss:
        # First: what the forward pass with gradient leaves in the model belongs to its backward pass.
        logp_base = None if self._base is None else self._base(micro)
        logp, _ = self._engine(micro)
        tokens = Tokens(
            logp=logp,
            logp_old=logp_old,
            logp_rollout=micro.rollout_logprobs,
            advantages=micro.advantages,
            mask=micro.mask,
            rows=micro.rows,
            num_rows=micro.num_rows,
            logp_base=logp_base,
            kl_weights=micro.kl_weights,
        )
        return policy_loss(tokens, totals, self._spec)


def learning_rate(spec: LearnerSpec, step: int, staleness: int = 0) -> float:
    """Of the policy; see moderation.py."""
    return spec.lr * rate_factor(spec, step, staleness)


def _mean_update(updates: list[dict[str, float]], more: Sequence[str]) -> dict[str, float]:
    """Mean over the updates of a step, also of `more` (counts: sum, deviation: largest, and that of the first update, before
    which no weight has moved: it shows whether the two forward passes of a step agree); zeros if there was none."""
    means = ("loss", "grad_norm", "clip_frac", *more)
    names = (*means, "ratio_deviation_max", "nonfinite_tokens")
    columns = {name: [update[name] for update in updates] or [0.0] for name in names}
    return {
        **{name: float(np.mean(columns[name])) for name in means},
        "ratio_deviation_max": max(columns["ratio_deviation_max"]),
        "ratio_deviation_start": columns["ratio_deviation_max"][0],
        "nonfinite_tokens": sum(columns["nonfinite_tokens"]),
        "updates": float(len(updates)),
    }


# Start


def _make_engine(model_folder: Path, spec: LearnerSpec, dtype: Dtype, device: str, lora: LoraSpec | None, seed: int) -> Any:
    _join_process_group(device)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = _load_model(model_folder, dtype)
    if spec.freeze_router:
        freeze_routers(model)
    if lora is not None:
        add_adapter(model, lora, seed)
    return _engine_around(Policy(model, replay=spec.routing_replay), spec, dtype)


def _load_model(folder: Path, dtype: Dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def _engine_around(module: torch.nn.Module, spec: LearnerSpec, dtype: Dtype) -> Any:
    """DeepSpeed's engine with AdamW over what is not frozen; the learning rate is set by each step."""
    import deepspeed

    from miles_core.learner.engine_files import EngineFiles

    # No dropout: a ratio is of two policies, not of two masks.
    module.eval()
    if spec.gradient_checkpointing:
        checkpoint_layers(module.model)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    betas = (spec.beta1, spec.beta2)
    optimizer = torch.optim.AdamW(trained, lr=spec.lr, betas=betas, weight_decay=spec.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=_engine_config(spec, dtype, trained))
    engine.checkpoint_engine = EngineFiles()
    # A script for people, which it would copy into every checkpoint while the ranks wait.
    engine._copy_recovery_script = lambda save_dir: None
    return engine


def _files_of(engine: Any) -> EngineFiles:
    files: EngineFiles = engine.checkpoint_engine
    return files


def _base_policy(model_folder: Path, dtype: Dtype, device: torch.device) -> Callable[[Microbatch], torch.Tensor]:
    """[N] logprobs by the base model as it is, whole on every rank, with its own routing; for KL only, so without gradient."""
    policy = Policy(_load_model(model_folder, dtype), replay=False).eval().requires_grad_(False).to(device)
    return lambda micro: policy(micro)[0]


def _engine_config(spec: LearnerSpec, dtype: Dtype, trained: Sequence[torch.Tensor]) -> dict[str, Any]:
    # DeepSpeed allocates a whole bucket in every backward pass, however small the model is.
    bucket = min(MAX_BUCKET_ELEMENTS, sum(parameter.numel() for parameter in trained))
    return {
        "train_micro_batch_size_per_gpu": 1,
        # Updates are cut by step() alone: their number of microbatches varies.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": spec.grad_clip,
        "bf16": {"enabled": dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": spec.zero_stage, "overlap_comm": False, "reduce_bucket_size": bucket},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 1 << 60,
    }


def _join_process_group(device: str) -> None:
    """Takes the process group that the ranks have formed (ranked.py); makes one of this process alone if there is none."""
    cuda = device.startswith("cuda")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    # cuBLAS repeats its sums only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Compiling it takes a minute at the first start; gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "nccl" if cuda else "gloo"
    if not torch.distributed.is_initialized():
        # A store in memory: no port that another process could hold.
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend)


def _gathered(parameters: list[torch.Tensor], zero_stage: int) -> AbstractContextManager[Any]:
    """Whole parameters while inside; only stage 3 parts them."""
    if zero_stage < 3:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
    return gathered
