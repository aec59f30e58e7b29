"""What a person trains: one typed, closed, frozen description of a run. Where it runs is cluster/profile.py; never mixed.

YAML is written by hand; the resolved copy in a run directory is JSON. Every cross-field rule refuses at submit and names
the fix. A field exists only if something reads it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from miles_core import presets
from miles_core.errors import RecipeError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class Closed(BaseModel):
    """A frozen model that refuses unknown keys, and numbers that JSON has no word for: run.json would hold null for them."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModelSpec(Closed):
    """The base model: a folder or hub id, or a warm-up that makes one from scratch."""

    path: str | None = None
    """Folder in Hugging Face layout, or a hub id. Exclusive with `bootstrap`."""
    bootstrap: str | None = None
    """Name of a warm-up in miles_core/bootstrap that makes the base model; cached by content."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the learner's forward pass and of the published weights."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.bootstrap is None):
            raise ValueError("model: give exactly one of `path` (a folder or hub id) and `bootstrap` (a warm-up's name)")
        return self


class EnvironmentSpec(Closed):
    """Where tasks come from, and what an episode may do."""

    family: str
    """A reasoning-gym family by its name there, for example `chain_sum`; `shell_puzzle`; or `package.module:ClassName`, an
    environment of your own (miles_core/environments/registry.py says what it needs)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that family; `level: 1` to `4` of a shell puzzle."""
    tool: Literal["none", "calculator", "shell"] = "none"
    """The tool offered to the model; `none` is one turn. An environment of your own decides itself."""
    max_turns: int = Field(default=1, ge=1)
    """Model turns per episode."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Sampled tokens per turn."""
    max_tokens: int = Field(default=160, ge=8)
    """Prompt, tool results and samples of one episode together; longer episodes end as `truncated`."""
    tool_deadline_s: float = Field(default=5.0, gt=0)
    """One tool call may take this long."""
    episode_deadline_s: float = Field(default=120.0, gt=0)
    """A whole episode may take this long; then it ends as failed (infrastructure)."""

    @property
    def is_own(self) -> bool:
        """Whether `family` names a class of the researcher's."""
        return ":" in self.family

    @model_validator(mode="after")
    def _options_are_json(self) -> Self:
        try:
            same = json.loads(json.dumps(self.options, allow_nan=False)) == self.options
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(
                f"environment.options: {self.options} would not reach the jobs as it is; use texts (also as keys), finite "
                f"numbers, true, false, null, lists and sections of these, and quote a date"
            )
        return self

    @model_validator(mode="after")
    def _turns_need_a_tool(self) -> Self:
        if self.is_own:
            return self
        if (self.family == "shell_puzzle") != (self.tool == "shell"):
            raise ValueError(
                f"environment: family {self.family!r} does not go with tool {self.tool!r}; shell_puzzle needs tool: shell, and "
                f"no other family has it"
            )
        if self.tool == "none" and self.max_turns > 1:
            raise ValueError("environment: max_turns > 1 needs a tool; set tool: calculator or max_turns: 1")
        return self


class RolloutPool(Closed):
    """Replicas of one kind. Its partition and resources come from the cluster profile, by the pool's name."""

    name: str = Field(default="main", pattern=r"^[a-z][a-z0-9_]*$")
    """Name the cluster profile may refer to."""
    replicas: int = Field(default=1, ge=1)
    """Jobs of this pool."""
    slots: int = Field(default=64, ge=1)
    """Trajectories sampled at once by one replica; a finished one frees its slot at once."""
    engine: Literal["torch"] = "torch"
    """Sampling engine."""


