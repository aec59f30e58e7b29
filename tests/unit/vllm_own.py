"""What vLLM alone has: models in other processes, as on GPUs (tensor parallel, and several engines in one replica), a KV cache
that is too small, prompts in parts, guesses, and models that it does not compute.

Run by tests/e2e/test_vllm.py with the interpreter that has vLLM; on CPUs, with two workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_core.errors import MilesError, RecipeError
from miles_core.recipe import VllmSpec
from miles_core.records import Version
from miles_core.rollout.router import FIRST_MEND_S, RoutedEngine
from miles_core.rollout.vllm_engine import VllmEngine
from miles_core.rollout.vllm_worker import files_of_memory
from miles_core.routers import Experts
from tests.unit.contract_engines import END, MAX_TOKENS, SLOTS, V0, V1, V2
from tests.unit.engine_history import History, drain, prompt
from tests.unit.test_engine_experts import Play
from tests.unit.tiny_models import Kind, save_tiny_model, tiny_model

EXACT = 1e-5
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
WAIT_S = 120.0
opened: list[VllmEngine] = []
"""Engines of the running test."""


def engine_of(folder: Path, *, spec: VllmSpec | None = None, gpus: tuple[str, ...] = (), end_id: int = END) -> VllmEngine:
    engine = VllmEngine(
        folder, dtype="float32", weights_dtype="float32", end_id=end_id, slots=SLOTS, max_tokens=MAX_TOKENS, version=V0,
        record_experts=True, spec=spec, gpus=gpus,
    )  # fmt: skip
    opened.append(engine)
    return engine


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
    while opened:
        engine = opened.pop()
        if hasattr(engine, "_core"):  # a dead one was closed by the router
            engine.close()
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


def test_a_session_that_loses_its_blocks_is_read_again_with_the_weights_of_now_and_its_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Kind = "qwen3_moe"
    blocks = 7  # of 32 tokens; four sessions need twelve
    bytes_of_block = 32 * 2 * 2 * 2 * 32 * 4
    engine = engine_of(save_model(tmp_path, kind), spec=VllmSpec(kv_cache_gib=(blocks + 1) * bytes_of_block / 2**30), end_id=-1)
    play, rng = Play(engine), np.random.default_rng(5)
    scheduler, lost = engine._core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *given, **named: (lost.append(given[0]), preempt(*given, **named))
    )
    for key in "abcd":
        play.ask(key, prompt(rng, 25, 30), 60)
    recorded: dict[str, Experts] = {}
    while len(play.turns) < 4:
        for key in play.step():
            engine.release(key)  # one that has ended keeps its blocks until then
        if lost and not recorded:
            key = engine._key_of[lost[0].request_id]
            recorded[key] = engine.so_far(key).experts
            engine.load_weights(model_of(kind, 1).state_dict(), V1)
    ((key, before),) = recorded.items()
    ((_, turn),) = play.turns[key]
    assert len(before) > 25 and np.array_equal(turn.experts[: len(before)], before) and set(turn.versions) == {V0, V1}
    assert len(turn.experts) == len(play.asked[key]) + len(turn.tokens) - 1


def test_sessions_that_hold_all_blocks_while_they_wait_give_them_to_turns_and_probes(tmp_path: Path) -> None:
    """Three sessions fill the cache. All go on at once and none has room; one alone needs what two that rest hold; a probe
    finds no free block, beside turns that are sampled."""
    kind: Kind = "qwen3_moe"
    bytes_of_block = 32 * 2 * 2 * 2 * 32 * 4
    engine = engine_of(save_model(tmp_path, kind), spec=VllmSpec(kv_cache_gib=7.5 * bytes_of_block / 2**30), end_id=-1)
    play, rng, until = Play(engine), np.random.default_rng(8), time.monotonic() + WAIT_S
    pool = engine._core.engine_core.scheduler.kv_cache_manager.block_pool

    def turns(keys: str, low: int, limit: int) -> None:
        for key in keys:
            play.ask(key, prompt(rng, low, low + 1), limit)
        while engine.running:
            assert time.monotonic() < until, "nothing moves"
            list(play.step())

    turns("abc", 60, 4)
    assert pool.get_num_free_blocks() < 2
    turns("abc", 4, 10)
    turns("b", 5, 8)
    for key in "abc":
        play.ask(key, prompt(rng, 2, 3), 4)
        list(play.step())
    probed = list(prompt(rng, 40, 41))
    with torch.no_grad():
        logprobs = torch.log_softmax(model_of(kind, 0)(torch.tensor([probed])).logits[0].float(), dim=-1)
    wanted = [float(logprobs[at, token]) for at, token in enumerate(probed[1:])]
    assert np.abs(engine.logprobs([probed])[0] - wanted).max() < EXACT
    while engine.running:
        assert time.monotonic() < until, "nothing moves"
        list(play.step())
    assert {key: len(found) for key, found in play.turns.items()} == {"a": 3, "b": 4, "c": 3}
    play.check({V0: model_of(kind, 0)})
    check_logprobs(play, {V0: model_of(kind, 0)})


def check_logprobs(play: Play, models: dict[Version, torch.nn.Module]) -> None:
    """As `History.worst`."""
    history = History(play.engine)
    for key, turns in play.turns.items():
        history.tokens[key], history.temperature[key] = [], 1.0
        for asked, turn in turns:
            history.tokens[key] += asked
            history.take(turn)
    assert history.worst(models) < EXACT


def test_prompts_that_are_read_in_parts_while_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in steps of 40 tokens: greedy, for a draw from a seed is taken back with every part on a CPU."""
    import vllm.engine.arg_utils as arguments

    make, parts = arguments.EngineArgs, {"enable_chunked_prefill": True, "max_num_batched_tokens": 40, "max_num_seqs": 8}
    monkeypatch.setattr(arguments, "EngineArgs", lambda **given: make(**given | parts))
    kind: Kind = "qwen3_moe"
    engine = engine_of(save_model(tmp_path, kind), end_id=-1)
    play, models = Play(engine), {V0: model_of(kind, 0), V1: model_of(kind, 1)}
    same = prompt(np.random.default_rng(1), 70, 71)
    play.ask("a", same, 6, temperature=0.0)
    play.ask("b", (*same[:40], 9, 9), 6, temperature=0.0)
    play.finish()
    play.ask("a", prompt(np.random.default_rng(2), 15, 16), 3, temperature=0.0)
    play.finish()
    for key in ("a", "b"):
        engine.release(key)
    other = prompt(np.random.default_rng(3), 70, 71)
    for key in ("c", "d", "e", "f"):
        play.ask(key, other, 6, temperature=0.0)
    assert not list(play.step())
    engine.load_weights(models[V1].state_dict(), V1)
    play.finish()
    assert all(set(turn.versions) == {V1} for key in "cdef" for _, turn in play.turns[key])
    del play.turns["c"]  # it had read a part with the weights before
    play.check(models)


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("mixtral", SHAPE | {"intermediate_size": 48}, "has intermediate_size=48; set engine: torch"),
        ("qwen3_moe", SHAPE | {"moe_intermediate_size": 48}, "has moe_intermediate_size=48; set engine: torch"),
        ("olmoe", {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}, "family olmoe .*set engine: torch"),
        ("mixtral", SHAPE | {"sliding_window": 32}, "SlidingWindowManager.*set it to false, or engine: torch"),
        ("qwen3", SHAPE | {"head_dim": 24}, "has head_dim=24; set engine: torch"),
    ],
)
def test_models_that_it_would_compute_wrongly_are_refused_at_the_start(
    tmp_path: Path, kind: Kind, shape: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        engine_of(save_tiny_model(tmp_path / kind, kind, **shape))


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


def test_what_turns_had_sampled_before_the_weights_broke_can_be_handed_on(tmp_path: Path) -> None:
    kind: Kind = "qwen3_moe"
    engine, rng = engine_of(save_model(tmp_path, kind), end_id=-1), np.random.default_rng(6)
    play = Play(engine)
    for key in "ab":
        play.ask(key, prompt(rng, 10, 11), 20)
    for _ in range(3):
        assert not list(play.step())
    broken = {name: tensor * torch.nan for name, tensor in model_of(kind, 1).state_dict().items() if name != "lm_head.weight"}
    engine.load_weights(broken, V1)
    with pytest.raises(MilesError, match="logits that are not finite"):
        list(play.step())
    for key in "ab":
        part = engine.so_far(key)
        assert part.reason == "broken" and part.versions == (V0,) * 3 and len(part.experts) == 12


def test_guesses_of_a_draft_model_over_turns_that_are_cut_and_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, which vLLM checks rightly on a CPU; the draft is the policy as it was."""
    monkeypatch.setattr("miles_core.rollout.vllm_start.check_kernels", lambda *given: None)
    folder = save_model(tmp_path, "qwen3_moe")
    engine = engine_of(folder, spec=VllmSpec.model_validate({"draft": {"model": str(folder)}}), end_id=-1)
    history, models, rng = (
        History(engine),
        {V0: model_of("qwen3_moe", 0), V1: model_of("qwen3_moe", 1)},
        np.random.default_rng(0),
    )
    for version in (V0, V0, V1):
        if version != engine.version:
            engine.load_weights(models[version].state_dict(), version)
        for key in "abc":
            history.ask(key, prompt(rng, 5, 12), 14, temperature=0.0)
        history.finish()
    assert history.worst(models) < EXACT and engine.counts.accepted_tokens > 2 * 3 * 7


def test_a_turn_that_ends_inside_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses behind the end are no part of the session. Greedy, which vLLM checks rightly on a CPU; all guesses are right. The
    last test here: a process that has guessed once starts no other engine on a CPU (vLLM stumbles over numba then)."""
    kind: Kind = "qwen3_moe"
    monkeypatch.setattr("miles_core.rollout.vllm_start.check_kernels", lambda *given: None)
    model = model_of(kind, 0)

    @torch.no_grad()
    def goes_on(tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        return tokens[-count:]

    def propose(
        _: int, sampled: list[list[int]], lengths: list[int], tokens: Any, *given: Any, **named: Any
    ) -> list[list[int]]:
        return [goes_on(tokens[row, : int(lengths[row])].tolist(), 3) if one else [] for row, one in enumerate(sampled)]

    spec = VllmSpec.model_validate({"ngram": {"tokens": 3, "match_min": 1, "match_max": 3}})
    asked = prompt(np.random.default_rng(5), 12, 13)
    engine = engine_of(save_model(tmp_path, kind), spec=spec, end_id=goes_on([*asked], 6)[2])
    drafter = engine._core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
    monkeypatch.setattr(drafter, "propose", propose)
    history = History(engine)
    history.ask("s", asked, 20, temperature=0.0)
    history.finish()
    assert len(history.tokens["s"]) == 12 + 3 and engine.counts.accepted_tokens > 1
    history.ask("s", (20, 21, 22), 6, temperature=0.0)
    history.finish()
    assert history.worst({V0: model}) < EXACT
