"""What a run was made from: git state, masked secrets, packages, data, machine; and that nothing missing stops a run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cluster.profile import ClusterProfile
from miles_core.base_model import model_files, weights_digest
from miles_core.masking import LEFT_OUT, MASK, is_secret_name, looks_secret, mask_arguments, mask_lines, secret_values
from miles_core.paths import RunPaths
from miles_core.provenance import read_provenance
from miles_core.recipe import EnvironmentSpec
from miles_core.run import read_run
from miles_core.runtime.machine import read_machine
from miles_core.store.fs import FileSystem
from miles_core.store.lease import UNKNOWN, LeaseFolder
from miles_core.tracking.machines import place_text, read_leases
from tasks import provenance
from tasks.prepare import ensure_run
from tasks.provenance import installed_packages, read_data, read_git
from tests.protocol.simulation import simulated_recipe

NAMES = [Path("pkg/a.py"), Path("pkg/new.yaml")]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of one commit with pkg/a.py."""
    folder = tmp_path / "checkout"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/a.py").write_text("x = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


# --- git -------------------------------------------------------------------------------------------------------------


def test_a_clean_checkout(checkout: Path) -> None:
    state, diff = read_git(checkout, NAMES[:1])
    assert (state.commit, state.dirty, diff) == (git(checkout, "rev-parse", "HEAD").strip(), False, "")


def test_changed_and_unknown_files_are_the_dirty_diff_and_it_applies(checkout: Path, tmp_path: Path) -> None:
    (checkout / "pkg/a.py").write_text("x = 2\n")
    (checkout / "pkg/new.yaml").write_text("steps: 1")
    (checkout / "notes.txt").write_text("of no package")
    state, diff = read_git(checkout, NAMES)
    assert state.dirty is True and "-x = 1" in diff and "+x = 2" in diff and "+steps: 1" in diff and "notes" not in diff
    (tmp_path / "diff").write_text(diff)
    git(checkout, "stash", "-q", "-u")
    git(checkout, "apply", str(tmp_path / "diff"))
    assert (checkout / "pkg/a.py").read_text() == "x = 2\n" and (checkout / "pkg/new.yaml").exists()


def test_a_checkout_in_a_folder_of_another_repository(checkout: Path) -> None:
    (checkout / "pkg/a.py").write_text("x = 2\n")
    state, diff = read_git(checkout / "pkg", [Path("a.py")])
    assert state.dirty is True and "b/a.py" in diff


