"""The `miles` command.

Exit codes: 0 well; 1 unexpected, or doctor found something bad; 2 wrong recipe, profile or run directory; 3 another supervisor
holds the run; 4 verify found faults; 5 a role cannot be replaced; 6 the run needs a rollback; 7 the scheduler refused; 8 a wait
ended; 9 damaged files; 10 the run was cancelled; 11 a rank of a job was lost; 12 a drill failed; 13 the run was drained; 130
left on Ctrl-C (the jobs go on); 141 nobody reads the output any more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flows.completion import complete_cluster, complete_plan, complete_recipe, complete_run
from flows.output import print_json, print_text, reader_may_leave
from flows.places import find_run, runs_folder
from miles_core.errors import MilesError

WATCH_S = 5.0


class Commands(TyperGroup):
    """The library ends a command whose reader left with 1, which is for what nobody expects."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with reader_may_leave():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with reader_may_leave():
            return super().invoke(ctx)


class Watchable(TyperCommand):
    """`--watch` with or without a number of seconds, which the library has no word for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        for index in reversed(range(len(given))):
            rest = given[index + 1 :]
            if given[index] in ("-w", "--watch") and not (rest and _is_number(rest[0])):
                given.insert(index + 1, str(WATCH_S))
        return super().parse_args(ctx, given)


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False


app = typer.Typer(
    name="miles",
    cls=Commands,
    help="RL post-training of language models as long-lived Slurm jobs that meet in one run directory.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
devslurm_app = typer.Typer(help="A throw-away real Slurm cluster on this machine, as a plain user.", no_args_is_help=True)
app.add_typer(devslurm_app, name="devslurm")

RECIPE_HELP = "A name in configs/recipes, or a YAML file."
RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help=RECIPE_HELP, autocompletion=complete_recipe)]
CHAT_HELP = "qwen3, chatml, llama3 or plain; without it the template in the model's folder."
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run id below the runs folder, or the path of a run directory.", autocompletion=complete_run
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster", metavar="NAME", help="A name in configs/clusters, or a YAML file.", autocompletion=complete_cluster
    ),
]
Settings = Annotated[list[str], typer.Option("--set", metavar="a.b=c", help="Change one recipe value; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, everything else on stderr.")]
TakeOver = Annotated[bool, typer.Option("--takeover", help="Take the run from a supervisor that still renews its lease.")]


def main() -> None:
    """Entry point: a MilesError becomes one message and its exit code, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app(prog_name="miles")
    except MilesError as error:
        print(f"miles: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"miles: {_explain(error)}", file=sys.stderr)
        sys.exit(1)


def _explain(error: OSError) -> str:
    """The last border: a filesystem that refuses what no command can do without."""
    where = error.filename or "the run directory"
    fix = {
        errno.ENOSPC: "make room there", errno.EDQUOT: "you are over your quota there", errno.EROFS: "it is mounted read-only",
        errno.EACCES: "you may not do that there", errno.ESTALE: "the mount is stale; try again",
    }.get(error.errno or 0, "is it mounted and healthy?")  # fmt: skip
    return f"{where}: {error.strerror or error}; {fix}. Nothing that was written is lost, and jobs that run go on"


@app.command()
def run(
    recipe: RecipeName,
    cluster: ClusterName = "local",
    run_id: Annotated[str | None, typer.Option(help="Name of the run; one that exists is continued.")] = None,
    settings: Settings = [],  # noqa: B006
    takeover: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Trains a recipe and supervises it until it is done; a run that exists goes on."""
    from flows.session import Session, run_recipe

    raise typer.Exit(run_recipe(recipe, cluster, run_id, tuple(settings), Session(takeover, as_json)))


@app.command()
def resume(
    run: RunName,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A corrected profile of the run's cluster.", autocompletion=complete_cluster),
    ] = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Of a run that needs it: drop what is missing, go on from the newest checkpoint.")
    ] = False,
    takeover: TakeOver = False,
    as_json: AsJson = False,
) -> None:
    """Goes on with a run that did not end, by its name alone; lifts a drain and adopts jobs that live."""
    from flows.session import Session, resume_run

    raise typer.Exit(resume_run(find_run(run), cluster, Session(takeover, as_json), rollback=rollback))


@app.command(cls=Watchable)
def status(
    run: RunName,
    as_json: AsJson = False,
    watch: Annotated[
        float | None, typer.Option("--watch", "-w", min=0.5, metavar="[SECONDS]", help="Again every 5 (or so many) seconds.")
    ] = None,
) -> None:
    """Shows how far a run is, what each role does, and what went wrong."""
    from flows.status import look
    from flows.status_text import status_text, watch_status
    from miles_core.run import read_run

    run_config, paths = read_run(find_run(run))
    if watch is not None and as_json:
        raise typer.BadParameter("--json prints once; leave --watch out")
    if watch is not None:
        watch_status(lambda: look(run_config, paths), watch)
    elif as_json:
        print_json(look(run_config, paths).as_json())
    else:
        print_text(status_text(look(run_config, paths)))


@app.command()
def logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow; ends with the run.")] = False,
    role: Annotated[str | None, typer.Option(help="Only this role (learner) or writer (rollout-1).")] = None,
) -> None:
    """Prints the logs of a run's roles, each line with its writer."""
    from flows.logs import print_logs
    from miles_core.run import read_run

    run_config, paths = read_run(find_run(run))
    print_logs(run_config, paths, follow=follow, role=role)


@app.command()
def cancel(run: RunName, as_json: AsJson = False) -> None:
    """Ends a run: all its jobs are cancelled, what it wrote stays."""
    from flows.ending import cancel_run

    raise typer.Exit(cancel_run(find_run(run), as_json=as_json))


@app.command()
def drain(
    run: RunName,
    within: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Time to leave by themselves.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Lets all jobs of a run save their work and leave; nobody is started again until `miles resume`."""
    from flows.ending import drain_run

    raise typer.Exit(drain_run(find_run(run), within, as_json=as_json))


@app.command()
def verify(run: RunName, as_json: AsJson = False) -> None:
    """Proves from the files alone that nothing was lost or trained twice, or names what is wrong (exit code 4)."""
    from miles_core.errors import VerifyFailed
    from miles_core.paths import check_trusted
    from miles_core.verify import verify_run

    root = find_run(run)
    check_trusted(root)
    result = verify_run(root)
    if as_json:
        print_json(result.as_json())
    else:
        print_text(result.as_text())
    if result.faults:
        raise VerifyFailed(f"{root}: {len(result.faults)} faults")


@app.command()
def report(run: RunName, as_json: AsJson = False) -> None:
    """Builds the report page of a run, live or finished: one file that opens without a network."""
    from flows.report import build_report

    path = build_report(find_run(run))
    if as_json:
        print_json({"report": str(path)})
    else:
        print_text(str(path))


@app.command()
def export(
    run: RunName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make; it must not exist yet.")],
    step: Annotated[int | None, typer.Option(min=0, help="Policy version to export; the newest without it.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with model.lora: only the adapter, in PEFT's layout; else it is merged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Writes a policy version as a model folder in Hugging Face layout, with a model card; also while the run goes on."""
    from miles_core.export import export_version
    from miles_core.run import read_run

    run_config, paths = read_run(find_run(run))
    record = export_version(run_config, paths, folder.expanduser().absolute(), step, adapter=adapter)
    print(json.dumps(record, indent=2) if as_json else f"{folder}: version {record['step']} of {record['run_id']}")


@app.command()
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, RUN or RUN@STEP.", autocompletion=complete_run)
    ],
    cluster: ClusterName = "local",
    recipe: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Whose tasks; those of the run without it.", autocompletion=complete_recipe),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Tasks of this family with its defaults; see --set.")] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out tasks.")] = 256,
    samples: Annotated[int, typer.Option(min=0, max=1024, help="Samples of each task beside the greedy answer.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the samples.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=1000, help="Of the sampling.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; that of the run's rollout without it.")] = None,
    settings: Annotated[list[str], typer.Option("--set", metavar="environment.b=c", help="Change the tasks.")] = [],  # noqa: B006
    cancel: Annotated[bool, typer.Option("--cancel", help="End the job of this evaluation; what is done stays.")] = False,
    as_json: AsJson = False,
) -> None:
    """Scores a model on held-out tasks, as a job: greedy, mean, pass@k, with error bars. Asked again it goes on, or answers."""
    from flows import evaluating

    asked = evaluating.Asked(model, recipe, family, tuple(settings), problems, samples, temperature, seed, dtype)
    if cancel:
        raise typer.Exit(evaluating.cancel(asked, cluster))
    raise typer.Exit(evaluating.evaluate(asked, cluster, as_json=as_json))


@app.command()
def compare(
    first: RunName,
    second: RunName,
    as_json: AsJson = False,
    diff: Annotated[bool, typer.Option("--diff", help="Also print the diff of the two code snapshots.")] = False,
) -> None:
    """Says why two runs differ: recipe, code, packages, model, data, cluster, hosts; then their figures side by side."""
    from flows.compare import print_comparison
    from miles_core.tracking.compare import compare as compare_runs

    print_comparison(compare_runs(find_run(first), find_run(second)), as_json=as_json, with_diff=diff)


@app.command()
def jobs(
    recipe: RecipeName,
    cluster: ClusterName = "local",
    settings: Settings = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Prints the exact job scripts of a recipe on a cluster; submits nothing."""
    from cluster.engines import check_engines
    from cluster.profile import load_cluster, short_lead
    from cluster.saves import unfit_save
    from flows.display import job_scripts
    from miles_core.errors import RecipeError
    from miles_core.recipe import load_recipe

    trained, profile = load_recipe(recipe, tuple(settings)), load_cluster(cluster)
    base_model = Path(trained.model.path or os.devnull).expanduser()
    for warning in filter(None, (short_lead(profile, trained), unfit_save(profile, trained, base_model))):
        logging.warning(warning)
    try:
        check_engines(trained, profile)
    except RecipeError as error:
        logging.warning("%s", error)
    scripts = job_scripts(trained, profile)
    if as_json:
        print_json([{"writer": writer, "script": script} for writer, script in scripts.items()])
    else:
        print_text("\n".join(f"# ---- {writer}\n{script.rstrip()}\n" for writer, script in scripts.items()))


@app.command()
def runs(as_json: AsJson = False) -> None:
    """Lists the runs below the runs folder (./runs, or MILES_RUNS)."""
    from flows.listing import print_runs

    print_runs(runs_folder(), as_json=as_json)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help=RECIPE_HELP, autocompletion=complete_recipe, show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lists the recipes there are; of one recipe it prints every value, with the defaults filled in."""
    from flows.listing import print_recipe, print_recipes

    if name is None:
        print_recipes(as_json=as_json)
    else:
        print_recipe(name, as_json=as_json)


@app.command()
def doctor(
    cluster: ClusterName = "local",
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Also start one small job on two nodes, to measure between them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Checks that this machine and this cluster can run the system, and says what to change (exit code 1: something is bad)."""
    from cluster.profile import load_cluster
    from flows.doctor import examine
    from flows.findings import findings_text

    findings = examine(load_cluster(cluster), nodes=nodes)
    if as_json:
        print_json([finding.as_json() for finding in findings])
    else:
        print_text(findings_text(findings))
    if any(finding.verdict == "bad" for finding in findings):
        raise typer.Exit(1)


@app.command()
def chat(
    folder: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder in Hugging Face layout.")],
    family: Annotated[str | None, typer.Option("--chat", metavar="FAMILY", help=CHAT_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Proves that a model's chat format only grows, or says where it rewrites what it wrote (exit code 1)."""
    from flows.chat import print_check

    if not print_check(folder, family, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def serve(
    folder: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder in Hugging Face layout.")],
    family: Annotated[str | None, typer.Option("--chat", metavar="FAMILY", help=CHAT_HELP)] = None,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of one conversation.")] = 2048,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens per turn.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampling; 0 is greedy.")] = 1.0,
) -> None:
    """Serves a model to agents on this machine, token-exact as in a run, to write an agent against; trains nothing."""
    from flows.chat import serve as serve_model
    from miles_core.rollout.sessions.live import SessionSpec

    spec = SessionSpec(max_tokens, max_new_tokens, max_tokens, temperature, seed=0, kind="branching", replay="json")
    serve_model(folder, family, spec, slots=8)


@app.command()
def drill(
    recipe: RecipeName,
    plan: Annotated[
        str,
        typer.Option("--plan", metavar="PLAN", help="A name in configs/drills, or a YAML file.", autocompletion=complete_plan),
    ],
    cluster: ClusterName = "local",
    run_id: Annotated[str | None, typer.Option(help="Name of the run; one that exists is continued, with its plan.")] = None,
    settings: Settings = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Rehearses failures on a run: injects a plan's faults, records what each one costs (exit code 12: one did not go well)."""
    from flows.drill import drill_recipe

    drill_recipe(recipe, cluster, plan, run_id, settings, as_json=as_json)


def _folder(text: str) -> Path:
    """A folder that is there or can be. Raises typer.BadParameter."""
    try:
        folder = Path(text).expanduser()
        is_wrong = not text or (folder.exists() and not folder.is_dir()) or (folder.is_symlink() and not folder.exists())
        is_wrong = is_wrong or any(parent.is_file() for parent in folder.parents)
    except (OSError, ValueError, RuntimeError) as error:
        raise typer.BadParameter(f"{text!r} cannot be a folder: {error}") from error
    if is_wrong:
        raise typer.BadParameter(f"{text!r} is not a folder")
    return folder


Folder = Annotated[Path, typer.Option(help="Folder of the cluster.", parser=_folder, metavar="FOLDER")]
DEVSLURM_FOLDER = Path("~/.cache/miles/devslurm")


def _devslurm(folder: Path, **settings: Any) -> Any:
    from cluster.slurm.devslurm import DevSlurm, slurm_available
    from miles_core.errors import SchedulerError

    missing = slurm_available()
    if missing is not None:
        raise SchedulerError(missing)
    return DevSlurm(folder.expanduser(), **settings)


@devslurm_app.command("up")
def devslurm_up(
    folder: Folder = DEVSLURM_FOLDER,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Virtual nodes of a new cluster.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Starts it (7 virtual nodes by default); one that runs is left as it is."""
    cluster = _devslurm(folder, num_nodes=nodes)
    cluster.up()
    if as_json:
        print_json(cluster.status())
    else:
        print_text(f"Slurm is up with {nodes} nodes. To use it by hand: export SLURM_CONF={cluster.env()['SLURM_CONF']}")


@devslurm_app.command("down")
def devslurm_down(folder: Folder = DEVSLURM_FOLDER, as_json: AsJson = False) -> None:
    """Stops it and everything that runs in it."""
    cluster = _devslurm(folder)
    cluster.down()
    if as_json:
        print_json(cluster.status())
    else:
        print_text("Slurm is down")


@devslurm_app.command("status")
def devslurm_status(folder: Folder = DEVSLURM_FOLDER, as_json: AsJson = False) -> None:
    """Says whether it runs, and its nodes."""
    state = _devslurm(folder).status()
    if as_json:
        print_json(state)
    else:
        print_text("\n".join(f"{key}: {value}" for key, value in state.items()))


if __name__ == "__main__":
    main()
