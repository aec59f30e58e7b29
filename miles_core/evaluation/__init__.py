"""Evaluation of any model folder or published version on held-out tasks, as a job of its own."""
