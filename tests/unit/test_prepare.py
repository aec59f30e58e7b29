"""A run directory before its run: made whole, trusted, and of one recipe and one cluster."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.profile import ClusterProfile
from miles_core.errors import RecipeError, RunDirectoryError
from miles_core.paths import RunPaths
from miles_core.recipe import Recipe, load_recipe
from miles_core.run import read_run
from tasks.prepare import cache_folder, code_digest, ensure_base_model, ensure_run, new_run_id, run_root
from tests.protocol.simulation import simulated_recipe


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """That of a site where groups share files; put back afterwards."""
    old = os.umask(0o002)
    yield
    os.umask(old)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def profile(tmp_path: Path, **changes: object) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "here", "kind": "local", "runs_root": str(tmp_path / "runs"), **changes})


def recipe(**changes: object) -> Recipe:
    return simulated_recipe(**changes)


def test_a_run_directory_is_whole_and_a_second_call_changes_nothing(tmp_path: Path, model: Path) -> None:
    paths = ensure_run(recipe(), profile(tmp_path), "one", model)
    run, _ = read_run(paths.root)
    assert run.code_digest == code_digest(paths.code) and (paths.code / "miles_core/roles/learner.py").exists()
    before = paths.run_file.read_bytes()
    assert ensure_run(recipe(), profile(tmp_path), "one", model) == paths
    assert paths.run_file.read_bytes() == before


def test_only_the_owner_may_change_what_runs_whatever_the_umask(tmp_path: Path, model: Path) -> None:
    root = ensure_run(recipe(), profile(tmp_path), "one", model).root
    open_to_others = [path for path in (root, *root.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert open_to_others == []


def test_the_digest_is_that_of_the_code_that_runs(tmp_path: Path, model: Path) -> None:
    """A start that died before run.json left a snapshot; the source may have changed since."""
    paths = ensure_run(recipe(), profile(tmp_path), "one", model)
    paths.run_file.unlink()
    (paths.code / "miles_core/errors.py").write_text("# as it was when the first start died\n")
    ensure_run(recipe(), profile(tmp_path), "one", model)
    assert read_run(paths.root)[0].code_digest == code_digest(paths.code)


def test_a_run_id_has_one_recipe(tmp_path: Path, model: Path) -> None:
    ensure_run(recipe(), profile(tmp_path), "one", model)
    with pytest.raises(RunDirectoryError, match=r"different: steps.*--run-id"):
        ensure_run(recipe(steps=9), profile(tmp_path), "one", model)


def test_a_run_id_has_one_cluster(tmp_path: Path, model: Path) -> None:
    ensure_run(recipe(), profile(tmp_path), "one", model)
    for other in (profile(tmp_path, name="there"), profile(tmp_path, kind="slurm"), profile(tmp_path, slurm={"devslurm": "x"})):
        with pytest.raises(RunDirectoryError, match=r"started on cluster here \(local\).*--cluster here"):
            ensure_run(recipe(), other, "one", model)


def test_a_run_id_has_one_number_of_ranks(tmp_path: Path, model: Path) -> None:
    ensure_run(recipe(), profile(tmp_path, resources={"learner": {"tasks": 2}}), "one", model)
    ensure_run(recipe(), profile(tmp_path, resources={"learner": {"tasks": 2, "cpus": 4}}), "one", model)
    with pytest.raises(RunDirectoryError, match=r"started with 2 ranks of the learner, not 1: .*nodes and tasks"):
        ensure_run(recipe(), profile(tmp_path), "one", model)


def test_a_run_of_another_version_is_said(tmp_path: Path, model: Path) -> None:
    paths = ensure_run(recipe(), profile(tmp_path), "one", model)
    paths.run_file.write_text(paths.run_file.read_text().replace('"drain_s"', '"patience_s"'))
    with pytest.raises(RunDirectoryError, match="patience_s"):
        ensure_run(recipe(), profile(tmp_path), "one", model)


def test_a_corrected_profile_of_the_same_cluster_is_taken(tmp_path: Path, model: Path) -> None:
    ensure_run(recipe(), profile(tmp_path), "one", model)
    ensure_run(recipe(), profile(tmp_path, resources={"learner": {"partition": "gpu"}}, role_failures=9), "one", model)


def test_two_starts_of_one_id_make_one_run(tmp_path: Path, model: Path) -> None:
    """The second one finds what the first one made in the meantime, run.json too."""
    first = ensure_run(recipe(), profile(tmp_path), "one", model)

    class Blind(RunPaths):
        """Still sees no run.json."""

    blind = Blind(first.root)
    from tasks import prepare

    prepare._make_run(blind, recipe(steps=9), profile(tmp_path), "one", model)
    assert read_run(first.root)[0].recipe == recipe()
    assert not [path for path in first.root.iterdir() if path.name.startswith(".tmp")]


def test_ids_made_in_one_second_differ() -> None:
    assert len({new_run_id(recipe()) for _ in range(50)}) > 40


@pytest.mark.parametrize("run_id", ["", "a/b", "../x", ".hidden", "a b", "a|b", "x" * 65, "ü"])
def test_an_id_that_is_no_folder_and_no_job_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunDirectoryError, match="run id"):
        run_root(profile(tmp_path), run_id)


def test_miles_runs_is_where_relative_roots_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_RUNS", str(tmp_path / "mine"))
    assert run_root(ClusterProfile(name="x", kind="local"), "one") == tmp_path / "mine" / "one"
    assert run_root(profile(tmp_path), "one") == tmp_path / "runs" / "one", "an absolute one is a fact of the site"


@pytest.fixture
def closed_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing can be made, for root neither: it is a file."""
    path = tmp_path / "closed"
    path.touch(mode=stat.S_IRUSR)
    yield path


def test_a_runs_folder_that_takes_nothing_is_one_message(tmp_path: Path, model: Path, closed_folder: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"closed/one cannot be made.*runs_root"):
        ensure_run(recipe(), profile(tmp_path, runs_root=str(closed_folder)), "one", model)


@pytest.mark.timeout(20)
def test_a_cache_that_takes_nothing_is_one_message(closed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_CACHE", str(closed_folder))
    with pytest.raises(RunDirectoryError, match="MILES_CACHE"):
        ensure_base_model(load_recipe("chain_sum"))


def test_no_home_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILES_CACHE", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(Path, "expanduser", _no_home)
    with pytest.raises(RunDirectoryError, match="MILES_CACHE"):
        cache_folder()


def _no_home(path: Path) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "config.json").unlink()
    given = recipe().model_copy(update={"model": recipe().model.model_copy(update={"path": str(model)})})
    with pytest.raises(RecipeError, match=r"config\.json"):
        ensure_base_model(given)
