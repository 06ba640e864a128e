"""What ended an attempt, and what is wrong with one that runs: cause, blame and the evidence.

Judges and reads; whether the run goes on, and where, is decided in recovery/.
"""
