"""Before the first submit: is this cluster, and this machine, set up so that runs survive?"""
