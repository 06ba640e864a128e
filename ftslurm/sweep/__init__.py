"""A sweep as a whole: where its tasks stand, what is left to queue, and following it to its end.

Reads what the runs themselves have written; a task ends by the rules of any run. Never trains,
composes or freezes anything.
"""
