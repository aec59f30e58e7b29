"""Does a Slurm site offer what a cluster profile asks for? Facts from cluster/slurm/site.py against the profile; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from cluster.profile import ClusterProfile, Resources
from cluster.slurm.command import NO_SLURM_HINT
from cluster.slurm.site import Partition, SiteFacts
from flows.findings import Finding, bad, ok, unknown, warn

ROLES = ("learner", "orchestrator", "grader", "rollout", "evaluator")
JOBS_OF_A_RUN = len(ROLES)
"""At least: one job a role."""
TRIED_VERSION = "22.05"
_POLITE_POLL_S = 30.0
_QUERIES_BEFORE_FORGOTTEN = 4


def judge(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Finding]:
    """All that the facts say of the profile, the fundamental first."""
    if facts.missing_commands:
        yield bad("slurm commands", f"not in PATH: {', '.join(facts.missing_commands)}", NO_SLURM_HINT)
    else:
        yield ok("slurm commands", "sbatch, squeue, scancel, sinfo, scontrol, srun")
    yield _version(facts)
    if not facts.ping:
        fix = "is slurmctld up, and SLURM_CONF right? try `scontrol ping`"
        if profile.slurm.devslurm is not None:
            fix = f"start it with `miles devslurm up`; the profile says it is in {profile.slurm.devslurm}"
        yield bad("slurmctld", facts.unknown.get("controller", "no answer"), fix)
        return
    yield ok("slurmctld", facts.ping.partition("\n")[0])
    yield _accounting(facts)
    yield _memory(profile, facts)
    yield _poll(profile)
    yield _binding(profile, facts)
    if facts.partitions is None:
        yield unknown("partitions", facts.unknown.get("partitions", "not listed"), "try `scontrol show partition`")
        return
    for role, wanted in asked_for(profile).items():
        yield from judge_role(profile, role, wanted, facts.partitions)
    yield from _names(profile, facts)


def asked_for(profile: ClusterProfile) -> dict[str, Resources]:
    """Resources by role, and by `rollout pool <name>` where a pool has its own."""
    roles = {role: profile.resources_for(role) for role in ROLES}  # type: ignore[arg-type]
    return {**roles, **{f"rollout pool {name}": wanted for name, wanted in profile.pools.items()}}


def _version(facts: SiteFacts) -> Finding:
    number = re.search(r"\d+\.\d+(?:\.\d+)?", facts.version)
    if number is None:
        return unknown("slurm version", facts.unknown.get("version", facts.version or "not said"))
    if number[0].startswith(TRIED_VERSION):
        return ok("slurm version", facts.version)
    return Finding("slurm version", "ok", f"{facts.version} (tried with {TRIED_VERSION})")


def _accounting(facts: SiteFacts) -> Finding:
    kind = facts.config.get("AccountingStorageType", "")
    if facts.has_accounting:
        return ok("accounting", "slurmdbd: accounts, QOS and their limits can be checked")
    if not kind:
        return unknown("accounting", facts.unknown.get("configuration", "the configuration does not say"))
    return ok("accounting", f"{kind}, no slurmdbd: a run needs none (its journals keep the record); accounts are not checked")


def _memory(profile: ClusterProfile, facts: SiteFacts) -> Finding:
    """How long an ended job stays listed: the supervisor learns its end from that list."""
    text = facts.config.get("MinJobAge", "")
    digits = re.match(r"\d+", text)
    if digits is None:
        return unknown("ended jobs", "MinJobAge is not said")
    needed = _QUERIES_BEFORE_FORGOTTEN * profile.scheduler_poll_s
    if int(digits[0]) >= needed:
        return ok("ended jobs", f"stay listed for {text} (MinJobAge)")
    return warn(
        "ended jobs", f"stay listed for only {text} (MinJobAge), less than {_QUERIES_BEFORE_FORGOTTEN} queries",
        "lower scheduler_poll_s, or ask for a larger MinJobAge: ends would be noticed late, by heartbeats",
    )  # fmt: skip


def _poll(profile: ClusterProfile) -> Finding:
    seen = f"one squeue each {profile.scheduler_poll_s:g} s"
    if profile.scheduler_poll_s >= _POLITE_POLL_S or profile.slurm.devslurm is not None:
        return ok("queries", seen)
    return warn("queries", seen, f"set scheduler_poll_s to {_POLITE_POLL_S:g} or more on a cluster that others use")


def _binding(profile: ClusterProfile, facts: SiteFacts) -> Finding:
    """Whether a job's threads stay on the cores that it was given."""
    plugin = facts.config.get("TaskPlugin", "")
    if not plugin:
        return unknown("core binding", "TaskPlugin is not said")
    if profile.slurm.devslurm is not None or "cgroup" in plugin or "affinity" in plugin:
        return ok("core binding", f"TaskPlugin={plugin}")
    return warn(
        "core binding", f"TaskPlugin={plugin}: jobs of a node run on each other's cores",
        "ask for TaskPlugin=task/cgroup,task/affinity with ConstrainCores=yes, or run with --exclusive (slurm.extra)",
    )  # fmt: skip


