"""What a run directory holds and what was asked for: facts, read by every other room.

Never decides, never runs a command.
"""
