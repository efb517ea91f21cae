"""A package of its own whose study `assay` finds, lists, runs and reports."""