def judge_role(profile: ClusterProfile, role: str, wanted: Resources, partitions: Mapping[str, Partition]) -> Iterator[Finding]:
    """Whether one role's job can ever start in its partition."""
    name, key = f"{role} job", f"resources.{role}" if "pool" not in role else f"pools.{role.rpartition(' ')[2]}"
    partition = _partition(wanted, partitions)
    if partition is None:
        asked = "the default partition" if wanted.partition is None else f"partition {wanted.partition!r}"
        there = ", ".join(partitions) or "none that you may use"
        yield bad(name, f"there is no {asked}", f"set {key}.partition to one of {there}")
        return
    faults = [*_policy_faults(profile, wanted, partition, key), *_shape_faults(profile, wanted, partition, key)]
    yield from (bad(name, seen, fix) for seen, fix in faults)
    if not faults:
        yield ok(name, f"fits {partition.name}: {_asks(wanted)}, {wanted.time_min} min of {_minutes(partition.max_time_min)}")
    if role == "learner":
        yield from _preemption(profile, partition)


def _preemption(profile: ClusterProfile, partition: Partition) -> Iterator[Finding]:
    """The learner's warning of a preemption is the partition's, not the profile's; what is not saved within it is lost."""
    if partition.preempts in ("REQUEUE", "CANCEL") and partition.grace_s < profile.slurm.signal_lead_s:
        yield warn(
            "learner preemption",
            f"{partition.name} may preempt it ({partition.preempts}) {partition.grace_s:.0f} s after a warning (GraceTime), "
            f"less than slurm.signal_lead_s {profile.slurm.signal_lead_s} s",
            "set resources.learner.partition to one that is not preempted, or lower learner.checkpoint_every: steps since the "
            "last checkpoint are trained again",
        )  # fmt: skip


def _partition(wanted: Resources, partitions: Mapping[str, Partition]) -> Partition | None:
    if wanted.partition is not None:
        return partitions.get(wanted.partition)
    return next((partition for partition in partitions.values() if partition.is_default), None)


def _policy_faults(profile: ClusterProfile, wanted: Resources, partition: Partition, key: str) -> Iterator[tuple[str, str]]:
    site = profile.slurm
    if partition.state != "UP":
        yield f"partition {partition.name} is {partition.state}", f"set {key}.partition to one that is up, or wait"
    if wanted.time_min > partition.max_time_min:
        yield (
            f"asks for {wanted.time_min} min, partition {partition.name} allows {_minutes(partition.max_time_min)}",
            f"lower {key}.time_min: a role that reaches its limit saves, leaves and is started again",
        )
    if site.signal_lead_s >= wanted.time_min * 60:
        yield f"slurm.signal_lead_s {site.signal_lead_s} s is the whole walltime", f"raise {key}.time_min"
    if wanted.nodes > partition.max_nodes:
        yield f"asks for {wanted.nodes} nodes, {partition.name} allows {partition.max_nodes:.0f}", f"lower {key}.nodes"
    if site.account and partition.accounts is not None and site.account not in partition.accounts:
        yield (
            f"account {site.account!r} may not use {partition.name}",
            f"set slurm.account to one of {', '.join(sorted(partition.accounts))}",
        )
    if site.qos and partition.qos is not None and site.qos not in partition.qos:
        yield f"QOS {site.qos!r} may not use {partition.name}", f"set slurm.qos to one of {', '.join(sorted(partition.qos))}"


