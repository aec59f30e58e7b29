"""Parsers on text that Slurm 22.05 printed, on its later spellings, and on rubbish."""

from __future__ import annotations

import pytest

from cluster.slurm.parse import expand_hostlist, parse_exit_codes, parse_job_id, parse_nodes, parse_squeue, parse_starts

SQUEUE = """\
3|COMPLETED|n1|None|(null)
16|FAILED|n1|NonZeroExitCode|miles:r1:rollout-0:a1:deadbeef
2|FAILED|n1|JobLaunchFailure|c2|x
5_3|PENDING||Resources|arr
6|PENDING||Priority|miles:r1:learner-1:a12:tok3
4|RUNNING|n[2-4,7]|None|miles:r2:learner-0:a1:tok4
5_[4-9]|PENDING||(a|b) odd reason|miles:r1:grader-0:a1:tok5
"""


def test_squeue_gives_our_jobs_oldest_first() -> None:
    jobs = parse_squeue(SQUEUE)
    assert [job.job_id for job in jobs] == ["4", "5_[4-9]", "6", "16"]
    assert [(job.run_id, job.writer, job.attempt, job.token) for job in jobs] == [
        ("r2", "learner-0", 1, "tok4"),
        ("r1", "grader-0", 1, "tok5"),
        ("r1", "learner-1", 12, "tok3"),
        ("r1", "rollout-0", 1, "deadbeef"),
    ]
    assert [job.state for job in jobs] == ["RUNNING", "PENDING", "PENDING", "FAILED"]
    assert jobs[0].nodes == ("n2", "n3", "n4", "n7") and jobs[2].nodes == ()
    assert [job.reason for job in jobs] == ["None", "(a|b) odd reason", "Priority", "NonZeroExitCode"]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "slurm_load_jobs error: Unexpected message received",
        "7|RUNNING|n1|None",
        "7|RUNNING|n1|None|miles:r1:rollout-0:a1",
        "7|RUNNING|n1|None|miles:r1:rollout-0:one:tok",
        "7|RUNNING|n1|None|not miles:r1:rollout-0:a1:tok",
        "7|RUNNING|n1|None|miles:r1:rollout-0:a1:tok and more",
        "|RUNNING|n1|None|miles:r1:rollout-0:a1:tok",
    ],
)
def test_lines_that_do_not_fit_are_skipped(line: str) -> None:
    assert parse_squeue(line) == []


def test_exit_codes_as_wait_status_and_as_pair() -> None:
    text = "1                       |1792        |\n2                       |11          |\n3|0:0|\n4|7:0|\n5|0:9|\n6|139|\n"
    assert parse_exit_codes(text) == {"1": 7, "2": 139, "3": 0, "4": 7, "5": 137, "6": 139}
    assert parse_exit_codes("error\n\n7|N/A|\n") == {}


@pytest.mark.parametrize(
    ("text", "job_id"), [("17\n", "17"), ("17;north\n", "17"), ("a note of the site\n18\n", "18"), ("", None), ("oops\n", None)]
)
def test_job_id(text: str, job_id: str | None) -> None:
    assert parse_job_id(text) == job_id


def test_nodes_are_counted_once_and_the_unknown_are_usable() -> None:
    text = (
        "n1|drained\nn1|drained\nn2|down\nn2|down\nn3|idle\nn4|down*\nn5|mixed*\nn6|unknown\nn7|allocated\n"
        "n8|draining\nn9|maint\nn10|idle~\nn11|inval\nn12|unk*\n"
    )
    down, usable = parse_nodes(text)
    assert down == ("n1", "n2", "n4", "n8", "n11")
    assert usable == len({"n3", "n5", "n6", "n7", "n10", "n12"})
    assert parse_nodes("") == ((), 0)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-10,12],gpu-a", ("n08", "n09", "n10", "n12", "gpu-a")),
        ("r[1-2]c[1,3]", ("r1c1", "r1c3", "r2c1", "r2c3")),
        ("a,b", ("a", "b")),
        ("rack[a,b]-x", ("racka-x", "rackb-x")),
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
    ],
)
def test_hostlists(text: str, names: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "line", ["", "7|N/A", "7", "7|", "slurm_load_jobs error: Invalid job id specified", "7|1969-13-01T00:00:00"]
)
def test_no_start_is_guessed(line: str) -> None:
    assert parse_starts(line) == {}


def test_starts_are_of_this_zone() -> None:
    starts = parse_starts("7|2026-11-30T16:08:38\n8|N/A\n12_3|2026-11-30T16:08:39\n")
    assert list(starts) == ["7", "12_3"] and starts["12_3"] - starts["7"] == 1
