"""One session: a request becomes tokens to sample (`prepare`), what was sampled becomes an answer (`commit`).

Neither waits for anything, and between them nothing is held: calls of one session may overlap, and it may be closed while
its turn is sampled; then the later one is told so and leaves nothing behind. All calls come from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from miles_core.errors import RecipeError
from miles_core.rollout.chat import ChatMessage, Said, ToolCall, Tools
from miles_core.rollout.session import ContextOverflow, Renderer, refuse_endless
from miles_core.rollout.sessions.assembly import Row, assemble
from miles_core.rollout.sessions.errors import BadMessages, Conflict, ContextFull, EngineFailed, NoSession
from miles_core.rollout.sessions.history import Attachment, History, Kind, Replay, Sampled
from miles_core.rollout.sessions.messages import ChatRequest, RequestReader, as_json, completion
from miles_core.rollout.sessions.transcript import mismatches


@dataclass(frozen=True)
class SessionSpec:
    """What a session may do, and how it is sampled."""

    max_tokens: int
    """Of one conversation, prompts and samples together."""
    max_new_tokens: int
    """Sampled tokens per turn."""
    max_turns: int
    """Model turns one behind another."""
    temperature: float
    seed: int
    kind: Kind = "linear"
    replay: Replay = "strict"


@dataclass(frozen=True)
class Ask:
    """A turn to sample."""

    number: int
    """Of the session's calls."""
    at: Attachment
    prompt: tuple[int, ...]
    """Tokens behind the parent's."""
    tools: Tools
    max_new_tokens: int
    temperature: float
    seed: int


