"""A checkpoint that cannot fit the warning ahead of a limit is refused at submit; what is not known refuses nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.profile import ClusterProfile
from cluster.saves import num_parameters, rank_bytes, unfit_save
from cluster.slurm.client import SlurmScheduler
from flows import launch
from miles_core.errors import RecipeError, SchedulerError
from miles_core.recipe import load_recipe
from tests.unit.supervised_site import Site

LEAD_S = 60
PARAMETERS = 1 << 18


def model(folder: Path, parameters: int = PARAMETERS) -> Path:
    """A model folder of so many parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {"a.weight": torch.zeros(parameters // 2, 1), "b.weight": torch.zeros(parameters // 2)}, folder / "model.safetensors"
    )
    return folder


def profile(kind: str = "slurm", ranks: int = 1, mib_s: float | None = None) -> ClusterProfile:
    resources = {"learner": {"tasks": ranks}}
    return ClusterProfile.model_validate({"name": "here", "kind": kind, "resources": resources, "write_mib_s": mib_s})


def test_parameters_are_those_of_the_files_that_the_index_names(tmp_path: Path) -> None:
    assert num_parameters(model(tmp_path / "whole")) == PARAMETERS
    parted = tmp_path / "parted"
    model(parted).joinpath("model.safetensors").rename(parted / "one.safetensors")
    save_file({"c.weight": torch.zeros(3, 5)}, parted / "two.safetensors")
    save_file({"again": torch.zeros(7)}, parted / "consolidated.safetensors")
    index = {"weight_map": {"a.weight": "one.safetensors", "b.weight": "one.safetensors", "c.weight": "two.safetensors"}}
    (parted / "model.safetensors.index.json").write_text(json.dumps(index))
    assert num_parameters(parted) == PARAMETERS + 15


@pytest.mark.parametrize("content", [None, b"", b"\x08\0\0\0\0\0\0\0rubbish!", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_model_that_cannot_be_read_has_no_number(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    assert num_parameters(tmp_path) is None and unfit_save(profile(mib_s=1e-9), load_recipe("chain_sum"), tmp_path) == ""


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        ((), 1, 16),
        (("model.dtype=bfloat16",), 1, 14),
        ((), 4, 4 + 3),
        (("learner.zero_stage=2", "model.dtype=bfloat16"), 2, 2 + 6),
        (("learner.zero_stage=3",), 4, 3),
        (("learner.objective=ppo",), 1, 32),
    ],
)
def test_bytes_of_the_rank_that_writes_most(settings: tuple[str, ...], ranks: int, expected: int) -> None:
    assert rank_bytes(load_recipe("chain_sum", settings), ranks, 1000) == 1000 * expected


def test_the_estimate_names_itself_the_lead_and_what_to_set(tmp_path: Path) -> None:
    recipe, folder = load_recipe("chain_sum"), model(tmp_path / "model")
    # 4 MiB in all.
    said = unfit_save(profile(mib_s=0.05), recipe, folder)
    for words in ("at least 80.0 s (4 MiB by one rank at write_mib_s=0.05)", f"signal_lead_s={LEAD_S} s", "to 160 "):
        assert words in said
    assert unfit_save(profile(mib_s=4 / LEAD_S), recipe, folder) == ""
    assert unfit_save(profile(mib_s=0.05), load_recipe("chain_sum", ("model.lora={}",)), folder) == ""
    assert unfit_save(profile(), recipe, folder) == "" == unfit_save(profile("local", mib_s=0.05), recipe, folder)
    assert "28" in unfit_save(profile(mib_s=0.0125, ranks=4), recipe, folder)


@pytest.mark.parametrize(("measured_s", "is_refused"), [((61.0, 61.0), True), ((1.0, 99.0, 59.0), False)])
def test_what_the_run_measured_counts_more_than_the_estimate(
    tmp_path: Path, measured_s: tuple[float, ...], is_refused: bool
) -> None:
    said = unfit_save(profile(mib_s=1e-6), load_recipe("chain_sum"), model(tmp_path), measured_s)
    assert bool(said) == is_refused and (not said or "takes the learner 61.0 s (median of 2 measured in this run)" in said)


class Away(SlurmScheduler):
    """The controller does not answer."""

    def _query(self, *argv: str) -> str:
        raise SchedulerError("away", transient=True)


def test_at_submit_it_is_refused_unless_jobs_of_the_run_may_live(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path / "run", write_mib_s=0.01)
    model(site.paths.base_model)

    def submit(kind: type[SlurmScheduler] = SlurmScheduler) -> None:
        launch.check_scripts(site.run, site.paths, site.profile, kind(site.profile.slurm, run=site.fake.run))

    with pytest.raises(RecipeError, match="so it could never save in time"):
        submit()
    submit(Away)
    assert caplog.text.count("could never save") == 1
    site.start_all()
    submit()
    assert caplog.text.count("could never save") == 2
    shard = site.paths.metrics("learner-0", 1)
    shard.parent.mkdir(parents=True)
    shard.write_text('{"event": "step", "checkpoint_s": 2.0}\n')
    submit()
    assert caplog.text.count("could never save") == 2
