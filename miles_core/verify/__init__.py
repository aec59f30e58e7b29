"""verify: proves from the files of a run directory alone, or refutes with names, that nothing was lost or trained twice (I9).

It shares the record vocabulary with the system but not its reading code: frames, streams, cuts and lineage are read again
here, plainly and whole. A fault says what is wrong, where, and what it was compared with.
"""

from miles_core.verify.checks import Verification, verify_run
from miles_core.verify.streams import Fault

__all__ = ["Fault", "Verification", "verify_run"]
