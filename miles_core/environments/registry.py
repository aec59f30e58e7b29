"""Which environment a recipe means: `environment.family`. Its verifier is made by miles_core/grading/rules.py.

- a name of a reasoning-gym family, for example `chain_sum`: its questions, judged by the library;
- `shell_puzzle`: a few commands of a real bash in a sandbox, judged by what is known of the puzzle;
- `terminal`: any line of bash in a sandbox, to repair a small project, judged by running its checks on what the folder holds;
- `verifiers`: an environment of that package, judged by its rubric (miles_core/environments/verifiers_env.py);
- `package.module:ClassName`: your own. It must be importable where the jobs run (installed, or in PYTHONPATH of the shell that
  submits or of the cluster profile's setup) and is two small protocols (miles_core/environments/base.py,
  miles_core/grading/base.py):

      class MyEnvironment:
          def __init__(self, spec): ...                      # the recipe's `environment` section; spec.options is yours
          def episode(self, seed, split): ...                # -> Episode: opening(), respond(), facts(), close()
          def verifier(self): ...                            # -> Verifier: source, value(task_seed, facts) in [0, 1]

  An episode reports facts and the verifier, in another process, judges them: it sees the seed and the facts, nothing else.

Failure: a class that is not there or lacks a method is a RecipeError that names what is missing.
"""

from __future__ import annotations

from typing import Any

from miles_core.environments.base import Environment
from miles_core.environments.shell_puzzle import FAMILY as SHELL_PUZZLE
from miles_core.environments.shell_puzzle import PuzzleSource
from miles_core.environments.terminal_task import FAMILY as TERMINAL
from miles_core.environments.terminal_task import TaskSource as TerminalTaskSource
from miles_core.environments.verifiers_env import FAMILY as VERIFIERS
from miles_core.environments.verifiers_env import VerifiersEnvironment, check_options
from miles_core.errors import RecipeError
from miles_core.named import load_named
from miles_core.recipe import EnvironmentSpec


def make_environment(spec: EnvironmentSpec, owner: str = "nobody") -> Environment:
    """The environment of a recipe; `owner` names the run and the role in what it leaves on the node. Raises RecipeError."""
    if spec.is_own:
        environment: Environment = make_own(spec, "episode")
        return environment
    if spec.family == SHELL_PUZZLE:
        from miles_core.environments.shell import ShellPuzzleEnvironment

        return ShellPuzzleEnvironment(spec, owner)
    if spec.family == TERMINAL:
        from miles_core.environments.terminal import TerminalEnvironment

        return TerminalEnvironment(spec, owner)
    if spec.family == VERIFIERS:
        return VerifiersEnvironment(spec)
    from miles_core.environments.reasoning_gym import ReasoningGymEnvironment

    return ReasoningGymEnvironment(spec)


def check_environment(spec: EnvironmentSpec) -> None:
    """What can be told without loading a library: options of the families with a shell and of verifiers. Raises RecipeError."""
    if spec.family == SHELL_PUZZLE:
        PuzzleSource(spec.options)
    if spec.family == TERMINAL:
        TerminalTaskSource(spec.options)
    if spec.family == VERIFIERS:
        check_options(spec.options)


def make_own(spec: EnvironmentSpec, method: str) -> Any:
    """An instance of the researcher's class, which must have `method`. Raises RecipeError."""
    made = load_named("environment.family", spec.family)(spec)
    if not callable(getattr(made, method, None)):
        raise RecipeError(
            f"environment.family: {spec.family!r} has no method {method}(); see miles_core/environments/registry.py for what "
            f"it needs"
        )
    return made
