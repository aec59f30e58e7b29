"""How a self-cutting role (learner, evaluator) begins: its journal, the cut of its predecessors, what they left (I5)."""

from __future__ import annotations

from miles_core.runtime.context import RoleContext
from miles_core.store.follow import Delivered, read_cut
from miles_core.store.journal import JournalWriter


def open_journal(context: RoleContext) -> tuple[JournalWriter, list[Delivered]]:
    """This attempt's journal with its cuts as first record, and all records of its predecessors before those cuts, in order.

    Raises LeaseLost, JournalCorrupt.
    """
    journal = context.journal()
    cuts = context.cut_predecessors()
    journal.write(cuts)
    folder = context.paths.journal(context.writer)
    return journal, [item for cut in cuts.cuts for item in read_cut(context.reading, folder, cut)]
