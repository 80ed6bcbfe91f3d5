"""Reusable suites and generators for tests of programs and strategies."""
