"""A whole run in one process in which every role is the real code, the supervisor too, over the simulation's disk and clock.

A role that blocks runs in a thread of its own, from one sleep to the next, one at a time: the run is a function of its seed.
A crash point leaves that thread standing for ever, so that nothing is flushed, closed or cleaned up, as SIGKILL does. Invented
are only the model (learner_run.FakeTrainer), what is sampled with it, its grades, and Slurm (a dictionary of jobs).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cluster.job_spec import token_of
from cluster.profile import ClusterProfile
from cluster.scheduler import Cause, JobSpec, JobView, Phase, Snapshot
from cluster.supervise import Supervisor
from miles_core.grading.worker import GraderWorker
from miles_core.learner.loop import Learner
from miles_core.orchestrator.loop import Orchestrator
from miles_core.policy.manifest import PolicyManifest
from miles_core.records import Version, trajectory_id
from miles_core.roles.evaluator import Evaluator
from miles_core.rollout.sampler import SampleRequest
from miles_core.rollout.worker import RolloutWorker
from miles_core.trajectories.schema import Trajectory, Turn, VersionRun
from tests.protocol.learner_run import PROBE, FakeTrainer
from tests.protocol.simulation import TIMING, Killed, Process, RoleSteps, SimCluster, Steps, simulated_recipe
from tests.protocol.simulation_roles import reward_of

TICK_S = 0.3
RECIPE = simulated_recipe(
    steps=4, learner__checkpoint_every=1, retention__trajectories="after_two_checkpoints", orchestrator__prompts=2
)


class RoleThread:
    """Real code that blocks, stepped from outside."""

    def __init__(self, process: Process, main: Callable[[Process], None]) -> None:
        self._process, self._main = process, main
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._has_ended = self._is_killed = False
        self.wakes_at = 0.0
        process.sleep = self._sleep
        self._thread = threading.Thread(target=self._run, name=process.node, daemon=True)
        self._thread.role = self  # type: ignore[attr-defined]
        self._thread.start()

    def resume(self) -> bool:
        """Runs to the next sleep; False at the end. Raises what ended it."""
        self._go.release()
        self._back.acquire()
        if self._is_killed:
            raise Killed(self._process.node)
        if self._error is not None:
            raise self._error
        return not self._has_ended

    def stop_for_ever(self) -> None:
        """The process is gone: not one more line of it runs."""
        self._is_killed = True
        self._back.release()
        threading.Event().wait()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._main(self._process)
        except BaseException as error:  # noqa: BLE001 - whoever steps it gets it
            self._error = error
        self._has_ended = True
        self._back.release()

    def _sleep(self, seconds: float) -> None:
        self.wakes_at = self._process.cluster.clock() + seconds
        self._back.release()
        self._go.acquire()


def end_process() -> None:
    """Stands in for crash.end_process."""
    role = getattr(threading.current_thread(), "role", None)
    if role is None:
        raise Killed
    role.stop_for_ever()


def in_thread(main: Callable[[Process], None]) -> RoleSteps:
    """A role of the simulation, from code that blocks."""

    def steps(process: Process) -> Steps:
        process.has_started = True
        thread = RoleThread(process, main)
        while thread.resume():
            yield
            while process.cluster.clock() < thread.wakes_at:
                yield

    return steps


# --- what is invented ------------------------------------------------------------------------------------------------


class Engine:
    """FakeTrainer's model, as a replica has it."""

    def __init__(self) -> None:
        self.version, self.running, self._weights = Version(-1, 0), 0, np.zeros(8, np.float32)

    def load_weights(self, tensors: dict[str, torch.Tensor], version: Version) -> None:
        self.version, self._weights = version, tensors["model.b.weight"].reshape(-1).numpy()

    def logprobs(self, token_lists: list[list[int]], temperature: float = 1.0) -> list[npt.NDArray[np.float32]]:
        return [-np.abs(self._weights[np.array(tokens[1:]) % 8]) / np.float32(temperature) for tokens in token_lists]


class Episodes:
    """Every sample takes three ticks."""

    def __init__(self, process: Process, engine: Engine) -> None:
        self._process, self._engine = process, engine
        self._live: list[tuple[SampleRequest, list[Version]]] = []

    @property
    def free_slots(self) -> int:
        return 4 - len(self._live)

    def submit(self, request: SampleRequest) -> None:
        self._live.append((request, []))
        self._engine.running = len(self._live)

    async def tick(self) -> list[Trajectory]:
        self._process.sleep(TICK_S)
        for _, versions in self._live:
            versions.append(self._engine.version)
        finished = [item for item in self._live if len(item[1]) == 3]
        self._live = [item for item in self._live if len(item[1]) < 3]
        self._engine.running = len(self._live)
        return [self._trajectory(*item) for item in finished]

    async def cancel_all(self) -> None:
        self._live.clear()

    def _trajectory(self, request: SampleRequest, versions: list[Version]) -> Trajectory:
        process, draw = self._process, np.random.default_rng(request.seed)
        changes = [nth for nth in range(3) if nth == 0 or versions[nth] != versions[nth - 1]]
        return Trajectory(
            trajectory_id=trajectory_id(request.sample_id, process.writer, process.attempt), sample_id=request.sample_id,
            group_id=request.group_id, order_id=request.order_id, producer=process.writer, producer_attempt=process.attempt,
            task_seed=request.task_seed, tokens=draw.integers(0, 8, 5, np.int32), loss_mask=np.array([0, 0, 1, 1, 1], np.uint8),
            logprobs=np.array([0, 0, -1, -1, -1], np.float32), turns=(Turn("user", 0, 2), Turn("assistant", 2, 5)),
            versions=tuple(VersionRun(2 + nth, *versions[nth]) for nth in changes), temperature=request.temperature,
            status="complete", facts={"sample": request.sample_id},
        )  # fmt: skip


