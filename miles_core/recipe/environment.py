"""Tasks, episodes and their grades."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from miles_core.recipe.closed import Closed

SHELL_FAMILIES = ("shell_puzzle", "terminal")
"""Families whose episodes run bash."""


class AgentSpec(Closed):
    """An agent loop that drives the episodes over HTTP, instead of the environment's own answers."""

    run: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, called as function(base_url, api_key, task) for every sample; it returns facts
    (miles_core/rollout/sessions/agents.py)."""
    history: Literal["linear", "branching"] = "linear"
    """`linear`: a conversation only goes on from its end, or tries its last turn again; anything else is refused. `branching`:
    it may go on from any turn and begin anew, for sub-agents and compaction; every turn is kept and trained once, but a try
    that was asked again in the same words. Its experts are not recorded for routing replay."""
    replay: Literal["strict", "json"] = "strict"
    """When an agent's conversation is the recorded one: word for word, or with tool arguments that are the same JSON."""


class PromptSpec(Closed):
    """What stands around the questions of a reasoning-gym family, so that a pretrained model answers in the right form."""

    system: str | None = None
    """System message in front of everything."""
    shots: int = Field(default=0, ge=0, le=16)
    """So many solved questions as turns of user and assistant in front; always the same ones, never trained or evaluated."""
    wording: str | None = None
    """How a question is asked, with fields of the entry's metadata in braces: `What is {expression}?`. null: as the library
    asks it."""


class EnvironmentSpec(Closed):
    """Where tasks come from, and what an episode may do."""

    family: str
    """A reasoning-gym family by its name there, for example `chain_sum`; `shell_puzzle`; `terminal`; `verifiers`, one of that
    package; or `package.module:ClassName`, one of your own (miles_core/environments/registry.py says what it needs)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that family; `level: 1` to `4` of a shell puzzle or a terminal task; `environment: NAME` and `args`
    of verifiers."""
    prompt: PromptSpec | None = None
    """What a reasoning-gym family's questions come with. null: the library's question alone."""
    tool: Literal["none", "calculator", "shell"] = "none"
    """The tool offered to the model; `none` is one turn. An environment of your own decides itself."""
    agent: AgentSpec | None = None
    """The agent that runs the episodes; it brings its own tools. null: the environment answers the model itself, but one of
    `verifiers`, which is driven by its own loop."""
    max_turns: int = Field(default=1, ge=1)
    """Model turns per episode."""
    max_new_tokens: int = Field(default=24, ge=1)
    """Sampled tokens per turn."""
    max_tokens: int = Field(default=160, ge=8)
    """Prompt, tool results and samples of one episode together; longer episodes end as `truncated`."""
    token_deadline_s: float = Field(default=300.0, gt=0)
    """One decode step of a replica, and nothing else that its engine does, may take this long. An engine whose step takes
    longer hangs: the replica ends with the stacks of its threads in its log, and is replaced. An exchange of weights has no
    deadline."""
    turn_deadline_s: float | None = Field(default=None, gt=0)
    """One turn of the model may take this long, from the request to its last token; then the episode ends as failed
    (infrastructure). null: as long as the episode."""
    tool_deadline_s: float = Field(default=5.0, gt=0)
    """One tool call may take this long: an answer of the environment, or what an agent does between two turns of the model;
    then the episode ends as failed (infrastructure)."""
    episode_deadline_s: float = Field(default=120.0, gt=0)
    """A whole episode may take this long; then it ends as failed (infrastructure)."""

    @property
    def is_own(self) -> bool:
        """Whether `family` names a class of the researcher's."""
        return ":" in self.family

    @model_validator(mode="after")
    def _fill_in_agent(self) -> Self:
        if self.family == "verifiers" and self.agent is None:
            object.__setattr__(self, "agent", AgentSpec(run="miles_core.environments.verifiers_env:run"))
        return self

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
    def _prompt_is_for_the_library(self) -> Self:
        if self.prompt is not None and (self.is_own or self.family in (*SHELL_FAMILIES, "verifiers")):
            raise ValueError(f"environment.prompt is for reasoning-gym families, {self.family!r} words its own; remove it")
        if self.prompt is not None and self.prompt.shots and self.tool != "none":
            raise ValueError("environment.prompt.shots are answered without a tool; set tool: none or shots: 0")
        return self

    @model_validator(mode="after")
    def _turns_need_a_tool(self) -> Self:
        if self.agent is not None and self.tool == "shell":
            raise ValueError(
                f"environment.agent: an agent brings its own tools and cannot reach the shell of {self.family}; leave agent "
                f"out, or take another family"
            )
        if self.is_own:
            return self
        if (self.family in SHELL_FAMILIES) != (self.tool == "shell"):
            raise ValueError(
                f"environment: family {self.family!r} does not go with tool {self.tool!r}; {' and '.join(SHELL_FAMILIES)} need "
                f"tool: shell, and no other family has it"
            )
        if self.tool == "none" and self.max_turns > 1 and self.agent is None:
            raise ValueError("environment: max_turns > 1 needs a tool or an agent; set tool: calculator or max_turns: 1")
        return self


class GradeWeightsSpec(Closed):
    """How much a sample counts by its grade (sources G3, G4; grading/weights.py)."""

    per_s: float = Field(default=1e-4, ge=0)
    """lambda of exp(-lambda x age): 1e-4 halves a weight in 1.9 hours."""
    std_scale: float = Field(default=0.15, gt=0)
    """A grade of this standard deviation counts half."""


class GraderSpec(Closed):
    """Grader replicas of tier L1 (rules)."""

    replicas: int = Field(default=1, ge=1)
    """Jobs of the tier."""
    attempts: int = Field(default=3, ge=1)
    """A trajectory without a grade is sent out at most this often; then its group is dropped as `ungraded`."""
    deadline_s: float = Field(default=10.0, gt=0)
    """One verifier call may take this long."""
    ranking: str | None = Field(default=None, pattern=r"^(brevity|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    """A ranking grader, by which the learner moves advantage among the passing answers of a group (groupwise advantage
    redistribution, grading/ranking.py): `brevity`, or `package.module:function` of your own. null: none."""
    weights: GradeWeightsSpec | None = None
    """Weighs samples by the age and the standard deviation of their grades; `{}` turns it on with its defaults."""
