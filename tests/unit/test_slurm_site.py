"""What a site says of itself: parsers on text that Slurm 22.05 printed, and a site that says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest

from cluster.slurm.command import Answer
from cluster.slurm.site import (
    Shape,
    ask_site,
    parse_associations,
    parse_config,
    parse_minutes,
    parse_partitions,
    parse_qos,
    parse_reservations,
    parse_shapes,
)
from miles_core.errors import SchedulerError

CONFIG = """\
Configuration data as of 2026-11-30T16:52:30
AccountingStorageType   = accounting_storage/none
AuthInfo                = socket=/run/munge.sock,cred_expire=5
MinJobAge               = 86400 sec
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=rollout AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-3] PreemptMode=OFF State=UP TotalCPUs=12 TotalNodes=3 \
TRES=cpu=12,mem=750G
PartitionName=gpu AllowGroups=ALL AllowAccounts=lab,other AllowQos=normal Default=NO GraceTime=20 MaxNodes=2 \
MaxTime=1-00:00:00 PreemptMode=REQUEUE State=DRAIN TotalNodes=2
"""
SHAPES = "rollout*|3|4|256000|gpu:4|(null)\ngpu|2|64|515000+|gpu:a100:4(S:0-1),gpu:h100:2|fast,ib\ngpu|1|8|1000|(null)|(null)\n"


def test_configuration_partitions_and_kinds_of_nodes() -> None:
    config = parse_config(CONFIG)
    assert config["MinJobAge"] == "86400 sec" and config["AuthInfo"] == "socket=/run/munge.sock,cred_expire=5"
    found = parse_partitions(PARTITIONS, parse_shapes(SHAPES))
    rollout, gpu = found["rollout"], found["gpu"]
    assert rollout.is_default and rollout.state == "UP" and math.isinf(rollout.max_time_min) and rollout.accounts is None
    assert rollout.shapes == (Shape(3, 4, 256000, 4, frozenset()),)
    assert (gpu.is_default, gpu.state, gpu.max_time_min, gpu.max_nodes) == (False, "DRAIN", 1440, 2)
    assert (rollout.preempts, gpu.preempts, gpu.grace_s) == ("OFF", "REQUEUE", 20.0)
    assert gpu.accounts == {"lab", "other"} and gpu.qos == {"normal"}
    assert gpu.shapes == (Shape(2, 64, 515000, 6, frozenset({"fast", "ib"})), Shape(1, 8, 1000, 0, frozenset()))


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("UNLIMITED", math.inf), ("infinite", math.inf), ("NONE", math.inf), ("", math.inf), ("n/a", math.inf),
        ("1-00:00:00", 1440), ("2-12", 3600), ("08:00:00", 480), ("30:00", 30), ("45", 45), ("00:00:30", 0.5),
    ],
)  # fmt: skip
def test_times_as_slurm_writes_them(text: str, minutes: float) -> None:
    assert parse_minutes(text) == minutes


def test_accounts_qos_and_reservations() -> None:
    (lab, free) = parse_associations("lab|normal,high|10|100\nfree|||\nslurm_load error\n")  # as sacctmgr 22.05 prints them
    assert (lab.account, lab.qos, lab.max_jobs, lab.max_submit) == ("lab", {"normal", "high"}, 10, 100)
    assert (free.account, free.qos, free.max_jobs) == ("free", frozenset(), None)
    assert parse_qos("normal|\nlong|7-00:00:00\n") == {"normal": math.inf, "long": 10080}
    assert parse_reservations("ReservationName=maint StartTime=x\nReservationName=rl State=ACTIVE\n") == ("maint", "rl")
    assert parse_reservations("No reservations in the system\n") == ()


def answering(answers: Mapping[tuple[str, ...], str]) -> tuple[list[tuple[str, ...]], object]:
    """A site that answers commands which begin with those words, and refuses all others."""
    asked: list[tuple[str, ...]] = []

    def run(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        asked.append(tuple(argv))
        assert env["LC_ALL"] == "C" and timeout_s <= 20
        for words, text in answers.items():
            if tuple(argv[: len(words)]) == words:
                return Answer(0, text)
        return Answer(1, "", f"{argv[0]}: error: refused")

    return asked, run


def test_a_site_that_says_nothing_is_unknown_with_its_own_words_and_not_asked_for_more() -> None:
    asked, run = answering({("sbatch", "--version"): "slurm 23.02.1\n"})
    facts = ask_site({}, run=run)  # type: ignore[arg-type]
    assert facts.version == "slurm 23.02.1" and facts.ping == "" and facts.partitions is None
    assert facts.unknown["controller"] == "scontrol: error: refused" and len(asked) == 2

    def missing(argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float, stdin: str = "") -> Answer:
        raise SchedulerError(f"{argv[0]} cannot be started")

    assert "cannot be started" in ask_site({}, run=missing).unknown["controller"]


def test_accounts_are_asked_for_only_where_there_is_a_database() -> None:
    site = {
        ("scontrol", "ping"): "Slurmctld(primary) at x is UP", ("scontrol", "show", "config"): CONFIG,
        ("scontrol", "--oneliner", "show", "partition"): PARTITIONS, ("sinfo",): SHAPES,
        ("scontrol", "--oneliner", "show", "reservation"): "No reservations in the system",
    }  # fmt: skip
    asked, run = answering(site)
    facts = ask_site({}, run=run, user="ada")  # type: ignore[arg-type]
    assert not facts.has_accounting and facts.associations is None and not [argv for argv in asked if argv[0] == "sacctmgr"]
    with_database = {
        **site, ("scontrol", "show", "config"): CONFIG.replace("accounting_storage/none", "accounting_storage/slurmdbd"),
        ("sacctmgr", "-nP", "show", "associations", "user=ada"): "lab|normal||\n",
    }  # fmt: skip
    asked, run = answering(with_database)
    facts = ask_site({}, run=run, user="ada")  # type: ignore[arg-type]
    assert facts.has_accounting and facts.associations is not None and facts.associations[0].account == "lab"
    assert facts.qos is None and facts.unknown["qos"] == "sacctmgr: error: refused"
