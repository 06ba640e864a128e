"""A run's figures as Prometheus text, for node_exporter's textfile collector.

Reads what `status` and `report` read, by their own functions; decides nothing about a run.
"""
