"""The learner's main: python -m miles_core.roles.learner --run-dir D --attempt N. The work is in learner/loop.py.

Of several ranks (learner/ranks.py) rank 0 is the role; the others only do what it says. They take no lease, write nothing but
their part of checkpoints, and stay on TERM and USR2, which srun gives to all: rank 0 decides when they leave.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from miles_core.base_model import check_base_model
from miles_core.errors import MilesError, RunDirectoryError
from miles_core.learner.loop import Learner
from miles_core.learner.loop import Trainer as AnyTrainer
from miles_core.learner.ranks import SILENT_S, Lead, Place, Sibling
from miles_core.paths import RunPaths
from miles_core.policy.manifest import probe_prompts
from miles_core.run import RunConfig, read_run
from miles_core.runtime.context import RoleContext, exit_code_of, own_job_id, parse_arguments, run_role, start_logging
from miles_core.runtime.hardening import harden

if TYPE_CHECKING:
    from miles_core.learner.trainer import Trainer

log = logging.getLogger("miles")


def main(context: RoleContext) -> None:
    """Trains the run. torch and DeepSpeed are imported when the journal is open: nobody waits for them to see the cuts."""
    lead = Lead(Place.of(os.environ), silent_s=max(SILENT_S, context.timing.lease_s))

    def start() -> AnyTrainer:
        from miles_core.learner.ranked import start_ranks

        return start_ranks(lead, lambda device: make_trainer(context.run, context.paths, device))

    try:
        if lead.gather(context):
            Learner(context, start, probe_prompts(read_vocabulary(context))).run()
    finally:
        lead.close()


def follow_rank_0(place: Place, argv: list[str] | None = None) -> int:
    """The main of every other rank; returns the exit code, 0 if rank 0 said leave."""
    arguments = parse_arguments(argv)
    start_logging(f"role=learner-0 attempt={arguments.attempt} rank={place.rank}")
    harden()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: log.info("signal=%s: rank 0 decides", signal.Signals(number).name))

    def play() -> int:
        run, paths = read_run(arguments.run_dir)
        token = os.environ.get("MILES_TOKEN", "")
        link = Sibling(place, run, paths, arguments.attempt, token, own_job_id()).join()
        from miles_core.learner.ranked import follow

        follow(link, place, arguments.attempt, lambda device: make_trainer(run, paths, device))
        return 0

    return exit_code_of(play)


def make_trainer(run: RunConfig, paths: RunPaths, device: str) -> Trainer:
    """This rank's part of the trainer. Raises DigestMismatch if it is to train an adapter of another base model."""
    from miles_core.learner.trainer import Trainer as DeepSpeedTrainer

    recipe = run.recipe
    if recipe.model.lora is not None:
        check_base_model(run, paths)
    return DeepSpeedTrainer(
        paths.base_model, recipe.learner, recipe.model.dtype, device=device, lora=recipe.model.lora, seed=recipe.seed
    )


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


def start(argv: list[str] | None = None) -> int:
    """Rank 0 or another one, as the environment says."""
    try:
        place = Place.of(os.environ)
    except MilesError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return run_role("learner", main, argv) if place.rank == 0 else follow_rank_0(place, argv)


if __name__ == "__main__":
    sys.exit(start())