class Pace:
    """Who is at work in a session, for deadlines: told in the server's thread (of `stop`: the agent's), asked in any. Monotonic
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: tuple[float, ...] = ()
        self._idle_since: float | None = None
        self._is_stopped = False

    def begin(self) -> float:
        """A turn was asked for; what to give to `end`."""
        began = self._clock()
        self._turns = (*self._turns, began)
        return began

    def end(self, began: float) -> None:
        """It was answered, refused or given up."""
        turns = list(self._turns)
        turns.remove(began)
        self._idle_since, self._turns = self._clock(), tuple(turns)

    def stop(self) -> None:
        """The agent has returned: it is idle no more."""
        self._is_stopped = True

    @property
    def turn_s(self) -> float:
        """Age of the oldest turn that is being sampled; 0 without one."""
        turns = self._turns
        return self._clock() - turns[0] if turns else 0.0

    @property
    def idle_s(self) -> float:
        """For how long the agent has asked for nothing since its last turn; 0 before the first, and once it has returned."""
        since = None if self._turns or self._is_stopped else self._idle_since
        return 0.0 if since is None else self._clock() - since


class LiveSession:
    """See module. `key` proves that a caller may use it."""

    def __init__(
        self,
        session_id: str,
        key: str,
        renderer: Renderer,
        spec: SessionSpec,
        *,
        unix_time: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session_id, self.key, self.spec = session_id, key, spec
        self.history = History(spec.kind, spec.replay)
        self.reader = RequestReader(spec.temperature)
        self.pace = Pace(monotonic)
        self.is_closed = False
        self.limit = ""
        """Why the session could not go on, in words; the episode is truncated."""
        self.broken = ""
        """What the engine did wrong, in words."""
        self._renderer, self._unix_time = renderer, unix_time
        self._asked = 0

    def prepare(self, request: ChatRequest) -> Ask:
        """What to sample. Raises SessionError and changes nothing, but for `limit`."""
        self._check_open()
        at = self.history.attach(request.messages)
        parent = at.parent
        depth, start = (1, 0) if parent is None else (parent.depth + 1, parent.end)
        tools = request.tools if parent is None else parent.tools
        if request.tools not in ((), tools):
            raise BadMessages("tools: not those of the first request; the model was offered these and no others")
        try:
            refuse_endless(at.messages, self.spec.max_tokens - start)
        except ContextOverflow as error:
            raise self._full(str(error)) from error
        prompt = self._tokens(at, tools)
        if depth > self.spec.max_turns:
            self.limit = f"environment.max_turns={self.spec.max_turns}"
            raise Conflict(f"the model has had its {self.spec.max_turns} turns ({self.limit}): end the episode")
        room = self.spec.max_tokens - start - len(prompt)
        if room < 1:
            raise self._full(
                f"{start} tokens of the conversation and {len(prompt)} of the new messages leave no room to answer"
            )
        self._asked += 1
        limit = min(room, self.spec.max_new_tokens, request.max_new_tokens or room)
        return Ask(self._asked, at, prompt, tools, limit, self.spec.temperature, self._seed())

    def _full(self, why: str) -> ContextFull:
        self.limit = f"environment.max_tokens={self.spec.max_tokens}"
        return ContextFull(f"{why} ({self.limit}): end the episode")

    def _tokens(self, at: Attachment, tools: Tools) -> tuple[int, ...]:
        try:
            if at.parent is None:
                return self._renderer.opening(at.messages, tools)
            return self._renderer.continuation(at.messages)
        except RecipeError as error:
            raise BadMessages(f"messages: {error}") from error

    def _seed(self) -> int:
        """Another one for each call, so that a second try is another draw; the same in every run of the sample."""
        return xxhash.xxh3_64_intdigest(f"{self.spec.seed}/{self._asked}".encode())

    def _check_open(self) -> None:
        if self.is_closed:
            raise NoSession(f"session {self.session_id} has ended")

    def commit(self, ask: Ask, sampled: Sampled) -> dict[str, Any]:
        """The answer to the request. Raises SessionError and records nothing."""
        self._check_open()
        self._check_sampled(ask, sampled)
        said = self._renderer.said(sampled.tokens, ask.tools) if sampled.ended else Said(self._renderer.text(sampled.tokens))
        calls = tuple(ToolCall(f"call_{ask.number}_{i}", *call) for i, call in enumerate(said.calls))
        reply = ChatMessage("assistant", said.content, calls)
        node = self.history.commit(ask.at, ask.prompt, sampled, reply, ask.tools, self._unix_time())
        self.reader.expect(reply)
        return completion(
            f"{self.session_id}-{ask.number}", reply,
            ended=sampled.ended, num_prompt=node.sampled_at, num_sampled=len(sampled.tokens),
        )  # fmt: skip

    def _check_sampled(self, ask: Ask, sampled: Sampled) -> None:
        counts = len(sampled.tokens), len(sampled.logprobs), len(sampled.versions)
        if not 0 < counts[0] == counts[1] == counts[2] or counts[0] > ask.max_new_tokens:
            self.broken = f"{counts[0]} tokens (at most {ask.max_new_tokens}), {counts[1]} logprobs, {counts[2]} versions"
        elif not np.isfinite(sampled.logprobs).all():
            self.broken = "logprobs that are not finite"
        if self.broken:
            raise EngineFailed(f"the engine gave no turn: {self.broken}")

    def rows(self) -> list[Row]:
        """What is trained of it."""
        return assemble(self.history, self.spec.max_tokens)

    def mismatches(self) -> list[str]:
        """How the conversations differ from a fresh rendering: kinds (transcript.py), sorted. A figure, never the record."""
        found: set[str] = set()
        for leaf in self.history.leaves():
            found |= mismatches(self._renderer, leaf)
        return sorted(found)

    def dump(self) -> dict[str, Any]:
        """Everything, as JSON, for a person to look at."""
        return {
            "id": self.session_id,
            "spec": vars(self.spec),
            "limit": self.limit,
            "taken_back": self.history.taken_back,
            "mismatches": self.mismatches(),
            "turns": [
                {
                    "seq": node.seq,
                    "parent": None if node.parent is None else node.parent.seq,
                    "messages": [as_json(message) for message in node.messages],
                    "reply": as_json(node.reply),
                    "prompt_ids": node.prompt,
                    "token_ids": node.sampled.tokens,
                    "logprobs": node.sampled.logprobs,
                    "versions": [tuple(version) for version in dict.fromkeys(node.sampled.versions)],
                    "admitted": tuple(node.sampled.admitted),
                    "completed": tuple(node.sampled.completed),
                    "finish_reason": "stop" if node.sampled.ended else "length",
                    "committed_s": node.committed_s,
                }
                for node in self.history.checkpoints
            ],
            "rows": [
                {
                    "turns": [node.seq for node in row.path],
                    "trained": sorted(row.owned),
                    "is_cut": row.is_cut,
                    "num_tokens": len(columns["tokens"]),
                    "num_sampled": int(columns["loss_mask"].sum()),
                }
                for row in self.rows()
                for columns in [row.columns()]
            ],
        }
