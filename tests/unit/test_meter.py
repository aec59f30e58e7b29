"""Where a replica's seconds and tokens go: the figures of an engine that is watched."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_core.records import Version
from miles_core.rollout.engine import Counts, Finished, Request
from miles_core.rollout.meter import MeteredEngine, step_within
from miles_core.rollout.torch_engine import TorchEngine
from tests.unit.tiny_models import tiny_model

V0, V1 = Version(0, 1), Version(1, 1)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Played:
    """An engine of four slots whose turns end when the test says so."""

    def __init__(self) -> None:
        self.version, self.counts = V0, Counts()
        self.held: set[str] = set()
        self.running = 0
        self.ends: list[Finished] = []

    @property
    def free_slots(self) -> int:
        return 4 - len(self.held)

    def add(self, request: Request) -> None:
        self.held.add(request.session_key)
        self.running += 1

    def step(self) -> list[Finished]:
        ends, self.ends = self.ends, []
        self.running -= len(ends)
        return ends

    def release(self, session_key: str) -> None:
        self.held.remove(session_key)

    def load_weights(self, tensors: dict[str, Any], version: Version) -> None:
        time.sleep(0.1)


def turn(key: str, *versions: Version) -> Finished:
    return Finished(key, np.zeros(len(versions), np.int32), np.zeros(len(versions), np.float32), versions, "end")


def ask(engine: MeteredEngine, key: str) -> None:
    engine.add(Request(key, (1, 2), 8, 1.0, 0))


def test_seconds_are_the_models_or_the_tools_and_slots_count_while_they_are_held() -> None:
    clock, played = Clock(), Played()
    engine = MeteredEngine(played, clock)
    ask(engine, "a")
    ask(engine, "b")
    clock.now += 2
    played.ends = [turn("a", V0, V0, V1)]
    played.counts = Counts(prompt_tokens=10, reused_tokens=4, drafted_tokens=8, accepted_tokens=2)
    assert [found.session_key for found in engine.step()] == ["a"]
    clock.now += 3
    ask(engine, "a")
    clock.now += 1
    played.ends = [turn("a", V1)]
    engine.step()
    clock.now += 4
    engine.release("a")
    engine.release("b")
    assert engine.figures() == {
        "running": 1, "tokens_per_s": 0.4, "slots_filled": 0.5, "prefix_hit_share": 0.4, "accept_rate": 0.25,
        "mixed_turns": 0.5, "model_s": 2 + 1 + 10, "tool_s": 3 + 4,
    }  # fmt: skip


def test_a_window_in_which_nothing_happened_has_no_shares() -> None:
    clock, played = Clock(), Played()
    engine = MeteredEngine(played, clock)
    assert engine.figures()["slots_filled"] is None
    clock.now += 1
    assert engine.figures() == {
        "running": 0, "tokens_per_s": 0.0, "slots_filled": 0.0, "prefix_hit_share": None, "accept_rate": None,
        "mixed_turns": None, "model_s": 0.0, "tool_s": 0.0,
    }  # fmt: skip


def test_a_later_turn_reuses_all_but_what_was_appended_and_the_newest_token() -> None:
    engine = MeteredEngine(TorchEngine(tiny_model(), end_id=-1, slots=1, max_tokens=64, version=V0))
    for number in (1, 2):
        engine.add(Request("a", (8,) * 10, 5, 1.0, 0))
        while engine.running:
            engine.step()
        assert engine.counts == (Counts(10, 0) if number == 1 else Counts(10 + 25, 14))
    assert engine.figures()["prefix_hit_share"] == pytest.approx(14 / 35)


HANGS = """
import re, sys, threading
from miles_core.rollout.meter import step_within
for _ in range(3):
    with step_within(0.2):
        pass
threading.Thread(target=threading.Event().wait, name="other", daemon=True).start()
with step_within(0.2):
    re.match("(x+x+)+y", "x" * 60)  # holds the interpreter for longer than anybody waits
"""


def test_a_step_that_hangs_ends_the_process_with_the_stacks_of_its_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "Timeout (0:00:00.200000)!" in done.stderr
    assert done.stderr.count("Thread 0x") + done.stderr.count("Current thread") >= 2 and "in wait" in done.stderr


def test_a_step_in_time_is_let_alone() -> None:
    with step_within(0.05):
        pass
    with step_within(None):
        time.sleep(0.1)
    engine = MeteredEngine(Played(), step_deadline_s=0.05)
    assert engine.step() == []
    time.sleep(0.1)
    engine.load_weights({}, V1)  # an exchange of weights has no deadline
