"""Experts and the exchange of their tokens in one kernel."""
