"""Calls of a rubric's functions, for verifiers_env.py: who they may hold up, and what becomes of one that breaks.

The package makes a 0 of a function that broke, and says so in its log alone: as an error, or, where a rubric of its own caught
it, as a warning. So its loggers are heard while a call runs, and what they say of a fault is the call's, whatever runs beside
it (a context variable goes with the call's tasks and threads).

- A call has an event loop to itself. A loop that is done is used again, for a judge's client keeps its connections in one;
  one that is blocked, or not done when its caller gave up, is left behind, and its end is nobody's fault but its own.
- A function of weight 0 only measures: what it does wrong is not heard, and neither is a value that is no number.
- A rubric's pool of processes that lost one is good for nothing more, so it gets a fresh one.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import re
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

NAMES_A_FAULT = re.compile(r"error|exception|fail|time[sd]?[ -]?out|broken|terminated", re.IGNORECASE)

T = TypeVar("T")

_heard: ContextVar[list[str] | None] = ContextVar("heard", default=None)
"""What this call's list is; None where nobody listens."""
_idle: list[asyncio.AbstractEventLoop] = []


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


def in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Runs it where nothing else runs, from any thread."""
    try:
        loop = _idle.pop()
    except IndexError:
        loop = new_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    finally:
        if future.done():
            _idle.append(loop)


async def faults_of(work: Awaitable[object]) -> list[str]:
    """Does it; what the package said meanwhile of functions that broke."""
    logger = logging.getLogger("verifiers")
    logger.addHandler(_EAR)  # each time: the package's own set-up takes all away
    if logger.getEffectiveLevel() > logging.WARNING:
        logger.setLevel(logging.WARNING)
    heard: list[str] = []
    _heard.set(heard)
    await work
    return heard


class _Ear(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        heard = _heard.get()
        if heard is not None and is_fault(record):
            heard.append(record.getMessage())


_EAR = _Ear(logging.WARNING)


def is_fault(record: logging.LogRecord) -> bool:
    """An error; or a warning that was given for an exception (one is being handled right now), or that speaks of one."""
    if record.levelno >= logging.ERROR or record.exc_info or sys.exc_info()[0] is not None:
        return True
    return bool(NAMES_A_FAULT.search(record.getMessage()))


# --- a rubric


def parts_of(rubric: Any) -> Iterator[Any]:
    """A rubric, and those that it is a group of."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from parts_of(part)


def is_of_group(rubric: Any, func: Any) -> bool:
    """Whether it scores the samples of a group together."""
    return bool(getattr(rubric, "_is_group_func", lambda func: False)(func))


def leave_out_measures(rubric: Any) -> None:
    """Functions of weight 0 break unheard from now on."""
    for part in parts_of(rubric):
        funcs, weights = getattr(part, "funcs", []), getattr(part, "weights", [])
        for number, (func, weight) in enumerate(zip(funcs, weights, strict=False)):
            if not weight and not getattr(func, "is_measure", False):
                funcs[number] = _nothing(func) if is_of_group(part, func) else _measure(func)


def _measure(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> float:
        before = _heard.set(None)
        try:
            value = func(*args, **kwargs)
            number = float(await value if inspect.isawaitable(value) else value)
        except Exception:  # noqa: BLE001 - foreign code, which the reward does not hang on
            return 0.0
        finally:
            _heard.reset(before)
        return number if math.isfinite(number) else 0.0

    call.__dict__["is_measure"] = True
    return call


def _nothing(func: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of one that scores a group together, which cannot be asked for one sample."""

    async def call() -> float:
        return 0.0

    call.__name__ = func.__name__
    call.__dict__["is_measure"] = True
    return call


def renew_pools(rubric: Any) -> None:
    """Fresh pools of processes in the place of broken ones."""
    for part in parts_of(rubric):
        pool = getattr(part, "executor", None)
        if isinstance(pool, ProcessPoolExecutor):
            try:
                pool.submit(int)
            except BrokenExecutor:
                part.executor = ProcessPoolExecutor(max_workers=1)
