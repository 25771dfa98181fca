"""Figures computed from traces, tokens and results. Pure functions: arrays and tables in, numbers and tables
out."""
