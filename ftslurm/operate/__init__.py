"""What a person does to a run: save, stop, pause, resume, cancel, look at its logs.

Gives orders, and cancels, holds or queues jobs; what follows an attempt is decided in recovery/.
"""
