"""What must never be copied into a record or onto a screen: lines, arguments and values that look like a secret.

It errs on the side of leaving out: records are for people, nothing is computed from them. What has a secret's name, a known
key's form, or the value of an environment variable with a secret's name is masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"
LEFT_OUT = "<left out: it looks like a secret>"

_STRONG = r"passw|passphrase|secret|credential|api_?-?key|access_?-?key|private_?-?key"
_WEAK = r"token(?!s|iz)|auth(?!or(?!iz))|bearer"
_NAME = re.compile(rf"(?i){_STRONG}|{_WEAK}")
_ASSIGNED = re.compile(
    rf"""(?ix) \w* (?: (?P<strong>{_STRONG}) | {_WEAK} ) [\w-]* ["']? \s* [:=] \s*
    (?: ["'] [^"'\s]{{4,}} | (?(strong) [^\s"'#] | (?= [^\s"'(),\[\]{{}}]* \d ) [^\s"'(),\[\]{{}}]{{8,}} ) )"""
)
"""`name = value` with a quoted value; a bare one counts behind a strong name, or if it holds a digit and is long."""
_FORMS = re.compile(
    r"AKIA[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|xox[abeprs]-[\w-]{8,}"
    r"|wandb_v\d_\w{16,}|eyJ[\w-]{10,}\.[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY|(?i:bearer)\s+[\w.~+/-]{8,}|://[^/\s:@]+:[^/\s@]+@"
    r"|(?=[A-Za-z+/=]*\d)(?=[\d+/=]*[A-Za-z])(?!(?:[A-Za-z0-9+=]*/){3})[A-Za-z0-9+/=]{40,}"
)
"""Known forms of keys, and long words of letters and digits that are no path."""
_LEAST_CHARACTERS = 8
"""Shorter values of secret variables are not looked for: they would be found in ordinary words."""


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret: HF_TOKEN, api-key; not max_new_tokens, tokenizer."""
    return _NAME.search(name) is not None


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of the environment variables that have a secret's name."""
    return tuple(value for name, value in environ.items() if is_secret_name(name) and len(value) >= _LEAST_CHARACTERS)


def looks_secret(line: str, secrets: Sequence[str] = ()) -> bool:
    """Whether a line holds something that looks like a secret, or one of `secrets`."""
    return bool(_ASSIGNED.search(line) or _FORMS.search(line)) or any(secret in line for secret in secrets)


def mask_lines(text: str, secrets: Sequence[str] = ()) -> str:
    """A diff or other text without its secret-looking lines; a diff's mark at the start of a line stays."""
    return "\n".join(
        f"{line[:1] if line[:1] in '+- ' else ''}{LEFT_OUT}" if looks_secret(line, secrets) else line
        for line in text.split("\n")
    )


def mask_arguments(arguments: Sequence[str], secrets: Sequence[str] = ()) -> tuple[str, ...]:
    """A command line: `--api-key X`, `a.token=X` and everything else that looks like a secret become ***."""
    masked: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value:
            masked.append(MASK)
        elif equals and is_secret_name(name):
            masked.append(f"{name}={MASK}")
        else:
            masked.append(MASK if looks_secret(argument, secrets) else argument)
        is_value = not equals and argument.startswith("-") and is_secret_name(argument)
    return tuple(masked)
