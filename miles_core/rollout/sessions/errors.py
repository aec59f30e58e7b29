"""Refusals of the session server, by kind; each is one HTTP status and one sentence that says what to do."""

from __future__ import annotations


class SessionError(Exception):
    """A request that is refused. It changes nothing."""

    status = 500
    kind = "internal"


class BadMessages(SessionError):
    """The request is malformed, or does not go on from what the session holds."""

    status, kind = 400, "invalid_request_error"


class ContextFull(BadMessages):
    """The conversation leaves no room for one token of an answer."""

    kind = "context_length_exceeded"


class NoKey(SessionError):
    """No session key, or that of another session."""

    status, kind = 401, "no_session_key"


class NoSession(SessionError):
    """Unknown, deleted or ended."""

    status, kind = 404, "no_such_session"


class Conflict(SessionError):
    """The session's state does not allow it: a cut turn, a lost race, no turns or checkpoints left."""

    status, kind = 409, "conflict"


class AssemblyFailed(SessionError):
    """The recorded turns do not make rows: names the turn and what does not fit."""

    status, kind = 422, "assembly_failed"


class EngineFailed(SessionError):
    """The engine gave nothing, or something that is no turn."""

    status, kind = 502, "engine_failed"
