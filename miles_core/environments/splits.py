"""Which tasks are held out: a question's own hash decides, so the two splits share none, whatever the seeds.

Whoever makes training data by another way asks here as well.
"""

from __future__ import annotations

import hashlib

EVAL_SHARE = 4
"""One question in this many belongs to the eval split."""
MAX_TRIES = 256
"""Draws for one seed until a question of the wanted split is there."""


def question_digest(question: str) -> str:
    """md5 of a question, hex."""
    return hashlib.md5(question.encode(), usedforsecurity=False).hexdigest()


def in_eval_split(digest: str) -> bool:
    """Whether the question of a digest is held out."""
    return int(digest, 16) % EVAL_SHARE == 0