class RolloutSpec(Closed):
    """The rollout pools and how they sample."""

    pools: tuple[RolloutPool, ...] = (RolloutPool(),)
    """One or more pools."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which rollout and evaluation compute: the engine casts the published weights. null: `model.dtype`."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training samples; evaluation is greedy."""
    shard_rows: int = Field(default=32, ge=1)
    """A shard is sealed at this many rows ..."""
    shard_age_s: float = Field(default=0.5, gt=0)
    """... or when its oldest row is this old."""
    sample_attempts: int = Field(default=3, ge=1)
    """A sample whose owner died is given out again at most this often in all; then its group is dropped."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise ValueError("rollout.pools: at least one pool is needed")
        if len(set(names)) != len(names):
            raise ValueError(f"rollout.pools: names must differ, got {names}")
        return self


class GraderSpec(Closed):
    """Grader replicas of tier L1 (rules)."""

    replicas: int = Field(default=1, ge=1)
    """Jobs of the tier."""
    attempts: int = Field(default=3, ge=1)
    """A trajectory without a grade is sent out at most this often; then its group is dropped as `ungraded`."""
    deadline_s: float = Field(default=10.0, gt=0)
    """One verifier call may take this long."""


class OrchestratorSpec(Closed):
    """Batch shape, buffer and staleness."""

    prompts: int = Field(default=16, ge=1)
    """Groups (prompts) per batch."""
    samples: int = Field(default=8, ge=2)
    """Samples per group; the advantage needs at least two."""
    capacity_batches: float = Field(default=3.0, ge=1.0)
    """Work is issued only while buffered + in-flight groups are under capacity_batches x prompts."""
    max_staleness: int = Field(default=4, ge=0)
    """Bound of (k-1) - oldest version that sampled a trained token (I7). 0 = synchronous."""
    version_wait_s: float = Field(default=30.0, gt=0)
    """A trajectory that names a version not yet known waits this long, then it is rejected."""


class RewardScalerSpec(Closed):
    """Rewards scaled by the mean and spread of earlier grades (sources G5, grading/scaler.py)."""

    short: int = Field(default=1000, ge=1)
    """Grades in the short window, which has 0.7 of the say; at least two batches."""
    long: int = Field(default=100_000, ge=1)
    """Grades in the long window, which has 0.3 of it."""
    gradient_weight: Literal["none", "damped", "boosted"] = "none"
    """What multiplies a sample's pull towards the base model (`learner.kl_coef`): less for rewards far from the mean, or more
    for high ones."""

    @model_validator(mode="after")
    def _windows_differ(self) -> Self:
        if self.long <= self.short:
            raise ValueError(f"learner.reward_scaler: long={self.long} must be over short={self.short}")
        return self


class LearnerSpec(Closed):
    """Objective and optimizer, on DeepSpeed. docs/objectives.md has the objectives' formulas."""

    lr: float = Field(default=3e-4, ge=0)
    """AdamW learning rate after the ramp."""
    ramp_steps: int = Field(default=3, ge=0)
    """Training steps of linear warm-up."""
    staleness_slowdown: float = Field(default=0.0, ge=0)
    """a: a batch of staleness s is trained at lr / (1 + a s) (sources O17). 0: at lr."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW beta1."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW beta2."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Global gradient norm bound."""
    objective: presets.Objective = "grpo"
    """Preset: gives the seven fields below their values where the recipe gives none (presets.py)."""
    advantage: presets.Advantage = "group_std"
    """What a sample's reward is compared with (learner/advantages.py)."""
    ratio: presets.Ratio = "token"
    """Ratio of new to old policy of a token, or the geometric mean over its row."""
    surrogate: presets.Surrogate = "clip"
    """`clip`: PPO, a clipped token gives no gradient. `weight`: CISPO, it does, with the clipped ratio as its weight."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The ratio is clipped below at 1 - clip_low; 1: not at all."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: presets.Aggregation = "token_mean"
    """How the tokens' losses become the loss of a minibatch."""
    flat_groups: presets.FlatGroups = "counted"
    """Groups without signal (all rewards equal) count in the mean's divisor, or are left out as if they had not been there."""
    loss_divisor_tokens: int | None = Field(default=None, ge=1)
    """Divisor of `aggregation: constant`. Default: the most tokens an episode of the recipe's environment can sample."""
    correction: presets.Correction = "tis"
    """How much a token sampled by an older policy counts (learner/corrections.py)."""
    allow_uncorrected: bool = False
    """Allows `correction: none` with asynchronous data, whose gradient is then biased."""
    tis_cap: float = Field(default=2.0, gt=0)
    """C of `correction: tis`."""
    mis_low: float | None = Field(default=None, ge=0)
    """`correction: mis_*`: weights under this become 0. Default by kind (presets.py)."""
    mis_high: float | None = Field(default=None, gt=0)
    """`correction: mis_*`: weights over this become 0. Default by kind (presets.py)."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """A row with a token whose weight is under this counts for nothing; 1e-4 is usual. Default: off."""
    kl_coef: float = Field(default=0.0, ge=0)
    """beta of the k3 estimate of KL(policy || base model) in a token's loss. Over 0: every rank keeps the base model in memory
    and asks it for the logprobs of every row, also of those without signal."""
    reward_scaler: RewardScalerSpec | None = None
    """Scales rewards before advantages are made of them; `{}` turns it on with its defaults. null: rewards as graded."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer updates per batch; groups are split evenly."""
    microbatch: int = Field(default=64, ge=1)
    """Trajectories per forward pass."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between checkpoints."""
    routing_replay: bool = True
    """For a mixture of experts: rollout records the experts of each token, the learner's forward pass takes the same ones
    (sources R6, L3). Without effect on a dense model, which has no experts; so it is one switch for all recipes, and a
    recipe need not know what is in `model.path`. False: the learner's routers choose anew, nothing is recorded."""
    zero_stage: Literal[1, 2, 3] = 1
    """DeepSpeed ZeRO stage; without one, it neither sums bfloat16 gradients in float32 nor reports the gradient norm."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_pieces(cls, fields: Any) -> Any:
        return presets.resolve(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _pieces_agree(self) -> Self:
        if self.loss_divisor_tokens is not None and self.aggregation != "constant":
            raise ValueError(
                f"learner.loss_divisor_tokens is the divisor of aggregation: constant, but aggregation is {self.aggregation}; "
                f"remove one of the two"
            )
        if self.reward_scaler is not None and self.reward_scaler.gradient_weight != "none" and self.kl_coef == 0:
            raise ValueError(
                f"learner.reward_scaler.gradient_weight={self.reward_scaler.gradient_weight} multiplies the pull towards the "
                f"base model, but kl_coef is 0; set kl_coef or gradient_weight: none"
            )
        if self.correction not in presets.MIS_BOUNDS and (self.mis_low, self.mis_high) != (None, None):
            raise ValueError(
                f"learner.mis_low and mis_high are bounds of masked importance sampling, but correction is {self.correction}; "
                f"set correction to mis_token, mis_sequence or mis_geometric, or remove them"
            )
        if self.mis_low is not None and self.mis_high is not None and self.mis_low >= self.mis_high:
            raise ValueError(f"learner: mis_low={self.mis_low} must be under mis_high={self.mis_high}")
        return self


class PolicySpec(Closed):
    """How versions are published: full (an anchor) or as the change from the version before (a delta)."""

    deltas: bool = True
    """False: every version is a full anchor."""
    anchor_every: int = Field(default=10, ge=1)
    """A full anchor every so many versions, so that a new reader never applies more than the deltas in between ..."""
    anchor_ratio: float = Field(default=1.0, gt=0)
    """... and as soon as the deltas since the last anchor would take more than this many times its size."""


class RetentionSpec(Closed):
    """What the collector deletes while the run goes on. Every deletion is recorded, and `miles verify` accepts no other."""

    versions: bool = True
    """Delete policy versions that nobody can need: those behind the two newest full ones, once they are evaluated."""
    checkpoints: int = Field(default=2, ge=2)
    """This many of the newest checkpoints stay; older ones are deleted."""
    trajectories: Literal["keep", "after_two_checkpoints"] = "keep"
    """Shards are what `miles verify` proves trained rows with, and what the report shows: `keep`. Otherwise those that no
    recovery from a kept checkpoint needs are deleted."""


class EvaluationSpec(Closed):
    """Greedy evaluation of the first and the last version on held-out tasks."""

    problems: int = Field(default=256, ge=1)
    """Held-out tasks, from a seed range that training never draws."""


class TrackingSpec(Closed):
    """Who is told of a run, besides its own metric shards, which are always written."""

    wandb: bool = False
    """Log to Weights & Biases: offline unless WANDB_MODE=online is set where the supervisor runs and there is a key."""
    project: str = Field(default="miles", min_length=1)
    """W&B project."""


class Recipe(Closed):
    """One run, resolved."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The recipe's name; run ids begin with it."""
    steps: int = Field(ge=1)
    """Training steps K; step k trains batch k and gives version k."""
    seed: int = 0
    """Seed of tasks and sampling."""
    model: ModelSpec
    """Base model."""
    environment: EnvironmentSpec
    """Tasks and episodes."""
    rollout: RolloutSpec = RolloutSpec()
    """Pools and sampling."""
    grader: GraderSpec = GraderSpec()
    """Grader tier."""
    orchestrator: OrchestratorSpec = OrchestratorSpec()
    """Batches, buffer, staleness."""
    learner: LearnerSpec = LearnerSpec()
    """Objective and optimizer."""
    policy: PolicySpec = PolicySpec()
    """Published versions."""
    retention: RetentionSpec = RetentionSpec()
    """What is deleted while the run goes on."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Greedy evaluation."""
    tracking: TrackingSpec = TrackingSpec()
    """W&B."""

    @property
    def rollout_dtype(self) -> Literal["float32", "bfloat16"]:
        """In which rollout and evaluation compute."""
        return self.rollout.dtype or self.model.dtype

    @model_validator(mode="after")
    def _fill_in_divisor(self) -> Self:
        if self.learner.aggregation == "constant" and self.learner.loss_divisor_tokens is None:
            most = min(self.environment.max_turns * self.environment.max_new_tokens, self.environment.max_tokens)
            object.__setattr__(self, "learner", self.learner.model_copy(update={"loss_divisor_tokens": most}))
        return self

    @model_validator(mode="after")
    def _cross_rules(self) -> Self:
        asynchronous = self.orchestrator.max_staleness > 0
        if self.learner.correction == "none" and asynchronous and not self.learner.allow_uncorrected:
            raise ValueError(
                "learner.correction: none needs orchestrator.max_staleness: 0; asynchronous data without correction is biased. "
                "Set correction (tis is usual) or max_staleness: 0, or say allow_uncorrected: true"
            )
        if self.orchestrator.prompts < self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} is more than orchestrator.prompts="
                f"{self.orchestrator.prompts}: every optimizer update needs at least one group"
            )
        grades = self.orchestrator.prompts * self.orchestrator.samples
        if self.learner.reward_scaler is not None and self.learner.reward_scaler.short < 2 * grades:
            raise ValueError(
                f"learner.reward_scaler.short={self.learner.reward_scaler.short} is under two batches of {grades} grades: mean "
                f"and spread would follow every batch; set it to at least {2 * grades}"
            )
        most = self.orchestrator.max_staleness + 1
        if self.orchestrator.capacity_batches > most:
            raise ValueError(
                f"orchestrator.capacity_batches={self.orchestrator.capacity_batches} is more than max_staleness + 1 = {most}: "
                f"what is buffered beyond that would be stale before it is trained; lower it or raise max_staleness"
            )
        return self


