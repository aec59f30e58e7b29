"""`miles compare`: each kind of difference is found and nothing else, equal runs say so, what is not known is UNKNOWN."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import cli
from flows.compare import conclusion, figure_lines, reason_lines
from miles_core.masking import MASK
from miles_core.paths import RunPaths
from miles_core.provenance import Data, Git, Provenance, Submitter
from miles_core.records import FileDigest, StepDone
from miles_core.tracking.compare import Comparison, Group, code_diff, compare
from tests.unit.synthetic_run import SyntheticRun


def made(root: Path, *, steps: int = 4, close: bool = True) -> RunPaths:
    """A run with all its records."""
    run = SyntheticRun(root, wandb=False)
    for step in range(1, steps + 1):
        run.train(step)
    run.evaluate(0, 0.25)
    if close:
        run.close()
    for name, text in (("miles_core/a.py", "x = 1\n"), ("configs/b.yaml", "y: 1\n")):
        (run.paths.code / name).parent.mkdir(parents=True)
        (run.paths.code / name).write_text(text)
    record = Provenance(
        git=Git(commit="c0ffee", dirty=False),
        data=Data(family="chain_sum", options={"max_terms": 3}, library="reasoning-gym 0.1.25", source_digest="d1"),
        base_model=tuple(
            FileDigest(name=name, size_bytes=1, digest=f"of {name}") for name in ("config.json", "tokenizer.json")
        ),
        packages={"python": "3.11.7", "torch": "2.13.0"},
        submitted=Submitter(user="alice", host="login1", command=("miles", "run", "chain_sum")),
    )
    run.paths.provenance.write_text(record.model_dump_json())
    return run.paths


@pytest.fixture
def two(tmp_path: Path) -> tuple[RunPaths, RunPaths]:
    """Two equal runs, in all but their place."""
    first = made(tmp_path / "first")
    shutil.copytree(first.root, tmp_path / "second")
    return first, RunPaths(tmp_path / "second")


def edit(path: Path, *keys: str | int, value: Any) -> None:
    """Sets a value in a JSON file."""
    data = json.loads(path.read_text())
    target = data
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    path.write_text(json.dumps(data))


def compared(two: tuple[RunPaths, RunPaths]) -> Comparison:
    return compare(two[0].root, two[1].root)


def group(comparison: Comparison, name: str) -> Group:
    return next(found for found in comparison.groups if found.name == name)


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_equal_runs_say_so(two: tuple[RunPaths, RunPaths]) -> None:
    comparison = compared(two)
    assert {found.verdict for found in comparison.groups} == {"equal"} and comparison.inputs == "equal"
    assert comparison.weights.common_steps == 4 and comparison.weights.differ_from is None
    assert conclusion(comparison) == (
        "equal: the same recipe, code, packages, model and data; the same weights after each of the 4 steps that both have"
    )


def lower_rate(paths: RunPaths) -> None:
    edit(paths.run_file, "recipe", "learner", "lr", value=1e-5)


def more_replicas(paths: RunPaths) -> None:
    edit(paths.run_file, "recipe", "rollout", "pools", 0, "replicas", value=2)


def changed_code(paths: RunPaths) -> None:
    (paths.code / "miles_core/a.py").write_text("x = 2\n")


def added_code(paths: RunPaths) -> None:
    (paths.code / "miles_core/new.py").write_text("z = 3\n")


def newer_torch(paths: RunPaths) -> None:
    edit(paths.provenance, "packages", "torch", value="2.14.0")


def other_weights(paths: RunPaths) -> None:
    edit(paths.run_file, "base_model_digest", value="0ther")


def other_tokenizer(paths: RunPaths) -> None:
    edit(paths.provenance, "base_model", 1, "digest", value="another")


def edited_library(paths: RunPaths) -> None:
    edit(paths.provenance, "data", "source_digest", value="d2")


def other_data_file(paths: RunPaths) -> None:
    edit(paths.provenance, "data", "files", value=[{"name": "problems.jsonl", "size_bytes": 1, "digest": "f1"}])


def other_partition(paths: RunPaths) -> None:
    edit(paths.run_file, "cluster", "resources", value={"learner": {"partition": "gpu"}})


def other_machine(paths: RunPaths) -> None:
    edit(paths.leases / "rollout-0.a1", "machine", "cpu", value="Slow CPU")


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (lower_rate, "recipe", "learner.lr: 0.0003 | 1e-05"),
        (more_replicas, "recipe", "rollout.pools.0.replicas: 1 | 2"),
        (changed_code, "code", "miles_core/a.py: "),
        (added_code, "code", "miles_core/new.py: (none) | "),
        (newer_torch, "packages", "torch: 2.13.0 | 2.14.0"),
        (other_weights, "base model", "weights: ba5e | 0ther"),
        (other_tokenizer, "base model", "tokenizer.json: of tokenizer | another"),
        (edited_library, "data", "source_digest: d1 | d2"),
        (other_data_file, "data", "problems.jsonl: (none) | f1"),
        (other_partition, "cluster", "resources.learner.partition: (none) | gpu"),
        (other_machine, "hosts", "rollout: n1: Fast CPU, 8 CPUs, 2 x H200 | n1: Slow CPU, 8 CPUs, 2 x H200"),
    ],
)
def test_a_difference_is_named_in_ten_lines_and_nothing_else_is(
    two: tuple[RunPaths, RunPaths], change: Callable[[RunPaths], None], name: str, words: str
) -> None:
    change(two[1])
    comparison = compared(two)
    assert [found.name for found in comparison.groups if found.verdict != "equal"] == [name]
    lines = reason_lines(comparison)
    assert len(lines) <= 10 and sum(words in line for line in lines) == 1, lines
    is_input = name not in ("cluster", "hosts")
    assert comparison.inputs == ("differs" if is_input else "equal") and name in lines[-1]


def test_many_differences_stay_one_line(two: tuple[RunPaths, RunPaths]) -> None:
    for index in range(300):
        edit(two[1].provenance, "packages", f"package-{index}", value="1.0")
    line = reason_lines(compared(two))[4]
    assert len(line) < 300 and "more (--json)" in line
    assert len(group(compared(two), "packages").differences) == 300


def test_no_secret_and_no_control_character_is_shown(two: tuple[RunPaths, RunPaths]) -> None:
    edit(
        two[0].run_file,
        "cluster",
        "slurm",
        value={"setup": ["export HF_TOKEN=hf_x123456789"], "api_key": "abc", "title": "\x1b[31m"},
    )
    found = {item.field: item.first for item in group(compared(two), "cluster").differences}
    assert found["slurm.setup.0"] == found["slurm.api_key"] == MASK and found["slurm.title"] == "?[31m"


# --- what is not known -----------------------------------------------------------------------------------------------


def test_runs_from_before_there_were_records(two: tuple[RunPaths, RunPaths]) -> None:
    old = two[1]
    old.provenance.unlink()
    shutil.rmtree(old.code)
    for lease in old.leases.iterdir():
        data = json.loads(lease.read_text())
        del data["machine"]
        lease.write_text(json.dumps(data))
    comparison = compared(two)
    verdicts = {found.name: found.verdict for found in comparison.groups}
    assert verdicts == {
        "recipe": "equal", "code": "equal", "packages": "UNKNOWN", "base model": "UNKNOWN", "data": "UNKNOWN",
        "cluster": "equal", "hosts": "UNKNOWN",
    }  # fmt: skip
    assert comparison.inputs == "UNKNOWN" and "the rest is UNKNOWN" in conclusion(comparison)
    assert "no readable record in b" in group(comparison, "packages").note
    edit(old.run_file, "code_digest", value="d1fferent")
    assert group(compared(two), "code").verdict == "differs" and "UNKNOWN" in group(compared(two), "code").note
    other_weights(old)
    assert group(compared(two), "base model").verdict == "differs"


def test_a_run_that_has_not_begun_beside_one_that_ended(two: tuple[RunPaths, RunPaths], tmp_path: Path) -> None:
    begun = RunPaths(tmp_path / "begun")
    begun.root.mkdir()
    shutil.copy(two[0].run_file, begun.run_file)
    comparison = compare(two[0].root, begun.root)
    assert comparison.weights == type(comparison.weights)(0, None) and "no step that both have" in conclusion(comparison)
    assert comparison.results["reward, first 5 steps"] == (0.5, None)
    assert any(line.split()[-1] == "UNKNOWN" for line in figure_lines(comparison))


# --- results ---------------------------------------------------------------------------------------------------------


def test_the_first_step_with_other_weights_is_named(two: tuple[RunPaths, RunPaths], tmp_path: Path) -> None:
    other = SyntheticRun(tmp_path / "third", wandb=False)
    for step in (1, 2):
        other.train(step)
    other.write("learner-0", StepDone(
        step=3, batch_id="b3.o1", manifest_digest="m", weights_digest="other", staleness=1, mean_reward=0.5
    ))  # fmt: skip
    comparison = compare(two[0].root, other.paths.root)
    assert (comparison.weights.common_steps, comparison.weights.differ_from) == (3, 3)
    assert "weights differ from step 3 on" in conclusion(comparison)


def test_figures_stand_side_by_side(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    second = SyntheticRun(tmp_path / "second", wandb=False)
    second.drop("g99.o1")
    second.train(1)
    second.lose("rollout-0", "node n1 failed")
    for paths in (first, second.paths):
        edit(paths.run_file, "cluster", value={"kind": "slurm", "resources": {"learner": {"cpus": 8, "gpus": 2}}})
    results = compare(first.root, second.paths.root).results
    assert results["state"] == ("COMPLETED", "RUNNING") and results["steps"] == (4, 1)
    assert results["groups dropped"] == ("none", "stale 1") and results["incidents"] == ("none", "role_lost 1")
    assert results["bytes published"] == (5000, 2000) and results["staleness max"] == (1, 0)
    cpu_hours, gpu_hours = results["CPU-hours, requested"][0], results["GPU-hours, requested"][0]
    assert cpu_hours > 4 * gpu_hours > 0, "8 CPUs and 2 GPUs of the learner, and the CPUs of the others"


def test_hours_are_unknown_where_roles_share_a_machine(two: tuple[RunPaths, RunPaths]) -> None:
    edit(two[1].run_file, "cluster", "kind", value="local")
    assert compared(two).results["GPU-hours, requested"] == (None, None)


# --- the command -----------------------------------------------------------------------------------------------------

Miles = Callable[..., tuple[int, str, str]]


@pytest.fixture
def miles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Miles:
    """Runs `miles compare` in this process; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILES_RUNS", str(tmp_path))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["miles", "compare", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def test_text_json_and_diff(two: tuple[RunPaths, RunPaths], miles: Miles) -> None:
    changed_code(two[1])
    code, out, _ = miles("first", "second", "--diff")
    assert code == 0 and "-x = 1\n+x = 2" in out and "--- a/miles_core/a.py" in out
    data = json.loads(miles("first", "second", "--json", "--diff")[1])
    assert data["groups"]["code"]["verdict"] == "differs" and "+x = 2" in data["code_diff"]
    assert data["weights"] == {"common_steps": 4, "differ_from_step": None} and data["results"]["steps"] == [4, 4]
    assert "the code snapshots are equal" in miles("first", "first", "--diff")[1]
    added_code(two[1])
    assert "/dev/null" in "\n".join(code_diff(*two)) and "+z = 3" in "\n".join(code_diff(*two))