def test_no_secret_is_in_the_dirty_diff(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_PASSWORD", "correct horse")
    (checkout / "pkg/a.py").write_text("API_KEY = 'abcd1234'\nsay('correct horse')\ny = 2\n")
    (checkout / "pkg/new.yaml").write_text("hf_token: hf_abcdefghijklmnopqrstuvwxyz\nsteps: 1\n")
    _, diff = read_git(checkout, NAMES, secret_values({"LAB_PASSWORD": "correct horse"}))
    assert not any(secret in diff for secret in ("abcd1234", "correct horse", "hf_abc"))
    assert diff.count(f"+{LEFT_OUT}") == 3 and "+y = 2" in diff and "+steps: 1" in diff


def test_a_large_dirty_diff_is_cut_and_says_so(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_DIFF_CHARACTERS", 1000)
    (checkout / "pkg/a.py").write_text("x = 2\n" * 5000)
    _, diff = read_git(checkout, NAMES[:1])
    assert len(diff) < 1100 and diff.splitlines()[-1].endswith("more characters; the code snapshot has everything>")


def test_what_is_no_checkout_is_unknown_and_says_why(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain/pkg").mkdir(parents=True)
    (tmp_path / "plain/pkg/a.py").write_text("x = 1\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(checkout / ".git"))  # of a hook that starts runs: not of this code
    state, diff = read_git(tmp_path / "plain", NAMES[:1])
    assert (state.commit, state.dirty, diff) == (UNKNOWN, UNKNOWN, "") and "not a git repository" in state.why


def test_a_copy_inside_a_foreign_checkout_is_unknown(checkout: Path) -> None:
    (checkout / "vendored/pkg").mkdir(parents=True)
    (checkout / "vendored/pkg/a.py").write_text("x = 1\n")
    state, _ = read_git(checkout / "vendored", NAMES[:1])
    assert state.commit == UNKNOWN and "does not know" in state.why


def test_no_git_and_a_repository_without_a_commit_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/a.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert read_git(tmp_path, NAMES[:1])[0].commit == UNKNOWN
    monkeypatch.setenv("PATH", "")
    assert "cannot be run" in read_git(tmp_path, NAMES[:1])[0].why


# --- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "password: hunter2", "PASSWD=x1", 'api_key = "abcd"', "apikey: 12", "HF_TOKEN=hf_x1234567", "'authToken': 'abcdef'",
        "client_secret: ab", "  private-key: q", "AWS_SECRET_ACCESS_KEY=abc", "AKIAABCDEFGHIJKLMNOP",
        "-----BEGIN RSA PRIVATE KEY-----",
        "url = 'https://me:pass@host/x'", "Authorization: Bearer abcdefgh12", "x = 'sk-abcdefghijklmnopqrst'",
        "key0123456789abcdefghijklmnopqrstuvwxyz0123456789", "ghp_abcdefghijklmnopqrstuvwx", "wandb_v1_abcdefghijklmnopqrst",
        "MYSQL_PWD=hunter22", "db_pass = 'hunter2'", "ASIAABCDEFGHIJKLMNOP", "KEY='AIzaSyA-_34567890abcdefghijklmnopqrstuv'",
        "npm_abcdefghijklmnopqrstuvwxyz0123456789", "pypi-AgEIcHlwaS5vcmcCJDEy", "dckr_pat_abcdefghijklmnop",
    ],
)  # fmt: skip
def test_what_looks_like_a_secret(line: str) -> None:
    assert looks_secret(line) and line not in mask_lines(f"+{line}")


@pytest.mark.parametrize(
    "line",
    [
        "token = token_of(run, writer, attempt)", "max_new_tokens: 24", "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "    token: str = ''", '"MILES_TOKEN": token,', "author = name", "learner: {lr: 3.0e-4}", "x = 1",
        "path: /scratch/users/alice/runs2026/models/Qwen34B", "def f(tokens: list[int]) -> None:", "num_tokens=12345678",
        "OLDPWD=/home/alice/run2026", "first_passage = 12345678", "pass_rate: 0.12345678",
    ],
)  # fmt: skip
def test_what_does_not(line: str) -> None:
    assert not looks_secret(line)


def test_no_line_of_a_private_key_is_kept() -> None:
    """Also those with many slashes, which look like paths, and the short last one."""
    key = ["-----BEGIN PRIVATE KEY-----", "a/b/c/d/e/f/g/h", "MC4CAQ==", "-----END PRIVATE KEY-----"]
    shown = mask_lines("\n".join(["+x = 1", *(f"+{line}" for line in key), "+y = 2"])).split("\n")
    assert shown == ["+x = 1", *[f"+{LEFT_OUT}"] * 3, "+-----END PRIVATE KEY-----", "+y = 2"]


def test_a_command_line_keeps_all_but_its_secrets() -> None:
    arguments = ["run", "chain_sum", "--set", "a.token=x", "--api-key", "k", "--set", "learner.lr=1e-4", "by hunter22"]
    assert mask_arguments(arguments, ("hunter22",)) == (
        "run", "chain_sum", "--set", f"a.token={MASK}", "--api-key", MASK, "--set", "learner.lr=1e-4", MASK,
    )  # fmt: skip
    assert is_secret_name("WANDB_API_KEY") and not is_secret_name("max_new_tokens")


# --- packages, data, model -------------------------------------------------------------------------------------------


def test_packages_are_sorted_and_hold_what_decides_results() -> None:
    packages = installed_packages()
    assert list(packages) == sorted(packages)
    assert {
        "python",
        "torch",
        "deepspeed",
        "transformers",
        "tokenizers",
        "numpy",
        "pyarrow",
        "reasoning-gym",
        "prefect",
    } <= set(packages)


def test_the_digest_of_the_tasks_follows_their_source_and_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    (tmp_path / "my_tasks").mkdir()
    for name in ("__init__.py", "games.py"):
        (tmp_path / "my_tasks" / name).write_text("")
    (tmp_path / "data.jsonl").write_text("{}")
    spec = EnvironmentSpec(family="chain_sum", options={"files": [str(tmp_path / "data.jsonl")], "n": 3, "none": "x" * 5000})
    first = read_data(spec)
    assert first.library.startswith("reasoning-gym ") and [file.name for file in first.files] == ["data.jsonl"]
    (tmp_path / "data.jsonl").write_text("[]")
    assert read_data(spec).files != first.files and read_data(spec).source_digest == first.source_digest
    own = spec.model_copy(update={"family": "my_tasks.games:Chess"})
    before = read_data(own)
    (tmp_path / "my_tasks/games.py").write_text("x = 1\n")
    assert UNKNOWN not in (before.source_digest, read_data(own).source_digest) and before.library == UNKNOWN
    assert read_data(own).source_digest != before.source_digest
    assert read_data(spec.model_copy(update={"family": "not_there:Chess"})).source_digest == UNKNOWN
    inside = read_data(spec.model_copy(update={"family": "miles_core.environments.mine:Sums"}))
    for family in ("shell_puzzle", "terminal"):
        assert inside == read_data(spec.model_copy(update={"family": family})).model_copy(update={"family": inside.family})
    assert inside.library.startswith("miles-slurm ") and inside.source_digest != UNKNOWN


def test_the_model_is_its_weights_its_tokenizer_and_its_configuration(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "tokenizer.json", "config.json", "chat_template.jinja", "picture.png"):
        (tmp_path / name).write_text(name)
    files = model_files(tmp_path)
    assert [file.name for file in files] == [
        "a.safetensors",
        "b.safetensors",
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    before = weights_digest(files)
    (tmp_path / "tokenizer.json").write_text("other")
    assert model_files(tmp_path) != files and weights_digest(model_files(tmp_path)) == before
    (tmp_path / "a.safetensors").write_text("other")
    assert weights_digest(model_files(tmp_path)) != before


# --- the machine -----------------------------------------------------------------------------------------------------


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_cpu_gpus_and_job_as_the_machine_names_them(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Fast CPU 9000\n")
    for bus in ("0000:01", "0000:02"):
        put(tmp_path, f"proc/driver/nvidia/gpus/{bus}/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n")
    machine = read_machine(tmp_path, {"CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_NODELIST": "n[1-4]"})
    assert (machine.cpu, machine.gpus, machine.gpus_visible, machine.nodes) == (
        "Fast CPU 9000",
        ("NVIDIA H200",) * 2,
        "1",
        "n[1-4]",
    )


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        },
        {
            "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/job\n0::/\n", "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)  # fmt: skip
def test_a_quota_above_the_process_counts(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        put(tmp_path, name, text)
    assert read_machine(tmp_path, {}).cpus == 0.5


def test_a_machine_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, {})
    assert machine.cpus >= 1 and machine.gpus == () and machine.nodes == "" and machine.cpu


def test_places_are_those_of_the_leases_that_can_be_read(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    put(tmp_path, "proc/cpuinfo", "model name : CPU\n")
    leases = LeaseFolder(FileSystem(), paths.leases, "r")
    machine = read_machine(tmp_path, {"SLURM_JOB_NODELIST": "n[1-2]"}).model_copy(
        update={"cpus": 2.0, "gpus": ("H200", "H200")}
    )
    leases.acquire("learner-0", 1, "t", host="n1", machine=machine)
    leases.acquire("rollout-0", 1, "t", host="n7")
    leases.tombstone("learner-0", 2, "t")
    (paths.leases / "learner-0.a3").write_text("{")
    run, _ = read_run(made(tmp_path / "other").root)
    found = {writer: [place_text(lease) for lease in of] for writer, of in read_leases(run, paths).items()}
    assert found == {"learner-0": ["n1 of n[1-2] (CPU, 2 CPUs, 2 x H200)"], "rollout-0": ["n7"]}
    assert read_leases(run, RunPaths(tmp_path / "nowhere")) == {}


# --- the file --------------------------------------------------------------------------------------------------------


def made(folder: Path) -> RunPaths:
    """A run directory with a model of two files."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    profile = ClusterProfile(name="here", kind="local", runs_root=str(folder / "runs"))
    return ensure_run(simulated_recipe(), profile, "one", model)


def test_the_record_is_written_once_beside_run_json(tmp_path: Path) -> None:
    paths = made(tmp_path)
    record = read_provenance(paths)
    assert record is not None and record.submitted.host and record.machine.cpus >= 1
    assert [file.name for file in record.base_model] == ["config.json", "model.safetensors"]
    assert (record.git.dirty is True) == paths.dirty_diff.exists(), "a dirty source has its diff, a clean one has none"
    before = paths.provenance.read_bytes()
    assert list(json.loads(before)["packages"]) == sorted(json.loads(before)["packages"])
    paths.run_file.unlink()
    ensure_run(
        simulated_recipe(),
        ClusterProfile(name="here", kind="local", runs_root=str(tmp_path / "runs")),
        "one",
        tmp_path / "model",
    )
    assert paths.provenance.read_bytes() == before


def test_git_says_nothing_of_a_snapshot_that_is_not_of_this_source(tmp_path: Path) -> None:
    """A start that died before run.json left a snapshot; the source may have changed since."""
    paths = made(tmp_path)
    for path in (paths.run_file, paths.provenance):
        path.unlink()
    paths.dirty_diff.unlink(missing_ok=True)
    (paths.code / "miles_core/errors.py").write_text("# as it was when the first start died\n")
    ensure_run(
        simulated_recipe(),
        ClusterProfile(name="here", kind="local", runs_root=str(tmp_path / "runs")),
        "one",
        tmp_path / "model",
    )
    record = read_provenance(paths)
    assert record is not None and record.git.commit == UNKNOWN and "earlier start" in record.git.why
    assert not paths.dirty_diff.exists()


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"schema_version": 2}', b"\xff\0"])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, data: bytes) -> None:
    RunPaths(tmp_path).provenance.write_bytes(data)
    assert read_provenance(RunPaths(tmp_path)) is None
