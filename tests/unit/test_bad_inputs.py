"""At least eleven wrong inputs for every command: the documented exit code, one message, no traceback, nothing on stdout.

The inputs come in families (a RUN, a RECIPE, a CLUSTER, options), so a new command takes the family of what it is given.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cluster.profile import ClusterProfile
from flows.cli import app, devslurm_app
from miles_core.paths import RunPaths
from miles_core.run import RunConfig
from miles_core.store.fs import FileSystem
from miles_core.store.lease import LeaseFolder
from tests.e2e.tamper import flip_byte, journal_file
from tests.protocol.simulation import simulated_recipe
from tests.unit.conftest import Miles

BINARY = bytes(range(256))
LONG = "x" * 5000
Prepare = Callable[[Path], None]
Case = tuple[str, tuple[str, ...], int, Prepare | None]
"""Name, arguments behind the command, exit code, and what is done to the folder before."""


# --- a RUN -----------------------------------------------------------------------------------------------------------


def new_run(folder: Path) -> Path:
    """runs/new: made, never started."""
    root = folder / "runs" / "new"
    root.mkdir(mode=0o755, parents=True)
    profile = ClusterProfile(name="local", kind="local")
    run = RunConfig(
        run_id="new", recipe=simulated_recipe(), timing=profile.timing, cluster=json.loads(profile.model_dump_json()),
        code_digest="", base_model_digest="", created_s=1.0,
    )  # fmt: skip
    (root / "run.json").write_text(run.model_dump_json())
    return root


def changed(change: Callable[[Path], object]) -> Prepare:
    """A run directory with something wrong."""

    def prepare(folder: Path) -> None:
        change(new_run(folder))

    return prepare


def make_file(folder: Path) -> None:
    (folder / "afile").write_text("text")


def make_folder(folder: Path) -> None:
    (folder / "afolder").mkdir()


def make_loop(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")


def torn(root: Path) -> None:
    path = root / "run.json"
    path.write_bytes(path.read_bytes()[:100])


def newer(root: Path) -> None:
    """Of another version."""
    path = root / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "from_the_future": 1}))


def is_folder(root: Path) -> None:
    (root / "run.json").unlink()
    (root / "run.json").mkdir()


def of_somebody_else(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(root, 65534, 65534)


RUN_CASES: list[Case] = [
    ("unknown", ("no-such-run",), 2, None),
    ("empty", ("",), 2, None),
    ("blanks", ("  ",), 2, None),
    ("newline", ("a\nb",), 2, None),
    ("unicode", ("gemüse-名前",), 2, None),
    ("not-utf8", ("\udcff\udcfe",), 2, None),
    ("too-long", (LONG,), 2, None),
    ("no-such-home", ("~nobody-of-that-name/x",), 2, None),
    ("plain-file", ("afile",), 2, make_file),
    ("folder-that-is-no-run", ("afolder",), 2, make_folder),
    ("link-to-itself", ("loop",), 2, make_loop),
    ("torn-run-file", ("new",), 2, changed(torn)),
    ("binary-run-file", ("new",), 2, changed(lambda root: (root / "run.json").write_bytes(BINARY))),
    ("empty-run-file", ("new",), 2, changed(lambda root: (root / "run.json").write_bytes(b""))),
    ("run-file-is-a-folder", ("new",), 2, changed(is_folder)),
    ("run-file-of-another-version", ("new",), 2, changed(newer)),
    ("writable-by-others", ("new",), 2, changed(lambda root: root.chmod(0o777))),
    ("of-somebody-else", ("new",), 2, changed(of_somebody_else)),
    ("no-run", (), 2, None),
    ("two-runs", ("new", "other"), 2, None),
    ("unknown-option", ("new", "--nope"), 2, None),
    ("flag-with-a-value", ("new", "--json=maybe"), 2, None),
]
TWO_RUNS: list[Case] = [
    *((name, (*argv, "new"), code, prepare) for name, argv, code, prepare in RUN_CASES if name not in ("no-run", "two-runs")),
    ("one-run", ("new",), 2, changed(lambda root: None)),
    ("three-runs", ("new", "new", "new"), 2, changed(lambda root: None)),
]


def damaged(name: str, code: int, journal: str = "supervisor/journal") -> Case:
    """A finished run with a flipped bit in a journal; its supervisor left."""

    def prepare(folder: Path) -> None:
        root = folder / "runs" / "one"
        described = json.loads((root / "run.json").read_text())
        described["cluster"] = json.loads(ClusterProfile(name="local", kind="local").model_dump_json())
        (root / "run.json").write_text(json.dumps(described))
        LeaseFolder(FileSystem(), RunPaths(root).leases, described["run_id"]).tombstone("supervisor-0", 2, "t")
        flip_byte(journal_file(root, journal))

    return f"{DAMAGED}{name}", ("one",), code, prepare


DAMAGED = "one:"
"""Cases that need a finished run of their own; the others share it."""


# --- a RECIPE --------------------------------------------------------------------------------------------------------


def recipe_file(content: bytes | str) -> Prepare:
    def prepare(folder: Path) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "mine.yaml").write_bytes(data)

    return prepare


def setting(text: str) -> tuple[str, ...]:
    return ("chain_sum", "--set", text)


RECIPE_ONLY: list[Case] = [
    ("unknown", ("nothing",), 2, None),
    ("newline", ("a\nb",), 2, None),
    ("too-long", (LONG,), 2, None),
    ("unicode", ("gemüse",), 2, None),
    ("a-folder", (".",), 2, None),
    ("missing-file", ("nothing.yaml",), 2, None),
    ("folder-called-yaml", ("mine.yaml",), 2, lambda folder: (folder / "mine.yaml").mkdir()),
    ("binary", ("mine.yaml",), 2, recipe_file(BINARY)),
    ("zero-bytes", ("mine.yaml",), 2, recipe_file("a\0b")),
    ("empty-file", ("mine.yaml",), 2, recipe_file("")),
    ("a-list", ("mine.yaml",), 2, recipe_file("- a\n- b\n")),
    ("not-yaml", ("mine.yaml",), 2, recipe_file("name: [a\nsteps: }")),
    ("deep", ("mine.yaml",), 2, recipe_file("[" * 400)),
    ("no-such-date", ("mine.yaml",), 2, recipe_file("name: x\nsteps: 2026-13-45\n")),
    ("a-date", ("mine.yaml",), 2, recipe_file("name: 2026-11-30\nsteps: 1\n")),
    ("keys-that-are-no-words", ("mine.yaml",), 2, recipe_file("1: 2\nnull: 3\n")),
    ("python-object", ("mine.yaml",), 2, recipe_file("name: !!python/object/apply:os.system [true]\n")),
    ("unknown-option", ("chain_sum", "--nope"), 2, None),
]
RECIPE_CASES: list[Case] = [
    *RECIPE_ONLY,
    ("empty", ("",), 2, None),
    ("no-recipe", (), 2, None),
    ("two-recipes", ("chain_sum", "chain_sum"), 2, None),
    ("setting-without-value", setting("steps"), 2, None),
    ("setting-without-key", setting("=1"), 2, None),
    ("setting-is-empty", setting(""), 2, None),
    ("no-setting", ("chain_sum", "--set"), 2, None),
    ("unknown-key", setting("learner.lx=1"), 2, None),
    ("wrong-type", setting("steps=many"), 2, None),
    ("negative", setting("steps=-1"), 2, None),
    ("zero", setting("steps=0"), 2, None),
    ("not-a-number", setting("learner.lr=nan"), 2, None),
    ("infinite", setting("learner.lr=inf"), 2, None),
    ("infinite-deadline", setting("environment.tool_deadline_s=.inf"), 2, None),
    ("infinite-option", setting("environment.options.x=.inf"), 2, None),
    ("option-that-is-a-date", setting("environment.options.x=2026-11-30"), 2, None),
    ("option-with-a-number-as-key", setting("environment.options.x={1: 2}"), 2, None),
    ("no-section", setting("steps.x=1"), 2, None),
    ("value-is-not-yaml", setting("learner.lr=[1,"), 2, None),
    ("value-is-no-date", setting("name=2026-13-45"), 2, None),
    ("no-pools", setting("rollout.pools=[]"), 2, None),
    ("rules-that-contradict", setting("orchestrator.capacity_batches=9"), 2, None),
    ("name-with-newline", setting('name="a\\nb"'), 2, None),
]


# --- a CLUSTER -------------------------------------------------------------------------------------------------------

SITE = {"name": "site", "kind": "local"}


def cluster_file(content: bytes | str | None = None, **changes: object) -> Prepare:
    text = yaml.safe_dump({**SITE, **changes}) if content is None else content

    def prepare(folder: Path) -> None:
        (folder / "site.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    return prepare


def on_cluster(name: str, value: str = "site.yaml", prepare: Prepare | None = None) -> Case:
    return f"cluster-{name}", ("--cluster", value), 2, prepare


CLUSTER_CASES: list[Case] = [
    on_cluster("unknown", "nowhere"),
    on_cluster("empty", ""),
    on_cluster("newline", "a\nb"),
    on_cluster("too-long", LONG),
    on_cluster("missing-file"),
    on_cluster("binary", prepare=cluster_file(BINARY)),
    on_cluster("empty-file", prepare=cluster_file("")),
    on_cluster("unknown-key", prepare=cluster_file(partition="gpu")),
    on_cluster("unknown-kind", prepare=cluster_file(kind="pbs")),
    on_cluster("wrong-type", prepare=cluster_file(resources=["learner"])),
    on_cluster("negative", prepare=cluster_file(scheduler_poll_s=-1)),
    on_cluster("infinite", prepare=cluster_file(scheduler_poll_s=float("inf"))),
    on_cluster("unknown-role", prepare=cluster_file(resources={"teacher": {"cpus": 1}})),
    on_cluster("no-cpus", prepare=cluster_file(resources={"learner": {"cpus": 0}})),
    on_cluster("times-that-kill", prepare=cluster_file(timing={"visibility_s": 60, "lease_s": 10})),
    ("cluster-without-value", ("--cluster",), 2, None),
]
WITH_CLUSTER: list[Case] = [
    *RECIPE_CASES, *((name, ("chain_sum", *argv), code, prepare) for name, argv, code, prepare in CLUSTER_CASES)
]  # fmt: skip


def make_model(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")


def runs_file(folder: Path) -> None:
    """The runs folder is a file."""
    (folder / "runs").write_text("")


def runs_file_and_model(folder: Path) -> None:
    runs_file(folder)
    make_model(folder)


def run_again(folder: Path) -> None:
    """Run `new` exists, with another recipe."""
    new_run(folder)
    make_model(folder)


MODEL = ("--set", "model.bootstrap=null", "--set", "model.path=model")
BAD_IDS = (("path", "a/b"), ("empty", ""), ("blank", "a b"), ("newline", "a\nb"), ("dot", ".."), ("long", "x" * 65))
RUN_COMMAND: list[Case] = [
    *WITH_CLUSTER,
    *((f"run-id-{name}", ("chain_sum", "--run-id", value), 2, None) for name, value in BAD_IDS),
    ("run-id-without-value", ("chain_sum", "--run-id"), 2, None),
    ("missing-model", ("chain_sum", "--set", "model.bootstrap=null", "--set", "model.path=/no/such"), 2, None),
    ("empty-model", ("chain_sum", *MODEL), 2, lambda folder: (folder / "model").mkdir()),
    ("another-recipe", ("chain_sum", "--run-id", "new", *MODEL), 2, run_again),
    ("runs-folder-is-a-file", ("chain_sum", *MODEL), 2, runs_file_and_model),
    ("flag-with-a-value", ("chain_sum", "--takeover=maybe"), 2, None),
]


# --- commands --------------------------------------------------------------------------------------------------------


def runs_holds(name: str, content: bytes | str | None) -> Prepare:
    """A folder below runs with this run.json (None: it is a folder)."""

    def prepare(folder: Path) -> None:
        root = folder / "runs" / name
        root.mkdir(parents=True)
        if content is None:
            (root / "run.json").mkdir()
        else:
            (root / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    return prepare


def folder_option(*values: tuple[str, str, int, Prepare | None]) -> list[Case]:
    return [(f"folder-{name}", ("--folder", value), code, prepare) for name, value, code, prepare in values]


DEVSLURM: list[Case] = [
    *folder_option(
        ("empty", "", 2, None), ("a-file", "afile", 2, make_file), ("below-a-file", "afile/x", 2, make_file),
        ("no-such-home", "~nobody-of-that-name", 2, None), ("too-long", LONG, 2, None),
        ("link-to-itself", "loop", 2, make_loop), ("not-for-slurm", "a,b", 7, None), ("newline", "a\nb", 7, None),
    ),
    ("folder-without-value", ("--folder",), 2, None),
    ("unknown-option", ("--nope",), 2, None),
    ("argument", ("extra",), 2, None),
    ("flag-with-a-value", ("--json=maybe",), 2, None),
    ("option-twice-one-empty", ("--folder", "x", "--folder", ""), 2, None),
]  # fmt: skip
NODES: list[Case] = [
    (f"nodes-{value or 'empty'}", ("--nodes", value), 2, None) for value in ("0", "-1", "65", "many", "", "1.5")
]

ONE_RUN = [case for case in RUN_CASES if case[0] not in ("no-run", "two-runs")]
RUN_FILES = (
    ("torn", "{"), ("binary", BINARY), ("empty", ""), ("of-another-version", '{"schema_version": 99}'), ("a-folder", None),
    ("a-list", "[]"),
)  # fmt: skip
RUN_NAMES = (("newline", "a\nb"), ("not-utf8", "\udcff"), ("blanks", " "), ("unicode", "名前"))

MODEL_FOLDER: list[Case] = [
    ("unknown", ("nothing",), 2, None), ("empty", ("",), 2, None), ("newline", ("a\nb",), 2, None),
    ("too-long", (LONG,), 2, None), ("not-utf8", ("\udcff",), 2, None), ("no-such-home", ("~nobody-of-that-name/x",), 2, None),
    ("plain-file", ("afile",), 2, make_file), ("folder-that-is-no-model", ("afolder",), 2, make_folder),
    ("link-to-itself", ("loop",), 2, make_loop), ("model-without-a-tokenizer", ("model",), 2, make_model),
    ("no-model", (), 2, None), ("two-models", ("model", "model"), 2, make_model),
    ("unknown-option", ("model", "--nope"), 2, make_model), ("unknown-chat", ("model", "--chat", "gpt"), 2, make_model),
    ("chat-without-value", ("model", "--chat"), 2, make_model),
]  # fmt: skip

COMMANDS: dict[str, list[Case]] = {
    "run": RUN_COMMAND,
    "resume": [
        *RUN_CASES, damaged("damaged-journal", 9), ("is-completed", ("one",), 2, None),
        *((name, ("one", *argv), code, prepare) for name, argv, code, prepare in CLUSTER_CASES),
    ],
    "status": [
        *RUN_CASES, damaged("damaged-journal", 0), damaged("damaged-orchestrator", 0, "orchestrator/journal"),
        *((f"watch-{value}", ("one", "-w", value), 2, None) for value in ("0", "-1", "nan")),
        ("json-and-watch", ("one", "--json", "-w"), 2, None),
    ],
    "logs": [
        *RUN_CASES, ("unknown-role", ("one", "--role", "teacher"), 2, None), ("empty-role", ("one", "--role", ""), 2, None),
        ("role-without-value", ("one", "--role"), 2, None), ("role-with-newline", ("one", "--role", "a\nb"), 2, None),
    ],
    "cancel": [*RUN_CASES, damaged("damaged-journal", 9)],
    "drain": [
        *RUN_CASES, damaged("damaged-journal", 9),
        *((f"within-{value or 'empty'}", ("one", "--within", value), 2, None) for value in ("0", "-5", "soon", "", "nan")),
        ("within-without-value", ("one", "--within"), 2, None),
    ],
    "verify": [*RUN_CASES, damaged("damaged-journal", 4)],
    "report": [*RUN_CASES, damaged("damaged-journal", 0)],
    "export": [
        *((name, (*argv, "out"), code, prepare) for name, argv, code, prepare in ONE_RUN),
        ("no-folder", ("one",), 2, None), ("negative-step", ("one", "out", "--step", "-1"), 2, None),
        ("no-number", ("one", "out", "--step", "last"), 2, None), ("folder-exists", ("one", "afolder"), 2, make_folder),
    ],
    "chat": [*MODEL_FOLDER, ("flag-with-a-value", ("model", "--json=maybe"), 2, make_model)],
    "serve": [
        *MODEL_FOLDER, ("no-tokens", ("model", "--max-tokens", "0"), 2, make_model),
        ("no-new-tokens", ("model", "--max-new-tokens", "many"), 2, make_model),
        ("cold", ("model", "--temperature", "-1"), 2, make_model),
    ],
    "evaluate": [
        *ONE_RUN, ("no-model", (), 2, None), ("two-models", ("one", "one"), 2, None), ("no-such-step", ("one@99",), 2, None),
        ("step-is-no-number", ("one@last",), 2, None), ("model-that-is-none", ("model",), 2, make_model),
        ("unknown-recipe", ("one", "--recipe", "nothing"), 2, None),
        ("unknown-family", ("one", "--family", "nothing"), 2, None),
        ("no-problems", ("one", "--problems", "0"), 2, None), ("negative-samples", ("one", "--samples", "-1"), 2, None),
        ("unknown-dtype", ("one", "--dtype", "int4"), 2, None), ("unknown-key", ("one", "--set", "environment.x=1"), 2, None),
        ("not-the-environment", ("one", "--set", "learner.lr=1"), 2, None),
        *((name, ("one", *argv), code, prepare) for name, argv, code, prepare in CLUSTER_CASES),
    ],
    "compare": TWO_RUNS,
    "jobs": WITH_CLUSTER,
    "drill": [
        *((name, (*argv, "--plan", "first"), code, prepare) for name, argv, code, prepare in WITH_CLUSTER if "no-" not in name),
        ("no-plan", ("chain_sum",), 2, None), ("unknown-plan", ("chain_sum", "--plan", "nothing"), 2, None),
        ("empty-plan", ("chain_sum", "--plan", ""), 2, None),
        ("binary-plan", ("chain_sum", "--plan", "mine.yaml"), 2, recipe_file(BINARY)),
    ],
    "recipes": [*RECIPE_ONLY, ("two-recipes", ("chain_sum", "chain_sum"), 2, None), ("empty", ("",), 2, None)],
    "runs": [
        ("argument", ("extra",), 2, None), ("unknown-option", ("--nope",), 2, None),
        ("flag-with-a-value", ("--json=maybe",), 2, None), ("no-folder", (), 0, None), ("folder-is-a-file", (), 0, runs_file),
        *((f"run-file-{name}", (), 0, runs_holds("x", content)) for name, content in RUN_FILES),
        *((f"called-{name}", (), 0, runs_holds(folder, "{}")) for name, folder in RUN_NAMES),
        ("writable-by-others", (), 0, changed(lambda root: root.chmod(0o777))),
        (f"{DAMAGED}damaged-journal", (), 0, damaged("", 0)[3]),
    ],
    "doctor": [
        *CLUSTER_CASES, ("argument", ("extra",), 2, None), ("unknown-option", ("--nope",), 2, None),
        ("nodes-without-a-cluster", ("--nodes",), 2, None),
    ],
    "devslurm up": [*DEVSLURM, *NODES],
    "devslurm down": DEVSLURM,
    "devslurm status": DEVSLURM,
}  # fmt: skip
CASES = [(command, case) for command, cases in COMMANDS.items() for case in cases]


@pytest.fixture(autouse=True)
def is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test starts by mistake finds neither Slurm, nor a cache, nor another's runs."""
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cluster.slurm.devslurm.slurm_available", lambda: None)
    monkeypatch.setattr("cluster.slurm.devslurm.DevSlurm.up", lambda self: pytest.fail("a cluster was started"))
    monkeypatch.setattr("cluster.supervise.Supervisor.tick", lambda self: pytest.fail("a run was supervised"))
    yield