def torn_run_file(paths: RunPaths) -> None:
    paths.run_file.write_bytes(paths.run_file.read_bytes()[:100])


def binary_run_file(paths: RunPaths) -> None:
    paths.run_file.write_bytes(b"\xff\xfe\0\0")


def other_version(paths: RunPaths) -> None:
    edit(paths.run_file, "recipe", "learner", "patience", value=3)


def writable_by_others(paths: RunPaths) -> None:
    paths.root.chmod(0o777)


def no_run_file(paths: RunPaths) -> None:
    paths.run_file.unlink()


def damaged_journal(paths: RunPaths) -> None:
    """For people a stream goes as far as it can be read."""
    journal = next(paths.journal("learner-0").iterdir())
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:1], b"x" * 20 + b"\n", *lines[2:]]))


def unknown_record(paths: RunPaths) -> None:
    from miles_core.store.journal import decode_frame, encode_frame

    journal = next(paths.journal("learner-0").iterdir())
    first, second, *rest = journal.read_bytes().splitlines(keepends=True)
    frame = decode_frame(second)
    assert frame is not None
    journal.write_bytes(first + encode_frame(frame[0].replace(b'"cuts"', b'"cats"', 1)) + b"".join(rest))


def torn_provenance(paths: RunPaths) -> None:
    paths.provenance.write_bytes(paths.provenance.read_bytes()[:50])


