"""What runs once on a node, or around each rank on it: environment, interface, container prefix.

Standard library only, Python 3.9. Nothing here asks the scheduler or decides what follows.
"""
