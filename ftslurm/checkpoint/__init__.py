"""Checkpoints on disk: format, publishing, verifying, choosing, retaining. Free of torch.

A step that is published is whole, durable and never written again; anything else is not a step.
"""
