"""python -m miles_core.roles.rollout --run-dir D --replica I --attempt N: one attempt of one rollout replica."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from miles_core.base_model import check_base_model
from miles_core.errors import RecipeError
from miles_core.recipe import RolloutPool
from miles_core.records import Version
from miles_core.rollout.engine import Member
from miles_core.rollout.router import RoutedEngine
from miles_core.run import rollout_writers
from miles_core.runtime.context import RoleContext, run_role

NOT_LOADED = Version(-1, 0)
"""The engine's version until a published one has passed its probe; nothing is sampled with it."""


def pool_of(context: RoleContext) -> RolloutPool:
    """The pool that this replica belongs to. KeyError for a replica that the recipe does not have."""
    name = dict(rollout_writers(context.recipe))[context.writer]
    return next(pool for pool in context.recipe.rollout.pools if pool.name == name)


def make_engine(context: RoleContext, pool: RolloutPool, end_id: int, index: int = 0) -> Member:
    """Engine `index` of a replica, over the base model; it serves when a published version was loaded. Raises RecipeError."""
    recipe, folder = context.recipe, context.paths.base_model
    settings: dict[str, Any] = {
        "dtype": recipe.rollout_dtype, "weights_dtype": recipe.model.dtype, "end_id": end_id, "slots": pool.slots_of(index),
        "max_tokens": recipe.environment.max_tokens, "version": NOT_LOADED, "record_experts": recipe.learner.routing_replay,
        "lora": recipe.model.lora,
    }  # fmt: skip
    if pool.engine == "vllm":
        from miles_core.rollout.vllm_engine import VllmEngine

        # Alone it has all GPUs of its job, and without tensor_parallel its model is in this process.
        return VllmEngine(folder, spec=pool.vllm, gpus=gpus_of(pool, index) if pool.engines > 1 else (), **settings)
    gpus = gpus_of(pool, index)
    from miles_core.rollout.torch_engine import TorchEngine

    # Names in CUDA_VISIBLE_DEVICES are counted from 0 inside the process.
    return TorchEngine.from_folder(folder, device=f"cuda:{index}" if gpus else "cpu", **settings)


def gpus_of(pool: RolloutPool, index: int) -> tuple[str, ...]:
    """The GPUs of engine `index`, as CUDA_VISIBLE_DEVICES names them; none without GPUs. Raises RecipeError for too few."""
    import torch

    if not torch.cuda.is_available():
        return ()
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else [str(number) for number in range(torch.cuda.device_count())]
    shared = 1 if pool.vllm is None else pool.vllm.tensor_parallel
    if len(names) < pool.engines * shared:
        raise RecipeError(
            f"rollout.pools.{pool.name}: engines={pool.engines} of {shared} GPUs each, but this job sees {len(names)} GPUs "
            f"({', '.join(names)}); give the pool gpus={pool.engines * shared} in the cluster profile, or lower engines"
        )
    return tuple(names[index * shared : (index + 1) * shared])


def make_fleet(context: RoleContext, pool: RolloutPool, end_id: int) -> RoutedEngine:
    """The several engines of a replica. On a CPU, where each would want all cores, they step one after another."""
    return RoutedEngine(
        lambda index: make_engine(context, pool, end_id, index), pool.engines, hands_on=pool.on_engine_death == "hand_on",
        is_parallel=bool(gpus_of(pool, 0)),
    )  # fmt: skip


def main(context: RoleContext) -> None:
    """Opens the journal first, so that this attempt is seen while torch and the model load."""
    journal = context.journal()

    from miles_core.environments.registry import make_environment
    from miles_core.rollout.choice import make_renderer, sampler_class
    from miles_core.rollout.meter import MeteredEngine
    from miles_core.rollout.worker import RolloutWorker

    recipe, pool = context.recipe, pool_of(context)
    if recipe.model.lora is not None:
        check_base_model(context.run, context.paths)
    renderer = make_renderer(context.paths.base_model, recipe.model.chat)
    fleet = make_fleet(context, pool, renderer.end_id) if pool.engines > 1 else None
    engine = MeteredEngine(
        fleet or make_engine(context, pool, renderer.end_id), step_deadline_s=recipe.environment.token_deadline_s
    )
    sampler = sampler_class(recipe.environment)(
        engine, make_environment(recipe.environment, f"{context.run.run_id}.{context.writer}"), renderer, recipe.environment,
        producer=context.writer, attempt=context.attempt,
    )  # fmt: skip
    worker = RolloutWorker(
        context, journal, engine, sampler, fleet=fleet,
        figures=lambda: engine.figures() | ({} if fleet is None else fleet.figures()),
    )  # fmt: skip
    asyncio.run(worker.run())


if __name__ == "__main__":
    sys.exit(run_role("rollout", main))
