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
_WEAK = r"token(?!s|iz)|auth(?!or(?!iz))|bearer|(?<=_)pwd|(?<=_)pass(?![a-z])"
_NAME = re.compile(rf"(?i){_STRONG}|{_WEAK}")
_ASSIGNED = re.compile(
    rf"""(?ix) \w* (?: (?P<strong>{_STRONG}) | {_WEAK} ) [\w-]* ["']? \s* [:=] \s*
    (?: ["'] [^"'\s]{{4,}} | (?(strong) [^\s"'#] | (?= [^\s"'(),\[\]{{}}]* \d ) [^\s"'(),\[\]{{}}]{{8,}} ) )"""
)
"""`name = value` with a quoted value; a bare one counts behind a strong name, or if it holds a digit and is long."""
_FORMS = re.compile(
    r"A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|npm_\w{30,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\."
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|xox[abeprs]-[\w-]{8,}"
    r"|wandb_v\d_\w{16,}|eyJ[\w-]{10,}\.[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY|(?i:bearer)\s+[\w.~+/-]{8,}|://[^/\s:@]+:[^/\s@]+@"
    r"|(?=[A-Za-z+/=]*\d)(?=[\d+/=]*[A-Za-z])(?!(?:[A-Za-z0-9+=]*/){3})[A-Za-z0-9+/=]{40,}"
)
"""Known forms of keys, and long words of letters and digits that are no path."""
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY")
_KEY_GOES_ON = re.compile(r"[-+ ]?[A-Za-z0-9+/=]+\r?")
"""A line of a private key's block, in a diff."""
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
    masked: list[str] = []
    is_key = False
    for line in text.split("\n"):
        is_key = _KEY_BEGINS.search(line) is not None or (is_key and _KEY_GOES_ON.fullmatch(line) is not None)
        mark = line[:1] if line[:1] in "+- " else ""
        masked.append(f"{mark}{LEFT_OUT}" if is_key or looks_secret(line, secrets) else line)
    return "\n".join(masked)


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
