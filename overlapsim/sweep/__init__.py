"""Sweeps: one question asked for many models, machines and settings, in processes or on a cluster, and resumed."""