def _shape_faults(profile: ClusterProfile, wanted: Resources, partition: Partition, key: str) -> Iterator[tuple[str, str]]:
    """Enough nodes of a kind that offers all of it; nothing is said of a partition whose nodes are not known."""
    if not partition.shapes:
        return
    features = _features(profile.slurm.constraint)
    cpus = wanted.cpus * wanted.tasks
    fitting = [
        shape for shape in partition.shapes
        if shape.cpus >= cpus and shape.gpus >= wanted.gpus and shape.mem_mb >= (wanted.mem_mb or 0)
        and features <= shape.features
    ]  # fmt: skip
    if sum(shape.nodes for shape in fitting) >= wanted.nodes:
        return
    offers = "; ".join(
        f"{shape.nodes} nodes of {shape.cpus} CPUs, {shape.gpus} GPUs, {shape.mem_mb} MiB" for shape in partition.shapes
    )
    extra = f" with {profile.slurm.constraint}" if features else ""
    yield f"no {wanted.nodes} nodes of {partition.name}{extra} offer {_asks(wanted)}; it has {offers}", f"lower {key}"


def _features(constraint: str | None) -> frozenset[str]:
    """Of a plain list of features that must all be there; expressions with alternatives are Slurm's to judge."""
    if not constraint or not re.fullmatch(r"[\w.&,+-]+", constraint):
        return frozenset()
    return frozenset(re.split(r"[&,]", constraint)) - {""}


def _names(profile: ClusterProfile, facts: SiteFacts) -> Iterator[Finding]:
    site = profile.slurm
    if facts.has_accounting:
        yield _account(site.account, facts)
        yield _qos(profile, facts)
    elif site.account or site.qos:
        named = ", ".join(f"{key} {value!r}" for key, value in (("account", site.account), ("qos", site.qos)) if value)
        yield unknown("account and QOS", f"{named}: not checked without slurmdbd", "Slurm ignores or refuses them at sbatch")
    if site.reservation and facts.reservations is not None:
        if site.reservation in facts.reservations:
            yield ok("reservation", site.reservation)
        else:
            there = ", ".join(facts.reservations) or "none"
            yield bad("reservation", f"there is no {site.reservation!r}", f"set slurm.reservation to one of: {there}")


def _account(account: str | None, facts: SiteFacts) -> Finding:
    if facts.associations is None:
        return unknown("account", facts.unknown.get("accounts", "not said"), "try `sacctmgr show associations user=$USER`")
    mine = {association.account: association for association in facts.associations}
    if account is not None and account not in mine:
        return bad("account", f"you may not charge {account!r}", f"set slurm.account to one of: {', '.join(mine) or 'none'}")
    chosen = [mine[account]] if account is not None else list(mine.values())
    limits = [limit for found in chosen for limit in (found.max_jobs, found.max_submit) if limit is not None]
    if limits and min(limits) < JOBS_OF_A_RUN:
        return bad(
            "account", f"at most {min(limits)} jobs at once, a run needs {JOBS_OF_A_RUN} and more",
            "ask for a higher MaxJobs and MaxSubmitJobs: roles that wait for each other in the queue never train",
        )  # fmt: skip
    shown = account or ", ".join(mine) or "none"
    return ok("account", f"{shown}{f', at most {min(limits)} jobs at once' if limits else ''}")


def _qos(profile: ClusterProfile, facts: SiteFacts) -> Finding:
    wanted = profile.slurm.qos
    if facts.qos is None:
        return unknown("QOS", facts.unknown.get("qos", "not said"), "try `sacctmgr show qos`")
    if wanted is None:
        return ok("QOS", f"none asked for; there are {', '.join(facts.qos)}")
    if wanted not in facts.qos:
        return bad("QOS", f"there is no {wanted!r}", f"set slurm.qos to one of: {', '.join(facts.qos)}")
    charged = [found for found in facts.associations or () if profile.slurm.account in (None, found.account)]
    allowed = frozenset().union(*(found.qos for found in charged))
    if allowed and wanted not in allowed:
        return bad("QOS", f"your account may not use {wanted!r}", f"set slurm.qos to one of: {', '.join(sorted(allowed))}")
    longest = max(resources.time_min for resources in asked_for(profile).values())
    if longest > facts.qos[wanted]:
        return bad("QOS", f"{wanted} allows {_minutes(facts.qos[wanted])}, a job asks for {longest} min", "lower time_min")
    return ok("QOS", f"{wanted}, {_minutes(facts.qos[wanted])}")


def _asks(wanted: Resources) -> str:
    gpus = f", {wanted.gpus} GPUs" if wanted.gpus else ""
    memory = f", {wanted.mem_mb} MiB" if wanted.mem_mb else ""
    return f"{wanted.nodes} x {wanted.cpus * wanted.tasks} CPUs{gpus}{memory}"


def _minutes(value: float) -> str:
    return "no limit" if math.isinf(value) else f"{value:.0f} min"
