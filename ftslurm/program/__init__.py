"""A program of the user's own as a rank: started, asked to leave, started again.

Standard library only, Python 3.9. Nothing here asks the scheduler or saves anything for the
program.
"""
