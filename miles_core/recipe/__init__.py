"""What a person trains: one typed, closed, frozen description of a run. Where it runs is cluster/profile.py; never mixed.

YAML is written by hand; the resolved copy in a run directory is JSON. Every cross-field rule refuses at submit and names
the fix. A field exists only if something reads it.
"""

from __future__ import annotations

from miles_core.recipe.closed import Closed
from miles_core.recipe.environment import AgentSpec, EnvironmentSpec, GraderSpec, GradeWeightsSpec, PromptSpec
from miles_core.recipe.learner import BalanceSpec, CriticSpec, LearnerSpec, RewardScalerSpec
from miles_core.recipe.model import EvaluationSpec, LoraSpec, ModelSpec, PolicySpec, RetentionSpec
from miles_core.recipe.reading import CONFIGS, apply_overrides, explain, find_config, load_recipe, read_yaml
from miles_core.recipe.rollout import NgramSpec, OrchestratorSpec, RolloutPool, RolloutSpec, VllmSpec
from miles_core.recipe.run import Recipe, TrackingSpec
from miles_core.recipe.timing import Timing

__all__ = [
    "AgentSpec",
    "CONFIGS",
    "BalanceSpec",
    "Closed",
    "CriticSpec",
    "EnvironmentSpec",
    "EvaluationSpec",
    "GradeWeightsSpec",
    "GraderSpec",
    "LearnerSpec",
    "LoraSpec",
    "ModelSpec",
    "NgramSpec",
    "OrchestratorSpec",
    "PolicySpec",
    "PromptSpec",
    "Recipe",
    "RetentionSpec",
    "RewardScalerSpec",
    "RolloutPool",
    "RolloutSpec",
    "Timing",
    "TrackingSpec",
    "VllmSpec",
    "apply_overrides",
    "explain",
    "find_config",
    "load_recipe",
    "read_yaml",
]