class Judge:
    """A verifier and a scorer."""

    source = "simulated"

    def value(self, task_seed: int, facts: dict[str, Any]) -> float:
        return reward_of(str(facts["sample"]))

    def load(self, tensors: dict[str, torch.Tensor], manifest: PolicyManifest) -> None: ...

    def score(self, seeds: Sequence[int]) -> list[float | None]:
        return [0.5] * len(seeds)


def _rollout(process: Process) -> None:
    engine = Engine()
    worker = RolloutWorker(process.context, process.context.journal(), engine, Episodes(process, engine))  # type: ignore[arg-type]
    asyncio.run(worker.run())


ROLES: dict[str, Callable[[Process], None]] = {
    "orchestrator": lambda process: Orchestrator(process.context).run(),
    "rollout": _rollout,
    "grader": lambda process: GraderWorker(process.context, process.context.journal(), Judge()).run(),
    "learner": lambda process: Learner(process.context, FakeTrainer, PROBE).run(),
    "evaluator": lambda process: Evaluator(process.context, Judge).run(),
}


# --- Slurm and the supervisor ----------------------------------------------------------------------------------------


class Jobs:
    """A Scheduler whose jobs are processes of the simulation."""

    def __init__(self, cluster: RealCluster) -> None:
        self._cluster = cluster
        self.down: set[str] = set()
        """Jobs whose node died."""

    def submit(self, spec: JobSpec) -> str:
        process = Process(self._cluster, spec.writer, spec.attempt, in_thread(ROLES[spec.writer.split("-")[0]]))
        self._cluster.processes.append(process)
        return process.context.job_id

    def snapshot(self, run_id: str) -> Snapshot:
        jobs = [process for process in self._cluster.processes if process.writer != "supervisor-0"]
        return Snapshot(ok=True, jobs=tuple(map(self._view, jobs)), usable_nodes=9)

    def _view(self, process: Process) -> JobView:
        cause, phase = Cause.NONE, Phase.RUNNING
        if not process.lives:
            well, phase = process.end in ("done", "left", "lost"), Phase.ENDED
            is_down = process.context.job_id in self.down
            cause = Cause.INFRASTRUCTURE if is_down else Cause.COMPLETED if well else Cause.FAILED
        return JobView(
            job_id=process.context.job_id, run_id=process.context.run.run_id, writer=process.writer, attempt=process.attempt,
            token=process.context.token, phase=phase, cause=cause, state=process.end or "RUNNING",
        )  # fmt: skip

    def cancel(self, job_ids: tuple[str, ...], *, signal: str = "") -> None:
        for process in self._cluster.processes:
            if process.context.job_id in job_ids and process.lives:
                process.context.leave.set()
                process.end = "" if signal else "cancelled"

    def expected_starts(self, job_ids: tuple[str, ...]) -> dict[str, float]:
        return {}

    def script(self, spec: JobSpec) -> str:
        return ""


class RealCluster(SimCluster):
    """See module. `run_to_the_end` is until a supervisor has closed the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, recipe=RECIPE, real_files=True)
        self.jobs = Jobs(self)
        self.outcome: object = None

    def token(self, writer: str, attempt: int) -> str:
        return token_of(self.run, writer, attempt)

    def _open_supervisor(self) -> None:  # type: ignore[override]
        """None of its own."""

    def start(self, *writers: str) -> None:
        self.epoch += 1
        self.processes.append(Process(self, "supervisor-0", self.epoch, in_thread(self._supervise)))

    def _supervise(self, process: Process) -> None:
        profile = ClusterProfile(name="simulated", kind="local", timing=TIMING, role_failures=9)
        self.outcome = Supervisor(process.context, profile, self.jobs).run()

    def tick(self) -> None:
        self.ticks += 1
        self.clock.advance(self.rng.uniform(0.1, 0.4))
        if not self.newest("supervisor-0").lives and self.outcome is None:
            self.start()
        for process in [process for process in self.processes if process.lives]:
            process.step()

    def is_over(self) -> bool:
        return self.outcome is not None

    def killed(self) -> list[str]:
        """Who died at a crash point."""
        return [process.node for process in self.processes if process.end == "killed"]
