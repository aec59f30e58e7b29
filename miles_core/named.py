"""What a recipe names as `package.module:name`: an environment, an agent or a ranking of one's own.

    python -m miles_core.named KEY=PACKAGE.MODULE:NAME ...

says for each, a line, what keeps it from being loaded by this interpreter, and ends with 1 if there is any. With the
interpreter, the folder and the PYTHONPATH of a job that is what the job would find (cluster/own_code.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from typing import Any

from miles_core.errors import RecipeError


def load_named(key: str, name: str) -> Any:
    """The class or function that the recipe's `key` names. Its module is foreign code. Raises RecipeError."""
    module_name, _, attribute = name.partition(":")
    where = f"{key}: {name!r}"
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RecipeError(
            f"{where} cannot be imported here ({error}); install it, or put it into PYTHONPATH of the jobs"
        ) from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(
            f"{where} breaks while it is imported ({type(error).__name__}: {error}; {last.filename}:{last.lineno}); mend it"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise RecipeError(f"{where}: module {module_name} has no class or function {attribute!r}")
    return found


def main(arguments: list[str]) -> int:
    """See module. What foreign code prints goes to stderr."""
    faults = []
    for argument in arguments:
        key, _, name = argument.partition("=")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                load_named(key, name)
        except RecipeError as error:
            faults.append(" ".join(str(error).split()))
    print(*faults, sep="\n", end="")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
