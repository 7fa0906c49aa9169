"""Federations on one machine or a cluster, their results and reports, and the command line."""
