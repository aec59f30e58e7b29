"""The learner's main: python -m miles_core.roles.learner --run-dir D --attempt N. The work is in learner/loop.py."""

from __future__ import annotations

import json
import sys

from miles_core.errors import RunDirectoryError
from miles_core.learner.loop import Learner, Trainer
from miles_core.policy.manifest import probe_prompts
from miles_core.runtime.context import RoleContext, run_role


def main(context: RoleContext) -> None:
    """Trains the run. torch and DeepSpeed are imported when the journal is open: nobody waits for them to see the cuts."""

    def make_trainer() -> Trainer:
        import torch

        from miles_core.learner.trainer import Trainer as DeepSpeedTrainer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return DeepSpeedTrainer(context.paths.base_model, context.recipe.learner, context.recipe.model.dtype, device=device)

    Learner(context, make_trainer, probe_prompts(read_vocabulary(context))).run()


def read_vocabulary(context: RoleContext) -> int:
    """Size of the base model's vocabulary. Raises RunDirectoryError."""
    path = context.paths.base_model / "config.json"
    try:
        size = json.loads(path.read_bytes()).get("vocab_size")
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path} is not readable as a model's config: {error}") from error
    if not isinstance(size, int) or size < 1:
        raise RunDirectoryError(f"{path}: vocab_size is {size!r}; the base model must be a causal language model")
    return size


if __name__ == "__main__":
    sys.exit(run_role("learner", main))
