"""python -m miles_core.roles.rollout --run-dir D --replica I --attempt N: one attempt of one rollout replica."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from miles_core.base_model import check_base_model
from miles_core.recipe import RolloutPool
from miles_core.records import Version
from miles_core.rollout.engine import Engine
from miles_core.run import rollout_writers
from miles_core.runtime.context import RoleContext, run_role

NOT_LOADED = Version(-1, 0)
"""The engine's version until a published one has passed its probe; nothing is sampled with it."""


def pool_of(context: RoleContext) -> RolloutPool:
    """The pool that this replica belongs to. KeyError for a replica that the recipe does not have."""
    name = dict(rollout_writers(context.recipe))[context.writer]
    return next(pool for pool in context.recipe.rollout.pools if pool.name == name)


def make_engine(context: RoleContext, pool: RolloutPool, end_id: int) -> Engine:
    """The engine of a pool, over the base model; it serves when a published version was loaded. Raises RecipeError."""
    recipe, folder = context.recipe, context.paths.base_model
    settings: dict[str, Any] = {
        "dtype": recipe.rollout_dtype, "weights_dtype": recipe.model.dtype, "end_id": end_id, "slots": pool.slots,
        "max_tokens": recipe.environment.max_tokens, "version": NOT_LOADED, "record_experts": recipe.learner.routing_replay,
        "lora": recipe.model.lora,
    }  # fmt: skip
    if pool.engine == "vllm":
        from miles_core.rollout.vllm_engine import VllmEngine

        return VllmEngine(folder, spec=pool.vllm, **settings)
    import torch

    from miles_core.rollout.torch_engine import TorchEngine

    return TorchEngine.from_folder(folder, device="cuda" if torch.cuda.is_available() else "cpu", **settings)


def main(context: RoleContext) -> None:
    """Opens the journal first, so that this attempt is seen while torch and the model load."""
    journal = context.journal()

    from miles_core.environments.registry import make_environment
    from miles_core.rollout.choice import make_renderer, sampler_class
    from miles_core.rollout.meter import MeteredEngine
    from miles_core.rollout.worker import RolloutWorker

    recipe = context.recipe
    if recipe.model.lora is not None:
        check_base_model(context.run, context.paths)
    renderer = make_renderer(context.paths.base_model, recipe.model.chat)
    engine = MeteredEngine(make_engine(context, pool_of(context), renderer.end_id))
    sampler = sampler_class(recipe.environment)(
        engine, make_environment(recipe.environment, f"{context.run.run_id}.{context.writer}"), renderer, recipe.environment,
        producer=context.writer, attempt=context.attempt,
    )  # fmt: skip
    asyncio.run(RolloutWorker(context, journal, engine, sampler, figures=engine.figures).run())


if __name__ == "__main__":
    sys.exit(run_role("rollout", main))
