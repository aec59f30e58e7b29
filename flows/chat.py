"""`miles chat`: whether a model's chat format only grows, or where it does not. `miles serve`: a model for agents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.output import columns, print_json, print_text
from miles_core.errors import RecipeError
from miles_core.rollout.chat import FAMILIES

if TYPE_CHECKING:
    from miles_core.rollout.sessions.live import SessionSpec

SAYS = {
    "append-only": "{family} only grows: what a session records is what a fresh rendering gives",
    "merges": "{family} writes the same text in other tokens where two pieces meet; a session keeps those that were sampled",
    "differs": "{family} rewrites history where it says `differs`: sessions are exact, but a server that renders afresh will "
    "give this model other tokens than it was trained on; set model.chat to a family that only grows",
}


def print_check(name: str, family: str | None, *, as_json: bool) -> bool:
    """Of the model folder `name`: prints what every probe showed; False if the format rewrites history. Raises RecipeError."""
    from transformers import AutoTokenizer

    from miles_core.rollout.chat_check import check_append_only
    from miles_core.rollout.choice import make_renderer

    check_name(family)
    folder = model_folder(name)
    renderer = make_renderer(folder, family)
    probes = check_append_only(renderer, AutoTokenizer.from_pretrained(folder))
    verdicts = {probe.verdict for probe in probes}
    worst = next((name for name in ("differs", "merges") if name in verdicts), "append-only")
    if as_json:
        print_json([vars(probe) for probe in probes])
    else:
        lines = columns([(probe.name, probe.verdict, probe.detail) for probe in probes])
        print_text("\n".join([*lines, SAYS[worst].format(family=family or f"the template of {folder}")]))
    return worst != "differs"


def model_folder(name: str) -> Path:
    """The folder of a model that a person named. Raises RecipeError."""
    try:
        folder = Path(name).expanduser()
        is_model = (folder / "config.json").exists()
    except (OSError, RuntimeError, ValueError) as error:
        # RuntimeError: the home of nobody. ValueError: a zero byte.
        raise RecipeError(f"MODEL: {name!r} cannot be looked at: {getattr(error, 'strerror', None) or error}") from error
    if not is_model:
        raise RecipeError(
            f"MODEL: {name!r} has no config.json; give a folder in Hugging Face layout, for example of `miles export`"
        )
    return folder


def check_name(family: str | None) -> None:
    """Raises RecipeError."""
    if family is not None and family not in FAMILIES:
        raise RecipeError(f"--chat: there is no family {family!r}; there are {', '.join(FAMILIES)}")


def serve(name: str, family: str | None, spec: SessionSpec, slots: int) -> None:
    """Serves a model folder to agents until Ctrl-C. Raises RecipeError, OSError."""
    import torch

    from miles_core.records import Version
    from miles_core.rollout.choice import make_renderer
    from miles_core.rollout.sessions.door import EngineDoor
    from miles_core.rollout.sessions.server import SessionServer
    from miles_core.rollout.torch_engine import TorchEngine

    check_name(family)
    folder = model_folder(name)
    renderer = make_renderer(folder, family)
    engine = TorchEngine.from_folder(
        folder, dtype="float32", end_id=renderer.end_id, slots=slots, max_tokens=spec.max_tokens, version=Version(0, 0),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )  # fmt: skip
    door = EngineDoor(engine)
    server = SessionServer(door, renderer, spec)
    print_text(how_to(server))
    try:
        while True:
            door.pump()
            door.wait(1.0)
    finally:
        server.stop()


def how_to(server: Any) -> str:
    """What a person types next."""
    return (
        f"serving at {server.url}, on this machine only; Ctrl-C ends it\n"
        f'a session:  curl -s -X POST {server.url}/sessions -H "Authorization: Bearer {server.key}"\n'
        f"gives id, key and base_url: what an agent's run(base_url, api_key, task) is handed. GET {server.url}/sessions/ID\n"
        f"with the session's key shows what was recorded, and what would be trained of it"
    )