@pytest.mark.parametrize(("command", "case"), CASES, ids=[f"{command}-{case[0]}" for command, case in CASES])
def test_a_wrong_input_is_one_message_and_the_documented_code(
    command: str, case: Case, tmp_path: Path, simulated: Path, miles: Miles, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, argv, code, prepare = case
    if name.startswith(DAMAGED):
        shutil.copytree(simulated, tmp_path / "runs" / "one", symlinks=True)
    elif "one" in argv:
        monkeypatch.setenv("MILES_RUNS", str(simulated.parent))
    if prepare is not None:
        prepare(tmp_path)
    seen = miles(*command.split(), *argv)
    assert seen.code == code, (seen.out, seen.err)
    assert "Traceback" not in seen.out + seen.err
    if name.startswith(DAMAGED) and command in ("status", "runs", "verify"):
        assert "journal" in seen.out, "what a bad frame hides is not passed over in silence"
    if code != 0:
        assert len(re.findall(r"(?m)^(?:miles: |Error: )", seen.err)) == 1, seen.err
        assert code == 4 or not seen.out.startswith(("{", "[")), "nothing for a script to take for an answer"


def test_every_command_has_at_least_eleven_wrong_inputs() -> None:
    names = {info.name or info.callback.__name__ for info in app.registered_commands}  # type: ignore[union-attr]
    names |= {f"devslurm {info.name}" for info in devslurm_app.registered_commands}
    assert names == COMMANDS.keys()
    for command, cases in COMMANDS.items():
        wrong = [name for name, *_ in cases]
        assert len(wrong) == len(set(wrong)) >= 11, (command, wrong)
