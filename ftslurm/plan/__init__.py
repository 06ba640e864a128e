"""What failures will cost a run, before it is submitted: formulas, a simulation, and a verb."""