def later_provenance(paths: RunPaths) -> None:
    edit(paths.provenance, "schema_version", value=2)


def provenance_is_a_folder(paths: RunPaths) -> None:
    paths.provenance.unlink()
    paths.provenance.mkdir()


def torn_leases(paths: RunPaths) -> None:
    for lease in paths.leases.iterdir():
        lease.write_bytes(lease.read_bytes()[:20])


def binary_metrics(paths: RunPaths) -> None:
    paths.metrics("learner-0", 1).write_bytes(b"\0\xff{}[]\n" * 9)


def binary_code(paths: RunPaths) -> None:
    (paths.code / "miles_core/a.py").write_bytes(b"\xff\0\xfe")


def cluster_of_another_shape(paths: RunPaths) -> None:
    edit(paths.run_file, "cluster", value={"kind": "slurm", "resources": ["learner"], "pools": "x"})


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (torn_run_file, 2), (binary_run_file, 2), (other_version, 2), (writable_by_others, 2), (no_run_file, 2),
        (damaged_journal, 0), (unknown_record, 9), (torn_provenance, 0), (later_provenance, 0), (provenance_is_a_folder, 0),
        (torn_leases, 0), (binary_metrics, 0), (binary_code, 0), (cluster_of_another_shape, 0),
    ],
)  # fmt: skip
def test_a_damaged_run_is_one_message_or_unknown(
    two: tuple[RunPaths, RunPaths], miles: Miles, damage: Callable[[RunPaths], None], code: int
) -> None:
    damage(two[1])
    for arguments in (("first", "second", "--diff"), ("second", "first", "--json")):
        got, out, err = miles(*arguments)
        assert got == code and "Traceback" not in err + out, err
        assert ("a bad frame" in err) == (damage is damaged_journal)
        assert code == 0 or (err.startswith("miles: ") and str(two[1].root) in err)


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("first",), ("first", "second", "third"), ("first", "nothing"), ("nothing", "first"), ("first", ""),
        ("first", "--nope"), ("first", "first/run.json"), ("first", "/"), ("first", "second\0"),
        ("first", "../.."),
    ],
)  # fmt: skip
def test_arguments_that_name_no_two_runs(two: tuple[RunPaths, RunPaths], miles: Miles, arguments: tuple[str, ...]) -> None:
    code, out, err = miles(*arguments)
    assert code == 2 and err and "Traceback" not in err + out
