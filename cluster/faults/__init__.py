"""Faults to rehearse on a live run (`miles drill`): what a plan may ask for, how each is done, and what it cost.

Nothing here is imported by a run itself: a drill stands beside it, as a bad day would.
"""
