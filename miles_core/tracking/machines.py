"""Where the attempts of a run ran, from their leases."""

from __future__ import annotations

from miles_core.paths import RunPaths
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import Lease, LeaseFolder


def read_leases(run: RunConfig, paths: RunPaths) -> dict[str, list[Lease]]:
    """Leases by writer, attempts ascending; without tombstones and what cannot be read."""
    folder = LeaseFolder(FileSystem(), paths.leases, run.run_id)
    try:
        folder.refresh()
    except OSError:
        return {}
    found: dict[str, list[Lease]] = {}
    for writer in folder.writers():
        for attempt in folder.attempts(writer):
            try:
                lease = folder.read(writer, attempt)
            except OSError:
                continue
            if lease.kind == "lease":
                found.setdefault(writer, []).append(lease)
    return found


def place_text(lease: Lease) -> str:
    """`n3 (AMD EPYC, 8 CPUs, 2 x H200)`; of a job of several nodes the node list, too. A host's name if no more is known."""
    host = lease.host or "UNKNOWN host"
    machine = lease.machine
    if machine is None:
        return host
    where = host if machine.nodes in ("", host) else f"{host} of {machine.nodes}"
    return f"{where} ({kind_text(lease)})"


def kind_text(lease: Lease) -> str:
    """The machine without its name: `AMD EPYC, 8 CPUs, 2 x H200`."""
    machine = lease.machine
    if machine is None:
        return "UNKNOWN machine"
    gpus = [f"{machine.gpus.count(model)} x {model}" for model in dict.fromkeys(machine.gpus)]
    return ", ".join([machine.cpu, f"{machine.cpus:g} CPUs" if machine.cpus else "UNKNOWN CPUs", *gpus])
