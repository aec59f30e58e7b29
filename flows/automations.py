"""Automations of a site, checked in: `python -m flows.automations` makes or updates them on the server of PREFECT_API_URL.

- A flow run of ours whose process sends no heartbeat any more is marked Crashed; its jobs go on. This needs
  PREFECT_FLOWS_HEARTBEAT_FREQUENCY (30 s and more) where the worker runs.
- A Crashed flow run is continued: the resume deployment adopts the run that the label `miles.run_dir` names. That is
  harmless where the crash was none: while a supervisor renews the run's lease, the new flow run only says who holds it. A run
  that a person drains stays drained.
"""

from __future__ import annotations

from typing import Any

from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore

from flows.prefect_report import RUN_DIR_LABEL

SILENT_S = 540
"""At least three heartbeats."""
ENDS = ("Completed", "Skipped", "Failed", "Cancelled", "Crashed")


def zombies() -> AutomationCore:
    """Marks flow runs without a process."""
    heartbeat = "prefect.flow-run.heartbeat"
    ends = [f"prefect.flow-run.{name}" for name in ENDS]
    return AutomationCore.model_validate({
        "name": "miles: no heartbeat, so crashed",
        "trigger": _trigger("Proactive", within=SILENT_S, after=[heartbeat], expect=[heartbeat, *ends]),
        "actions": [{
            "type": "change-flow-run-state", "state": "CRASHED",
            "message": f"no heartbeat of the flow's process for {SILENT_S} s; its jobs go on",
        }],
    })  # fmt: skip


def continued(resume_deployment_id: str) -> AutomationCore:
    """Resumes the runs of crashed flow runs."""
    run_dir = f"{{{{ flow_run.labels['{RUN_DIR_LABEL}'] }}}}"
    return AutomationCore.model_validate({
        "name": "miles: a crashed run is continued",
        "trigger": _trigger("Reactive", within=0, expect=["prefect.flow-run.Crashed"]),
        "actions": [{
            "type": "run-deployment", "source": "selected", "deployment_id": resume_deployment_id,
            "parameters": {"run": {"__prefect_kind": "jinja", "template": run_dir}, "go_on": False},
        }],
    })  # fmt: skip


def _trigger(posture: str, **events: Any) -> dict[str, Any]:
    """On each flow run of the deployments tagged `miles` by itself."""
    return {
        "type": "event", "posture": posture, "threshold": 1, **events,
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.miles"},
        "for_each": ["prefect.resource.id"],
    }  # fmt: skip


def main() -> None:
    """Makes them, or brings those of the same name up to date."""
    with get_client(sync_client=True) as client:
        resume = client.read_deployment_by_name("resume/resume")
        for automation in (zombies(), continued(str(resume.id))):
            known = client.read_automations_by_name(automation.name)
            if known:
                client.update_automation(known[0].id, automation)
            else:
                client.create_automation(automation)
            print(f"{'updated' if known else 'made'}: {automation.name}")


if __name__ == "__main__":
    main()
