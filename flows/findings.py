"""What an examination finds: a verdict, what was seen, and what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "bad", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One check. `warn`: it works, but worse than it could; `unknown`: it could not be found out, which is not well."""

    name: str
    verdict: Verdict
    seen: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def ok(name: str, seen: str) -> Finding:
    return Finding(name, "ok", seen)


def warn(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, "warn", seen, fix)


def bad(name: str, seen: str, fix: str) -> Finding:
    return Finding(name, "bad", seen, fix)


def unknown(name: str, seen: str, fix: str = "") -> Finding:
    return Finding(name, "unknown", seen, fix)


def findings_text(findings: list[Finding]) -> str:
    """A line each, the fix below; the number of each verdict at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:7} {finding.name}: {finding.seen}")
        if finding.fix:
            lines.append(f"        -> {finding.fix}")
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in ("ok", "warn", "bad", "unknown")}
    return "\n".join([*lines, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])
