"""What vLLM alone has: models in other processes, as on GPUs (tensor parallel, and several engines in one replica), and a KV
cache that is too small.

Run by tests/e2e/test_vllm.py with the interpreter that has vLLM; on CPUs, with two workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.recipe import VllmSpec
from miles_core.rollout.router import FIRST_MEND_S, RoutedEngine
from miles_core.rollout.vllm_engine import VllmEngine
from miles_core.rollout.vllm_worker import files_of_memory
from tests.unit.contract_engines import END, MAX_TOKENS, SLOTS, V0, V1, V2
from tests.unit.engine_history import History, drain, prompt
from tests.unit.test_engine_experts import Play
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model

EXACT = 1e-5
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
WAIT_S = 120.0


def engine_of(folder: Path, *, spec: VllmSpec | None = None, gpus: tuple[str, ...] = (), end_id: int = END) -> VllmEngine:
    return VllmEngine(
        folder, dtype="float32", weights_dtype="float32", end_id=end_id, slots=SLOTS, max_tokens=MAX_TOKENS, version=V0,
        record_experts=True, spec=spec, gpus=gpus,
    )  # fmt: skip


def model_of(kind: Kind, seed: int) -> torch.nn.Module:
    return tiny_model(kind, seed, **SHAPE | ({"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}))


def save_model(folder: Path, kind: Kind) -> Path:
    return save_tiny_model(folder / kind, kind, **SHAPE | ({"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}))


def workers() -> set[int]:
    """Processes of vLLM that this one started and that run."""
    listed = subprocess.run(["ps", "-o", "pid=,stat=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return {int(pid) for pid, state, name in rows if "Worker" in name and not state.startswith("Z")}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not workers()


def test_two_ranks_compute_what_hugging_face_does_over_turns_exchanges_and_probes(tmp_path: Path) -> None:
    kind: Kind = "qwen3_moe"
    engine = engine_of(save_model(tmp_path, kind), spec=VllmSpec(tensor_parallel=2))
    assert len(workers()) == 2
    history = History(engine)
    models = {version: model_of(kind, seed) for seed, version in enumerate((V0, V1, V2))}

    def swap(steps: int) -> None:
        if steps in (4, 9):
            version = V1 if steps == 4 else V2
            engine.load_weights(models[version].state_dict(), version)
            assert engine.running, "the swap must meet turns in the middle"

    drain(history, [f"s{i}" for i in range(6)], np.random.default_rng(3), turns=2, swap=swap)
    assert history.worst(models) < EXACT and history.worst(dict.fromkeys(models, models[V0])) > 100 * EXACT
    tokens = list(prompt(np.random.default_rng(4), 20, 21))
    with torch.no_grad():
        logprobs = torch.log_softmax(models[V2](torch.tensor([tokens])).logits[0].float(), dim=-1)
    wanted = [float(logprobs[at, token]) for at, token in enumerate(tokens[1:])]
    assert np.abs(engine.logprobs([tokens])[0] - wanted).max() < EXACT
    play = Play(engine)
    for key in "ab":
        play.ask(key, (*tokens, *tokens), 9)
    play.finish()
    play.check(models)
    engine.close()


def test_sessions_that_lose_their_blocks_are_read_again_and_their_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Kind = "qwen3_moe"
    blocks = 7  # of 32 tokens; four sessions need twelve
    bytes_of_block = 32 * 2 * 2 * 2 * 32 * 4
    engine = engine_of(save_model(tmp_path, kind), spec=VllmSpec(kv_cache_gib=(blocks + 1) * bytes_of_block / 2**30), end_id=-1)
    play, history, rng = Play(engine), History(engine), np.random.default_rng(5)
    scheduler, lost = engine._core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *given, **named: (lost.append(given), preempt(*given, **named)))
    for key in "abcd":
        play.ask(key, prompt(rng, 25, 30), 60)
    while len(play.turns) < 4:
        for key in play.step():
            engine.release(key)  # one that has ended keeps its blocks until then
    assert lost, "no session lost its blocks"
    play.check({V0: model_of(kind, 0)})
    for key, ((asked, turn),) in play.turns.items():
        history.tokens[key], history.temperature[key] = [*asked], 1.0
        history.take(turn)
    assert history.worst({V0: model_of(kind, 0)}) < EXACT
    engine.close()


def test_an_engine_whose_worker_is_killed_hands_its_turns_on_and_comes_back(tmp_path: Path) -> None:
    """Each has a worker of its own, all step at the same time, and the dead one is made again in a thread."""
    folder = save_model(tmp_path, "qwen3")
    of_engine: dict[int, set[int]] = {}

    def make(index: int) -> VllmEngine:
        before = workers()
        made = engine_of(folder, gpus=(str(index),))
        of_engine[index] = workers() - before
        return made

    routed = RoutedEngine(make, 2, is_parallel=True)
    history, rng = History(routed), np.random.default_rng(1)
    models = {V0: model_of("qwen3", 0), V1: model_of("qwen3", 1)}
    for number in range(2 * SLOTS):
        history.ask(f"s{number}", prompt(rng), 30)
    for _ in range(4):
        assert not routed.step()
    (killed,) = of_engine[0]
    os.kill(killed, signal.SIGKILL)
    for _ in range(3):
        assert not routed.step()
    assert routed.figures()["engine_deaths"] == 1 and killed not in workers()
    until = time.monotonic() + WAIT_S
    while len(history.turns) < 2 * SLOTS and time.monotonic() < until:
        for turn in routed.step():
            history.take(turn)
            routed.release(turn.session_key)
    assert history.turns == {f"s{number}": 1 for number in range(2 * SLOTS)} and routed.figures()["handed_on"] == SLOTS
    routed.load_weights(models[V1].state_dict(), V1)
    come_back(routed, models[V1])
    history.ask("after", prompt(rng), 20)
    history.ask("beside", prompt(rng), 20)
    assert routed.figures()["engine_active"] == [1, 1]
    history.finish()
    assert history.worst(models) < EXACT
    for _, engine in routed._living:
        engine.close()


def come_back(routed: RoutedEngine, newest: torch.nn.Module) -> None:
    """What the replica does between two steps, until both engines live."""
    until = time.monotonic() + FIRST_MEND_S + WAIT_S
    while None in routed.figures()["engine_active"]:
        assert time.monotonic() < until, "the engine is not there again"
        if routed.is_mendable:
            routed.mend(lambda engine: engine.load_weights(newest.state_dict(), V1))
        time.sleep(0.1)


def test_weights_in_several_files_of_memory() -> None:
    from safetensors.torch import load_file

    tensors = {f"t{number}": torch.full((number, 3), float(number)) for number in range(1, 6)}
    before = set(os.listdir("/proc/self/fd"))
    with files_of_memory(tensors, shard_bytes=64) as paths:
        found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        assert len(paths) == 4
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert set(os.listdir("/proc/self/fd")) == before