class Timing(Closed):
    """How the filesystem of a cluster behaves, and how patient roles are. The part of a cluster profile that roles read."""

    visibility_s: float = Field(default=1.0, ge=0)
    """How late a name or bytes written by one node may appear on another (local 0.5, NFS 60)."""
    lease_s: float = Field(default=10.0, gt=0)
    """A holder unseen for this long is dead."""
    poll_s: float = Field(default=0.05, gt=0)
    """Pause between two polls of a journal by a role."""
    sync_s: float = Field(default=0.05, gt=0)
    """A journal groups records and syncs at most once in this time."""
    orphan_s: float = Field(default=86400.0, gt=0)
    """Roles leave when no supervisor was seen for this long."""
    stall_s: float = Field(default=600.0, gt=0)
    """A role without progress for this long is named by the watchdog."""

    @model_validator(mode="after")
    def _lease_covers_visibility(self) -> Self:
        if self.lease_s < 3 * self.visibility_s:
            raise ValueError(
                f"timing.lease_s={self.lease_s} is under 3 x visibility_s={self.visibility_s}: a slow filesystem would "
                f"kill healthy roles; set lease_s to at least {3 * self.visibility_s}"
            )
        return self


def explain(error: ValidationError, where: str, *, keys_in: str = "miles_core/recipe.py") -> RecipeError:
    """Turns pydantic's findings into one message: key, value, fix. `keys_in`: the file that documents the keys."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(whole file)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{key}: no such key; {keys_in} has the keys there are, each with its meaning")
        else:
            shown = "" if isinstance(item.get("input"), dict) else f" (got {item.get('input')!r})"
            lines.append(f"{key}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return RecipeError(f"{where} is not valid:\n  " + "\n  ".join(lines))


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a mapping from a YAML file. Raises RecipeError."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A ValueError is a file that is not text, or 2026-13-45: YAML takes it for a date.
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: expected a mapping of keys at the top, got {type(data).__name__}")
    return data


def find_config(name: str, folder: str) -> Path:
    """A YAML file by path, or by name below configs/<folder>. Raises RecipeError with the names there are."""
    path, found = Path(name), CONFIGS / folder / f"{name}.yaml"
    try:
        if path.suffix in (".yaml", ".yml") or path.is_file():
            return path
        is_there = found.exists()
    except (OSError, ValueError) as error:
        # A name that is too long, holds a zero byte, or lies in a folder that may not be entered.
        raise RecipeError(f"{folder[:-1]} {name!r} cannot be looked for: {error}") from error
    if not is_there:
        there = sorted(p.stem for p in (CONFIGS / folder).glob("*.yaml"))
        raise RecipeError(f"no {folder[:-1]} named {name!r}: give a YAML file or one of {', '.join(there)}")
    return found


def apply_overrides(data: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    """Applies `a.b=value` settings (value in YAML) to a nested mapping and returns the new mapping."""
    result = copy.deepcopy(data)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set {text!r}: write it as key.path=value, for example learner.lr=1e-4")
        target = result
        *parents, last = key.split(".")
        for part in parents:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise RecipeError(f"--set {text!r}: {part!r} is not a section")
        try:
            parsed = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise RecipeError(f"--set {text!r}: the value is not YAML: {error}") from error
        target[last] = _number(parsed)
    return result


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text; a person means the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def load_recipe(name: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Reads a recipe by name (configs/recipes) or file and applies overrides. Raises RecipeError."""
    path = find_config(name, "recipes")
    data = apply_overrides(read_yaml(path), overrides)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise explain(error, f"recipe {path}") from error
